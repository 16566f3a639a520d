"""Tests metrics in both formats: Prometheus text, and OpenMetrics with exemplars."""

import gc
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from rota.metrics import ComputedMetric, GroupCounter, Labels, Metric, Metrics, MetricsFormat

PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"


def samples(metrics: Metrics, *computed: ComputedMetric) -> dict[tuple[str, Labels], float]:
    """Return the samples of Rota in the text format; those in OpenMetrics must be equal."""
    text, openmetrics = (
        {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in families_of(metrics, style, computed)
            for sample in family.samples
            if sample.name.startswith("rota_")
        }
        for style in (MetricsFormat.TEXT, MetricsFormat.OPENMETRICS)
    )
    assert text == openmetrics
    return text


def families_of(metrics: Metrics, style: MetricsFormat, computed: Iterable[ComputedMetric] = ()) -> list[Any]:
    """Return the families that the parser of prometheus-client reads."""
    parse: Any = read_text if style is MetricsFormat.TEXT else read_openmetrics
    return list(parse(metrics.render(style, computed).decode()))


def computed_metric(metric: Metric, values: dict[Labels, float]) -> ComputedMetric:
    return ComputedMetric(metric, lambda: values)


def test_metrics_counter_and_histogram_are_rendered_in_both_formats() -> None:
    metrics = Metrics()
    metrics.counter("rota_things_total", "Things.", ("kind",)).labels("a").inc(2)
    metrics.histogram("rota_seconds", "Seconds.", bounds=(0.1, 1)).observe(0.5)
    assert samples(metrics) == {
        ("rota_things_total", ("a",)): 2,
        ("rota_seconds_bucket", ("0.1",)): 0,
        ("rota_seconds_bucket", ("1.0",)): 1,
        ("rota_seconds_bucket", ("+Inf",)): 1,
        ("rota_seconds_sum", ()): 0.5,
        ("rota_seconds_count", ()): 1,
    }


def test_metrics_have_no_series_with_the_time_of_their_creation() -> None:
    metrics = Metrics()
    metrics.counter("rota_things_total", "Things.")
    assert b"_created" not in metrics.render(MetricsFormat.TEXT) + metrics.render(MetricsFormat.OPENMETRICS)


def test_metrics_of_python_and_of_the_process_are_rendered() -> None:
    gc.collect()
    families = {family.name for family in families_of(Metrics(), MetricsFormat.TEXT)}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info", "python_gc_collections"} <= families


def test_metrics_that_are_computed_are_read_at_scrape_time() -> None:
    metrics = Metrics()
    values: dict[Labels, float] = {("a",): 1.0}
    metrics.add_computed(Metric("rota_things", "Things.", ("kind",)), lambda: values)
    assert samples(metrics) == {("rota_things", ("a",)): 1}
    values |= {("a",): -0.25, ("b",): 3.0}
    assert samples(metrics) == {("rota_things", ("a",)): -0.25, ("rota_things", ("b",)): 3}


def test_metrics_that_are_computed_may_be_counters_or_without_labels() -> None:
    total = computed_metric(Metric("rota_lost_total", "What was lost.", kind="counter"), {(): 7.0})
    assert samples(Metrics(), total) == {("rota_lost_total", ()): 7}
    assert "# TYPE rota_lost counter" in Metrics().render(MetricsFormat.OPENMETRICS, [total]).decode().splitlines()
    assert "# TYPE rota_lost_total counter" in Metrics().render(MetricsFormat.TEXT, [total]).decode().splitlines()


@pytest.mark.parametrize("text", ["", "plain", 'a"b', "a\\b", "a\nb", '\\"', "\\n", "ü, {le=}", 'x"} 1\nrota_forged 7'])
def test_metrics_label_values_that_are_computed_round_trip(text: str) -> None:
    metric = computed_metric(Metric("rota_things", "Things.", ("kind", "other")), {(text, "x"): 1.0})
    assert samples(Metrics(), metric) == {("rota_things", (text, "x")): 1}


@pytest.mark.parametrize("value", [0.0, 1e-9, 0.1 + 0.2, 2**60, 1e300, float("inf"), -3.5])
def test_metrics_numbers_that_are_computed_keep_full_precision(value: float) -> None:
    assert samples(Metrics(), computed_metric(Metric("rota_things", "Things."), {(): value})) == {
        ("rota_things", ()): value
    }


def test_metrics_reject_labels_beyond_those_declared() -> None:
    with pytest.raises(ValueError, match="longer"):
        Metrics().render(
            MetricsFormat.TEXT, [computed_metric(Metric("rota_things", "Things.", ("kind",)), {("a", "b"): 1.0})]
        )


def test_metrics_exemplar_names_a_trace_in_openmetrics_only() -> None:
    metrics = Metrics()
    metrics.histogram("rota_seconds", "Seconds.", bounds=(1,)).observe(0.5, {"trace_id": "ab" * 16})
    families = families_of(metrics, MetricsFormat.OPENMETRICS)
    (family,) = [family for family in families if family.name == "rota_seconds"]
    (exemplar,) = [sample.exemplar for sample in family.samples if sample.exemplar]
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "ab" * 16}, 0.5)
    assert b"trace_id" not in metrics.render(MetricsFormat.TEXT)


def test_metrics_counter_of_groups_begins_with_0_and_forgets_a_group() -> None:
    metrics = Metrics()
    counter = GroupCounter()
    metrics.add_computed(
        Metric("rota_things_total", "Things.", ("namespace", "group", "kind"), "counter"), counter.samples
    )
    counter.add(("shop", "orders"), "a", amount=0)
    counter.add(("shop", "bills"), "a", amount=2)
    counter.add(("shop", "bills"), "a")
    orders, bills = (("rota_things_total", ("shop", group, "a")) for group in ("orders", "bills"))
    assert samples(metrics) == {orders: 0, bills: 3}
    counter.forget(("shop", "bills"))
    assert samples(metrics) == {orders: 0}


@pytest.mark.parametrize(
    ("accept", "style"),
    [
        (PROMETHEUS, MetricsFormat.OPENMETRICS),
        ("application/openmetrics-text", MetricsFormat.OPENMETRICS),
        ("text/plain;version=0.0.4", MetricsFormat.TEXT),
        ("*/*", MetricsFormat.TEXT),
        ("text/html", MetricsFormat.TEXT),
        ("", MetricsFormat.TEXT),
    ],
)
def test_metrics_format_is_the_one_that_the_client_accepts(accept: str, style: MetricsFormat) -> None:
    assert MetricsFormat.from_accept_header(accept) is style


def test_metrics_content_types_have_the_versions_of_their_formats() -> None:
    assert MetricsFormat.TEXT.value == "text/plain; version=0.0.4; charset=utf-8"
    assert MetricsFormat.OPENMETRICS.value == "application/openmetrics-text; version=1.0.0; charset=utf-8"
