"""Explanation of each recommendation: a sentence for users, computed as a Spark column."""

from collections.abc import Callable
from typing import NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F

from rota.pipeline.recommend.cost_weights import MEASURES

MAX_NAMED_SAVINGS = 3  # savings named in a sentence
MIN_DRAWBACK_FRACTION = 0.1  # fraction of the saved cost: a larger drawback is named, too


def explain_recommendation(min_gain: float) -> Column:
    """Return the reason to change (the largest differences) or to stay.

    Reads the columns `current` and `cheapest` (the rows of both policies), `gain` and `change`.
    """
    name = F.col("cheapest.policy")
    percent = _write_number(F.col("gain") * 100)
    has_no_current_cost = F.col("current.cost").isNull()
    why_unknown = F.coalesce(F.left(F.col("current.problem"), F.lit(300)), F.lit("it was not simulated"))
    cause = F.concat(F.lit("The policy in use has no known cost ("), why_unknown, F.lit(")"))
    no_comparison = F.concat(cause, F.lit("; of the other policies, "), name, F.lit(" costs least."))
    too_little = F.concat(
        F.lit("Keep the policy: the best alternative, "),
        name,
        F.lit(", would save "),
        percent,
        F.lit(f" %, which is below {min_gain * 100:g} %."),
    )
    return (
        F.when(has_no_current_cost & name.isNull(), F.concat(cause, F.lit(", and neither has any other policy.")))
        .when(has_no_current_cost, no_comparison)
        .when(F.col("change"), _describe_differences())
        .when(name == F.col("current.policy"), "Keep the policy: no tested policy costs less.")
        .otherwise(too_little)
    )


def _describe_differences() -> Column:
    """Return the largest savings, and the largest drawback if it is considerable, as one sentence."""
    differences = F.array(*map(_compare_measure, MEASURES))
    most_saved_first = F.array_sort(differences, lambda left, right: F.sign(right["saved"] - left["saved"]).cast("int"))
    savings = F.slice(F.filter(most_saved_first, lambda part: part["saved"] > 0), 1, MAX_NAMED_SAVINGS)
    max_unnamed_drawback = MIN_DRAWBACK_FRACTION * (F.col("current.cost") - F.col("cheapest.cost"))
    drawbacks = F.filter(F.reverse(most_saved_first), lambda part: part["saved"] < -max_unnamed_drawback)
    largest_drawback = F.get(drawbacks, F.lit(0))["words"]
    words = F.concat_ws("; ", F.transform(savings, lambda part: part["words"]))
    but = F.coalesce(F.concat(F.lit("; but "), largest_drawback), F.lit(""))
    return F.concat(F.upper(F.left(words, F.lit(1))), F.substr(words, F.lit(2)), but, F.lit("."))


def _compare_measure(measure: str) -> Column:
    """Return the points that a measure saves (0 if unknown), and its values as text: the new with its unit, the old."""
    write, prefix, suffix = _MEASURE_PHRASES[measure]
    saved = F.col(f"current.cost_{measure}") - F.col(f"cheapest.cost_{measure}")
    words = F.concat(F.lit(prefix), write("cheapest"), F.lit(f"{suffix} instead of "), write("current"))
    return F.struct(F.coalesce(saved, F.lit(0.0)).alias("saved"), words.alias("words"))


def _measure_writer(measure: str) -> Callable[[str], Column]:
    """Return a function that writes a measure of a row, `current` or `cheapest`."""
    return lambda row: _write_number(F.col(f"{row}.{measure}"))


def _write_load(row: str) -> Column:
    return _write_number(F.col(f"{row}.imbalance") + 1)


def _write_lag(row: str) -> Column:
    mean = _write_number(F.col(f"{row}.lag_mean"))
    peak = _write_number(F.col(f"{row}.lag_peak"))
    return F.concat(mean, F.lit(" (highest "), peak, F.lit(")"))


class _MeasurePhrase(NamedTuple):
    """How a measure is written: its value, between a prefix and a suffix."""

    write: Callable[[str], Column]
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


def _write_number(value: Column) -> Column:
    """Write a number with three significant digits."""
    written = (
        F.when(value == F.floor(value), F.format_number(value, 0))
        .when(F.abs(value) < 10, F.format_number(value, 2))  # noqa: PLR2004 - three digits count
        .when(F.abs(value) < 100, F.format_number(value, 1))  # noqa: PLR2004
        .otherwise(F.format_number(value, 0))
    )
    return F.coalesce(written, F.lit("an unknown number"))
