"""The polling schedule: each member is read once a round, and a slow member delays only itself."""

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest

from rota.kube.members import polling_schedule
from rota.kube.members.polling_schedule import PollSchedule, PollTurn, run_polls
from rota.kube.state.group import Group

GROUP = Group("shop", "orders")


class StepsOverError(Exception):
    """Ends the poller after a number of steps."""


def a_turn_of_each(*names: str) -> list[PollTurn]:
    return [PollTurn(("shop", "orders"), GROUP, name, f"uid-{name}") for name in names]


def test_report_poll_has_each_member_once_a_round() -> None:
    members = a_turn_of_each(*(f"m{number}" for number in range(100)))
    schedule = PollSchedule(members_per_step=10, min_steps=5)
    due = [turn for step in range(3, 13) for turn in schedule.select_due(members, step)]
    assert Counter(due) == Counter(members)


async def test_report_poll_skips_a_member_with_a_read_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.0)
    reads: Counter[str] = Counter()
    response = asyncio.Event()

    def due(step: int) -> Iterable[PollTurn]:
        if step == 4:
            response.set()
        if step == 8:
            raise StepsOverError
        return a_turn_of_each("slow", "quick")

    async def read(turn: PollTurn) -> None:
        reads[turn.name] += 1
        if turn.name == "slow":
            await response.wait()

    with pytest.RaisesGroup(StepsOverError):
        await run_polls(due, read)
    assert reads["quick"] == 7
    assert 1 < reads["slow"] < 7, "it is read again after its response"


async def test_report_poll_ends_with_the_error_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor restarts the poller."""
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.0)

    async def read(_: PollTurn) -> None:
        raise StepsOverError

    with pytest.RaisesGroup(StepsOverError):
        await run_polls(lambda _: a_turn_of_each("m1"), read)
