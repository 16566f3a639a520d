"""Who held what when: a right history is clean, and each thing planted in one is found."""

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.testing import assertDataFrameEqual

from builders import NOW, a_document, a_snapshot, a_view, obeying
from pipeline.frames import frames
from pipeline.journal_lines import Line, a_plan, a_whole, an_act, at, local, told
from rota.model import Queue
from rota.pipeline.common.schemas import INTERVALS, VIOLATIONS
from rota.pipeline.history.audit import intervals, violations
from rota.pipeline.ingest.facts import Facts
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.journaling_replay import JournalingReplay
from rota.planner import owners_record, plan
from rota.records import journal_record


def moved(group: str, **changed: Any) -> list[Line]:
    """Return how queue 0 goes from m1 to m2 in generations 6 and 7, after a whole at 5."""
    grant: Line = {"from": "m1", "to": "m2"} | changed
    return [
        a_whole(group, 5, 0, m1="0", m2=""),
        a_plan(group, 6, 60),
        an_act(group, 6, 60, "Revoke", **{"from": "m1", "to": "m2", "proof": "None", "state": "Owned"}),
        a_plan(group, 7, 62),
        an_act(group, 7, 62, "Grant", **grant),
    ]


def dropped(group: str) -> list[Line]:
    return [
        a_whole(group, 5, 0, m1="0"),
        a_plan(group, 6, 60),
        an_act(group, 6, 60, "Drop", **{"from": "m1", "proof": "Ended", "state": "Owned"}),
    ]


def first_document(group: str, seconds: float, member: str) -> list[Line]:
    """Return what is told of a group that was just made."""
    members = {member: {"uid": f"uid-{member}", "standing": "Ready"}}
    return [
        journal_record("membership", group, told(seconds), generation=1, members=members),
        a_plan(group, 1, seconds, members=1),
        an_act(group, 1, seconds, "Grant", to=member, state="Free"),
    ]


def planted() -> Iterator[tuple[str, list[Line], list[tuple[Any, ...]]]]:
    """Yield histories by name, and what is to be found in each: kind, since, until, members."""
    yield "clean", [*moved("clean"), a_whole("clean", 7, 3600, m1="", m2="0")], []
    yield "owner-of-another", moved("owner-of-another", **{"from": "m3"}), [("TwoOwners", 62, None, ["m1", "m2"])]
    twice = [a_whole("twice", 5, 0, m1="0", m2="0")]
    yield "twice", twice, [("TwoOwners", 0, None, ["m1", "m2"])]
    yield "unproved", moved("unproved", proof="None"), [("Unproved", 62, None, ["m1", "m2"])]
    immediate = [
        it | {"rules": {"handover": {"mode": "Immediate"}}} if it["kind"] == "owners" else it
        for it in moved("immediate", proof="None")
    ]
    yield "immediate", immediate, []
    again = [a_plan("free", 7, 90), an_act("free", 7, 90, "Grant", to="m2", state="Free")]
    yield "free", [*dropped("free"), *again], [("Unowned", 60, 90, [])]
    yield "gone", [*dropped("gone"), a_whole("gone", 6, 3600, m1="")], []
    yield (
        "nobody-shares",
        [
            *dropped("nobody-shares")[:1],
            a_plan("nobody-shares", 6, 60, members=0),
            *dropped("nobody-shares")[2:],
            a_plan("nobody-shares", 7, 90, queues=0),
            an_act("nobody-shares", 7, 90, "Grant", to="m2", state="Free"),
        ],
        [],
    )
    yield (
        "missing",
        [*moved("missing")[:3], a_plan("missing", 8, 300), a_whole("missing", 8, 301, m1="", m2="0")],
        [("Unknown", 60, 301, ["m1"])],
    )
    yield (
        "otherwise",
        [*moved("otherwise"), a_plan("otherwise", 8, 90), a_whole("otherwise", 8, 3600, m1="0", m2="")],
        [("Unknown", 90, 3600, ["m2", "m1"])],
    )
    yield (
        "left-out",
        [*moved("left-out"), a_plan("left-out", 8, 90), a_whole("left-out", 8, 3600, m1="")],
        [("Unknown", 90, 3600, ["m2"])],
    )
    anew = [a_plan("anew", 1, 600), an_act("anew", 1, 600, "Grant", to="m9", state="Free")]
    yield "anew", [*moved("anew"), *anew], []
    yield "anew-at-once", [*first_document("anew-at-once", 0, "m1"), *first_document("anew-at-once", 600, "m9")], []
    late = [it | {"at": told(59)} if it.get("generation") == 7 else it for it in moved("other-clock")]
    yield "other-clock", late, []


