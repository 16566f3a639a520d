"""Explanation of a recommendation: the reason to change or to stay, as a sentence for users."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.cost_weights import MEASURES

MAX_NAMED_SAVINGS = 3  # savings named in a sentence
MIN_DRAWBACK_FRACTION = 0.1  # fraction of the saved cost; a larger drawback is named, too
MAX_PROBLEM_CHARACTERS = 300  # a longer problem is cut

CostRow = Mapping[str, Any]  # measures, costs and rank of one policy


def explain_recommendation(
    current: CostRow | None, cheapest: CostRow | None, gain: float | None, min_gain: float, *, change: bool
) -> str:
    """Return the reason to change (the largest differences) or to stay.

    `current` and `cheapest` are the rows of both policies, None if there is none; `gain` is the fraction of the cost
    that the cheapest would save, None if the cost of the current policy is unknown.
    """
    if current is None or cheapest is None or gain is None:
        return _explain_unknown_cost(current, cheapest)
    if change:
        return _describe_differences(current, cheapest)
    if cheapest["policy"] == RECORDED_POLICY:
        return "Keep the policy: no tested policy costs less."
    saved = f"the best alternative, {cheapest['policy']}, would save {_write_number(gain * 100)} %"
    return f"Keep the policy: {saved}, which is below {min_gain * 100:g} %."


def _explain_unknown_cost(current: CostRow | None, cheapest: CostRow | None) -> str:
    problem = str(current["problem"])[:MAX_PROBLEM_CHARACTERS] if current else "it was not simulated"
    cause = f"The policy in use has no known cost ({problem})"
    if cheapest is None:
        return f"{cause}, and neither has any other policy."
    return f"{cause}; of the other policies, {cheapest['policy']} costs least."


class _Difference(NamedTuple):
    """How a change of the policy changes one measure."""

    saved: float  # points that the change saves; negative: it costs more
    text: str  # both values of the measure
    is_visible: bool  # whether the values differ in the digits that are written


def _describe_differences(current: CostRow, cheapest: CostRow) -> str:
    """Return the largest savings, and the largest drawback if it is considerable, as one sentence."""
    differences = sorted(_compare_measures(current, cheapest), key=lambda difference: -difference.saved)
    savings = [difference for difference in differences if difference.saved > 0]
    # Leave out "0.5 instead of 0.5", unless all savings look so.
    named = [saving.text for saving in savings if saving.is_visible] or [saving.text for saving in savings]
    max_unnamed_drawback = MIN_DRAWBACK_FRACTION * (current["cost"] - cheapest["cost"])
    largest_drawback = differences[-1]
    but = f"; but {largest_drawback.text}" if largest_drawback.saved < -max_unnamed_drawback else ""
    text = "; ".join(named[:MAX_NAMED_SAVINGS])
    return f"{text[:1].upper()}{text[1:]}{but}."


def _compare_measures(current: CostRow, cheapest: CostRow) -> Iterator[_Difference]:
    """Yield each measure's difference; one that is unknown saves nothing."""
    for measure in MEASURES:
        phrase = _MEASURE_PHRASES[measure]
        cost_now = current[f"cost_{measure}"]
        cost_then = cheapest[f"cost_{measure}"]
        saved = 0.0 if cost_now is None or cost_then is None else cost_now - cost_then
        now = phrase.write(current)
        then = phrase.write(cheapest)
        yield _Difference(saved, f"{phrase.prefix}{then}{phrase.suffix} instead of {now}", is_visible=now != then)


def _measure_writer(measure: str) -> Callable[[CostRow], str]:
    """Return a function that writes a measure of a row."""
    return lambda row: _write_number(row[measure])


def _write_load(row: CostRow) -> str:
    imbalance = row["imbalance"]
    return _write_number(None if imbalance is None else imbalance + 1)


def _write_lag(row: CostRow) -> str:
    return f"{_write_number(row['lag_mean'])} (highest {_write_number(row['lag_peak'])})"


class _MeasurePhrase(NamedTuple):
    """How a measure is written: its value, between a prefix and a suffix."""

    write: Callable[[CostRow], str]
    prefix: str
    suffix: str


_MEASURE_PHRASES = {
    "moves": _MeasurePhrase(_measure_writer("moves"), "", " moves a day"),
    "pause": _MeasurePhrase(_measure_writer("pause"), "", " s of pauses a day"),
    "duplicates": _MeasurePhrase(_measure_writer("duplicates"), "", " duplicates a day"),
    "imbalance": _MeasurePhrase(_write_load, "the busiest member has ", " times the mean load"),
    "idle": _MeasurePhrase(_measure_writer("idle"), "", " idle member-hours a day"),
    "unowned": _MeasurePhrase(_measure_writer("unowned"), "queues without owner for ", " s a day"),
    "lag": _MeasurePhrase(_write_lag, "a mean lag of ", ""),
}


def _write_number(value: float | None) -> str:
    """Write a number with up to three significant digits."""
    if value is None:
        return "an unknown number"
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0  # noqa: PLR2004 - three digits count
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
