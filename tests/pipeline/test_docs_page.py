"""Each `rota pipeline` line of docs/pipeline.md runs, in the page's order, for a smaller fleet."""

import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from kube.pages import blocks
from rota.cli import main
from rota.pipeline.lake.tables import Lake

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pipeline.md"
SMALLER = {"--groups": "1", "--hours": "2"}
ASSUMED_LAKES = ("/var/lib/rota/lake", "LAKE")  # lakes whose journal the page assumes
TRACE = '{"name": "clicks", "start": "2015-02-26T21:42:53", "step_seconds": 300, "values": [104, 100]}'
ASSUMED_JOURNALS = {"/var/lib/rota/journal": "var/lib/rota/lake/journal", "JOURNAL": "LAKE/journal"}

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
        elif previous == "--policies":
            adapted[index] = str(ROOT / word)
        elif previous in (command, "--to", "--journal", "--rates") and not word.startswith("-"):
            adapted[index] = str(folder / ASSUMED_JOURNALS.get(word, word).lstrip("/"))
    return adapted


def run(words: Words) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, (words, result.stderr, result.exception)


@pytest.mark.slow("each command of docs/pipeline.md")
def test_docs_pipeline_page_commands_all_run_and_write_their_output(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.version  # the commands take its session
    smaller = [word for option in SMALLER.items() for word in option]
    for name in ASSUMED_LAKES:
        run(["pipeline", "generate", *smaller, "--to", str(tmp_path / name.lstrip("/"))])
    (tmp_path / "traces.jsonl").write_text(TRACE)
    for words in lines():
        run(adapt_line(words, tmp_path))
    assert Lake(str(tmp_path / "lake")).snapshot().tables.keys() >= {"lake/offsets", "marts/rollup", "marts/chosen"}
    assert Lake(str(tmp_path / "LAKE")).snapshot().tables.keys() >= {"marts/rollup", "marts/intervals"}
    assert "marts/backtest" in Lake(str(tmp_path / "lake")).snapshot().tables
    assert TRACE in PAGE.read_text()
    assert (tmp_path / "advice" / "report.html").stat().st_size > 1000
