import logging

import pytest

from rota.kube.telemetry.change_log import ChangeLog
from rota.logs import FIELDS
from rota.records import journal_record

KEY = ("shop", "orders")
AT = "2026-11-21T08:00:00.000Z"


def membership(generation: int, **states: str) -> dict[str, object]:
    members = {name: {"uid": f"uid-{name}", "standing": state} for name, state in states.items()}
    return journal_record("membership", "shop/orders", AT, generation=generation, members=members)


def plan(generation: int, at: str = AT) -> dict[str, object]:
    return journal_record(
        "plan", "shop/orders", at, generation=generation, reason="MemberJoined", message="The member m2 joined"
    )


def logged_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    """Return the text and fields of each line."""
    return [
        (record.getMessage(), {name: getattr(record, name) for name in FIELDS if hasattr(record, name)})
        for record in caplog.records
    ]


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rota")


def test_log_shows_the_start_and_the_end_of_a_rebalance(caplog: pytest.LogCaptureFixture) -> None:
    log = ChangeLog()
    log.write(KEY, [membership(7, m1="Ready", m2="Ready"), plan(7)], rebalance_started_at=AT)
    log.write(KEY, [plan(8, "2026-11-21T08:00:01.000Z")], rebalance_started_at=AT)
    end = {"reason": "MemberJoined", "outcome": "Settled", "moved": 3, "seconds": 1.5}
    log.write(KEY, [journal_record("rebalance", "shop/orders", AT, generation=8, **end)], rebalance_started_at=AT)
    fields = {"namespace": "shop", "group": "orders", "reason": "MemberJoined"}
    assert logged_lines(caplog) == [
        ("Assignment stored, rebalance started: The member m2 joined", {**fields, "generation": 7}),
        ("Assignment stored: The member m2 joined", {**fields, "generation": 8}),
        ("Rebalance ended (Settled): 3 queues moved", {**fields, "generation": 8, "seconds": 1.5}),
    ]


def test_log_names_members_that_join_are_lost_or_deleted(caplog: pytest.LogCaptureFixture) -> None:
    log = ChangeLog()
    for generation, states in enumerate(
        [{"m1": "Ready"}, {"m1": "Ready", "m2": "Joining"}, {"m1": "Lost", "m2": "Joining"}, {"m2": "Joining"}]
    ):
        log.write(KEY, [membership(generation, **states)], rebalance_started_at="")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "Member is Joining, was unknown"),
        ("WARNING", "Member is Lost, was Ready"),
        ("INFO", "Member is Deleted, was Lost"),
    ]
    assert logged_lines(caplog)[1][1] == {"namespace": "shop", "group": "orders", "member": "m1", "generation": 2}


def test_log_warns_of_queues_that_were_granted_by_force(caplog: pytest.LogCaptureFixture) -> None:
    facts = {"proof": "Lost", "from": "m1", "to": "m2", "queues": {"orders": {"broker-a": "0-3,7"}}}
    records = [
        journal_record("handover", "shop/orders", AT, generation=9, act="Grant", **facts),
        journal_record("handover", "shop/orders", AT, generation=9, act="Force", **facts),
    ]
    ChangeLog().write(KEY, records, rebalance_started_at="")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    text, fields = logged_lines(caplog)[0]
    assert text == "5 queues were granted to m2 before the member released them"
    assert fields == {"namespace": "shop", "group": "orders", "generation": 9, "member": "m1", "reason": "Lost"}


def test_log_has_a_line_for_each_changed_condition(caplog: pytest.LogCaptureFixture) -> None:
    facts = {"condition": "Ready", "status": "False", "reason": "NoMembers", "message": "No pod is a member"}
    ChangeLog().write(KEY, [journal_record("verdict", "shop/orders", AT, **facts)], rebalance_started_at="")
    assert logged_lines(caplog) == [
        ("Condition Ready=False: No pod is a member", {"namespace": "shop", "group": "orders", "reason": "NoMembers"})
    ]


def test_log_of_a_forgotten_group_does_not_report_its_members_as_new(caplog: pytest.LogCaptureFixture) -> None:
    log = ChangeLog()
    log.write(KEY, [membership(1, m1="Ready")], rebalance_started_at="")
    log.forget(KEY)
    log.write(KEY, [membership(2, m1="Lost")], rebalance_started_at="")
    assert not caplog.records
