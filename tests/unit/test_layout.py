"""The shape of the repository, as far as a machine can hold it."""

import operator
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROTA = ROOT / "operator" / "rota"


def test_layout_source_root_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.add(1, 2) == 3


def test_layout_source_files_have_at_most_400_lines() -> None:
    files = [*ROTA.rglob("*.py"), *(ROOT / "tests" / "ground").rglob("*.py")]
    assert [str(path) for path in files if len(path.read_text().splitlines()) > 400] == []


def test_build_make_offers_at_most_sixteen_targets_and_help_by_default() -> None:
    offered = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    targets = re.findall(r"make ([a-z-]+)", offered)
    assert {"help", "demo", "test", "check", "presubmit", "bench"} <= set(targets)
    assert len(targets) <= 16


def test_build_dependencies_each_have_a_reason_comment() -> None:
    for name in ("pyproject.toml", "tests/pyproject.toml"):
        text = (ROOT / name).read_text()
        project = tomllib.loads(text)
        wanted = [*project["project"].get("dependencies", []), *_grouped(project)]
        unexplained = [it for it in wanted if not re.search(rf'"{re.escape(it)}",\s*# \w', text)]
        assert unexplained == ["rota-ground"] * (name == "pyproject.toml")


def _grouped(project: dict[str, dict[str, dict[str, list[object]]]]) -> list[str]:
    groups = [
        *project["project"].get("optional-dependencies", {}).values(),
        *project.get("dependency-groups", {}).values(),
    ]
    return [it for group in groups for it in group if isinstance(it, str)]


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("planner.py", "import time", "The core decides without I/O, clock, chance or logs"),
        ("model.py", "import rota.planner", "Rooms stand on the rooms below them and on nothing else"),
        ("brokers/__init__.py", "import pyspark", "Only the pipeline knows Spark"),
        ("metrics.py", "import kopf", "Only the kube room knows kopf and Kubernetes"),
        ("documents.py", "import numpy", "The sidecar stays small: no kopf, Kubernetes, numpy or Spark"),
    ],
)
def test_layout_import_contracts_detect_violations(tmp_path: Path, module: str, line: str, broken: str) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for path in ROTA.rglob("*.py"):
        copy = tmp_path / "rota" / path.relative_to(ROTA)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    with (tmp_path / "rota" / module).open("a") as file:
        file.write(f"{line}\n")
    lint = Path(sys.executable).with_name("lint-imports")
    ran = subprocess.run(
        [lint, "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert ran.returncode == 1
    assert f"{broken}" in " ".join(ran.stdout.partition("Broken contracts")[2].split())


def test_image_is_built_with_the_uv_version_of_the_environment() -> None:
    pinned = re.search(r'"uv==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert f"astral-sh/uv:{pinned[1]}\n" in (ROOT / "Dockerfile").read_text()
