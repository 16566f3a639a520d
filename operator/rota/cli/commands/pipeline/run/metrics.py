"""Metrics of a completed run, in a file for node_exporter's textfile collector, or pushed to a Pushgateway."""

import re
import time
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, push_to_gateway, write_to_textfile

from rota.cli.commands.pipeline.output_paths import check_writable
from rota.cli.commands.pipeline.progress import print_note
from rota.cli.commands.pipeline.run.summary import RunSummary
from rota.metrics import Labels, Metric

JOB = "rota-pipeline"
SUFFIX = ".prom"
PUSH_TIMEOUT_SECONDS = 30.0
_GATEWAY_PATTERN = re.compile(r"https?://[^/@\s]+(/\S*)?")  # without user:password@: messages show the URL

LAST_SUCCESS = Metric(
    "rota_pipeline_last_success_timestamp_seconds",
    "Time at which the last run completed, in seconds since 1970; a run that fails changes no metric.",
    ("lake",),
)
STEP_SECONDS = Metric("rota_pipeline_step_seconds", "Duration of each step of the last run.", ("lake", "step"))
ROWS = Metric("rota_pipeline_rows", "Rows that the last run wrote, by table.", ("lake", "table"))
SEGMENTS = Metric("rota_pipeline_segments", "New segments of the journal that the last run ingested.", ("lake",))
QUARANTINED_LINES = Metric(
    "rota_pipeline_quarantined_lines", "Lines that the last run rejected: they are in the quarantine.", ("lake",)
)
GAPS = Metric(
    "rota_pipeline_gaps", "Records of lost journal records (gap) in the days that the last run examined.", ("lake",)
)
VIOLATIONS = Metric(
    "rota_pipeline_violations",
    "Errors of the operator in queue ownership (TwoOwners, Unproved), and periods in which a queue had no owner"
    " (Unowned) or an unknown one (Unknown), in the days that the last run examined, by kind.",
    ("lake", "kind"),
)
RECOMMENDED_CHANGES = Metric(
    "rota_pipeline_recommended_changes",
    "Groups for which the last run recommends another policy; absent if it simulated none.",
    ("lake",),
)
SNAPSHOT = Metric("rota_pipeline_snapshot", "Number of the newest snapshot after the last run.", ("lake",))
# All of them: tests compare them with the docs and the dashboards.
METRICS = (
    LAST_SUCCESS,
    STEP_SECONDS,
    ROWS,
    SEGMENTS,
    QUARANTINED_LINES,
    GAPS,
    VIOLATIONS,
    RECOMMENDED_CHANGES,
    SNAPSHOT,
)


class MetricsOutput:
    """A file and a Pushgateway for the metrics of a run, both optional, and checked before the run."""

    def __init__(self, file: str | None, gateway: str | None) -> None:
        if file is not None and not file.endswith(SUFFIX):
            raise ValueError(
                f"--metrics-file {file} must end with {SUFFIX}: the textfile collector reads no other file"
            )
        if file is not None:
            check_writable("--metrics-file", Path(file).absolute().parent, file)
            if Path(file).is_dir():
                raise ValueError(f"--metrics-file {file} is a folder; name a file in it, such as rota{SUFFIX}")
        if gateway is not None and not _GATEWAY_PATTERN.fullmatch(gateway):
            raise ValueError("--push-gateway must be a URL without a user name, such as http://pushgateway:9091")
        self._file = file
        self._gateway = gateway

    def write(self, summary: RunSummary) -> None:
        """Write the metrics of a completed run; a failure is only printed, since the tables are published already."""
        registry = build_registry(summary, time.time())
        if self._file is not None:
            try:
                Path(self._file).absolute().parent.mkdir(parents=True, exist_ok=True)
                write_to_textfile(self._file, registry)
            except OSError as error:
                print_note(f"the metrics were not written to {self._file}: {error.strerror or error}")
        if self._gateway is not None:
            key = {"lake": summary.lake}  # otherwise the runs of two lakes would replace each other's metrics
            try:
                push_to_gateway(self._gateway, JOB, registry, grouping_key=key, timeout=PUSH_TIMEOUT_SECONDS)
            except (OSError, HTTPException) as error:
                print_note(f"the metrics were not pushed to {self._gateway}: {error}")


def build_registry(summary: RunSummary, now: float) -> CollectorRegistry:
    """Return all metrics of a run that completed at a time."""
    registry = CollectorRegistry()
    single_values: dict[Metric, float | None] = {
        LAST_SUCCESS: now,
        SEGMENTS: summary.segments,
        QUARANTINED_LINES: summary.quarantined_lines,
        GAPS: summary.gaps,
        RECOMMENDED_CHANGES: summary.recommended_changes,
        SNAPSHOT: summary.published_snapshot,
    }
    for metric, value in single_values.items():
        if value is not None:
            _add_gauge(registry, metric, {(summary.lake,): value})
    values_by_label: dict[Metric, Mapping[str, float]] = {  # by the value of the metric's second label
        STEP_SECONDS: summary.seconds,
        ROWS: summary.rows,
        VIOLATIONS: summary.violations,
    }
    for metric, values in values_by_label.items():
        _add_gauge(registry, metric, {(summary.lake, label): value for label, value in values.items()})
    return registry


def _add_gauge(registry: CollectorRegistry, metric: Metric, samples: Mapping[Labels, float]) -> None:
    gauge = Gauge(metric.name, metric.help, metric.labels, registry=registry)
    for labels, value in samples.items():
        gauge.labels(*labels).set(value)
