"""Explanation of each recommendation: a sentence for users, computed as a Spark column."""

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F

from rota.pipeline.recommend.cost_weights import MEASURES

MAX_NAMED_SAVINGS = 3  # savings named in a sentence
MIN_DRAWBACK_FRACTION = 0.1  # fraction of the saved cost: a larger drawback is named, too


def explain_recommendation(min_gain: float) -> Column:
    """Return the reason to change (the largest differences of `now` and `then`) or to stay; reads `gain`, `change`."""
    name = F.col("then.policy")
    gain = _write_number(F.col("gain") * 100)
    no_name = F.col("then.policy").isNull()
    unknown = F.col("now.cost").isNull()
    why = F.coalesce(F.left(F.col("now.problem"), F.lit(300)), F.lit("it was not simulated"))
    cause = F.concat(F.lit("The policy in use has no known cost ("), why, F.lit(")"))
    cheapest = F.concat(cause, F.lit("; of the other policies, "), name, F.lit(" costs least."))
    too_little = F.concat(
        F.lit("Keep the policy: the best alternative, "),
        name,
        F.lit(", would save "),
        gain,
        F.lit(f" %, which is below {min_gain * 100:g} %."),
    )
    return (
        F.when(unknown & no_name, F.concat(cause, F.lit(", and neither has any other policy.")))
        .when(unknown, cheapest)
        .when(F.col("change"), _describe_differences())
        .when(name == F.col("now.policy"), "Keep the policy: no tested policy costs less.")
        .otherwise(too_little)
    )


def _describe_differences() -> Column:
    parts = F.array(*(_compare_measure(measure) for measure in MEASURES))
    largest = F.array_sort(parts, lambda left, right: F.sign(right["saved"] - left["saved"]).cast("int"))
    saved = F.slice(F.filter(largest, lambda part: part["saved"] > 0), 1, MAX_NAMED_SAVINGS)
    total = F.col("now.cost") - F.col("then.cost")
    lost = F.slice(F.filter(F.reverse(largest), lambda part: part["saved"] < -MIN_DRAWBACK_FRACTION * total), 1, 1)
    words = F.concat_ws("; ", F.transform(saved, lambda part: part["words"]))
    drawback = F.when(F.size(lost) > 0, F.concat(F.lit("; but "), lost[0]["words"])).otherwise("")
    return F.concat(F.upper(F.left(words, F.lit(1))), F.substr(words, F.lit(2)), drawback, F.lit("."))


def _compare_measure(measure: str) -> Column:
    saved = F.col(f"now.cost_{measure}") - F.col(f"then.cost_{measure}")
    now, then = (_MEASURE_WRITERS[measure](f"{when}.") for when in ("now", "then"))
    words = F.concat(then, F.lit(" instead of "), now)
    return F.struct(F.coalesce(saved, F.lit(0.0)).alias("saved"), words.alias("words"))


def _measure_writer(column: str, prefix: str, suffix: str = "") -> Callable[[str], Column]:
    """Return a function that writes a measure of `now.` or `then.`; only `then.`, written first, gets the affixes."""

    def write(when: str) -> Column:
        first = F.lit(prefix if when == "then." else "")
        return F.concat(first, _write_number(F.col(f"{when}{column}")), F.lit(suffix if when == "then." else ""))

    return write


def _write_load(when: str) -> Column:
    prefix = "the busiest member has " if when == "then." else ""
    return F.concat(
        F.lit(prefix), _write_number(F.col(f"{when}imbalance") + 1), F.lit(" times the mean load" * bool(prefix))
    )


def _write_lag(when: str) -> Column:
    prefix = "a mean lag of " if when == "then." else ""
    mean, peak = (_write_number(F.col(f"{when}{name}")) for name in ("lag_mean", "lag_peak"))
    return F.concat(F.lit(prefix), mean, F.lit(" (highest "), peak, F.lit(")"))


_MEASURE_WRITERS: dict[str, Callable[[str], Column]] = {
    "moves": _measure_writer("moves", "", " moves a day"),
    "pause": _measure_writer("pause", "", " s of pauses a day"),
    "duplicates": _measure_writer("duplicates", "", " duplicates a day"),
    "imbalance": _write_load,
    "idle": _measure_writer("idle", "", " idle member-hours a day"),
    "unowned": _measure_writer("unowned", "queues without owner for ", " s a day"),
    "lag": _write_lag,
}


def _write_number(value: Column) -> Column:
    """Write a number with three significant digits."""
    small, medium = F.abs(value) < 10, F.abs(value) < 100  # noqa: PLR2004 - three digits count
    short = F.when(small, F.format_number(value, 2)).when(medium, F.format_number(value, 1))
    written = F.when(value == F.floor(value), F.format_number(value, 0)).otherwise(
        F.coalesce(short, F.format_number(value, 0))
    )
    return F.coalesce(written, F.lit("an unknown number"))
