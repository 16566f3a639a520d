"""The images that are published: how big they are, what is in them, and that they run as the chart runs them."""

import gzip
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import pytest

from ground.node import RealNode
from ground.node.build import CREATED, REVISION, build_image

pytestmark = pytest.mark.node

MEGABYTES = {"operator": 170, "sidecar": 120}  # at most, base included, as a registry keeps them
NEVER = {"pyspark", "pandas", "pyarrow", "pip", "setuptools", "uv", "uv_build"}
BUILDERS = {"cc", "gcc", "c++", "g++", "clang", "ld", "as", "make", "cargo", "rustc", "go", "uv"}
SHELLS = ("/usr/bin/bash", "/usr/bin/dash")  # whose name /bin/sh is
SAFE = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
ALONE = """
import importlib, json, os, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
read_only = bool(os.statvfs("/").f_flag & os.ST_RDONLY)
print(json.dumps({"user": os.getuid(), "read only": read_only, "shell": os.access("/bin/sh", os.X_OK)}))
"""


@dataclass(frozen=True)
class Layer:
    """One layer of an image: what lies in it, and its compressed size."""

    files: frozenset[str]
    megabytes: float

    @classmethod
    def of(cls, content: bytes) -> "Layer":
        with tarfile.open(fileobj=io.BytesIO(content)) as layer:
            files = frozenset(f"/{name.removeprefix('./')}" for name in layer.getnames())
        return cls(files, len(gzip.compress(content, compresslevel=6)) / 1e6)


@dataclass(frozen=True)
class Image:
    """An image as it was built: the base, and what we put on it."""

    name: str
    settings: dict[str, Any]
    base: Layer
    ours: list[Layer]

    @property
    def files(self) -> frozenset[str]:
        """What we put there."""
        return frozenset().union(*(layer.files for layer in self.ours))

    @property
    def modules(self) -> set[str]:
        """What we put there to import."""
        installed = [file.partition("/site-packages/")[2] for file in self.files]
        return {PurePath(file).parts[0] for file in installed if file}


@pytest.fixture(scope="module")
def images(real_node: RealNode) -> dict[str, Image]:
    known: dict[str, Layer] = {}  # both stand on one base
    return {target: read(real_node.build(target), target, known) for target in MEGABYTES}


@pytest.fixture(params=MEGABYTES)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(images: dict[str, Image], target: str) -> Image:
    return images[target]


def read(name: str, target: str, known: dict[str, Layer]) -> Image:
    with tarfile.open(build_image(target, name)) as archive:

        def content(of: str) -> bytes:
            file = archive.extractfile(of)
            assert file
            return file.read()

        (manifest,) = json.loads(content("manifest.json"))
        for layer in manifest["Layers"]:
            known[layer] = known.get(layer) or Layer.of(content(layer))
        settings = json.loads(content(manifest["Config"]))["config"]
    base, *ours = (known[layer] for layer in manifest["Layers"])
    return Image(name, settings, base, ours)


def test_image_size_is_within_its_limit(image: Image, target: str) -> None:
    sizes = [layer.megabytes for layer in (image.base, *image.ours)]
    print(f"{target}: {sum(sizes):.1f} MB, by layer {', '.join(f'{size:.1f}' for size in sizes)}")
    assert sum(sizes) <= MEGABYTES[target]


def test_image_entrypoint_is_ours_and_runs_as_an_unprivileged_user(image: Image) -> None:
    assert image.settings["User"] == "65532:65532"
    assert image.settings["Entrypoint"][0] in image.files


def test_image_names_its_commit_and_when_it_was_built(image: Image) -> None:
    labels = image.settings["Labels"]
    assert labels["org.opencontainers.image.revision"] == REVISION
    assert labels["org.opencontainers.image.created"] == CREATED


def test_image_holds_no_build_tools_tests_or_unneeded_packages(image: Image) -> None:
    assert {file for file in image.files if not file.startswith("/opt/rota/")} <= {"/opt", "/opt/rota"}
    assert not {PurePath(file).name for file in image.files | image.base.files if "/bin/" in file} & BUILDERS
    assert not [file for file in image.files if "/tests/" in file]
    assert not image.modules & NEVER
    assert {"rota", "aiohttp", "msgspec"} <= image.modules


def test_image_of_the_operator_alone_has_kopf_kubernetes_and_numpy(images: dict[str, Image]) -> None:
    packages = {"kopf", "kubernetes", "numpy"}
    assert {*packages, "opentelemetry"} <= images["operator"].modules
    assert "opentelemetry" in images["sidecar"].modules
    assert not packages & images["sidecar"].modules


def test_image_runs_on_a_read_only_root_without_a_shell(real_node: RealNode, images: dict[str, Image]) -> None:
    made = {
        "help": {"image": images["operator"].name, "args": ["--help"]},
        "operator": alone(images["operator"], "numpy", "kopf", "rota.kube.operator", "rota.kube.telemetry.span_export"),
        "sidecar": alone(images["sidecar"], "aiohttp", "lz4.frame", "zstandard", "rota.sidecar.main"),
    }
    hidden = [{"name": "nothing", "mountPath": path} for path in SHELLS]
    rest = {"securityContext": SAFE, "volumeMounts": hidden}
    spec = {
        "restartPolicy": "Never",
        "containers": [{"name": name, **container, **rest} for name, container in made.items()],
        "volumes": [{"name": "nothing", "hostPath": {"path": "/dev/null"}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "images"}, "spec": spec}
    real_node.kubectl("create", "-f-", feed=json.dumps(pod))
    real_node.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/images", "--timeout=180s")
    assert "Usage: rota operator" in real_node.kubectl("logs", "images", "-c", "help")
    for name in ("operator", "sidecar"):
        told = json.loads(real_node.kubectl("logs", "images", "-c", name))
        assert told == {"user": 65532, "read only": True, "shell": False}


def alone(image: Image, *modules: str) -> dict[str, Any]:
    return {"image": image.name, "command": ["python", "-c", ALONE, *modules]}
