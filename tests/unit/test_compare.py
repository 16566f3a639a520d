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


def test_a_fleet_to_which_nothing_happens_is_right_at_once() -> None:
    found = after(stint("a", 0, OVER))
    assert (found.twice, found.lost, found.disorder, found.overlap, found.right) == (0, 0, 0, 0, 0)
    assert not found.touched
    assert max(found.others) < PACE


def test_a_queue_that_moves_pauses_until_its_next_member_goes_on() -> None:
    found = after([*stint("a", 0, 11), *behind(stint("b", 11, OVER), 11.6)])
    assert found.touched == pytest.approx([0.6], abs=PACE)
    assert found.right == pytest.approx(1.6, abs=PACE)
    assert (found.twice, found.overlap) == (0, 0)


def test_a_queue_in_which_nothing_lay_did_not_pause() -> None:
    found = after([*stint("a", 0, 15), *stint("a", 18, OVER)])
    assert max(found.others) < PACE
    assert found.right == 0


def test_a_queue_that_stays_may_pause_too() -> None:
    found = after([*stint("a", 0, 12), *behind(stint("a", 12, OVER), 12.5)])
    assert found.touched == []
    assert found.others == pytest.approx([0.5], abs=PACE)
    assert found.right == 0


def test_a_queue_that_stands_still_is_touched_though_nobody_else_takes_it() -> None:
    found = after([*stint("a", 0, 12), *behind(stint("a", 12, OVER), 14)])
    assert found.touched == pytest.approx([2], abs=PACE)
    assert found.right == pytest.approx(4, abs=PACE)


def test_what_was_wrong_before_anything_was_done_does_not_count() -> None:
    found = after([*stint("a", 0, 2), *behind(stint("a", 2, OVER), 9)])
    assert max(found.others) < PACE
    found = after([*stint("a", 0, 2), *behind(stint("a", 2, OVER), ACT + 2)])
    assert found.touched == pytest.approx([2], abs=2 * PACE), "as long as it still lasted then"
    gone = after([*stint("a", 0, 2), *stint("b", 0, OVER, queue=1)], queues=2)
    assert gone.touched == pytest.approx([OVER - ACT])


def test_queues_of_a_member_that_was_struck_count_as_moved_though_it_comes_back_itself() -> None:
    came = [*stint("a", 0, 10), *behind(stint("a", 10, OVER), 13), *stint("b", 0, OVER, queue=1)]
    found = after(came, queues=2, struck="a")
    assert found.touched == pytest.approx([3], abs=2 * PACE)
    assert len(found.others) == 1


def test_what_comes_again_is_counted_each_time() -> None:
    came = stint("a", 0, OVER)
    again = [it._replace(at=it.at + 0.5, member="b") for it in came[1500:1503]]
    assert after([*came, *again, again[0]]).twice == 4


def test_what_comes_again_out_of_the_retry_topic_is_twice_but_moves_no_queue() -> None:
    came = stint("a", 0, OVER)
    found = after([*came, came[1500]._replace(at=30.0, member="b", queue=ASIDE)])
    assert found.twice == 1
    assert found.touched == []
    assert (found.overlap, found.right) == (0, 0)


def test_what_never_comes_is_lost() -> None:
    came = stint("a", 0, OVER)
    assert outcome(Run(came[:-7], len(came), 1, (ACT,), OVER)).lost == 7


def test_a_queue_that_nobody_works_any_more_is_never_right() -> None:
    found = after([*stint("a", 0, 12), *stint("b", 0, OVER, queue=1)], queues=2)
    assert found.touched == pytest.approx([28], abs=PACE)
    assert found.right is None


def test_a_new_queue_pauses_from_its_first_message_until_somebody_reads_it() -> None:
    came = [*stint("a", 0, OVER), *behind(stint("b", 12, OVER, queue=1), 17)]
    found = after(came, queues=2)
    assert found.touched == pytest.approx([5], abs=2 * PACE)
    assert found.right == pytest.approx(7, abs=2 * PACE)


def test_a_new_queue_that_nobody_reads_is_seen() -> None:
    found = after(stint("a", 0, OVER), queues=2)
    assert found.touched == pytest.approx([OVER - ACT])
    assert found.right is None


def test_two_members_that_work_one_queue_overlap_for_as_long_as_they_do() -> None:
    turns = [it._replace(member="b") if place % 2 else it for place, it in enumerate(stint("a", 15, 18))]
    found = after([*stint("a", 0, 15), *turns, *stint("b", 18, OVER)])
    assert found.overlap == pytest.approx(3, abs=3 * PACE)
    assert found.right == pytest.approx(8, abs=3 * PACE)


