"""The images: built twice without anything kept from before, and looked into for what the bills of materials say."""

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
from release.work import Failed, LeftOut, Work, repack

TARGETS = ("operator", "sidecar")
LEFT = "the pipeline's, of 1 GB, is left out"


def build(work: Work) -> str:
    """Build each from both copies and write its bill of materials."""
    if os.geteuid() != 0 or not shutil.which("buildah"):
        raise LeftOut(
            "images need root and buildah; their content is fixed by Dockerfile, uv.lock and the base's digest"
        )
    told = []
    for target in TARGETS:
        one, another = (_built(work, target, number) for number in (0, 1))
        if _id(one) != _id(another):
            raise Failed(f"two builds of the image {target} differ in {_differences(one, another)}")
        bom = _bill(work, target, one)
        repack(one, work.into / f"rota-{target}-{work.version}.image.tar.gz", work.epoch)
        told.append(f"{target} {_id(one)[:19]}, {len(bom['components'])} components")
    return f"{'; '.join(told)}; built twice, the same ids; on a base of this machine's Debian; {LEFT}"


def _built(work: Work, target: str, number: int) -> Path:
    folder = work.into.parent / f"images-{number}"
    folder.mkdir(exist_ok=True)
    how = ("--no-cache", f"--timestamp={work.epoch}")
    build_into(folder, target, f"ghcr.io/rota-dev/rota-{target}:{work.version}", *how, source=work.copies[number])
    return folder / f"{target}.tar"


def _id(archive: Path) -> str:
    """Return an image's id: the digest of its settings and of all its layers."""
    with tarfile.open(archive) as tar:
        return "sha256:" + hashlib.sha256(_read(tar, _manifest(tar)["Config"])).hexdigest()


def _bill(work: Work, target: str, archive: Path) -> boms.Bom:
    """Write what is in an image: of what its extra brings, what is there, and the base's packages."""
    bom, found = boms.of_extra(work, target), dict(_packages(archive))
    locked = {(it["name"], it["version"]): it for it in bom["components"]}
    name = f"rota-{work.version}-{target}-image.cdx.json"
    strange = sorted(" ".join(it) for it, kind in found.items() if kind == "pypi" and it not in locked)
    strange = [it for it in strange if it != f"rota-operator {work.version}"]
    if strange:
        raise Failed(f"the image {target} holds what uv.lock does not give it: {', '.join(strange)}")
    kept = [it for package, it in locked.items() if package in found]
    debian = [_debian(*package) for package, kind in sorted(found.items()) if kind == "deb"]
    known = {it["bom-ref"] for it in (bom["metadata"]["component"], *kept)}
    bom["dependencies"] = [
        it | {"dependsOn": [on for on in it.get("dependsOn", []) if on in known]}
        for it in bom["dependencies"]
        if it["ref"] in known
    ]
    bom["components"] = [*kept, *debian]
    bom["metadata"]["component"] |= {"type": "container", "name": "rota-operator"}
    bom = boms.stamped(bom, work.epoch)
    wrong = [f"{name} {told}" for told in boms.flaws(bom)]
    if wrong:
        raise Failed("; ".join(wrong))
    boms.write(work, name, bom)
    return bom


def _debian(name: str, version: str) -> boms.Bom:
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe=':')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _packages(archive: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the packages that lie in an image: Python's and Debian's."""
    for layer in _layers(archive):
        for member in layer:
            if re.search(r"opt/rota/.*\.dist-info/METADATA$", member.name):
                about = message_from_bytes(_read(layer, member.name))
                yield (re.sub(r"[-_.]+", "-", about["Name"].lower()), about["Version"]), "pypi"
            if member.name.removeprefix("./") == "var/lib/dpkg/status":
                for package in _read(layer, member.name).split(b"\n\n"):
                    about = message_from_bytes(package)
                    if (about["Status"] or "").endswith(" installed"):
                        yield (about["Package"], about["Version"]), "deb"


def _differences(one: Path, another: Path) -> str:
    """Name what differs, for whoever has to find out why."""
    ours, theirs = (dict(_files(path)) for path in (one, another))
    differ = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return f"{len(differ)} files: {', '.join(differ[:5])}" if differ else "their settings"


def _files(archive: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
    for number, layer in enumerate(_layers(archive)):
        for it in layer:
            content = hashlib.sha256(_read(layer, it.name)).hexdigest() if it.isfile() else it.linkname
            yield f"{number}:{it.name}", (it.type, it.mode, it.uid, it.gid, it.mtime, content)


def _layers(archive: Path) -> Iterator[tarfile.TarFile]:
    with tarfile.open(archive) as tar:
        for name in _manifest(tar)["Layers"]:
            with tarfile.open(fileobj=tar.extractfile(name)) as layer:
                yield layer


def _manifest(tar: tarfile.TarFile) -> boms.Bom:
    (found,) = json.loads(_read(tar, "manifest.json"))
    return dict(found)


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if not file:
        raise Failed(f"{name} in an archive has no content")
    return file.read()
