"""Tests the layout of the repository: sizes, names, comments and imports."""

import ast
import operator
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROTA = ROOT / "operator" / "rota"


def test_layout_source_root_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.add(1, 2) == 3


def test_layout_source_files_have_at_most_400_lines() -> None:
    files = [*ROTA.rglob("*.py"), *(ROOT / "tests" / "ground").rglob("*.py")]
    assert [str(path) for path in files if len(path.read_text().splitlines()) > 400] == []


def test_layout_folders_have_at_most_ten_modules() -> None:
    modules = Counter(path.parent for path in ROTA.rglob("*.py") if path.name != "__init__.py")
    allowed = {ROTA, ROTA / "strategies"}
    assert {folder: count for folder, count in modules.items() if count > 10 and folder not in allowed} == {}


def test_layout_packages_have_docstrings() -> None:
    packages = [path for path in ROTA.rglob("__init__.py") if not path.read_text().startswith('"""')]
    assert packages == []


@pytest.mark.parametrize(("page", "number"), [("AGENTS.md", 15), ("docs/architecture.md", 8)])
def test_layout_map_names_functions_that_exist(page: str, number: int) -> None:
    entries = re.findall(r"`([a-z_/]+\.py):([A-Za-z_.]+)`", (ROOT / page).read_text())
    roots = (ROTA, ROTA / "kube")
    assert len(entries) >= number
    for file, name in entries:
        path = _file_of_map(file, roots)
        assert path, f"{page} names {file}, which does not exist"
        assert name in _definitions(path), f"{page} names {name}, which {file} does not define"


@pytest.mark.parametrize(("heading", "number"), [("Where to open", 100), ("Limits, pauses and thresholds", 250)])
def test_layout_map_names_files_that_exist(heading: str, number: int) -> None:
    section = _section_of_map(heading)
    files = re.findall(r"`(Dockerfile|[\w./]+\.(?:py|js|css|yaml|json|md|txt|tpl|sh))(?::[\w.]+)?`", section)
    assert len(files) >= number
    assert [file for file in files if "/" in file and not _file_of_map(file)] == []


def test_layout_map_of_limits_names_existing_constants() -> None:
    """A name without a file is in the file before it, in the same row."""
    rows = [
        row.split(" | ")[1] for row in _section_of_map("Limits, pauses and thresholds").splitlines() if " | " in row
    ]
    checked = 0
    for row in rows:
        path: Path | None = None
        for term in re.findall(r"`([^`]+)`", row):
            file, _, name = term.partition(":")
            if "/" in file or _file_of_map(file):
                path = _file_of_map(file)
                assert path, f"{file} does not exist"
            else:
                name = term
            if not name:
                continue
            assert path, f"{term} stands before the name of its file"
            exists = name in _definitions(path) if path.suffix == ".py" else name in path.read_text()
            assert exists, f"{path.name} does not define {name}"
            checked += 1
    assert checked >= 250


def _section_of_map(heading: str) -> str:
    text = (ROOT / "AGENTS.md").read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def _file_of_map(file: str, roots: tuple[Path, ...] = (ROTA, ROOT)) -> Path | None:
    return next((root / file for root in roots if (root / file).is_file()), None)


def _definitions(path: Path) -> set[str]:
    """Return the names of a module's functions, classes, methods and constants."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [
                definition.name
                for definition in node.body
                if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            names.update(f"{node.name}.{method}" for method in methods)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


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
        dependencies = [*project["project"].get("dependencies", []), *_optional_dependencies(project)]
        unexplained = [
            dependency for dependency in dependencies if not re.search(rf'"{re.escape(dependency)}",\s*# \w', text)
        ]
        assert unexplained == ["rota-ground"] * (name == "pyproject.toml")


def _optional_dependencies(project: dict[str, dict[str, dict[str, list[object]]]]) -> list[str]:
    groups = [
        *project["project"].get("optional-dependencies", {}).values(),
        *project.get("dependency-groups", {}).values(),
    ]
    return [dependency for group in groups for dependency in group if isinstance(dependency, str)]


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("planner.py", "import time", "The core decides without I/O, clock, chance or logs"),
        ("model.py", "import rota.planner", "Packages import only packages below them"),
        ("brokers/port.py", "import pyspark", "Only the pipeline knows Spark"),
        ("metrics.py", "import kopf", "Only kube knows kopf and Kubernetes"),
        ("documents.py", "import numpy", "The sidecar stays small: no kopf, Kubernetes, numpy or Spark"),
        ("kube/state/group.py", "import rota.kube.members.topology", "kube: from the API server's client up"),
        ("sidecar/status/problems.py", "import rota.sidecar.delivery.push", "sidecar: from pure machines up"),
        ("pipeline/ingest/facts.py", "import rota.pipeline.history.audit", "pipeline: from the journal to the report"),
        ("pipeline/ingest/facts.py", "import deltalake", "Only the lake knows the format of its tables"),
        (
            "brokers/rocketmq/wire/codes.py",
            "import rota.brokers.rocketmq.transport.connection",
            "RocketMQ: the wire format",
        ),
        (
            "cli/console/output.py",
            "import rota.cli.client.leader_connection",
            "cli: commands on the console and the client",
        ),
        ("object_store/folder.py", "import rota.object_store.bucket", "Object store: a folder needs no package"),
        ("kube/options.py", "import obstore", "Only object_store.bucket knows obstore"),
    ],
)
def test_layout_import_contracts_detect_violations(tmp_path: Path, module: str, line: str, contract: str) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for path in ROTA.rglob("*.py"):
        copy = tmp_path / "rota" / path.relative_to(ROTA)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    with (tmp_path / "rota" / module).open("a") as file:
        file.write(f"{line}\n")
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [lint, "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 1
    assert f"{contract}" in " ".join(result.stdout.partition("Broken contracts")[2].split())


def test_image_is_built_with_the_uv_version_of_the_environment() -> None:
    pinned = re.search(r'"uv==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert f"astral-sh/uv:{pinned[1]}\n" in (ROOT / "Dockerfile").read_text()


def test_layout_class_names_are_used_once() -> None:
    modules: dict[str, list[str]] = {}
    for path in ROTA.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(path.name)
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
