"""Tests the evaluation of `make compare`: it detects each violation, and reports none for a clean run."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from bench import compare
from bench.reckoning import (
    BEGIN,
    END,
    Line,
    Outcome,
    Run,
    Span,
    Unmarked,
    outcome,
    replaced,
    table,
    united,
)
from ground.deliveries import ASIDE, Came

PACE = 0.01  # seconds between two messages of a queue
ACT, OVER = 10.0, 40.0


def deliveries_to(member: str, begin: float, end: float, *, queue: int = 0, delay: float = 0.001) -> list[Came]:
    """Return the deliveries to the only owner of a queue, each right after it was sent; numbers grow with that time."""
    numbers = range(round(begin / PACE), round(end / PACE))
    return [Came(PACE * n + delay, 1000 * n + queue, queue, member, PACE * n) for n in numbers]


def outcome_of(
    deliveries: Iterable[Came], *, acts: tuple[float, ...] = (ACT,), queues: int = 1, struck: str = ""
) -> Outcome:
    """Return the outcome of a run in which every sent message is among these deliveries."""
    all_deliveries = [*deliveries]
    return outcome(
        Run(all_deliveries, len({delivery.number for delivery in all_deliveries}), queues, acts, OVER, struck)
    )


def delayed(deliveries: Iterable[Came], until: float) -> list[Came]:
    """Return the deliveries with none before `until`: those due earlier arrive right after it, in order."""
    return [delivery._replace(at=max(delivery.at, until + delivery.at / 1e6)) for delivery in deliveries]


def test_compare_of_an_undisturbed_run_finds_no_fault() -> None:
    result = outcome_of(deliveries_to("a", 0, OVER))
    assert (result.twice, result.lost, result.disorder, result.overlap, result.right) == (0, 0, 0, 0, 0)
    assert not result.touched
    assert max(result.others) < PACE


def test_compare_pause_of_a_moved_queue_lasts_until_the_next_owner_consumes() -> None:
    result = outcome_of([*deliveries_to("a", 0, 11), *delayed(deliveries_to("b", 11, OVER), 11.6)])
    assert result.touched == pytest.approx([0.6], abs=PACE)
    assert result.right == pytest.approx(1.6, abs=PACE)
    assert (result.twice, result.overlap) == (0, 0)


def test_compare_counts_no_pause_for_an_empty_queue() -> None:
    result = outcome_of([*deliveries_to("a", 0, 15), *deliveries_to("a", 18, OVER)])
    assert max(result.others) < PACE
    assert result.right == 0


def test_compare_counts_pauses_of_queues_that_stay() -> None:
    result = outcome_of([*deliveries_to("a", 0, 12), *delayed(deliveries_to("a", 12, OVER), 12.5)])
    assert result.touched == []
    assert result.others == pytest.approx([0.5], abs=PACE)
    assert result.right == 0


def test_compare_counts_a_stalled_queue_as_affected_without_a_new_owner() -> None:
    result = outcome_of([*deliveries_to("a", 0, 12), *delayed(deliveries_to("a", 12, OVER), 14)])
    assert result.touched == pytest.approx([2], abs=PACE)
    assert result.right == pytest.approx(4, abs=PACE)


def test_compare_ignores_faults_before_the_event() -> None:
    result = outcome_of([*deliveries_to("a", 0, 2), *delayed(deliveries_to("a", 2, OVER), 9)])
    assert max(result.others) < PACE
    result = outcome_of([*deliveries_to("a", 0, 2), *delayed(deliveries_to("a", 2, OVER), ACT + 2)])
    assert result.touched == pytest.approx([2], abs=2 * PACE), "only as long as it lasted after the event"
    abandoned = outcome_of([*deliveries_to("a", 0, 2), *deliveries_to("b", 0, OVER, queue=1)], queues=2)
    assert abandoned.touched == pytest.approx([OVER - ACT])


def test_compare_counts_queues_of_a_failed_member_as_affected_even_if_it_returns() -> None:
    deliveries = [
        *deliveries_to("a", 0, 10),
        *delayed(deliveries_to("a", 10, OVER), 13),
        *deliveries_to("b", 0, OVER, queue=1),
    ]
    result = outcome_of(deliveries, queues=2, struck="a")
    assert result.touched == pytest.approx([3], abs=2 * PACE)
    assert len(result.others) == 1


def test_compare_counts_each_duplicate_delivery() -> None:
    deliveries = deliveries_to("a", 0, OVER)
    duplicates = [delivery._replace(at=delivery.at + 0.5, member="b") for delivery in deliveries[1500:1503]]
    assert outcome_of([*deliveries, *duplicates, duplicates[0]]).twice == 4


def test_compare_counts_a_redelivery_from_the_retry_topic_as_duplicate_only() -> None:
    deliveries = deliveries_to("a", 0, OVER)
    result = outcome_of([*deliveries, deliveries[1500]._replace(at=30.0, member="b", queue=ASIDE)])
    assert result.twice == 1
    assert result.touched == []
    assert (result.overlap, result.right) == (0, 0)


def test_compare_counts_undelivered_messages_as_lost() -> None:
    deliveries = deliveries_to("a", 0, OVER)
    assert outcome(Run(deliveries[:-7], len(deliveries), 1, (ACT,), OVER)).lost == 7


def test_compare_run_with_an_abandoned_queue_never_recovers() -> None:
    result = outcome_of([*deliveries_to("a", 0, 12), *deliveries_to("b", 0, OVER, queue=1)], queues=2)
    assert result.touched == pytest.approx([28], abs=PACE)
    assert result.right is None


def test_compare_pause_of_a_new_queue_lasts_from_first_message_to_first_delivery() -> None:
    deliveries = [*deliveries_to("a", 0, OVER), *delayed(deliveries_to("b", 12, OVER, queue=1), 17)]
    result = outcome_of(deliveries, queues=2)
    assert result.touched == pytest.approx([5], abs=2 * PACE)
    assert result.right == pytest.approx(7, abs=2 * PACE)


def test_compare_detects_a_new_queue_without_consumer() -> None:
    result = outcome_of(deliveries_to("a", 0, OVER), queues=2)
    assert result.touched == pytest.approx([OVER - ACT])
    assert result.right is None


def test_compare_overlap_lasts_while_two_members_consume_one_queue() -> None:
    alternating = [
        delivery._replace(member="b") if index % 2 else delivery
        for index, delivery in enumerate(deliveries_to("a", 15, 18))
    ]
    result = outcome_of([*deliveries_to("a", 0, 15), *alternating, *deliveries_to("b", 18, OVER)])
    assert result.overlap == pytest.approx(3, abs=3 * PACE)
    assert result.right == pytest.approx(8, abs=3 * PACE)


def test_compare_run_with_a_lasting_overlap_never_recovers() -> None:
    alternating = [
        delivery._replace(member="b") if index % 2 else delivery
        for index, delivery in enumerate(deliveries_to("a", 15, OVER))
    ]
    result = outcome_of([*deliveries_to("a", 0, 15), *alternating])
    assert result.overlap == pytest.approx(25, abs=3 * PACE)
    assert result.right is None


def test_compare_counts_simultaneous_overlaps_of_several_queues_once() -> None:
    alternating = [
        delivery._replace(member="b") if index % 2 else delivery
        for index, delivery in enumerate(deliveries_to("a", 0, OVER))
    ]
    result = outcome_of(
        [*alternating, *(delivery._replace(queue=1, number=delivery.number + 1) for delivery in alternating)], queues=2
    )
    assert result.overlap == pytest.approx(OVER - ACT, abs=3 * PACE)


def test_compare_counts_no_overlap_for_a_queue_that_returns_later() -> None:
    result = outcome_of([*deliveries_to("a", 0, 15), *deliveries_to("b", 15, 20), *deliveries_to("a", 20, OVER)])
    assert result.overlap == 0
    assert result.right == pytest.approx(10, abs=PACE)


def test_compare_sums_recovery_times_of_two_events() -> None:
    deliveries = [*deliveries_to("a", 0, 12), *delayed(deliveries_to("b", 12, 32), 16), *deliveries_to("a", 32, OVER)]
    assert outcome_of(deliveries, acts=(10.0, 30.0)).right == pytest.approx(6 + 2, abs=2 * PACE)


def test_compare_counts_a_stall_across_two_events_in_full() -> None:
    deliveries = [*deliveries_to("a", 0, 10), *delayed(deliveries_to("a", 10, OVER), 31)]
    assert outcome_of(deliveries, acts=(10.0, 30.0), struck="a").right == pytest.approx(20 + 1, abs=3 * PACE)


def test_compare_counts_a_first_delivery_after_a_later_message_as_out_of_order() -> None:
    deliveries = deliveries_to("a", 0, OVER)
    swapped = (
        deliveries[1500]._replace(number=deliveries[1501].number),
        deliveries[1501]._replace(number=deliveries[1500].number),
    )
    result = outcome_of([*deliveries[:1500], *swapped, *deliveries[1502:]])
    assert result.disorder == 1
    assert outcome_of([*deliveries, deliveries[1500]._replace(at=30.0)]).disorder == 0


def test_compare_merges_touching_spans() -> None:
    assert united([Span(5, 6), Span(1, 4), Span(4, 4.5), Span(2, 3)]) == [Span(1, 4.5), Span(5, 6)]


GOOD = Outcome(touched=[0.1, 0.2, 0.3], others=[0.4], twice=0, lost=0, disorder=0, overlap=0.0, right=1.5)
BAD = Outcome([0.1, 41.04], [], twice=1605, lost=7, disorder=3, overlap=12.3, right=None, watched=30.2)


def test_compare_table_line_shows_both_systems() -> None:
    head, rule, line = table([Line("it burns", GOOD, BAD)]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    ours = "0.20 / 0.30 / 0.40 | 0 | 0 | 0.00 | 1.50 s"
    theirs = "0.10 / 41.0 / 41.0 | 1,605 | 7 | 12.3 | never, in 30 s"
    assert line == f"| it burns | {ours} | {theirs} |"


def test_compare_table_shows_out_of_order_deliveries_of_orderly_events() -> None:
    assert "| 7, 3 out of order |" in table([Line("it burns", GOOD, BAD, ordered=True)])


def test_compare_table_replaces_only_text_between_its_markers() -> None:
    text = f"above\n\n{BEGIN}\nold\nolder\n{END}\n\nbelow\n"
    assert replaced(text, "| new |") == f"above\n\n{BEGIN}\n| new |\n{END}\n\nbelow\n"
    assert replaced(replaced(text, "x"), "| new |") == replaced(text, "| new |")


@pytest.mark.parametrize(
    "text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}", f"named in `{BEGIN}` `{END}`"]
)
def test_compare_rejects_a_page_without_its_two_markers(text: str) -> None:
    with pytest.raises(Unmarked):
        replaced(text, "| new |")


def test_compare_reports_usage_errors_and_leaves_the_page_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("no place for it\n")
    assert compare.main(["jion"]) == 2
    assert compare.main(["--write", str(page)]) == 2
    assert compare.main(["--write", str(tmp_path / "none.md")]) == 2
    assert compare.main(["join", "--write", str(page)]) == 2, "otherwise the other lines would be lost"
    errors = capsys.readouterr().err.splitlines()
    assert [line.startswith("compare: ") and line.endswith(".") for line in errors] == [True] * 4
    assert page.read_text() == "no place for it\n"


CLEAN = Outcome([], [], twice=0, lost=0, disorder=0, overlap=0.0, right=0.0)
BROKEN = Outcome([], [], twice=2, lost=1, disorder=4, overlap=3.0, right=None)


@pytest.mark.parametrize(
    ("name", "beginnings"),
    [
        (
            "leave",
            ["Rota lost 1 ", "Rota delivered 2 messages twice", "Two of Rota's members worked one queue for 3.0"],
        ),
        ("crash", ["Rota lost 1 "]),
        ("orderly", ["Rota lost 1 ", "Two of Rota's members", "Rota delivered 4 messages out of order"]),
    ],
)
def test_compare_fails_for_violations_of_rota_but_not_of_java(name: str, beginnings: list[str]) -> None:
    ordered = compare.EVENTS[name].orderly
    assert [*compare.promises_broken([(name, Line("it", CLEAN, BROKEN, ordered))])] == []
    violations = [*compare.promises_broken([(name, Line("it", BROKEN, CLEAN, ordered))])]
    assert [
        beginning
        for beginning, violation in zip(beginnings, violations, strict=True)
        if not violation.startswith(beginning)
    ] == []
