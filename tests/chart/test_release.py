"""`make release-check` as a whole, without its longest checks: wheel, chart, bills of materials; and its failures."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from release.__main__ import CHECKS

ROOT = Path(__file__).parents[2]
SLOW = ("extras", "images")


def release(into: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the release check without the checks that take minutes."""
    without = [f"--without={name}" for name in SLOW]
    argv = [sys.executable, "-m", "release", f"--into={into}", *without, *arguments]
    return subprocess.run(argv, cwd=ROOT / "tests", capture_output=True, text=True, check=False)


def results_of(process: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    """Return the printed result of each check."""
    lines = process.stdout.partition("\n\n")[0].splitlines()[1:]
    return {line[:12].strip(): line[12:22].strip() for line in lines}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> "tuple[Path, subprocess.CompletedProcess[str]]":
    into = tmp_path_factory.mktemp("release") / "dist"
    return into, release(into)


@pytest.mark.slow("make release-check, without its longest checks")
def test_release_check_builds_the_artifacts_and_passes(
    made: "tuple[Path, subprocess.CompletedProcess[str]]",
) -> None:
    into, process = made
    assert process.returncode == 0, process.stdout + process.stderr
    results = results_of(process)
    assert {name for name, sign in results.items() if sign == "LEFT OUT"} == set(SLOW)
    assert {sign for name, sign in results.items() if name not in SLOW} == {"ok"}
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=into, check=False).returncode == 0
    for name in (
        "kubectl-rota-0.1.0.tar.gz",
        "kubectl-rota.yaml",
        "rota-0.1.0.tgz",
        "rota_operator-0.1.0-py3-none-any.whl",
        "rota_operator-0.1.0.tar.gz",
    ):
        assert f"  {name} " in process.stdout
    bill = json.loads((into / "rota-0.1.0-sidecar.cdx.json").read_text())
    names = {component["name"] for component in bill["components"]}
    assert "aiohttp" in names
    assert "kopf" not in names
    assert "aiohttp" in (into / "licences.txt").read_text()


def test_release_check_leaves_a_folder_with_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").touch()
    process = release(tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(f"release: {tmp_path} holds letters, which no release made; ")
    assert (tmp_path / "letters").exists()


class Checkout:
    """A copy of the sources in a new repository, with a previous release."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "rota"
        self.into = folder / "dist"
        listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").strip("\0").split("\0")
        for name in listed:
            if os.path.lexists(ROOT / name):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name, follow_symlinks=False)

    def begin(self) -> None:
        git(self.folder, "init", "--quiet")
        self.commit()
        git(self.folder, "tag", "v0.0.1")
        self.commit()

    def commit(self) -> None:
        git(self.folder, "add", "--all")
        git(self.folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-mmore")

    def change(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        (self.folder / name).write_text(text.replace(old, new, 1))
        self.commit()

    def check(self) -> "subprocess.CompletedProcess[str]":
        """Run only the checks of versions and compatibility, which are quick."""
        without = [f"--without={name}" for name in CHECKS if name not in {"versions", "compatible"}]
        argv = [sys.executable, "-m", "release", f"--into={self.into}", *without]
        return subprocess.run(argv, cwd=self.folder / "tests", capture_output=True, text=True, check=False)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.slow("make release-check of an incompatible change")
def test_release_check_fails_on_an_incompatible_change_unless_it_is_declared(checkout: Checkout) -> None:
    checkout.begin()
    compatible = checkout.check()
    assert (compatible.returncode, results_of(compatible)["compatible"]) == (0, "ok"), compatible.stdout
    assert "what works with v0.0.1 works with this" in compatible.stdout
    assert "Rota 0.1.0 of commit " in compatible.stdout
    checkout.change("crds/rota.dev_rebalancepolicies.yaml", f"{' ' * 20}- Sticky\n", "")
    incompatible = checkout.check()
    assert (incompatible.returncode, results_of(incompatible)["compatible"]) == (1, "FAILED")
    place = "RebalancePolicy/v1alpha1 spec.strategy"
    assert f"not compatible with v0.0.1: {place}: does not take Sticky any more. If" in incompatible.stdout
    assert not checkout.into.exists(), "neither the broken one nor the one before"
    checkout.change("CHANGELOG.md", "## Unreleased\n", f"## Unreleased\n\n### Breaking\n\n- `{place}`: no Sticky.\n")
    declared = checkout.check()
    assert (declared.returncode, results_of(declared)["compatible"]) == (0, "ok")
    assert "but for what CHANGELOG.md calls Breaking (1)" in declared.stdout


@pytest.mark.slow("make release-check of a forgotten version")
def test_release_check_fails_on_a_forgotten_version(checkout: Checkout) -> None:
    checkout.begin()
    checkout.change("charts/rota/Chart.yaml", "version: 0.1.0", "version: 0.2.0")
    git(checkout.folder, "tag", "v0.2.0")
    process = checkout.check()
    assert (process.returncode, process.stderr) == (1, "This cannot be released.\n")
    errors = "version in charts/rota/Chart.yaml is 0.2.0; the commit is tagged v0.2.0; CHANGELOG.md calls Unreleased"
    assert f"pyproject.toml says 0.1.0, but {errors} what is tagged v0.2.0" in process.stdout


def test_release_check_fails_when_the_previous_tag_was_not_fetched(checkout: Checkout) -> None:
    (checkout.folder / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.0.1 (2026-01-01)\n")
    git(checkout.folder, "init", "--quiet")
    checkout.commit()
    process = checkout.check()
    assert process.returncode == 1
    assert "there is no tag v0.0.1 to compare with; fetch it with `git fetch --tags`" in process.stdout


def test_release_check_fails_outside_a_git_repository(checkout: Checkout) -> None:
    process = checkout.check()
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(f"release: {checkout.folder} is no checkout of Git with a commit; ")
