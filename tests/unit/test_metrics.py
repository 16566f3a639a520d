"""Metrics as Prometheus reads them."""

import re
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.metrics import CONTENT_TYPE, Counter, Gauge, Histogram, Labels, render

_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{((?:{_LABEL})(?:,(?:{_LABEL}))*)\}})? (\S+)")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class Sample(NamedTuple):
    """One line, as it is understood."""

    name: str
    labels: dict[str, str]
    value: float


def read(text: str) -> list[Sample]:
    """Read the text format as its description has it; what does not fit fails."""
    assert text.endswith("\n")
    found = []
    for line in text[:-1].split("\n"):
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP \S+ .+|TYPE \S+ (counter|gauge|histogram))", line)
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample, line
        labels = {
            name: re.sub(r"\\.", lambda it: _ESCAPES[it[0]], value)
            for name, value in re.findall(_LABEL, sample[2] or "")
        }
        found.append(Sample(sample[1], labels, float(sample[sample.lastindex or 0])))
    assert len({(it.name, *sorted(it.labels.items())) for it in found}) == len(found), "no series twice"
    return found


def test_metrics_counter_has_a_header_and_a_line_per_label_set() -> None:
    counter = Counter("rota_things_total", "Things.", ("kind", "how"))
    counter.add("b", "well")
    counter.add("a", "well", by=2)
    counter.add("b", "well", by=0.5)
    assert render([counter]).splitlines() == [
        "# HELP rota_things_total Things.",
        "# TYPE rota_things_total counter",
        'rota_things_total{kind="a",how="well"} 2',
        'rota_things_total{kind="b",how="well"} 1.5',
    ]


def test_metrics_counter_without_labels_starts_at_0() -> None:
    counter = Counter("rota_things_total", "Things.")
    assert read(render([counter])) == [("rota_things_total", {}, 0.0)]
    counter.add()
    assert read(render([counter])) == [("rota_things_total", {}, 1.0)]


def test_metrics_counter_with_labels_has_no_sample_before_its_first_use() -> None:
    assert read(render([Counter("rota_things_total", "Things.", ("kind",))])) == []


def test_metrics_gauge_is_read_at_scrape_time() -> None:
    values: dict[Labels, float] = {("a",): 1.0}
    gauge = Gauge("rota_things", "Things.", ("kind",), look=lambda: values)
    assert read(render([gauge])) == [("rota_things", {"kind": "a"}, 1.0)]
    values |= {("a",): -0.25, ("b",): 3.0}
    assert read(render([gauge])) == [("rota_things", {"kind": "a"}, -0.25), ("rota_things", {"kind": "b"}, 3.0)]
    assert read(render([Gauge("rota_things", "Things.")])) == []


def test_metrics_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram("rota_seconds", "Seconds.", bounds=(0.1, 1, 2.5))
    for value in (0.05, 0.1, 0.2, 1.0, 2.0, 99.0):
        histogram.observe(value)
    assert render([histogram]).splitlines()[2:] == [
        'rota_seconds_bucket{le="0.1"} 2',
        'rota_seconds_bucket{le="1"} 4',
        'rota_seconds_bucket{le="2.5"} 5',
        'rota_seconds_bucket{le="+Inf"} 6',
        "rota_seconds_sum 102.35",
        "rota_seconds_count 6",
    ]


def test_metrics_histogram_has_buckets_per_label_set() -> None:
    histogram = Histogram("rota_seconds", "Seconds.", ("how",), bounds=(1,))
    histogram.observe(0.5, "well")
    histogram.observe(3, "badly", times=4)
    assert read(render([histogram])) == [
        ("rota_seconds_bucket", {"how": "badly", "le": "1"}, 0),
        ("rota_seconds_bucket", {"how": "badly", "le": "+Inf"}, 4),
        ("rota_seconds_sum", {"how": "badly"}, 12),
        ("rota_seconds_count", {"how": "badly"}, 4),
        ("rota_seconds_bucket", {"how": "well", "le": "1"}, 1),
        ("rota_seconds_bucket", {"how": "well", "le": "+Inf"}, 1),
        ("rota_seconds_sum", {"how": "well"}, 0.5),
        ("rota_seconds_count", {"how": "well"}, 1),
    ]


def test_metrics_histograms_share_no_state() -> None:
    one, other = Histogram("rota_a", "A."), Histogram("rota_b", "B.")
    one.observe(1)
    assert read(render([other])) == []


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_metrics_histogram_counts_a_value_in_every_bucket_not_below_it(values: list[float]) -> None:
    histogram = Histogram("rota_seconds", "Seconds.")
    for value in values:
        histogram.observe(value)
    *buckets, total, count = read(render([histogram]))
    for bucket in buckets:
        assert bucket.value == sum(value <= float(bucket.labels["le"]) for value in values)
    assert count.value == buckets[-1].value == len(values)
    assert total.value == pytest.approx(sum(values))


@pytest.mark.parametrize("text", ["", "plain", 'a"b', "a\\b", "a\nb", '\\"', "\\n", "ü, {le=}", "\\\n\\\\"])
def test_metrics_label_values_round_trip(text: str) -> None:
    counter = Counter("rota_things_total", "Things.", ("kind", "other"))
    counter.add(text, "x")
    assert read(render([counter])) == [("rota_things_total", {"kind": text, "other": "x"}, 1.0)]


def test_metrics_line_break_in_a_label_adds_no_line() -> None:
    counter = Counter("rota_things_total", "Things.", ("kind",))
    counter.add('x"} 1\nrota_forged 7')
    assert len(render([counter]).splitlines()) == 3


@pytest.mark.parametrize("value", [0.0, 1e-9, 0.1 + 0.2, 2**60, 1e300, float("inf"), -3.5])
def test_metrics_numbers_keep_full_precision(value: float) -> None:
    assert read(render([Gauge("rota_things", "Things.", look=lambda: {(): value})])) == [("rota_things", {}, value)]


def test_metrics_reject_labels_beyond_those_declared() -> None:
    counter = Counter("rota_things_total", "Things.", ("kind",))
    counter.add("a", "b")
    with pytest.raises(ValueError, match="longer"):
        render([counter])


def test_metrics_are_rendered_in_order() -> None:
    text = render([Counter("rota_a_total", "A."), Gauge("rota_b", "B.", look=lambda: {(): 2})])
    assert [(it.name, it.value) for it in read(text)] == [("rota_a_total", 0), ("rota_b", 2)]
    assert render([]) == ""


def test_metrics_content_type_has_the_format_version() -> None:
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"
