"""Wheel and sdist: built twice, compared with the sources, and installed into empty environments."""

import json
import zipfile
from pathlib import Path

from release.work import CheckFailedError, Work, sha256

# The module that each extra enables; the pipeline's is not imported, see `install_extras`.
EXTRAS = {"operator": "rota.kube.operator", "sidecar": "rota.sidecar.main", "pipeline": ""}


def build(work: Work) -> str:
    """Build wheel and sdist from both copies; the files must be equal."""
    digests = []
    for number, copy in enumerate(work.copies):
        folder = work.into.parent / f"built-{number}"
        work.uv("build", "--quiet", "--out-dir", folder, copy)
        digests.append({path.name: sha256(path) for path in folder.iterdir() if path.suffix in {".whl", ".gz"}})
    first, second = digests
    if len(first) != 2:
        raise CheckFailedError(f"uv made {', '.join(first) or 'nothing'}, and not a wheel and an sdist")
    differ = [name for name in first if first[name] != second.get(name)]
    if differ:
        raise CheckFailedError(f"two builds of one commit differ: {', '.join(differ)}")
    for name in first:
        (work.into.parent / "built-0" / name).rename(work.into / name)
    return f"{_check_contents(work)}; built twice, the same bytes"


def install(work: Work) -> str:
    """Install the wheel alone, and run its programs."""
    python = _create_venv(work, "")
    bin_folder = python.parent
    version_line = work.run(bin_folder / "rota", "--version", cwd=work.into).strip()
    if not version_line.endswith(f" {work.version}"):
        raise CheckFailedError(f"`rota --version` of the installed wheel says {version_line}")
    for program in ("rota", "kubectl-rota"):
        if "Usage:" not in work.run(bin_folder / program, "--help", cwd=work.into):
            raise CheckFailedError(f"`{program} --help` of the installed wheel shows no usage")
    packages = json.loads(work.uv("pip", "list", "--format=json", "--python", python))
    return f"{len(packages)} packages with its own, nothing is missing; `rota --help` runs"


def install_extras(work: Work) -> str:
    """Install every extra, and import its module; the pipeline's is only resolved, because of its size."""
    summaries = []
    for extra, module in EXTRAS.items():
        if module:
            python = _create_venv(work, extra)
            work.run(python, "-c", f"import {module}", cwd=work.into)
            summaries.append(f"{extra} installs and imports {module}")
        else:
            requirements = work.into.parent / f"{extra}.in"
            requirements.write_text(_requirement(work, extra))
            plan = work.uv("pip", "compile", "--quiet", "--no-header", "--no-annotate", requirements)
            summaries.append(f"{extra} resolves to {len(plan.splitlines())} packages")
    return ", ".join(summaries)


def wheel(work: Work) -> Path:
    """Return the built wheel."""
    wheels = [*work.into.glob("*.whl")]
    if not wheels:
        raise CheckFailedError("there is no wheel to look at")
    return wheels[0]


def _create_venv(work: Work, extra: str) -> Path:
    """Create an environment with the wheel and its dependencies, and return its Python."""
    folder = work.into.parent / f"installed-{extra}"
    work.uv("venv", "--quiet", folder)
    python = folder / "bin" / "python"
    work.uv("pip", "install", "--quiet", "--python", python, _requirement(work, extra))
    work.uv("pip", "check", "--quiet", "--python", python)
    return python


def _requirement(work: Work, extra: str) -> str:
    return f"rota-operator{f'[{extra}]' if extra else ''} @ {wheel(work).as_uri()}"


def _check_contents(work: Work) -> str:
    """Check that the wheel has all sources and no other files."""
    path = wheel(work)
    inside = {name for name in zipfile.ZipFile(path).namelist() if not name.endswith("/")}
    files = {name for name in inside if ".dist-info/" not in name}
    operator = work.source / "operator"
    sources = {str(path.relative_to(operator)) for path in operator.rglob("*") if path.is_file()}
    errors = [f"{path.name} lacks {name}" for name in sorted(sources - files)]
    errors += [f"{path.name} has {name}, which is no source" for name in sorted(files - sources)]
    if not any(name.endswith("/licenses/LICENSE") for name in inside):
        errors.append(f"{path.name} lacks its licence")
    if errors:
        raise CheckFailedError("; ".join(errors))
    return f"{path.name} and its sdist, {len(files)} files"
