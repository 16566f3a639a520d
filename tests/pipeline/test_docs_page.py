"""Each `rota pipeline` line of docs/pipeline.md runs, in the page's order, for a smaller fleet; then the queries."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from kube.pages import blocks
from rota.cli import main
from rota.pipeline.common import schemas
from rota.pipeline.lake.tables import Lake

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pipeline.md"
TABLES_PAGE = ROOT / "docs" / "pipeline-tables.md"
SMALLER = {"--groups": "1", "--hours": "2"}
ASSUMED_LAKE = "LAKE"  # its journal is assumed by the page
TRACE = '{"name": "clicks", "start": "2015-02-26T21:42:53", "step_seconds": 300, "values": [104, 100]}'
Words = list[str]


def lines() -> list[Words]:
    """Return the words of each line, without `rota` and its comment."""
    shown = "".join(blocks(PAGE, "bash")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in shown if line.startswith("rota pipeline ")]


def adapt_line(words: Words, folder: Path) -> Words:
    """Return a line for a small fleet, with all folders below one."""
    _, command, *_ = words
    adapted = list(words)
    for index, (previous, word) in enumerate(pairwise(words), 1):
        if previous in SMALLER:
            adapted[index] = SMALLER[previous]
        elif previous in (command, "--to", "--rates", "--policies") and not word.startswith("-"):
            adapted[index] = str(folder / word)
    return adapted


def run(words: Words) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, (words, result.stderr, result.exception)


@pytest.mark.parametrize(
    ("section", "schema"),
    [
        ("Timeline of owners", schemas.INTERVALS),
        ("Timeline of owners", schemas.VIOLATIONS),
        ("Rollups", schemas.ROLLUP),
        ("Simulations", schemas.RESULTS),
        ("Simulations", schemas.SERIES),
        ("Recommendations", schemas.COSTS),
        ("Recommendations", schemas.CHOSEN),
        ("Recommendations", schemas.BACKTEST),
    ],
)
def test_docs_tables_page_names_all_columns(section: str, schema: StructType) -> None:
    text = TABLES_PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", text))
    endings = tuple(name for name in named if name.startswith("_"))  # `lag_p50`, `_p99`
    assert [name for name in schema.names if name not in named and not name.endswith(endings)] == []


@pytest.mark.slow("each command of docs/pipeline.md")
def test_docs_pipeline_page_commands_all_run_and_write_their_output(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.version  # the commands take its session
    smaller = [word for option in SMALLER.items() for word in option]
    run(["pipeline", "generate", *smaller, "--to", str(tmp_path / ASSUMED_LAKE)])
    (policies,) = blocks(PAGE, "yaml", "Try it")
    (tmp_path / "policies.yaml").write_text(policies)
    (tmp_path / "traces.jsonl").write_text(TRACE)
    for words in lines():
        run(adapt_line(words, tmp_path))
    run(["history", "synthetic-0/group-00000", "--lake", str(tmp_path / "lake")])
    assert Lake(str(tmp_path / "lake")).snapshot().tables.keys() >= {"lake/offsets", "marts/rollup", "marts/chosen"}
    assert Lake(str(tmp_path / "LAKE")).snapshot().tables.keys() >= {"marts/rollup", "marts/intervals"}
    assert "marts/backtest" in Lake(str(tmp_path / "lake")).snapshot().tables
    assert TRACE in PAGE.read_text()
    assert (tmp_path / "advice" / "report.html").stat().st_size > 1000
    for query in blocks(TABLES_PAGE, "python"):
        answer_query(query, tmp_path)


def answer_query(query: str, folder: Path) -> None:
    """Run a query of the page in the folder that has the lake, if its packages are installed."""
    packages = [line.split()[1] for line in query.splitlines() if line.startswith(("import ", "from "))]
    if all(find_spec(name.partition(".")[0]) for name in packages):
        process = subprocess.run([sys.executable, "-c", query], cwd=folder, capture_output=True, text=True, check=False)
        assert process.returncode == 0, (query, process.stderr)
        assert "group" in process.stdout, (query, process.stdout)
