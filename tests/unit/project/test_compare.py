"""What `make compare` makes of what came: each violation is seen, and a clean run has none."""

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


def stint(member: str, begin: float, end: float, *, queue: int = 0, late: float = 0.001) -> list[Came]:
    """Return what comes to a member that works a queue alone, as soon as it is sent; numbers tell when that was."""
    sent = range(round(begin / PACE), round(end / PACE))
    return [Came(PACE * n + late, 1000 * n + queue, queue, member, PACE * n) for n in sent]


def after(came: Iterable[Came], *, acts: tuple[float, ...] = (ACT,), queues: int = 1, struck: str = "") -> Outcome:
    """Reckon a run of which all that was sent is told of here."""
    found = [*came]
    return outcome(Run(found, len({it.number for it in found}), queues, acts, OVER, struck))


def behind(its: Iterable[Came], until: float) -> list[Came]:
    """Return the same, of which what was sent before a moment comes only then."""
    return [it._replace(at=max(it.at, until + it.at / 1e6)) for it in its]


def test_compare_of_an_undisturbed_run_finds_no_fault() -> None:
    found = after(stint("a", 0, OVER))
    assert (found.twice, found.lost, found.disorder, found.overlap, found.right) == (0, 0, 0, 0, 0)
    assert not found.touched
    assert max(found.others) < PACE


def test_compare_pause_of_a_moved_queue_lasts_until_the_next_owner_consumes() -> None:
    found = after([*stint("a", 0, 11), *behind(stint("b", 11, OVER), 11.6)])
    assert found.touched == pytest.approx([0.6], abs=PACE)
    assert found.right == pytest.approx(1.6, abs=PACE)
    assert (found.twice, found.overlap) == (0, 0)


def test_compare_counts_no_pause_for_an_empty_queue() -> None:
    found = after([*stint("a", 0, 15), *stint("a", 18, OVER)])
    assert max(found.others) < PACE
    assert found.right == 0


def test_compare_counts_pauses_of_queues_that_stay() -> None:
    found = after([*stint("a", 0, 12), *behind(stint("a", 12, OVER), 12.5)])
    assert found.touched == []
    assert found.others == pytest.approx([0.5], abs=PACE)
    assert found.right == 0


def test_compare_counts_a_stalled_queue_as_affected_without_a_new_owner() -> None:
    found = after([*stint("a", 0, 12), *behind(stint("a", 12, OVER), 14)])
    assert found.touched == pytest.approx([2], abs=PACE)
    assert found.right == pytest.approx(4, abs=PACE)


def test_compare_ignores_faults_before_the_event() -> None:
    found = after([*stint("a", 0, 2), *behind(stint("a", 2, OVER), 9)])
    assert max(found.others) < PACE
    found = after([*stint("a", 0, 2), *behind(stint("a", 2, OVER), ACT + 2)])
    assert found.touched == pytest.approx([2], abs=2 * PACE), "as long as it still lasted then"
    gone = after([*stint("a", 0, 2), *stint("b", 0, OVER, queue=1)], queues=2)
    assert gone.touched == pytest.approx([OVER - ACT])


def test_compare_counts_queues_of_a_failed_member_as_affected_even_if_it_returns() -> None:
    came = [*stint("a", 0, 10), *behind(stint("a", 10, OVER), 13), *stint("b", 0, OVER, queue=1)]
    found = after(came, queues=2, struck="a")
    assert found.touched == pytest.approx([3], abs=2 * PACE)
    assert len(found.others) == 1


def test_compare_counts_each_duplicate_delivery() -> None:
    came = stint("a", 0, OVER)
    again = [it._replace(at=it.at + 0.5, member="b") for it in came[1500:1503]]
    assert after([*came, *again, again[0]]).twice == 4


def test_compare_counts_a_redelivery_from_the_retry_topic_as_duplicate_only() -> None:
    came = stint("a", 0, OVER)
    found = after([*came, came[1500]._replace(at=30.0, member="b", queue=ASIDE)])
    assert found.twice == 1
    assert found.touched == []
    assert (found.overlap, found.right) == (0, 0)


def test_compare_counts_undelivered_messages_as_lost() -> None:
    came = stint("a", 0, OVER)
    assert outcome(Run(came[:-7], len(came), 1, (ACT,), OVER)).lost == 7


def test_compare_run_with_an_abandoned_queue_never_recovers() -> None:
    found = after([*stint("a", 0, 12), *stint("b", 0, OVER, queue=1)], queues=2)
    assert found.touched == pytest.approx([28], abs=PACE)
    assert found.right is None


