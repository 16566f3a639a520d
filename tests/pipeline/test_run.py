"""`rota pipeline run`: all steps in one Spark application, its summary, its metrics, and what a failed step leaves."""

import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

from pipeline.lake_folders import DAY, verdict_line, write_file, write_segment
from pipeline.test_backtest import fleet
from rota.cli import main
from rota.cli.commands.pipeline import rollup
from rota.cli.commands.pipeline.run.metrics import METRICS, MetricsOutput
from rota.cli.commands.pipeline.run.summary import RunSummary
from rota.object_store import open_store
from rota.pipeline.lake.tables import Lake
from rota.pipeline.recommend.backtest import summarize
from rota.records import journal_record

STEADY = "kind: RebalancePolicy\nmetadata: {name: steady}\nspec: {strategy: Sticky}\n"
GROUPS, HOURS = 2, 2


class Gateway(NamedTuple):
    """A server that takes what is pushed: paths and bodies."""

    url: str
    pushed: list[tuple[str, str]]


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    pushed: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            pushed.append((self.path, body.decode()))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield Gateway(f"http://127.0.0.1:{server.server_port}", pushed)
    server.shutdown()
    thread.join()
    server.server_close()


def rota(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["pipeline", *map(str, arguments)])


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values of a text of metrics, by name and all labels but the lake."""
    values: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for label, value in sample.labels.items() if label != "lake"]
            values[(sample.name, *labels)] = sample.value
    return values


def tables_of(lake: Path) -> dict[str, int]:
    return Lake(str(lake)).snapshot().tables


def two_owners(lake: Path) -> Path:
    """Write a journal in which a queue has two owners."""
    owner = {"standing": "Ready", "queues": {"orders": {"broker-a": "0"}}}
    rules: dict[str, Any] = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None}
    state = {"rules": {}, "members": {name: owner | {"uid": name} for name in ("a", "b")}, "releasing": []}
    at = "2026-11-21T08:00:00.000Z"
    record = journal_record("owners", "shop/orders", at, generation=1, unowned={}, **rules, **state)
    write_segment(lake, "08-a.jsonl.gz", json.dumps(record).encode())
    return lake


def test_pipeline_run_writes_all_marts_and_summarizes_them_in_values_and_metrics(
    spark: SparkSession, gateway: Gateway, tmp_path: Path
) -> None:
    assert spark.version  # the command takes its session
    lake = tmp_path / "lake"
    policies = tmp_path / "policies.yaml"
    policies.write_text(STEADY)
    assert not rota("generate", "--groups", GROUPS, "--hours", HOURS, "--to", lake).exit_code
    write_file(lake, "09-z.jsonl.gz", b"not gzip", day=DAY)
    file = tmp_path / "metrics" / "rota.prom"
    advice = ("--policies", policies, "--to", tmp_path / "advice", "--backtest")
    outputs = ("--metrics-file", file, "--push-gateway", gateway.url)
    result = rota("run", lake, *advice, *outputs, "-o", "json")
    assert result.exit_code == 0, (result.stderr, result.exception)

    summary = json.loads(result.stdout)
    assert summary["lake"] == str(lake)
    assert summary["snapshot"] == {"read": 1, "published": 5}
    assert list(summary["seconds"]) == ["ingest", "rollup", "timeline", "simulate", "recommend"]
    assert summary["rows"]["marts/rollup"] == GROUPS * HOURS
    assert summary["rows"]["marts/results"] == GROUPS * 2
    assert summary["rows"]["marts/chosen"] == summary["rows"]["marts/backtest"] == GROUPS
    assert summary["rows"]["lake/quarantine"] == summary["found"]["quarantined_lines"] == 1
    assert summary["found"]["violations"].keys() == {"TwoOwners", "Unproved", "Unowned", "Unknown"}
    assert (summary["found"]["gaps"], summary["found"]["recommended_changes"] in range(GROUPS + 1)) == (0, True)
    assert tables_of(lake).keys() >= {f"marts/{name}" for name in ("rollup", "intervals", "results", "chosen")}
    assert Path(summary["report"]) == tmp_path / "advice" / "report.html"
    assert Path(summary["report"]).exists()
    tested = summary["found"]["backtest"]
    assert tested["groups"] + tested["untested"] == GROUPS
    assert tested["best"] <= min(tested["recorded"], tested["advised"])

    values = samples(file.read_text())
    assert {name for name, *_ in values} == {metric.name for metric in METRICS}
    assert values["rota_pipeline_rows", "marts/rollup"] == GROUPS * HOURS
    assert values["rota_pipeline_segments",] == summary["segments"]
    assert values["rota_pipeline_quarantined_lines",] == 1
    assert values["rota_pipeline_violations", "TwoOwners"] == 0
    assert values["rota_pipeline_step_seconds", "rollup"] > 0
    ((path, pushed),) = gateway.pushed
    assert path.startswith("/metrics/job/rota-pipeline/lake@base64/")
    assert samples(pushed) == values
    assert [path.name for path in file.parent.iterdir()] == ["rota.prom"]


def test_pipeline_run_fails_for_violations_only_if_asked(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.version
    lake = two_owners(tmp_path / "lake")
    result = rota("run", lake)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert re.search(r"^Errors of the operator in queue ownership: TwoOwners \d+$", result.stdout, re.MULTILINE)
    assert "1 new segment, 0 lines in quarantine, 0 gaps" in result.stdout
    again = rota("run", lake, "--fail-on-violations")
    assert again.exit_code == 1
    assert "0 new segments" in again.stdout
    assert "recommended" not in again.stdout


def test_pipeline_run_keeps_the_snapshots_of_steps_before_the_one_that_fails(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "/var/lib/rota")

    assert spark.version
    lake = two_owners(tmp_path / "lake")
    file = tmp_path / "rota.prom"
    monkeypatch.setattr(rollup, "write_audit", fail)
    result = rota("run", lake, "--metrics-file", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == "rota: /var/lib/rota cannot be read or written: No space left on device"
    assert tables_of(lake).keys() >= {"lake/owners", "marts/rollup"}
    assert "marts/violations" not in tables_of(lake)
    assert not file.exists(), "only a run that completes has metrics"


def test_pipeline_run_without_a_journal_reads_the_history_of_the_lake(spark: SparkSession, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    segment = write_segment(lake, "08-a.jsonl.gz", verdict_line(1))
    assert spark.version
    assert rota("ingest", lake).exit_code == 0
    segment.unlink()
    result = rota("run", lake)
    assert (result.exit_code, "contains no segment" in result.stderr) == (0, True), result.stderr
    assert "marts/rollup" in tables_of(lake)


# Without Spark.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--policies", "p.yaml"], "--policies and --to belong together"),
        (["--to", "advice"], "--policies and --to belong together"),
        (["--metrics-file", "rota.txt"], "--metrics-file rota.txt must end with .prom"),
        (["--metrics-file", "p.yaml/rota.prom"], "--metrics-file p.yaml/rota.prom cannot be a folder, because "),
        (["--metrics-file", "/proc/x/rota.prom"], "--metrics-file /proc/x/rota.prom cannot be written: nothing can "),
        (["--metrics-file", "folder.prom"], "--metrics-file folder.prom is a folder; name a file in it, such as rota"),
        (["--policies", "p.yaml", "--to", "/proc/x"], "--to /proc/x cannot be written: nothing can be created in "),
        (["--push-gateway", "pushgateway:9091"], "--push-gateway must be a URL without a user name"),
        (["--push-gateway", "http://me:secret@pushgateway"], "--push-gateway must be a URL without a user name"),
        ([], "lake/journal does not exist; name the journal with --journal"),
    ],
)
def test_pipeline_run_rejects_options_before_spark_starts(
    options: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(STEADY)
    Path("folder.prom").mkdir()
    result = rota("run", "lake", *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert error in result.stderr


def test_pipeline_run_with_if_any_succeeds_without_a_journal(tmp_path: Path) -> None:
    result = rota("run", tmp_path / "lake", "--if-any")
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)


def test_pipeline_run_whose_metrics_cannot_be_written_still_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rota.prom"
    metrics = MetricsOutput(str(folder), "http://127.0.0.1:1")
    folder.mkdir()
    metrics.write(RunSummary("lake"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(" to ")[0].strip() for line in lines] == [
        "the metrics were not written",
        "the metrics were not pushed",
    ]
    assert list(tmp_path.iterdir()) == [folder]


def test_pipeline_run_pushes_the_metrics_of_each_lake_under_its_whole_uri(gateway: Gateway, tmp_path: Path) -> None:
    uris = ["s3://east/rota", "s3://west/rota", "abfs://rota@east.dfs.core.windows.net/rota", f"{tmp_path}/rota"]
    for uri in uris:
        MetricsOutput(None, gateway.url).write(RunSummary(open_store(uri).uri))
    keys = [path.removeprefix("/metrics/job/rota-pipeline/lake@base64/") for path, _ in gateway.pushed]
    assert [urlsafe_b64decode(key).decode() for key in keys] == uris
    assert all(f'lake="{uri}"' in text for uri, (_, text) in zip(uris, gateway.pushed, strict=True))


@pytest.mark.parametrize(
    ("violations", "errors", "periods"),
    [
        ({}, "none", "none"),
        ({"TwoOwners": 1, "Unproved": 2}, "TwoOwners 1, Unproved 2", "none"),
        ({"Unowned": 3, "Unknown": 4}, "none", "Unowned 3, Unknown 4"),
    ],
)
def test_pipeline_run_prints_errors_of_the_operator_apart_from_periods_without_an_owner(
    violations: dict[str, int], errors: str, periods: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = RunSummary("lake")
    summary.violations |= violations
    summary.print_text()
    printed = capsys.readouterr().out
    assert f"Errors of the operator in queue ownership: {errors}\n" in printed
    assert f"Periods in which a queue had no owner, or an unknown one: {periods}\n" in printed


def test_pipeline_run_prints_the_result_of_the_backtest_and_where_the_report_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = RunSummary("lake", recommended_changes=3, backtest=summarize(fleet(), ["steady", "even"]))
    summary.report = "advice/report.html"
    summary.print_text()
    printed = capsys.readouterr().out
    assert "cost 15 % less than no change; 2 of 3 advised changes would have been wrong\n" in printed
    assert "The report is advice/report.html\n" in printed
