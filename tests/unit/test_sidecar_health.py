"""What keeps a member from working, and since when."""

import logging

import pytest

from rota.sidecar.health import UNREACHABLE, Health


def test_a_broker_that_was_never_asked_is_not_spoken_of() -> None:
    assert Health().brokers(0.0) == {}


def test_a_broker_that_answers_can_be_reached() -> None:
    health = Health()
    health.reached("a")
    assert health.brokers(1e9) == {"a": True}


@pytest.mark.parametrize("answered_before", [False, True])
def test_a_broker_cannot_be_reached_once_it_has_not_answered_for_a_while(
    answered_before: bool,  # noqa: FBT001 - a case
) -> None:
    health = Health()
    if answered_before:
        health.reached("a")
    health.missed("a", 10.0)
    assert health.brokers(10.0 + UNREACHABLE - 0.1) == {"a": True}
    health.missed("a", 14.0)  # since the first time it counts
    assert health.brokers(10.0 + UNREACHABLE) == {"a": False}


def test_one_answer_makes_up_for_it() -> None:
    health = Health()
    health.missed("a", 10.0)
    health.reached("a")
    assert health.brokers(99.0) == {"a": True}
    health.missed("a", 100.0)
    assert health.brokers(104.9) == {"a": True}
    assert health.brokers(105.0) == {"a": False}


def test_brokers_are_judged_one_by_one() -> None:
    health = Health()
    health.reached("a")
    health.missed("b", 0.0)
    health.missed("c", 9.0)
    assert health.brokers(10.0) == {"a": True, "b": False, "c": True}


def test_a_trouble_is_told_until_it_is_no_more(caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    with caplog.at_level(logging.INFO, "rota"):
        for told in ("one", "one", "another", "", ""):
            health.trouble("Why", told)
    assert [it.getMessage() for it in caplog.records] == ["Why: one", "Why: another", "Why is no more"]


def test_troubles_are_there_to_be_read() -> None:
    health = Health()
    health.trouble("Other", "something else")
    health.trouble("Why", "one")
    health.trouble("Why", "another")
    assert health.troubles == {"Other": "something else", "Why": "another"}
    health.trouble("Why", "")
    assert health.troubles == {"Other": "something else"}