def test_compare_pause_of_a_new_queue_lasts_from_first_message_to_first_delivery() -> None:
    came = [*stint("a", 0, OVER), *behind(stint("b", 12, OVER, queue=1), 17)]
    found = after(came, queues=2)
    assert found.touched == pytest.approx([5], abs=2 * PACE)
    assert found.right == pytest.approx(7, abs=2 * PACE)


def test_compare_detects_a_new_queue_without_consumer() -> None:
    found = after(stint("a", 0, OVER), queues=2)
    assert found.touched == pytest.approx([OVER - ACT])
    assert found.right is None


def test_compare_overlap_lasts_while_two_members_consume_one_queue() -> None:
    turns = [it._replace(member="b") if place % 2 else it for place, it in enumerate(stint("a", 15, 18))]
    found = after([*stint("a", 0, 15), *turns, *stint("b", 18, OVER)])
    assert found.overlap == pytest.approx(3, abs=3 * PACE)
    assert found.right == pytest.approx(8, abs=3 * PACE)


def test_compare_run_with_a_lasting_overlap_never_recovers() -> None:
    turns = [it._replace(member="b") if place % 2 else it for place, it in enumerate(stint("a", 15, OVER))]
    found = after([*stint("a", 0, 15), *turns])
    assert found.overlap == pytest.approx(25, abs=3 * PACE)
    assert found.right is None


def test_compare_counts_simultaneous_overlaps_of_several_queues_once() -> None:
    turns = [it._replace(member="b") if place % 2 else it for place, it in enumerate(stint("a", 0, OVER))]
    found = after([*turns, *(it._replace(queue=1, number=it.number + 1) for it in turns)], queues=2)
    assert found.overlap == pytest.approx(OVER - ACT, abs=3 * PACE)


def test_compare_counts_no_overlap_for_a_queue_that_returns_later() -> None:
    found = after([*stint("a", 0, 15), *stint("b", 15, 20), *stint("a", 20, OVER)])
    assert found.overlap == 0
    assert found.right == pytest.approx(10, abs=PACE)


def test_compare_sums_recovery_times_of_two_events() -> None:
    came = [*stint("a", 0, 12), *behind(stint("b", 12, 32), 16), *stint("a", 32, OVER)]
    assert after(came, acts=(10.0, 30.0)).right == pytest.approx(6 + 2, abs=2 * PACE)


def test_compare_counts_a_stall_across_two_events_in_full() -> None:
    came = [*stint("a", 0, 10), *behind(stint("a", 10, OVER), 31)]
    assert after(came, acts=(10.0, 30.0), struck="a").right == pytest.approx(20 + 1, abs=3 * PACE)


def test_compare_counts_a_first_delivery_after_a_later_message_as_out_of_order() -> None:
    came = stint("a", 0, OVER)
    swapped = came[1500]._replace(number=came[1501].number), came[1501]._replace(number=came[1500].number)
    found = after([*came[:1500], *swapped, *came[1502:]])
    assert found.disorder == 1
    assert after([*came, came[1500]._replace(at=30.0)]).disorder == 0


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
    "text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}", f"said in `{BEGIN}` `{END}`"]
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
    assert compare.main(["join", "--write", str(page)]) == 2, "or the other lines would be gone"
    told = capsys.readouterr().err.splitlines()
    assert [line.startswith("compare: ") and line.endswith(".") for line in told] == [True] * 4
    assert page.read_text() == "no place for it\n"


WELL = Outcome([], [], twice=0, lost=0, disorder=0, overlap=0.0, right=0.0)
BROKEN = Outcome([], [], twice=2, lost=1, disorder=4, overlap=3.0, right=None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "leave",
            ["Rota lost 1 ", "Rota delivered 2 messages twice", "Two of Rota's members worked one queue for 3.0"],
        ),
        ("crash", ["Rota lost 1 "]),
        ("orderly", ["Rota lost 1 ", "Two of Rota's members", "Rota delivered 4 messages out of order"]),
    ],
)
def test_compare_fails_for_violations_of_rota_but_not_of_java(name: str, told: list[str]) -> None:
    ordered = compare.EVENTS[name].orderly
    assert [*compare.promises_broken([(name, Line("it", WELL, BROKEN, ordered))])] == []
    found = [*compare.promises_broken([(name, Line("it", BROKEN, WELL, ordered))])]
    assert [so for so, one in zip(told, found, strict=True) if not one.startswith(so)] == []
