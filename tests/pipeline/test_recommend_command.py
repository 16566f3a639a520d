"""The commands of `rota pipeline` for a test of advice, links and earlier advice in the report, and recorded rates."""

import json
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipeline.test_command import a_file, error_of, mart_rows, output_of
from rota.pipeline.lake.tables import Lake
from rota.pipeline.report.plots import format_utc
from rota.pipeline.report.sections.backtest_section import TITLE as BACKTEST_TITLE

GROUPS, HOURS = 3, 3
POLICIES = "\n---\n".join(
    f"{{kind: RebalancePolicy, metadata: {{name: {strategy.lower()}}}, spec: {{strategy: {strategy}}}}}"
    for strategy in ("Sticky", "AveragelyByCircle", "Balanced")
)
EARLIER_TITLE = "What earlier advice came to"
TRACE = '{"name": "clicks", "start": "2015-02-26T21:42:53", "step_seconds": 300, "values": [300, 600]}\n'


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_file(tmp_path_factory.mktemp("policies") / "policies.yaml", POLICIES)


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a lake with a generated journal, which is ingested."""
    assert spark.version  # the commands take its session
    lake = tmp_path_factory.mktemp("advice") / "lake"
    output_of("generate", "--groups", GROUPS, "--hours", HOURS, "--to", lake)
    output_of("ingest", lake)
    return lake


def test_recommend_command_links_groups_then_tests_advice_and_compares_the_earlier_one(
    lake: Path, policies: Path, tmp_path: Path
) -> None:
    arguments = ["recommend", lake, "--policies", policies, "--to", tmp_path, "--least-gain", 0]
    urls = ["--page-url", "https://rota.example.com/", "--board-url", "https://grafana.example.com"]
    output_of(*arguments, *urls)
    report = (tmp_path / "report.html").read_text()
    changing = [row["group"] for row in mart_rows(lake, "chosen") if row["change"]]
    assert changing
    for group in changing:
        namespace, _, name = group.partition("/")
        assert f'href="https://rota.example.com/#{namespace}/{name}"' in report
        board = f"https://grafana.example.com/d/rota-group?var-namespace={namespace}&amp;var-group={name}"
        assert f'href="{board}"' in report
    assert EARLIER_TITLE not in report
    assert BACKTEST_TITLE not in report
    opened = Lake(str(lake))
    written_at = opened.table("marts/chosen").written_at(opened.snapshot().version("marts/chosen"))
    assert written_at
    output_of("rollup", lake)  # its snapshot is newer than the recommendation

    lines = output_of(*arguments, "--backtest").splitlines()
    report = (tmp_path / "report.html").read_text()
    assert "https://rota.example.com" not in report
    assert EARLIER_TITLE in report
    assert f"On {format_utc(written_at.timestamp())} UTC, " in report
    assert BACKTEST_TITLE in report
    rows = mart_rows(lake, "backtest")
    assert len(rows) == GROUPS
    assert {(row["source"], round(row["hours"], 3), row["problem"]) for row in rows} == {("synthetic", HOURS / 2, None)}
    header = next(index for index, line in enumerate(lines) if line.startswith("POLICY"))
    choices = {re.split(r"  +", line)[0] for line in lines[header + 1 : -1]}
    assert {"without a change", "as advised", "best of each group, in hindsight", "sticky", "balanced"} <= choices
    assert "The histories are synthetic: members and message rates are generated." in lines
    assert lines[-1].startswith("The report is ")


@pytest.mark.parametrize("option", ["--page-url", "--board-url"])
def test_recommend_command_rejects_an_invalid_base_url(lake: Path, policies: Path, tmp_path: Path, option: str) -> None:
    target = tmp_path / "to"
    error = error_of("recommend", lake, "--policies", policies, "--to", target, option, "rota.example.com")
    assert error == f"{option} rota.example.com is no base URL; give one such as https://rota.example.com"
    assert not target.exists()


def test_generate_command_writes_groups_with_recorded_rates(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.version
    rates = a_file(tmp_path / "rates.jsonl", TRACE)
    lake = tmp_path / "lake"
    size = ["--groups", 1, "--hours", 1]
    counts = json.loads(output_of("generate", *size, "--rates", rates, "--scale", 2, "--to", lake, "-o", "json"))
    assert counts["groups"] == 1
    output_of("ingest", lake)
    opened = Lake(str(lake))
    offsets = opened.table("lake/offsets").to_arrow(opened.snapshot().version("lake/offsets")).to_pylist()
    assert {row["group"] for row in offsets} == {"synthetic-rates-0/group-00000"}
    assert {topic for row in offsets for topic, _ in row["topics"]} == {"clicks"}


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (None, [], "{file} cannot be read: No such file or directory"),
        ("", [], "{file} has no traces; give a file of JSON lines with name, start, step_seconds, values"),
        (TRACE, ["--scale", 0], "The scale of recorded rates is 0; give a number above 0"),
        (TRACE, ["--scale", "nan"], "The scale of recorded rates is nan; give a number above 0"),
    ],
)
def test_generate_command_rejects_invalid_recorded_rates(
    tmp_path: Path, text: str | None, options: list[object], sentence: str
) -> None:
    file = tmp_path / "rates.jsonl" if text is None else a_file(tmp_path / "rates.jsonl", text)
    lake = tmp_path / "lake"
    assert error_of("generate", "--to", lake, "--rates", file, *options) == sentence.format(file=file)
    assert not lake.exists()


def test_generate_command_rejects_a_scale_without_rates(tmp_path: Path) -> None:
    error = error_of("generate", "--to", tmp_path / "lake", "--scale", 2)
    assert error == "--scale multiplies recorded rates; name their file by --rates, too"
