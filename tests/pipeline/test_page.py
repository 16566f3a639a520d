"""Each `rota pipeline` line of docs/pipeline.md is typed, in the page's order, on a fleet that is smaller than its."""

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
FEWER = {"--groups": "1", "--hours": "2"}
FLEETS = ("/var/lib/rota/journal", "JOURNAL")  # journals that the page's reader has
CTRL_C = 130  # what a command ends with then

Words = list[str]


def lines() -> list[Words]:
    """Return the words of each line, without `rota` and what is said about it."""
    shown = "".join(blocks(PAGE, "bash")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in shown if line.startswith("rota pipeline ")]


def here(words: Words, at: Path) -> Words:
    """Return a line for a small fleet, with all folders under one."""
    _, command, *_ = words
    known = {"SOURCE": "lake", "FOLDER": f"{command}ed"}
    found = list(words)
    for place, (before, word) in enumerate(pairwise(words), 1):
        if before in FEWER:
            found[place] = FEWER[before]
        elif before == "--policies":
            found[place] = str(ROOT / word)
        elif before in (command, "--to") and not word.startswith("-"):
            found[place] = str(at / known.get(word, word).lstrip("/"))
    return found


def run(words: Words) -> None:
    ran = CliRunner().invoke(main, words)
    assert (ran.exit_code, ran.stderr) == (0, ""), (words, ran.exception)


def watched(words: Words) -> None:
    """Run what goes on until Ctrl-C, and do that when it has something to show."""
    with subprocess.Popen(
        [sys.executable, "-m", "rota.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | SMALL,
        start_new_session=True,  # its Java is in its group, and nothing else
    ) as process:
        assert process.stdout
        try:
            assert b"TABLE" in process.stdout.readline()
            assert process.poll() is None, "it goes on"
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of them
            assert process.wait(LONGEST) == CTRL_C
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow("each command line of docs/pipeline.md, typed")
def test_docs_pipeline_page_commands_all_run_and_write_their_output(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.version  # whose session the commands take
    for fleet in FLEETS:
        journal = tmp_path / fleet.lstrip("/")
        run(["pipeline", "generate", *(word for it in FEWER.items() for word in it), "--to", str(journal)])
        for path in journal.rglob("*.jsonl"):
            os.utime(path, (0, 0))  # nobody writes it any more
    written: dict[str, Path] = {}
    for words in lines():
        typed = here(words, tmp_path)
        if "--to" in typed:
            written[" ".join(words)] = Path(typed[typed.index("--to") + 1])
        if "generate" in typed:
            shutil.rmtree(tmp_path / "journal", ignore_errors=True)  # one that was invented before
        if "--watch" in typed:
            shutil.rmtree(tmp_path / "LAKE")  # or there would be nothing new
            watched(typed)
        else:
            run(typed)
    assert [line for line, folder in written.items() if not any(folder.iterdir())] == []
    assert (tmp_path / "advice" / "report.html").stat().st_size > 1000
