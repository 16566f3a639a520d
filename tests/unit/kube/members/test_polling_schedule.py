"""Reading members by turns: each once a round, and a slow one delays only itself."""

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest

from rota.kube.members import polling_schedule
from rota.kube.members.polling_schedule import PollSchedule, PollTurn, poll_members
from rota.kube.state.group import Group

GROUP = Group("shop", "orders")


class OverError(Exception):
    """So many steps are over."""


def turns(*names: str) -> list[PollTurn]:
    return [PollTurn(("shop", "orders"), GROUP, name, f"uid-{name}") for name in names]


def test_report_poll_has_each_member_once_a_round() -> None:
    members = turns(*(f"m{number}" for number in range(100)))
    every = PollSchedule(members_per_step=10, min_steps=5)
    due = [turn for step in range(3, 13) for turn in every.due(members, 100, step)]
    assert Counter(due) == Counter(members)


async def test_report_poll_passes_over_a_member_whose_last_read_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.0)
    asked, answer = Counter[str](), asyncio.Event()

    def due(step: int) -> Iterable[PollTurn]:
        if step == 4:
            answer.set()
        if step == 8:
            raise OverError
        return turns("slow", "quick")

    async def read(turn: PollTurn) -> None:
        asked[turn.name] += 1
        if turn.name == "slow":
            await answer.wait()

    with pytest.RaisesGroup(OverError):
        await poll_members(due, read)
    assert asked["quick"] == 7
    assert 1 < asked["slow"] < 7, "it is asked again once it has answered"


async def test_report_poll_ends_with_the_error_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it restarts it."""
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.0)

    async def read(_: PollTurn) -> None:
        raise OverError

    with pytest.RaisesGroup(OverError):
        await poll_members(lambda _: turns("m1"), read)
