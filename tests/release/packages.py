"""Wheel and sdist: built twice, looked into, installed where nothing else is."""

import json
import zipfile
from pathlib import Path

from release.work import Failed, Work, sha256

EXTRAS = {
    "operator": "rota.kube.operator",
    "sidecar": "rota.sidecar.main",
    "pipeline": "",
}  # what each is there to import


def build(work: Work) -> str:
    """Build both from both copies."""
    made = []
    for number, copy in enumerate(work.copies):
        folder = work.into.parent / f"built-{number}"
        work.uv("build", "--quiet", "--out-dir", folder, copy)
        made.append({path.name: sha256(path) for path in folder.iterdir() if path.suffix in {".whl", ".gz"}})
    one, another = made
    if len(one) != 2:
        raise Failed(f"uv made {', '.join(one) or 'nothing'}, and not a wheel and an sdist")
    differ = [name for name in one if one[name] != another.get(name)]
    if differ:
        raise Failed(f"two builds of one commit differ: {', '.join(differ)}")
    for name in one:
        (work.into.parent / "built-0" / name).rename(work.into / name)
    return f"{_looked_into(work)}; built twice, the same bytes"


def installs(work: Work) -> str:
    """Install the wheel alone, and run what it brings."""
    python = _venv(work, "")
    bin_folder = python.parent
    told = work.run(bin_folder / "rota", "--version", cwd=work.into).strip()
    if not told.endswith(f" {work.version}"):
        raise Failed(f"`rota --version` of the installed wheel says {told}")
    for program in ("rota", "kubectl-rota"):
        if "Usage:" not in work.run(bin_folder / program, "--help", cwd=work.into):
            raise Failed(f"`{program} --help` of the installed wheel shows no usage")
    found = json.loads(work.uv("pip", "list", "--format=json", "--python", python))
    return f"{len(found)} packages with its own, nothing is missing; `rota --help` runs"


def extras(work: Work) -> str:
    """Install every extra, and import what it is for; the pipeline's is resolved only, for its size."""
    told = []
    for extra, module in EXTRAS.items():
        if module:
            python = _venv(work, extra)
            work.run(python, "-c", f"import {module}", cwd=work.into)
            told.append(f"{extra} installs and imports {module}")
        else:
            asked = work.into.parent / f"{extra}.in"
            asked.write_text(_wanted(work, extra))
            plan = work.uv("pip", "compile", "--quiet", "--no-header", "--no-annotate", asked)
            told.append(f"{extra} resolves to {len(plan.splitlines())} packages")
    return ", ".join(told)


def wheel(work: Work) -> Path:
    """Return the wheel that was built."""
    found = [*work.into.glob("*.whl")]
    if not found:
        raise Failed("there is no wheel to look at")
    return found[0]


def _venv(work: Work, extra: str) -> Path:
    """Make an environment with the wheel and what it asks for, and return its Python."""
    folder = work.into.parent / f"installed-{extra}"
    work.uv("venv", "--quiet", folder)
    python = folder / "bin" / "python"
    work.uv("pip", "install", "--quiet", "--python", python, _wanted(work, extra))
    work.uv("pip", "check", "--quiet", "--python", python)
    return python


def _wanted(work: Work, extra: str) -> str:
    return f"rota-operator{f'[{extra}]' if extra else ''} @ {wheel(work).as_uri()}"


def _looked_into(work: Work) -> str:
    """Compare the wheel with the sources: all of them, and nothing else."""
    path = wheel(work)
    inside = {name for name in zipfile.ZipFile(path).namelist() if not name.endswith("/")}
    ours = {name for name in inside if ".dist-info/" not in name}
    operator = work.source / "operator"
    sources = {str(it.relative_to(operator)) for it in operator.rglob("*") if it.is_file()}
    wrong = [f"{path.name} lacks {name}" for name in sorted(sources - ours)]
    wrong += [f"{path.name} has {name}, which is no source" for name in sorted(ours - sources)]
    wrong += [f"{path.name} lacks its licence"] * (not any(name.endswith("/licenses/LICENSE") for name in inside))
    if wrong:
        raise Failed("; ".join(wrong))
    return f"{path.name} and its sdist, {len(ours)} files"
