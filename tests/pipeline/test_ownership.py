"""Ownership over time: a correct history has no violations, and each planted violation is found."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from builders import NOW, a_document, a_snapshot, a_view, obeying
from pipeline.group_lines import gaps_in, group_records
from pipeline.journal_lines import Line, handover_line, iso_time, owners_line, plan_line, time_at
from rota.model import Queue
from rota.pipeline.history.audit import Audit, Interval, audit_group
from rota.pipeline.history.ordering import Gaps
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.journaling_replay import JournalingReplay
from rota.planner import owners_record, plan
from rota.records import journal_record


def handover_history(group: str, **changes: Any) -> list[Line]:
    """Return the lines of a handover of queue 0 from m1 to m2 in generations 6 and 7, after owners at 5."""
    grant: Line = {"from": "m1", "to": "m2"} | changes
    return [
        owners_line(group, 5, 0, m1="0", m2=""),
        plan_line(group, 6, 60),
        handover_line(group, 6, 60, "Revoke", **{"from": "m1", "to": "m2", "proof": "None", "state": "Owned"}),
        plan_line(group, 7, 62),
        handover_line(group, 7, 62, "Grant", **grant),
    ]


def drop_history(group: str) -> list[Line]:
    return [
        owners_line(group, 5, 0, m1="0"),
        plan_line(group, 6, 60),
        handover_line(group, 6, 60, "Drop", **{"from": "m1", "proof": "Ended", "state": "Owned"}),
    ]


def first_records(group: str, seconds: float, member: str) -> list[Line]:
    """Return the first records of a group that was just created."""
    members = {member: {"uid": f"uid-{member}", "standing": "Ready"}}
    return [
        journal_record("membership", group, iso_time(seconds), generation=1, members=members),
        plan_line(group, 1, seconds, members=1),
        handover_line(group, 1, seconds, "Grant", to=member, state="Free"),
    ]


class PlantedHistory(NamedTuple):
    """A history, and its expected violations: kind, since, until, members."""

    name: str
    lines: list[Line]
    violations: list[tuple[Any, ...]]


def planted_histories() -> Iterator[PlantedHistory]:
    """Yield histories with a planted violation or with none."""
    yield PlantedHistory("clean", [*handover_history("clean"), owners_line("clean", 7, 3600, m1="", m2="0")], [])
    yield PlantedHistory(
        "owner-of-another",
        handover_history("owner-of-another", **{"from": "m3"}),
        [("TwoOwners", 62, None, ["m1", "m2"])],
    )
    two_owners = [owners_line("two-owners", 5, 0, m1="0", m2="0")]
    yield PlantedHistory("two-owners", two_owners, [("TwoOwners", 0, None, ["m1", "m2"])])
    yield PlantedHistory("unproved", handover_history("unproved", proof="None"), [("Unproved", 62, None, ["m1", "m2"])])
    immediate = [
        line | {"rules": {"handover": {"mode": "Immediate"}}} if line["kind"] == "owners" else line
        for line in handover_history("immediate", proof="None")
    ]
    yield PlantedHistory("immediate", immediate, [])
    regrant = [plan_line("free", 7, 90), handover_line("free", 7, 90, "Grant", to="m2", state="Free")]
    yield PlantedHistory("free", [*drop_history("free"), *regrant], [("Unowned", 60, 90, [])])
    yield PlantedHistory("dropped", [*drop_history("dropped"), owners_line("dropped", 6, 3600, m1="")], [])
    yield PlantedHistory(
        "no-members",
        [
            *drop_history("no-members")[:1],
            plan_line("no-members", 6, 60, members=0),
            *drop_history("no-members")[2:],
            plan_line("no-members", 7, 90, queues=0),
            handover_line("no-members", 7, 90, "Grant", to="m2", state="Free"),
        ],
        [],
    )
    yield PlantedHistory(
        "missing",
        [*handover_history("missing")[:3], plan_line("missing", 8, 300), owners_line("missing", 8, 301, m1="", m2="0")],
        [("Unknown", 60, 301, ["m1"])],
    )
    yield PlantedHistory(
        "other-owner",
        [
            *handover_history("other-owner"),
            plan_line("other-owner", 8, 90),
            owners_line("other-owner", 8, 3600, m1="0", m2=""),
        ],
        [("Unknown", 90, 3600, ["m2", "m1"])],
    )
    yield PlantedHistory(
        "left-out",
        [*handover_history("left-out"), plan_line("left-out", 8, 90), owners_line("left-out", 8, 3600, m1="")],
        [("Unknown", 90, 3600, ["m2"])],
    )
    recreated = [plan_line("recreated", 1, 600), handover_line("recreated", 1, 600, "Grant", to="m9", state="Free")]
    yield PlantedHistory("recreated", [*handover_history("recreated"), *recreated], [])
    yield PlantedHistory(
        "recreated-at-once",
        [*first_records("recreated-at-once", 0, "m1"), *first_records("recreated-at-once", 600, "m9")],
        [],
    )
    late = [
        line | {"at": iso_time(59)} if line.get("generation") == 7 else line for line in handover_history("other-clock")
    ]
    yield PlantedHistory("other-clock", late, [])


GAP = {"schema": 1, "kind": "gap", "at": iso_time(7300), "writer": "rota-1", "since": iso_time(7000), "missing": 3}
# The gap has an act of generation 6; group untorn has no plan in it, so nothing of it is missing.
RECORDS_AROUND_GAP = [
    owners_line("torn", 5, 6900, m1="0"),
    plan_line("torn", 6, 7100),
    owners_line("torn", 6, 7400, m1="0"),
    owners_line("untorn", 5, 6900, m1="0"),
    owners_line("untorn", 5, 7400, m1="0"),
    owners_line("silent", 5, 6900, m1="0"),
]


def audit(lines: list[Line], gaps: Gaps | None = None) -> Audit:
    return audit_group(group_records(lines), gaps or Gaps())


@pytest.mark.parametrize("history", list(planted_histories()), ids=lambda history: history.name)
def test_timeline_finds_each_planted_violation_and_no_other(history: PlantedHistory) -> None:
    violations = audit(history.lines).violations
    assert [
        (violation.kind, violation.since, violation.until, list(violation.members)) for violation in violations
    ] == [
        (kind, time_at(since), None if until is None else time_at(until), members)
        for kind, since, until, members in history.violations
    ]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("silent", [("Unknown", time_at(7000), None)]),
        ("torn", [("Unknown", time_at(7100), time_at(7400))]),
        ("untorn", []),
    ],
)
def test_timeline_reports_ownership_as_unknown_where_records_are_missing(
    group: str, expected: list[tuple[Any, ...]]
) -> None:
    lines = [line for line in RECORDS_AROUND_GAP if line["group"] == group]
    violations = audit(lines, gaps_in([GAP])).violations
    assert [(violation.kind, violation.since, violation.until) for violation in violations] == expected


def test_timeline_intervals_list_the_owner_of_a_queue_over_time() -> None:
    obeyed = {"member": "m2", "uid": "uid-m2", "queues": {"t": {"a": "0"}}}
    lines = [
        *handover_history("g"),
        journal_record("obeyed", "g", iso_time(62.5), generation=7, **obeyed),
        owners_line("g", 7, 3600, m1="", m2="0"),
        plan_line("g", 9, 4000),  # 8 is missing
        owners_line("g", 9, 4001, m1="", m2="0"),
        plan_line("g", 10, 4100),
        handover_line("g", 10, 4100, "Force", **{"from": "m2", "to": "m1", "proof": "Lost", "state": "Owned"}),
    ]
    queue = Queue("t", "a", 0)
    assert audit(lines).intervals == [
        Interval(queue, "m1", "uid-m1", time_at(0), time_at(62), 5, forced=False, obeyed=None, seconds=None),
        Interval(queue, "m2", "uid-m2", time_at(62), time_at(3600), 7, forced=False, obeyed=time_at(62.5), seconds=2.5),
        Interval(queue, "m2", "uid-m2", time_at(4001), time_at(4100), 9, forced=False, obeyed=None, seconds=None),
        Interval(queue, "m1", "uid-m1", time_at(4100), None, 10, forced=True, obeyed=None, seconds=None),
    ]


def test_timeline_of_the_planners_journal_records_has_no_violations_and_its_owners() -> None:
    """One member ended, one joins, queues are in handover; the owners before the plan are recorded, too."""
    queues = [Queue("orders", "a", number) for number in range(8)]
    document = a_document(
        members={"m1": queues[:2], "m2": queues[2:4]}, taken={queues[4]: ("m2", "m1"), queues[5]: ("m0", "m1")}
    )
    snapshot = a_snapshot(
        document=document, pods=obeying(document), deleted_uids=frozenset({"uid-m0"}), views={"orders": a_view(7)}
    )
    assert snapshot.spec
    planned = plan(snapshot, NOW)
    assert planned.document
    lines: list[Any] = [owners_record(snapshot, planned, document, snapshot.spec, NOW - 1), *planned.journal_records]
    lines.append(owners_record(snapshot, planned, planned.document, snapshot.spec, NOW + 1))
    result = audit(lines)
    assert [violation for violation in result.violations if violation.kind != "Unowned"] == []
    held = {interval.queue.id: interval.member for interval in result.intervals if interval.until is None}
    expected = {queue.id: name for name, share in planned.document.members.items() for queue in share.queues}
    assert held == expected | {
        queue.id: revocation.holder.name for queue, revocation in planned.document.releasing.items()
    }


@pytest.mark.parametrize("number", range(12))
def test_timeline_of_a_synthetic_group_has_no_violations_and_an_owner_of_every_queue(number: int) -> None:
    """Two hours of a group, planned by the real planner."""
    lines: list[Any] = []
    history = generate_history(number, 7, 2.0)
    JournalingReplay(history, lines.append).run()
    result = audit(lines)
    assert result.violations == []
    assert sorted(interval.queue for interval in result.intervals if interval.until is None) == list(history.queues)
