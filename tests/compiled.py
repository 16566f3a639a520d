"""The package with the sidecar's compiled modules, as in the sidecar's image: `python -m compiled` prints its folder.

Programs that have the folder in PYTHONPATH import the compiled modules.
"""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from ground import cache, packages
from ground.cluster import PROJECT
from ground.report import progress

COMPILED_MODULES = (PROJECT / "docker/compiled_modules.txt").read_text().split()
_SCRIPT = PROJECT / "docker/compile_sidecar.py"
_INPUTS = ("pyproject.toml", "docker", "operator")
_MAX_ENTRIES = 10  # packages of this many versions of the sources stay in the cache


def compiled_package() -> Path:
    """Return a folder with the package `rota` and its compiled modules, made once for each version of the sources."""
    recipe = "\n".join([sys.version, version("mypy"), *cache.digests(PROJECT, _INPUTS)])
    folder = cache.entry("compiled", recipe, _build)
    cache.remove_least_recent(folder, _MAX_ENTRIES)
    return folder


def _build(into: Path) -> None:
    if not shutil.which("gcc"):
        packages.debian("gcc", "libc6-dev")
    shutil.copytree(PROJECT / "operator/rota", into / "rota", ignore=shutil.ignore_patterns("__pycache__"))
    with progress("compiling the sidecar's modules"):
        step: list[str | Path] = [sys.executable, _SCRIPT, into, into]
        cache.run(step, "Compiling the sidecar's modules", env={"PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    print(compiled_package())
