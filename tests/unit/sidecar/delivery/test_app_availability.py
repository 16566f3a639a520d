"""How often an app that is away is tried, by a clock that the test sets."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from rota.deliveries import DeliveryOutcome
from rota.model import Reason
from rota.sidecar.delivery.app_availability import AppAvailability


class _Host:
    """The parts of a delivery's host that availability uses."""

    def __init__(self) -> None:
        self.time = 100.0
        self.problems = SimpleNamespace(set_problem=self._set_problem)
        self.metrics = SimpleNamespace(paused=SimpleNamespace(inc=lambda _: None))
        self.settings = SimpleNamespace(delivery=SimpleNamespace(push=SimpleNamespace(path="/", port=8080)))
        self.open_problems: set[Reason] = set()

    def now(self) -> float:
        return self.time

    def _set_problem(self, reason: Reason, text: str) -> None:
        (self.open_problems.add if text else self.open_problems.discard)(reason)


def _tries(host: Any, outcome: DeliveryOutcome, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Yield the times of tries that all have this outcome, relative to the first, for so many seconds."""
    pauses: list[float] = []
    monkeypatch.setattr(
        asyncio, "get_running_loop", lambda: SimpleNamespace(call_later=lambda pause, _: pauses.append(pause))
    )
    availability = AppAvailability(host, lambda: None)
    began = host.time
    while host.time <= began + seconds:
        assert not availability.is_away or availability.is_try_due(host.time)
        availability.track(outcome)
        yield host.time - began
        host.time += pauses[-1]


def test_push_to_an_app_that_starts_again_is_tried_often_at_first_and_once_a_second_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = _Host()
    tries = list(_tries(host, DeliveryOutcome.REFUSED, 60.0, monkeypatch))
    assert len([at for at in tries if at <= 0.4]) == 9
    assert max(later - earlier for earlier, later in pairwise(tries) if later < 1.0) < 0.125
    assert tries[-1] - tries[-2] == pytest.approx(1.0)
    assert host.open_problems == {Reason.APP_NOT_LISTENING}


def test_push_to_a_wrong_path_is_tried_once_a_second_and_rarely_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list(_tries(_Host(), DeliveryOutcome.NOT_FOUND, 300.0, monkeypatch))
    assert tries[1:4] == pytest.approx([1.0, 2.0, 3.0])
    assert tries[-1] - tries[-2] == pytest.approx(10.0)
    assert len(tries) <= 60
