"""Custom strategies run in threads: a hanging one delays only its own requests, and discarded requests end."""

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


class EntryPoints:
    """Entry points of the custom strategies `slow` and `quick`; `slow` returns once it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.started = threading.Event()
        self._strategies: dict[str, Strategy] = {"slow": self._slow, "quick": self._quick}

    def __call__(self, **_: object) -> list["EntryPoint"]:
        return [EntryPoint(name, strategy) for name, strategy in self._strategies.items()]

    def _slow(self, roster: Roster, **_: object) -> list[int]:
        self.started.set()
        self.released.wait(60)
        return self._quick(roster)

    def _quick(self, roster: Roster, **_: object) -> list[int]:
        return [0] * len(roster.queues)


class EntryPoint:
    """The entry point of one custom strategy."""

    def __init__(self, name: str, strategy: Strategy) -> None:
        self.name = name
        self._strategy = strategy

    def load(self) -> Strategy:
        return self._strategy


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryPoints]:
    entry_points = EntryPoints()
    monkeypatch.setattr(sys.modules["rota.strategies.custom"], "entry_points", entry_points)
    monkeypatch.setattr(planning, "CUSTOM_STRATEGY_SECONDS", 0.05)
    yield entry_points
    entry_points.released.set()


@pytest.fixture
def plan_runner() -> Iterator[PlanRunner]:
    runner = PlanRunner()
    yield runner
    runner.close()


def a_request(name: str) -> Snapshot:
    return a_snapshot(
        policy=a_policy(strategy="Custom", options={"custom": {"name": name}}), pods=(a_pod("m1", a_report("m1", 0)),)
    )


def owned_count(plan: Plan) -> int:
    assert plan.document is not None
    return len(plan.document.members["m1"].queues)


async def test_custom_strategy_that_hangs_is_not_called_again_before_it_returns(
    plan_runner: PlanRunner, entry_points: EntryPoints
) -> None:
    for _ in range(2 * planning.MAX_CUSTOM_STRATEGIES):  # otherwise repeated calls would take all threads
        with pytest.raises(NoResponseError, match="has not returned"):
            await plan_runner.plan(a_request("slow"), 0.0)
    entry_points.released.set()

    async def wait_for_plan() -> Plan:
        while True:
            try:
                return await plan_runner.plan(a_request("slow"), 0.0)
            except NoResponseError:
                await asyncio.sleep(0)

    assert owned_count(await wait_for_plan()) == 6


@pytest.mark.usefixtures("entry_points")
async def test_custom_strategy_that_hangs_does_not_block_another_policy(plan_runner: PlanRunner) -> None:
    with pytest.raises(NoResponseError):
        await plan_runner.plan(a_request("slow"), 0.0)
    assert owned_count(await plan_runner.plan(a_request("quick"), 0.0)) == 6


async def test_custom_strategy_is_called_again_for_a_recreated_group(
    plan_runner: PlanRunner, entry_points: EntryPoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "CUSTOM_STRATEGY_SECONDS", 1.0)  # long enough for the group to be deleted meanwhile
    previous_request = asyncio.create_task(plan_runner.plan(a_request("slow"), 0.0))
    await asyncio.to_thread(entry_points.started.wait, 60)
    plan_runner.discard_request(a_request("slow").group)
    with pytest.raises(NoResponseError):
        await previous_request
    entry_points.started.clear()
    new_request = asyncio.create_task(plan_runner.plan(a_request("slow"), 0.0))
    assert await asyncio.to_thread(entry_points.started.wait, 60)  # called again
    entry_points.released.set()
    assert owned_count(await new_request) == 6