def test_two_members_that_go_on_to_work_one_queue_are_never_right() -> None:
    turns = [it._replace(member="b") if place % 2 else it for place, it in enumerate(stint("a", 15, OVER))]
    found = after([*stint("a", 0, 15), *turns])
    assert found.overlap == pytest.approx(25, abs=3 * PACE)
    assert found.right is None


def test_seconds_in_which_several_queues_are_worked_by_two_count_once() -> None:
    turns = [it._replace(member="b") if place % 2 else it for place, it in enumerate(stint("a", 0, OVER))]
    found = after([*turns, *(it._replace(queue=1, number=it.number + 1) for it in turns)], queues=2)
    assert found.overlap == pytest.approx(OVER - ACT, abs=3 * PACE)


def test_a_queue_that_comes_back_after_a_while_was_not_shared() -> None:
    found = after([*stint("a", 0, 15), *stint("b", 15, 20), *stint("a", 20, OVER)])
    assert found.overlap == 0
    assert found.right == pytest.approx(10, abs=PACE)


def test_of_two_acts_what_was_wrong_after_each_is_added_up() -> None:
    came = [*stint("a", 0, 12), *behind(stint("b", 12, 32), 16), *stint("a", 32, OVER)]
    assert after(came, acts=(10.0, 30.0)).right == pytest.approx(6 + 2, abs=2 * PACE)


def test_a_queue_that_stands_still_until_the_next_act_is_wrong_for_as_long() -> None:
    came = [*stint("a", 0, 10), *behind(stint("a", 10, OVER), 31)]
    assert after(came, acts=(10.0, 30.0), struck="a").right == pytest.approx(20 + 1, abs=3 * PACE)


def test_what_comes_for_the_first_time_after_a_later_one_is_out_of_order() -> None:
    came = stint("a", 0, OVER)
    swapped = came[1500]._replace(number=came[1501].number), came[1501]._replace(number=came[1500].number)
    found = after([*came[:1500], *swapped, *came[1502:]])
    assert found.disorder == 1
    assert after([*came, came[1500]._replace(at=30.0)]).disorder == 0


def test_spans_that_touch_are_one() -> None:
    assert united([Span(5, 6), Span(1, 4), Span(4, 4.5), Span(2, 3)]) == [Span(1, 4.5), Span(5, 6)]


GOOD = Outcome(touched=[0.1, 0.2, 0.3], others=[0.4], twice=0, lost=0, disorder=0, overlap=0.0, right=1.5)
BAD = Outcome([0.1, 41.04], [], twice=1605, lost=7, disorder=3, overlap=12.3, right=None, watched=30.2)


def test_a_line_of_the_table_shows_both_systems() -> None:
    head, rule, line = table([Line("it burns", GOOD, BAD)]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    ours = "0.20 / 0.30 / 0.40 | 0 | 0 | 0.00 | 1.50 s"
    theirs = "0.10 / 41.0 / 41.0 | 1,605 | 7 | 12.3 | never, in 30 s"
    assert line == f"| it burns | {ours} | {theirs} |"


def test_what_was_to_come_in_order_and_did_not_is_shown() -> None:
    assert "| 7, 3 out of order |" in table([Line("it burns", GOOD, BAD, ordered=True)])


def test_the_table_goes_between_its_two_lines_and_nothing_else_changes() -> None:
    text = f"above\n\n{BEGIN}\nold\nolder\n{END}\n\nbelow\n"
    assert replaced(text, "| new |") == f"above\n\n{BEGIN}\n| new |\n{END}\n\nbelow\n"
    assert replaced(replaced(text, "x"), "| new |") == replaced(text, "| new |")


@pytest.mark.parametrize(
    "text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}", f"said in `{BEGIN}` `{END}`"]
)
def test_a_text_without_the_two_lines_is_refused(text: str) -> None:
    with pytest.raises(Unmarked):
        replaced(text, "| new |")


def test_mistakes_are_told_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_what_rota_may_never_do_fails_the_command_and_what_java_does_never(name: str, told: list[str]) -> None:
    ordered = compare.EVENTS[name].orderly
    assert [*compare.promises_broken([(name, Line("it", WELL, BROKEN, ordered))])] == []
    found = [*compare.promises_broken([(name, Line("it", BROKEN, WELL, ordered))])]
    assert [so for so, one in zip(told, found, strict=True) if not one.startswith(so)] == []
