"""The images: built twice without a cache, and compared with their bills of materials."""

import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path
from urllib.parse import quote

from ground.node.build import build_into
from release import boms
from release.work import CheckFailedError, SkippedError, Work, repack

# As in the Dockerfile.
IMAGE_EXTRAS = {"operator": ("operator", "traces", "bucket"), "sidecar": ("sidecar", "traces")}
OMITTED = "the pipeline's, of 1 GB, is left out"


def build(work: Work) -> str:
    """Build each image from both copies, and write its bill of materials."""
    if os.geteuid() != 0 or not shutil.which("buildah"):
        raise SkippedError(
            "images need root and buildah; their content is fixed by Dockerfile, uv.lock and the base's digest"
        )
    summaries = []
    for target in IMAGE_EXTRAS:
        first = _build_image(work, target, 0)
        second = _build_image(work, target, 1)
        if _id(first) != _id(second):
            raise CheckFailedError(f"two builds of the image {target} differ in {_differences(first, second)}")
        bom = _write_bill(work, target, first)
        repack(first, work.into / f"rota-{target}-{work.version}.image.tar.gz", work.epoch)
        summaries.append(f"{target} {_id(first)[:19]}, {len(bom['components'])} components")
    return f"{'; '.join(summaries)}; built twice, the same ids; on a base of this machine's Debian; {OMITTED}"


def _build_image(work: Work, target: str, number: int) -> Path:
    folder = work.into.parent / f"images-{number}"
    folder.mkdir(exist_ok=True)
    options = ("--no-cache", f"--timestamp={work.epoch}")
    build_into(folder, target, f"ghcr.io/rota-dev/rota-{target}:{work.version}", *options, source=work.copies[number])
    return folder / f"{target}.tar"


def _id(archive: Path) -> str:
    """Return an image's id: the digest of its settings and of all its layers."""
    with tarfile.open(archive) as tar:
        return "sha256:" + hashlib.sha256(_read(tar, _manifest(tar)["Config"])).hexdigest()


def _write_bill(work: Work, target: str, archive: Path) -> boms.Bom:
    """Write the bill of an image: the packages of its extras that are present, and the packages of its base."""
    bom = boms.bom_of_extras(work, *IMAGE_EXTRAS[target])
    packages = dict(_packages(archive))
    locked = {(component["name"], component["version"]): component for component in bom["components"]}
    name = f"rota-{work.version}-{target}-image.cdx.json"
    allowed = {*locked, ("rota-operator", work.version)}
    python_packages = {package for package, kind in packages.items() if kind == "pypi"}
    unexpected = sorted(" ".join(package) for package in python_packages - allowed)
    if unexpected:
        raise CheckFailedError(f"the image {target} holds what uv.lock does not give it: {', '.join(unexpected)}")
    present = [component for package, component in locked.items() if package in packages]
    debian = [_debian_component(*package) for package, kind in sorted(packages.items()) if kind == "deb"]
    references = {component["bom-ref"] for component in (bom["metadata"]["component"], *present)}
    dependencies = []
    for dependency in bom["dependencies"]:
        if dependency["ref"] in references:
            targets = [reference for reference in dependency.get("dependsOn", []) if reference in references]
            dependencies.append(dependency | {"dependsOn": targets})
    bom["dependencies"] = dependencies
    bom["components"] = [*present, *debian]
    bom["metadata"]["component"] |= {"type": "container", "name": "rota-operator"}
    bom = boms.stamped(bom, work.epoch)
    errors = [f"{name} {flaw}" for flaw in boms.flaws(bom)]
    if errors:
        raise CheckFailedError("; ".join(errors))
    boms.write(work, name, bom)
    return bom


def _debian_component(name: str, version: str) -> boms.Bom:
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe=':')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _packages(archive: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the Python and Debian packages in an image."""
    for layer in _layers(archive):
        for member in layer:
            if re.search(r"opt/rota/.*\.dist-info/METADATA$", member.name):
                metadata = message_from_bytes(_read(layer, member.name))
                yield (re.sub(r"[-_.]+", "-", metadata["Name"].lower()), metadata["Version"]), "pypi"
            if member.name.removeprefix("./") == "var/lib/dpkg/status":
                for package in _read(layer, member.name).split(b"\n\n"):
                    metadata = message_from_bytes(package)
                    if (metadata["Status"] or "").endswith(" installed"):
                        yield (metadata["Package"], metadata["Version"]), "deb"


def _differences(first: Path, second: Path) -> str:
    """Describe the differences between two images."""
    first_files = dict(_files(first))
    second_files = dict(_files(second))
    differ = sorted(
        name for name in first_files.keys() | second_files.keys() if first_files.get(name) != second_files.get(name)
    )
    return f"{len(differ)} files: {', '.join(differ[:5])}" if differ else "their settings"


def _files(archive: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
    for number, layer in enumerate(_layers(archive)):
        for member in layer:
            content = hashlib.sha256(_read(layer, member.name)).hexdigest() if member.isfile() else member.linkname
            yield f"{number}:{member.name}", (member.type, member.mode, member.uid, member.gid, member.mtime, content)


def _layers(archive: Path) -> Iterator[tarfile.TarFile]:
    with tarfile.open(archive) as tar:
        for name in _manifest(tar)["Layers"]:
            with tarfile.open(fileobj=tar.extractfile(name)) as layer:
                yield layer


def _manifest(tar: tarfile.TarFile) -> boms.Bom:
    (manifest,) = json.loads(_read(tar, "manifest.json"))
    return dict(manifest)


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if not file:
        raise CheckFailedError(f"{name} in an archive has no content")
    return file.read()
