"""The order in which a new leader reconciles its groups."""

import asyncio

from rota.kube.reconcile.observe import PriorityLimiter
from rota.kube.reconcile.pod_annotator import TokenBucket
from rota.kube.state.group import Group


class SettledGroup(Group):
    """A group at rest."""

    is_at_rest = True


A, B, C, D = (SettledGroup("shop", name) for name in "abcd")
UNSETTLED = Group("shop", "unsettled")


async def run_tasks() -> None:
    """Let all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


class Reconciles:
    """Reconciles that run until a test finishes them."""

    def __init__(self, limiter: PriorityLimiter) -> None:
        self.limiter = limiter
        self.started: list[str] = []
        self.released: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, *groups: Group) -> None:
        for group in groups:
            self.released[group.name] = asyncio.Event()
            self.tasks[group.name] = asyncio.create_task(self._reconcile(group))
        await run_tasks()

    async def _reconcile(self, group: Group) -> None:
        async with self.limiter.hold_slot(group):
            self.started.append(group.name)
            await self.released[group.name].wait()

    async def finish(self, group: Group) -> None:
        self.released[group.name].set()
        await run_tasks()

    async def cancel(self, *groups: Group) -> None:
        for group in groups:
            self.tasks[group.name].cancel()
        await run_tasks()


async def test_reconcile_limiter_admits_groups_in_order() -> None:
    reconciles = Reconciles(PriorityLimiter(2))
    await reconciles.start(A, B, C, D)
    assert reconciles.started == ["a", "b"]
    await reconciles.finish(B)
    assert reconciles.started == ["a", "b", "c"]
    await reconciles.finish(A)
    assert reconciles.started == ["a", "b", "c", "d"]
    await reconciles.finish(C)
    await reconciles.finish(D)
    await reconciles.start(A, B)
    assert reconciles.started[4:] == ["a", "b"]
    await reconciles.cancel(A, B)


async def test_reconcile_limiter_admits_a_prioritized_group_first() -> None:
    limiter = PriorityLimiter(1)
    reconciles = Reconciles(limiter)
    await reconciles.start(A, B, C, D)
    limiter.prioritize(D)
    limiter.prioritize(A)  # A has its slot already
    await reconciles.finish(A)
    assert reconciles.started == ["a", "d"]
    await reconciles.cancel(B, C, D)


async def test_reconcile_limiter_admits_unsettled_groups_before_settled_ones() -> None:
    reconciles = Reconciles(PriorityLimiter(1))
    await reconciles.start(A, B, UNSETTLED, C)
    await reconciles.finish(A)
    assert reconciles.started == ["a", "unsettled"]
    await reconciles.cancel(B, C, UNSETTLED)


async def test_reconcile_limiter_skips_a_cancelled_waiter() -> None:
    limiter = PriorityLimiter(1)
    reconciles = Reconciles(limiter)
    await reconciles.start(A, B, C)
    await reconciles.cancel(B)
    await reconciles.finish(A)
    assert reconciles.started == ["a", "c"]
    await reconciles.finish(C)
    await reconciles.start(D)
    assert reconciles.started == ["a", "c", "d"]
    await reconciles.cancel(D)


async def test_reconcile_limiter_passes_on_the_slot_of_a_waiter_cancelled_at_its_turn() -> None:
    for is_slot_first in (True, False):
        reconciles = Reconciles(PriorityLimiter(1))
        await reconciles.start(A, B, C)
        if is_slot_first:
            reconciles.released["a"].set()
            await asyncio.sleep(0)  # b has got the slot, but has not run yet
            reconciles.tasks["b"].cancel()
        else:
            reconciles.tasks["b"].cancel()
            reconciles.released["a"].set()
        await run_tasks()
        assert reconciles.started == ["a", "c"]
        await reconciles.cancel(C)


def test_poke_for_settings_is_limited_to_a_rate_with_a_burst() -> None:
    bucket = TokenBucket(per_second=10.0, burst=5)
    assert [bucket.take(3, 0.0), bucket.take(3, 0.0), bucket.take(3, 0.0)] == [3, 2, 0]
    assert bucket.take(3, 0.25) == 2
    assert bucket.take(100, 1000.0) == 5
