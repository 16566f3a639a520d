"""The published images: their size and contents, and that they run with the chart's security context."""

import gzip
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import pytest

from compiled import COMPILED_MODULES
from ground.node import RealNode
from ground.node.build import CREATED, REVISION, build_image

pytestmark = pytest.mark.node

MEGABYTES = {"operator": 170, "sidecar": 120}  # limits, base image included, compressed as in a registry
UNNEEDED_PACKAGES = {"pyspark", "pandas", "pyarrow", "pip", "setuptools", "uv", "uv_build"}
BUILDERS = {"cc", "gcc", "c++", "g++", "clang", "ld", "as", "make", "cargo", "rustc", "go", "uv"}
SHELLS = ("/usr/bin/bash", "/usr/bin/dash")  # the targets of /bin/sh
SECURITY_CONTEXT = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
IMPORT_AND_PRINT_FACTS = """
import importlib, json, os, sys
modules = [importlib.import_module(module) for module in sys.argv[1:]]
compiled = sorted(module.__name__ for module in modules if module.__file__.endswith(".so"))
read_only = bool(os.statvfs("/").f_flag & os.ST_RDONLY)
facts = {"user": os.getuid(), "read only": read_only, "shell": os.access("/bin/sh", os.X_OK), "compiled": compiled}
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Layer:
    """One layer of an image: its files, and its compressed size."""

    files: frozenset[str]
    megabytes: float

    @classmethod
    def of(cls, content: bytes) -> "Layer":
        with tarfile.open(fileobj=io.BytesIO(content)) as layer:
            files = frozenset(f"/{name.removeprefix('./')}" for name in layer.getnames())
        return cls(files, len(gzip.compress(content, compresslevel=6)) / 1e6)


@dataclass(frozen=True)
class Image:
    """An image: its base layer, and the layers of its own."""

    name: str
    settings: dict[str, Any]
    base: Layer
    own_layers: list[Layer]

    @property
    def files(self) -> frozenset[str]:
        """The files of its own layers."""
        return frozenset().union(*(layer.files for layer in self.own_layers))

    @property
    def modules(self) -> set[str]:
        """The installed Python modules of its own layers."""
        installed = [file.partition("/site-packages/")[2] for file in self.files]
        return {PurePath(file).parts[0] for file in installed if file}


@pytest.fixture(scope="module")
def images(real_node: RealNode) -> dict[str, Image]:
    layers: dict[str, Layer] = {}  # both images share the base layer
    return {target: read_image(real_node.build(target), target, layers) for target in MEGABYTES}


@pytest.fixture(params=MEGABYTES)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(images: dict[str, Image], target: str) -> Image:
    return images[target]


def read_image(name: str, target: str, layers: dict[str, Layer]) -> Image:
    with tarfile.open(build_image(target, name)) as archive:

        def content(path: str) -> bytes:
            file = archive.extractfile(path)
            assert file
            return file.read()

        (manifest,) = json.loads(content("manifest.json"))
        for layer in manifest["Layers"]:
            layers[layer] = layers.get(layer) or Layer.of(content(layer))
        settings = json.loads(content(manifest["Config"]))["config"]
    base, *own_layers = (layers[layer] for layer in manifest["Layers"])
    return Image(name, settings, base, own_layers)


def test_image_size_is_within_its_limit(image: Image, target: str) -> None:
    sizes = [layer.megabytes for layer in (image.base, *image.own_layers)]
    print(f"{target}: {sum(sizes):.1f} MB, by layer {', '.join(f'{size:.1f}' for size in sizes)}")
    assert sum(sizes) <= MEGABYTES[target]


def test_image_entrypoint_is_a_file_of_its_own_layers_and_runs_as_an_unprivileged_user(image: Image) -> None:
    assert image.settings["User"] == "65532:65532"
    assert image.settings["Entrypoint"][0] in image.files


def test_image_labels_contain_its_commit_and_build_time(image: Image) -> None:
    labels = image.settings["Labels"]
    assert labels["org.opencontainers.image.revision"] == REVISION
    assert labels["org.opencontainers.image.created"] == CREATED


def test_image_holds_no_build_tools_tests_or_unneeded_packages(image: Image) -> None:
    assert {file for file in image.files if not file.startswith("/opt/rota/")} <= {"/opt", "/opt/rota"}
    assert not {PurePath(file).name for file in image.files | image.base.files if "/bin/" in file} & BUILDERS
    assert not [file for file in image.files if "/tests/" in file]
    assert not image.modules & UNNEEDED_PACKAGES
    assert {"rota", "aiohttp", "msgspec"} <= image.modules


def test_image_of_the_operator_alone_has_kopf_kubernetes_and_numpy(images: dict[str, Image]) -> None:
    packages = {"kopf", "kubernetes", "numpy"}
    assert {*packages, "opentelemetry"} <= images["operator"].modules
    assert "opentelemetry" in images["sidecar"].modules
    assert not packages & images["sidecar"].modules


def test_image_runs_on_a_read_only_root_without_a_shell(real_node: RealNode, images: dict[str, Image]) -> None:
    containers = {
        "help": {"image": images["operator"].name, "args": ["--help"]},
        "operator": import_container(
            images["operator"], "numpy", "kopf", "rota.kube.operator", "rota.kube.telemetry.span_export"
        ),
        "sidecar": import_container(
            images["sidecar"], "aiohttp", "lz4.frame", "zstandard", "rota.sidecar.main", *COMPILED_MODULES
        ),
    }
    hidden = [{"name": "nothing", "mountPath": path} for path in SHELLS]
    common_fields = {"securityContext": SECURITY_CONTEXT, "volumeMounts": hidden}
    spec = {
        "restartPolicy": "Never",
        "containers": [{"name": name, **container, **common_fields} for name, container in containers.items()],
        "volumes": [{"name": "nothing", "hostPath": {"path": "/dev/null"}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "images"}, "spec": spec}
    real_node.kubectl("create", "-f-", feed=json.dumps(pod))
    real_node.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/images", "--timeout=180s")
    assert "Usage: rota operator" in real_node.kubectl("logs", "images", "-c", "help")
    for name, compiled in (("operator", []), ("sidecar", COMPILED_MODULES)):
        facts = json.loads(real_node.kubectl("logs", "images", "-c", name))
        assert facts == {"user": 65532, "read only": True, "shell": False, "compiled": compiled}


def import_container(image: Image, *modules: str) -> dict[str, Any]:
    return {"image": image.name, "command": ["python", "-c", IMPORT_AND_PRINT_FACTS, *modules]}
