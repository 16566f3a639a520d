"""Generated histories: order of their changes, and message rates that follow recorded traces."""

import re
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.test_replay import rebuild_history, recorded_facts, replay_row
from rota.pipeline.common.history_sources import HistorySource, source_of
from rota.pipeline.replay.group_history import STEP_SECONDS
from rota.pipeline.synthetic.histories import (
    SCENARIOS,
    START_SECONDS,
    Scenario,
    SyntheticFleet,
    generate_history,
    lose_zone,
    roll_out_daily,
)
from rota.pipeline.synthetic.rates import DAY_SECONDS, RateTrace, RecordedRates, read_rates, trace_rates

STEPS_PER_DAY = int(DAY_SECONDS / STEP_SECONDS)
GOOD_LINE = '{"name": "clicks", "start": "2015-02-26T21:42:53", "step_seconds": 300, "values": [104, 0, 99.5]}'


def a_trace(
    values: list[float], name: str = "clicks", hour: float = 0.0, step_seconds: float = STEP_SECONDS
) -> RateTrace:
    start = datetime(2015, 2, 26) + timedelta(hours=hour)  # noqa: DTZ001 - traces may have no time zone
    return RateTrace(name=name, start=start, step_seconds=step_seconds, values=values)


def daily_values(days: int) -> list[float]:
    """Return 300 messages in each step of the first day, 600 in each of the second, and so on."""
    return [300.0 * (1 + day) for day in range(days) for _ in range(STEPS_PER_DAY)]


# Scenarios.


RARE_EVENTS = {roll_out_daily, lose_zone}  # about one a day


@pytest.mark.parametrize("scenario", [scenario for scenario, _ in SCENARIOS], ids=lambda scenario: scenario.__name__)
def test_generate_events_of_a_group_never_overlap(scenario: Scenario) -> None:
    """An event that began during another one would end before it, and restore pods that the other has ended."""
    days = 200 if scenario in RARE_EVENTS else 20
    for seed in range(4):
        fleet = SyntheticFleet(np.random.default_rng(seed), "shop/orders")
        fleet.start_pods(24)
        fleet.record_change(START_SECONDS)
        scenario(fleet, START_SECONDS, START_SECONDS + days * DAY_SECONDS)
        times = [at for at, _ in fleet.changes]
        assert times == sorted(times)


# Recorded rates.


def test_generate_reads_traces_from_a_file_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(f"{GOOD_LINE}\n\n{GOOD_LINE.replace('clicks', 'views')}\n")
    rates = read_rates(path, 2.0)
    assert [trace.name for trace in rates.traces] == ["clicks", "views"]
    assert rates.traces[0].values == [104.0, 0.0, 99.5]
    assert rates.traces[0].start_seconds == 1_424_986_973.0
    assert rates.scale == 2.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no traces; give a file of JSON lines with name, start, step_seconds, values"),
        ("[1]", "line 1, is not a trace: Expected `object`, got `array`"),
        (GOOD_LINE[:-1], "line 1, is not a trace: "),
        (f"{GOOD_LINE}\n{GOOD_LINE}", "has several traces with the name clicks; give each a name of its own"),
        (GOOD_LINE.replace("clicks", "a/b"), "line 1, is not a trace: Expected `str` matching regex"),
        (GOOD_LINE.replace("99.5", "null"), "line 1, is not a trace: Expected `float`, got `null` - at `$.values[2]`"),
        (GOOD_LINE.replace("99.5", "-1"), "line 1, is not a trace: Expected `float` >= 0.0 - at `$.values[2]`"),
        (GOOD_LINE.replace("99.5", "1e999"), "line 1, is not a trace: "),
        (GOOD_LINE.replace("300", "0"), "line 1, is not a trace: Expected `float` > 0.0 - at `$.step_seconds`"),
        (GOOD_LINE.replace("104, 0, 99.5", "0, 0"), "line 1: trace clicks has no messages; remove it"),
        (
            GOOD_LINE.replace("99.5", "1e300"),
            "line 1: trace clicks has more than 1,000,000,000 messages a second; correct",
        ),
        (GOOD_LINE.replace("values", "counts"), "line 1, is not a trace: Object contains unknown field `counts`"),
        ('{"name": "\xff"}', "line 1, is not a trace: "),
    ],
)
def test_generate_rejects_invalid_traces_with_file_and_line(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))},? {re.escape(error)}"):
        read_rates(path)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_generate_rejects_a_scale_that_is_not_positive(scale: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"The scale of recorded rates is .*; give a number above 0"):
        read_rates(tmp_path / "traces.jsonl", scale)


def test_generate_names_a_file_of_traces_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path} cannot be read: Is a directory")):
        read_rates(tmp_path)


def test_generate_rates_are_those_of_the_same_time_of_day() -> None:
    """The trace starts at six o'clock, so the history's midnight is 18 hours later in the trace."""
    values = [300.0 * step for step in range(STEPS_PER_DAY)]
    rates = trace_rates(a_trace(values, hour=6.0), START_SECONDS, 3, first_day=0)
    assert rates.tolist() == pytest.approx([216.0, 217.0, 218.0])


def test_generate_rates_start_on_any_day_and_repeat_the_trace() -> None:
    trace = a_trace(daily_values(3))
    rates = trace_rates(trace, START_SECONDS, 4 * STEPS_PER_DAY, first_day=1)
    assert rates[::STEPS_PER_DAY].tolist() == pytest.approx([2.0, 3.0, 1.0, 2.0])


@pytest.mark.parametrize("step_seconds", [60.0, 300.0, 900.0, 700.0])
def test_generate_rates_do_not_depend_on_the_steps_of_the_trace(step_seconds: float) -> None:
    count = int(2 * DAY_SECONDS / step_seconds) + 1
    rates = trace_rates(a_trace([5 * step_seconds] * count, step_seconds=step_seconds), START_SECONDS, 700, first_day=0)
    assert rates.tolist() == pytest.approx([5.0] * 700)


@pytest.mark.parametrize("number", range(4))
def test_generate_group_has_the_rates_of_its_traces_times_the_scale(number: int) -> None:
    traces = [a_trace(daily_values(1), name) for name in ("clicks", "views")]
    history = generate_history(number, 7, 6, rates=RecordedRates(traces, 20.0))
    topics = {queue.topic for queue in history.queues}
    assert topics <= {"clicks", "views"}
    for topic in topics:
        columns = [index for index, queue in enumerate(history.queues) if queue.topic == topic]
        assert history.arrivals[:, columns].sum(axis=1).tolist() == pytest.approx([20.0] * 72)
    assert list(history.queues) == sorted(history.queues)
    assert source_of(history.group) is HistorySource.RATES


def test_generate_with_recorded_rates_is_reproducible_from_number_and_seed() -> None:
    rates = RecordedRates([a_trace([float(step % 7) for step in range(1000)], name) for name in ("clicks", "views")])
    first, again = (msgspec.json.encode(recorded_facts(generate_history(2, 7, 2, rates=rates))) for _ in range(2))
    assert first == again


def test_generate_fleet_with_recorded_rates_is_sized_for_its_usual_peak() -> None:
    """A spike of five minutes is a hundred times the usual rate: it causes lag, which the members then consume."""
    values = daily_values(1)
    values[100] *= 100
    history = generate_history(5, 7, 24, rates=RecordedRates([a_trace(values)]))
    rebuilt = rebuild_history(history.group, recorded_facts(history), history.ends)
    lag = replay_row(history)["lag_peak"]
    assert lag > 10_000
    assert replay_row(rebuilt)["lag_peak"] == pytest.approx(lag, rel=0.2)
