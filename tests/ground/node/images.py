"""Container images without a registry: archives that every engine reads, packed from a layer or a single program."""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from ground import cache
from ground.programs import program

PAUSE = "rota.local/pause:1"
COREDNS = "rota.local/coredns:1"


def own(name: str, tag: str) -> Path:
    """Return the archive of an image with one static program of ours."""
    path = program(name)

    def build(into: Path) -> None:
        pack_program(into / f"{name}.tar", tag, path)

    return cache.entry(f"image-{name}", f"{tag} {path} {path.stat().st_mtime_ns}", build) / f"{name}.tar"


def pack_program(archive: Path, tag: str, path: Path) -> None:
    """Write an image that contains one static program and nothing else."""
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        tar.add(path.resolve(), path.name)
    pack(archive, tag, layer, {"Entrypoint": [f"/{path.name}"]})


def pack(archive: Path, tag: str, layer: Path, settings: Mapping[str, object]) -> None:
    """Write an image of one layer in the archive format of `docker save`; the layer's file is removed."""
    with layer.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "ground"}],  # buildah counts layers by it
    }
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for name, value in (("config.json", config), ("manifest.json", manifest)):
            text = json.dumps(value).encode()
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
        tar.add(layer, "layer.tar")
    layer.unlink()


def overlays(folder: Path) -> bool:
    """Whether this folder can hold layers of an overlay file system; a folder on an overlay cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    file_system = subprocess.run(
        ["stat", "--file-system", "--format=%T", folder], capture_output=True, text=True, check=False
    )
    return file_system.stdout.strip() != "overlayfs"
