"""Custom strategies are asked aside: one that hangs holds up who asked it, and nobody asks it for what is over."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from builders import a_pod, a_policy, a_report, a_snapshot
from rota.kube.client.api import NoResponseError
from rota.kube.reconcile import planning
from rota.kube.reconcile.planning import PlanRunner
from rota.model import Roster
from rota.planner import Plan, Snapshot

Strategy = Callable[..., object]


class Points:
    """Custom strategies by their names: `slow` answers once it is freed."""

    def __init__(self) -> None:
        self.freed, self.begun = threading.Event(), threading.Event()
        self._all: dict[str, Strategy] = {"slow": self._slow, "quick": self._quick}

    def __call__(self, **_: object) -> list["Point"]:
        return [Point(name, strategy) for name, strategy in self._all.items()]

    def _slow(self, roster: Roster, **_: object) -> list[int]:
        self.begun.set()
        self.freed.wait(60)
        return self._quick(roster)

    def _quick(self, roster: Roster, **_: object) -> list[int]:
        return [0] * len(roster.queues)


class Point:
    """An entry point that offers one of them."""

    def __init__(self, name: str, strategy: Strategy) -> None:
        self.name, self._strategy = name, strategy

    def load(self) -> Strategy:
        return self._strategy


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[Points]:
    found = Points()
    monkeypatch.setattr(sys.modules["rota.strategies.custom"], "entry_points", found)
    monkeypatch.setattr(planning, "CUSTOM_STRATEGY_SECONDS", 0.05)
    yield found
    found.freed.set()


@pytest.fixture
def aside() -> Iterator[PlanRunner]:
    made = PlanRunner()
    yield made
    made.close()


def asking(name: str) -> Snapshot:
    return a_snapshot(
        policy=a_policy(strategy="Custom", options={"custom": {"name": name}}), pods=(a_pod("m1", a_report("m1", 0)),)
    )


def owned(found: Plan) -> int:
    assert found.document is not None
    return len(found.document.members["m1"].queues)


async def test_custom_strategy_that_hangs_is_not_called_again_before_it_returns(
    aside: PlanRunner, points: Points
) -> None:
    for _ in range(
        2 * planning.MAX_CUSTOM_STRATEGIES
    ):  # else those who ask would take all room, and nobody were answered
        with pytest.raises(NoResponseError, match="has not returned"):
            await aside.plan(asking("slow"), 0.0)
    points.freed.set()

    async def answered() -> Plan:
        while True:
            try:
                return await aside.plan(asking("slow"), 0.0)
            except NoResponseError:
                await asyncio.sleep(0)

    assert owned(await answered()) == 6


@pytest.mark.usefixtures("points")
async def test_custom_strategy_that_hangs_does_not_block_another_policy(aside: PlanRunner) -> None:
    with pytest.raises(NoResponseError):
        await aside.plan(asking("slow"), 0.0)
    assert owned(await aside.plan(asking("quick"), 0.0)) == 6


async def test_custom_strategy_is_called_again_for_a_recreated_group(
    aside: PlanRunner, points: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "CUSTOM_STRATEGY_SECONDS", 1.0)  # time enough for it to go meanwhile
    before = asyncio.create_task(aside.plan(asking("slow"), 0.0))
    await asyncio.to_thread(points.begun.wait, 60)
    aside.discard_request(asking("slow").group)
    with pytest.raises(NoResponseError):
        await before
    points.begun.clear()
    after = asyncio.create_task(aside.plan(asking("slow"), 0.0))
    assert await asyncio.to_thread(points.begun.wait, 60)  # it is asked anew
    points.freed.set()
    assert owned(await after) == 6
