"""What keeps a member from working, and since when."""

import logging

import pytest

from rota.model import Reason
from rota.sidecar.status.problems import UNREACHABLE, Problems


def test_health_omits_a_broker_that_was_never_contacted() -> None:
    assert Problems().brokers(0.0) == {}


def test_health_reports_a_broker_that_answered_as_reachable() -> None:
    health = Problems()
    health.reached("a")
    assert health.brokers(1e9) == {"a": True}


@pytest.mark.parametrize("answered_before", [False, True])
def test_health_reports_a_broker_as_unreachable_after_a_time_without_responses(
    answered_before: bool,  # noqa: FBT001 - a case
) -> None:
    health = Problems()
    if answered_before:
        health.reached("a")
    health.missed("a", 10.0)
    assert health.brokers(10.0 + UNREACHABLE - 0.1) == {"a": True}
    health.missed("a", 14.0)  # since the first time it counts
    assert health.brokers(10.0 + UNREACHABLE) == {"a": False}


def test_health_reports_a_broker_as_reachable_again_after_one_response() -> None:
    health = Problems()
    health.missed("a", 10.0)
    health.reached("a")
    assert health.brokers(99.0) == {"a": True}
    health.missed("a", 100.0)
    assert health.brokers(104.9) == {"a": True}
    assert health.brokers(105.0) == {"a": False}


def test_health_is_tracked_for_each_broker() -> None:
    health = Problems()
    health.reached("a")
    health.missed("b", 0.0)
    health.missed("c", 9.0)
    assert health.brokers(10.0) == {"a": True, "b": False, "c": True}


def test_health_logs_a_problem_when_it_changes_and_when_it_is_cleared(caplog: pytest.LogCaptureFixture) -> None:
    health = Problems()
    with caplog.at_level(logging.INFO, "rota"):
        for told in ("one", "one", "another", "", ""):
            health.trouble(Reason.APP_NOT_LISTENING, told)
    assert [it.getMessage() for it in caplog.records] == ["one", "another", "The problem is over"]
    assert {vars(it)["reason"] for it in caplog.records} == {"AppNotListening"}


def test_health_lists_current_problems() -> None:
    health = Problems()
    health.trouble(Reason.MISSING_SECRET, "something else")
    health.trouble(Reason.APP_NOT_LISTENING, "one")
    health.trouble(Reason.APP_NOT_LISTENING, "another")
    assert health.troubles == {"MissingSecret": "something else", "AppNotListening": "another"}
    health.trouble(Reason.APP_NOT_LISTENING, "")
    assert health.troubles == {"MissingSecret": "something else"}


def test_health_reports_a_failed_task_until_it_runs_steadily_again() -> None:
    health = Problems()
    health.task_failed("beat", KeyError("a"))
    health.task_failed("commits", ValueError("b"))
    assert health.troubles["InternalError"].startswith("The task beat failed and is restarted: KeyError('a')")
    health.task_failed("beat", None)
    assert "commits" in health.troubles["InternalError"]
    health.task_failed("commits", None)
    assert health.troubles == {}
