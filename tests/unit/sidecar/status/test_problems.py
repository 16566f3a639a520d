"""The problems that a member reports, and how long they have lasted."""

import logging

import pytest

from rota.model import Queue, Reason
from rota.sidecar.member.queue_lifecycle import LeaseEvent
from rota.sidecar.status.problems import UNREACHABLE_SECONDS, Problems


def test_health_omits_a_broker_that_was_never_contacted() -> None:
    assert Problems().broker_reachability(0.0) == {}


def test_health_reports_a_broker_that_answered_as_reachable() -> None:
    health = Problems()
    health.record_answer("a")
    assert health.broker_reachability(1e9) == {"a": True}


@pytest.mark.parametrize("answered_before", [False, True])
def test_health_reports_a_broker_as_unreachable_after_a_time_without_responses(
    answered_before: bool,  # noqa: FBT001 - a case
) -> None:
    health = Problems()
    if answered_before:
        health.record_answer("a")
    health.record_no_answer("a", 10.0)
    assert health.broker_reachability(10.0 + UNREACHABLE_SECONDS - 0.1) == {"a": True}
    health.record_no_answer("a", 14.0)  # the first failure counts
    assert health.broker_reachability(10.0 + UNREACHABLE_SECONDS) == {"a": False}


def test_health_reports_a_broker_as_reachable_again_after_one_response() -> None:
    health = Problems()
    health.record_no_answer("a", 10.0)
    health.record_answer("a")
    assert health.broker_reachability(99.0) == {"a": True}
    health.record_no_answer("a", 100.0)
    assert health.broker_reachability(104.9) == {"a": True}
    assert health.broker_reachability(105.0) == {"a": False}


def test_health_is_tracked_for_each_broker() -> None:
    health = Problems()
    health.record_answer("a")
    health.record_no_answer("b", 0.0)
    health.record_no_answer("c", 9.0)
    assert health.broker_reachability(10.0) == {"a": True, "b": False, "c": True}


def test_health_logs_a_problem_when_it_changes_and_when_it_is_cleared(caplog: pytest.LogCaptureFixture) -> None:
    health = Problems()
    with caplog.at_level(logging.INFO, "rota"):
        for message in ("one", "one", "another", "", ""):
            health.set_problem(Reason.APP_NOT_LISTENING, message)
    assert [log_record.getMessage() for log_record in caplog.records] == ["one", "another", "The problem is resolved"]
    assert {vars(log_record)["reason"] for log_record in caplog.records} == {"AppNotListening"}


def test_health_lists_current_problems() -> None:
    health = Problems()
    health.set_problem(Reason.MISSING_SECRET, "something else")
    health.set_problem(Reason.APP_NOT_LISTENING, "one")
    health.set_problem(Reason.APP_NOT_LISTENING, "another")
    assert health.messages == {"MissingSecret": "something else", "AppNotListening": "another"}
    health.set_problem(Reason.APP_NOT_LISTENING, "")
    assert health.messages == {"MissingSecret": "something else"}


def test_health_reports_a_failed_task_until_it_runs_steadily_again() -> None:
    health = Problems()
    health.report_task("beat", KeyError("a"))
    health.report_task("commits", ValueError("b"))
    assert health.messages["InternalError"].startswith("The task beat failed and is restarted: KeyError('a')")
    health.report_task("beat", None)
    assert "commits" in health.messages["InternalError"]
    health.report_task("commits", None)
    assert health.messages == {}


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (LeaseEvent.REFUSED, "another consumer has its lock"),
        (LeaseEvent.FAILED, "the request for its lock or for its start offset failed, as the sidecar's log shows"),
    ],
)
def test_health_names_the_cause_of_a_queue_that_cannot_be_started(event: LeaseEvent, cause: str) -> None:
    health = Problems()
    health.report_stuck({Queue("orders", "broker-a", 3): event})
    assert health.messages["QueueStartFailed"] == (
        f"Some queues are not consumed, such as orders/broker-a/3: {cause}; the sidecar retries"
    )