GAP = {"schema": 1, "kind": "gap", "at": told(7300), "writer": "rota-1", "since": told(7000), "missing": 3}
TORN = [  # an act of generation 6 is missing in the gap; of the other group nothing is, for it had no document
    a_whole("torn", 5, 6900, m1="0"),
    a_plan("torn", 6, 7100),
    a_whole("torn", 6, 7400, m1="0"),
    a_whole("untorn", 5, 6900, m1="0"),
    a_whole("untorn", 5, 7400, m1="0"),
    a_whole("silent", 5, 6900, m1="0"),
]


@pytest.fixture(scope="module")
def audited(spark: SparkSession) -> list[Row]:
    lines = [line for _, some, _ in planted() for line in some]
    return violations(frames(spark, lines)).collect()


@pytest.mark.parametrize(("group", "expected"), [pytest.param(name, it, id=name) for name, _, it in planted()])
def test_timeline_finds_each_planted_violation_and_no_other(
    audited: list[Row], group: str, expected: list[tuple[Any, ...]]
) -> None:
    found = [it for it in audited if it["group"] == group]
    assert [(it["kind"], it["since"], it["until"], it["members"]) for it in found] == [
        (kind, local(since), None if until is None else local(until), members)
        for kind, since, until, members in expected
    ]


@pytest.mark.slow("ownership is unknown where records are missing")
def test_timeline_reports_ownership_as_unknown_where_records_are_missing(spark: SparkSession) -> None:
    facts = frames(spark, [*TORN, GAP])
    found = [(it["group"], it["kind"], it["since"], it["until"]) for it in violations(facts).collect()]
    assert sorted(found, key=str) == [
        ("silent", "Unknown", local(7000), None),
        ("torn", "Unknown", local(7100), local(7400)),
    ]


def test_timeline_intervals_list_the_owner_of_a_queue_over_time(spark: SparkSession) -> None:
    obeyed = {"member": "m2", "uid": "uid-m2", "queues": {"t": {"a": "0"}}}
    lines = [
        *moved("g"),
        journal_record("obeyed", "g", told(62.5), generation=7, **obeyed),
        a_whole("g", 7, 3600, m1="", m2="0"),
        a_plan("g", 9, 4000),  # 8 is missing
        a_whole("g", 9, 4001, m1="", m2="0"),
        a_plan("g", 10, 4100),
        an_act("g", 10, 4100, "Force", **{"from": "m2", "to": "m1", "proof": "Lost", "state": "Owned"}),
    ]
    rows = [
        ("g", "t", "a", 0, "m1", "uid-m1", at(0), at(62), 5, False, None, None),
        ("g", "t", "a", 0, "m2", "uid-m2", at(62), at(3600), 7, False, at(62.5), 2.5),
        ("g", "t", "a", 0, "m2", "uid-m2", at(4001), at(4100), 9, False, None, None),
        ("g", "t", "a", 0, "m1", "uid-m1", at(4100), None, 10, True, None, None),
    ]
    assertDataFrameEqual(intervals(frames(spark, lines)), spark.createDataFrame(rows, INTERVALS))


@pytest.mark.slow("a timeline of records that the planner made")
def test_timeline_of_the_planners_journal_records_has_no_violations_and_its_owners(spark: SparkSession) -> None:
    """One ended, one joins, queues are under way; what the owners are before it is told, too."""
    q = [Queue("orders", "a", number) for number in range(8)]
    document = a_document(members={"m1": q[:2], "m2": q[2:4]}, taken={q[4]: ("m2", "m1"), q[5]: ("m0", "m1")})
    snapshot = a_snapshot(
        document=document, pods=obeying(document), deleted_uids=frozenset({"uid-m0"}), views={"orders": a_view(7)}
    )
    assert snapshot.spec
    planned = plan(snapshot, NOW)
    assert planned.document
    lines: list[Any] = [owners_record(snapshot, planned, document, snapshot.spec, NOW - 1), *planned.journal_records]
    lines.append(owners_record(snapshot, planned, planned.document, snapshot.spec, NOW + 1))
    facts = frames(spark, lines)
    assert [it for it in violations(facts).collect() if it["kind"] != "Unowned"] == []
    held = {it["queue"]: it["member"] for it in intervals(facts).filter("until is null").collect()}
    expected = {queue.id: name for name, share in planned.document.members.items() for queue in share.queues}
    assert held == expected | {queue.id: it.holder.name for queue, it in planned.document.releasing.items()}


def test_timeline_of_synthetic_groups_has_no_violations(spark: SparkSession) -> None:
    facts = invented_facts(spark)
    assertDataFrameEqual(violations(facts), spark.createDataFrame([], VIOLATIONS))


def invented_facts(spark: SparkSession) -> Facts:
    """Return two hours of three groups as the real planner shares them."""
    lines: list[Any] = []
    for number in range(3):
        JournalingReplay(generate_history(number, 7, 2.0), lines.append).run()
    return frames(spark, lines)
