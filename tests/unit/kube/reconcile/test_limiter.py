"""Whose turn it is to be looked at by a new leader."""

import asyncio

from rota.kube.reconcile.limiter import PriorityLimiter, TokenBucket
from rota.kube.state.group import Group


class Resting(Group):
    """A group at rest, unless said."""

    is_at_rest = True


A, B, C, D = (Resting("shop", name) for name in "abcd")
WAITS = Group("shop", "waits")


async def steps() -> None:
    """Let everybody do what can be done."""
    for _ in range(5):
        await asyncio.sleep(0)


class Some:
    """Groups that are looked at until they are told to end."""

    def __init__(self, turns: PriorityLimiter) -> None:
        self.turns, self.there = turns, list[str]()
        self.over: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *groups: Group) -> None:
        for group in groups:
            self.over[group.name] = asyncio.Event()
            self.tasks[group.name] = asyncio.create_task(self._look(group))
        await steps()

    async def _look(self, group: Group) -> None:
        async with self.turns.hold_slot(group):
            self.there.append(group.name)
            await self.over[group.name].wait()

    async def go(self, group: Group) -> None:
        self.over[group.name].set()
        await steps()

    async def give_up(self, *groups: Group) -> None:
        for group in groups:
            self.tasks[group.name].cancel()
        await steps()


async def test_reconcile_limiter_admits_groups_in_order() -> None:
    some = Some(PriorityLimiter(2))
    await some.come(A, B, C, D)
    assert some.there == ["a", "b"]
    await some.go(B)
    assert some.there == ["a", "b", "c"]
    await some.go(A)
    assert some.there == ["a", "b", "c", "d"]
    await some.go(C)
    await some.go(D)
    await some.come(A, B)
    assert some.there[4:] == ["a", "b"]
    await some.give_up(A, B)


async def test_reconcile_limiter_admits_a_prioritized_group_first() -> None:
    turns = PriorityLimiter(1)
    some = Some(turns)
    await some.come(A, B, C, D)
    turns.prioritize(D)
    turns.prioritize(A)  # it has its turn already
    await some.go(A)
    assert some.there == ["a", "d"]
    await some.give_up(B, C, D)


async def test_reconcile_limiter_admits_unsettled_groups_before_settled_ones() -> None:
    some = Some(PriorityLimiter(1))
    await some.come(A, B, WAITS, C)
    await some.go(A)
    assert some.there == ["a", "waits"]
    await some.give_up(B, C, WAITS)


async def test_reconcile_limiter_skips_a_cancelled_waiter() -> None:
    turns = PriorityLimiter(1)
    some = Some(turns)
    await some.come(A, B, C)
    await some.give_up(B)
    await some.go(A)
    assert some.there == ["a", "c"]
    await some.go(C)
    await some.come(D)
    assert some.there == ["a", "c", "d"]
    await some.give_up(D)


async def test_reconcile_limiter_passes_on_the_slot_of_a_waiter_cancelled_at_its_turn() -> None:
    for first_the_turn in (True, False):
        some = Some(PriorityLimiter(1))
        await some.come(A, B, C)
        if first_the_turn:
            some.over["a"].set()
            await asyncio.sleep(0)  # its turn has come, and it has not taken a step
            some.tasks["b"].cancel()
        else:
            some.tasks["b"].cancel()
            some.over["a"].set()
        await steps()
        assert some.there == ["a", "c"]
        await some.give_up(C)


def test_poke_for_settings_is_limited_to_a_rate_with_a_burst() -> None:
    bucket = TokenBucket(per_second=10.0, burst=5)
    assert [bucket.take(3, 0.0), bucket.take(3, 0.0), bucket.take(3, 0.0)] == [3, 2, 0]
    assert bucket.take(3, 0.25) == 2
    assert bucket.take(100, 1000.0) == 5
