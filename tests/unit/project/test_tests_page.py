"""Tests that tests/README.md lists the existing folders, files and slow tests."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
PAGE = (TESTS / "README.md").read_text()
FOLDERS, FEATURES, SLOW = (PAGE.split("\n## ")[number] for number in range(3))
FEATURE_WORDS = (TESTS / "features.txt").read_text().split()


def test_docs_tests_readme_has_a_row_per_test_folder() -> None:
    tested = {path.relative_to(TESTS).parts[:-1] for path in TESTS.rglob("test_*.py")}
    folders = {"/".join(parts[:2]) if parts[0] == "ground" else parts[0] for parts in tested}
    rows = re.findall(r"^\| (.+?) \|", FOLDERS, re.MULTILINE)
    assert folders <= {name for row in rows for name in re.findall(r"`([a-z0-9/]+)`", row)}


def test_docs_tests_readme_names_only_existing_files() -> None:
    files = re.findall(r"`([a-z0-9_/]+\.py)`", FEATURES)
    assert files
    assert [name for name in files if not (TESTS / name).exists()] == []


def test_docs_tests_readme_lists_every_slow_test() -> None:
    marked = {
        f"- {proof} (`{path.relative_to(TESTS)}`)"
        for path in TESTS.rglob("test_*.py")
        for proof in re.findall(r'mark\.slow\(\s*"([^"]+)"', path.read_text())
    }
    assert marked
    assert {*re.findall(r"^- .+$", SLOW, re.MULTILINE)} == marked


@pytest.mark.parametrize("target", ["test", "test-all", "unit"])
def test_docs_tests_readme_commands_are_make_targets(target: str) -> None:
    assert f"`make {target}`" in PAGE
    assert re.search(rf"^{target}:", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)


def test_docs_test_names_begin_with_a_feature() -> None:
    names = {
        name: path
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)
    }
    without_feature = {name: path for name, path in names.items() if not _begins_with_a_feature(name)}
    assert without_feature == {}, "start each name with a word of features.txt"


def _begins_with_a_feature(name: str) -> bool:
    return any(name == feature or name.startswith(f"{feature}_") for feature in FEATURE_WORDS)
