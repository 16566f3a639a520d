"""tests/README.md, held against the tests that there are."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "README.md").read_text()
FOLDERS, FEATURES, SLOW = (PAGE.split("\n## ")[number] for number in range(3))


def test_every_folder_with_tests_has_a_row() -> None:
    folders = {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}
    rows = re.findall(r"^\| (.+?) \|", FOLDERS, re.MULTILINE)
    assert folders <= {name for row in rows for name in re.findall(r"`([a-z0-9/]+)`", row)}


def test_every_file_that_a_feature_names_exists() -> None:
    files = re.findall(r"`([a-z0-9_/]+\.py)`", FEATURES)
    assert files
    assert [name for name in files if not (TESTS / name).exists()] == []


def test_what_only_the_slow_tests_prove_is_listed() -> None:
    marked = {
        f"- {proof} (`{path.relative_to(TESTS)}`)"
        for path in TESTS.rglob("test_*.py")
        for proof in re.findall(r'mark\.slow\(\s*"([^"]+)"', path.read_text())
    }
    assert marked
    assert {*re.findall(r"^- .+$", SLOW, re.MULTILINE)} == marked


@pytest.mark.parametrize("target", ["test", "test-all", "unit"])
def test_the_commands_of_the_page_are_targets_of_make(target: str) -> None:
    assert f"`make {target}`" in PAGE
    assert re.search(rf"^{target}:", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)
