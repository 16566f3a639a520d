"""What the documents say is true: what they name is there, and commands they show on files run."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from rota.cli import main
from rota.model import Reason

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")]


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    return [
        line[2:].partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.startswith("$ ")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    paths = re.findall(r"`((?:docs|tests|operator|bench|charts)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_in_the_pages_exist(page: Path) -> None:
    offered = subprocess.run(["make", "-qp"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    named = set(re.findall(r"(?:`|\$ |^    )make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert [target for target in named if f"\n{target}:" not in offered] == []


SHOWN = [(page.name, command) for page in PAGES for command in commands(page) if command.startswith("rota ")]


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{page}: {command}" for page, command in SHOWN])
def test_rota_commands_in_the_pages_run(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert CliRunner().invoke(main, shlex.split(command)[1:]).exit_code == 0, f"{page}: {command}"


def test_every_reason_stands_once_in_the_page_of_conditions_and_nothing_else_does() -> None:
    page = (ROOT / "docs" / "conditions.md").read_text()
    assert sorted(re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)) == sorted(Reason)
