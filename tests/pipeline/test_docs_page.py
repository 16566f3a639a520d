"""Each `rota pipeline` line of docs/pipeline.md runs, in the page's order, for a smaller fleet."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from kube.pages import blocks
from pipeline.small_spark import LONGEST, SMALL
from rota.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pipeline.md"
SMALLER = {"--groups": "1", "--hours": "2"}
JOURNALS = ("/var/lib/rota/journal", "JOURNAL")  # journals that the page assumes
CTRL_C = 130  # the exit code after an interrupt

Words = list[str]


def lines() -> list[Words]:
    """Return the words of each line, without `rota` and its comment."""
    shown = "".join(blocks(PAGE, "bash")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in shown if line.startswith("rota pipeline ")]


def adapt_line(words: Words, folder: Path) -> Words:
    """Return a line for a small fleet, with all folders below one."""
    _, command, *_ = words
    folders = {"SOURCE": "lake", "FOLDER": f"{command}ed"}
    adapted = list(words)
    for index, (previous, word) in enumerate(pairwise(words), 1):
        if previous in SMALLER:
            adapted[index] = SMALLER[previous]
        elif previous == "--policies":
            adapted[index] = str(ROOT / word)
        elif previous in (command, "--to") and not word.startswith("-"):
            adapted[index] = str(folder / folders.get(word, word).lstrip("/"))
    return adapted


def run(words: Words) -> None:
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.stderr) == (0, ""), (words, result.exception)


def run_until_interrupted(words: Words) -> None:
    """Run a command that continues until Ctrl-C, and interrupt it after its first output."""
    with subprocess.Popen(
        [sys.executable, "-m", "rota.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | SMALL,
        start_new_session=True,  # its process group has its Java, and nothing else
    ) as process:
        assert process.stdout
        try:
            assert b"TABLE" in process.stdout.readline()
            assert process.poll() is None, "the command continues"
            os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does it
            assert process.wait(LONGEST) == CTRL_C
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow("each command of docs/pipeline.md")
def test_docs_pipeline_page_commands_all_run_and_write_their_output(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.version  # the commands take its session
    for name in JOURNALS:
        journal = tmp_path / name.lstrip("/")
        run(["pipeline", "generate", *(word for option in SMALLER.items() for word in option), "--to", str(journal)])
        for path in journal.rglob("*.jsonl"):
            os.utime(path, (0, 0))  # old enough to count as complete
    written: dict[str, Path] = {}
    for words in lines():
        adapted = adapt_line(words, tmp_path)
        if "--to" in adapted:
            written[" ".join(words)] = Path(adapted[adapted.index("--to") + 1])
        if "generate" in adapted:
            shutil.rmtree(tmp_path / "journal", ignore_errors=True)  # of an earlier generate
        if "--watch" in adapted:
            shutil.rmtree(tmp_path / "LAKE")  # otherwise the watch would find no new hours
            run_until_interrupted(adapted)
        else:
            run(adapted)
    assert [line for line, folder in written.items() if not any(folder.iterdir())] == []
    assert (tmp_path / "advice" / "report.html").stat().st_size > 1000
