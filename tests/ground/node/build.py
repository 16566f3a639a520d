"""Images of the project's own Dockerfile, built by buildah on a base made from Debian's packages.

The user's own files are not touched: layers are in the cache, and mounts of a build are private to it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ground import cache
from ground.cluster import PROJECT
from ground.node.images import overlays, pack, pack_program
from ground.programs import wheel
from ground.report import progress

_INPUTS = ("Dockerfile", ".dockerignore", "pyproject.toml", "uv.lock", "README.md", "LICENSE", "operator", "docker")
_MOST_IMAGES = 3  # images of one target
_MEBIBYTES = 4096  # of buildah's layers

# buildah's record of its mounts ($0/run) must end with them: after a crash buildah would trust it.
# Commit and time in images of tests: always the same, so that images are built once per content.
REVISION = "0" * 40
CREATED = "2026-01-01T00:00:00Z"
_PRIVATE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-euc")
_BUILDAH = 'mount -t tmpfs tmpfs "$0/run"; exec buildah "$@"'
_STORAGE = '[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/layers"\nrunroot = "{folder}/run"\n'
_BUILD = ("bud", "--layers", "--isolation=chroot", "--pull-never", "--network=host")


def build_image(target: str, tag: str, source: Path = PROJECT) -> Path:
    """Build one target of the Dockerfile in `source` and return it as an archive; built once per content."""
    recipe = "\n".join([target, tag, _suite(), *cache.digests(source, _INPUTS)])
    built = cache.entry(f"image-{target}", recipe, partial(build_into, target=target, tag=tag, source=source))
    cache.remove_least_recent(built, _MOST_IMAGES)
    return built / f"{target}.tar"


def build_into(into: Path, target: str, tag: str, *options: str, source: Path = PROJECT) -> None:
    """Build one target of the Dockerfile in `source` into an archive in a folder, with further options of buildah."""
    with cache.locked(cache.folder() / "buildah.lock", waiting_for="images"), _storage(), progress(f"building {tag}"):
        arguments = {
            "BASE": _import(_base_image()),
            "UV": _import(_uv_image()),
            "PYTHON_HEADERS": "libpython3-dev",
            "REVISION": REVISION,
            "CREATED": CREATED,
        }
        step = [*_BUILD, f"--target={target}", f"--tag={tag}"]
        step += [f"--build-arg={name}={value}" for name, value in arguments.items()]
        certificates = os.environ.get("SSL_CERT_FILE")
        if certificates:  # the image looks there for the system's certificates
            step.append(f"--volume={certificates}:/etc/ssl/certs/ca-certificates.crt:ro")
        _buildah(f"Building the image {tag}", *step, *options, source)
        _buildah(f"Packing the image {tag}", "push", "--quiet", tag, f"docker-archive:{into}/{target}.tar:{tag}")


@contextmanager
def _storage() -> Iterator[None]:
    """Keep buildah's layers, which make builds faster; start with an empty folder if they are broken or too large."""
    folder = cache.folder() / "buildah"
    in_work = folder / "in-work"
    size = int(cache.run(["du", "-sm", folder], "Measuring").split()[0]) if folder.exists() else 0
    if in_work.exists() or size > _MEBIBYTES:
        cache.remove(folder)
    cache.need_room(4)
    (folder / "run").mkdir(parents=True, exist_ok=True)
    driver = "overlay" if overlays(folder) else "vfs"
    (folder / "storage.conf").write_text(_STORAGE.format(folder=folder, driver=driver))
    in_work.touch()
    yield
    in_work.unlink()  # remains after a build that failed, or was killed


def _buildah(what: str, *argv: str | Path) -> str:
    folder = cache.folder() / "buildah"
    env = {"CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf", "CONTAINERS_CONF": "/dev/null", "TMPDIR": str(folder)}
    return cache.run([*_PRIVATE, _BUILDAH, folder, *argv], what, env=env).strip()


def _import(archive: Path) -> str:
    """Import an archive into buildah and return the name of its image."""
    name = f"rota.local/{archive.parent.name}"
    if name not in _buildah("Listing images", "images", "--format", "{{.Name}}").split():
        imported = _buildah(f"Taking in {archive.name}", "pull", "--quiet", f"docker-archive:{archive}")
        _buildah(f"Naming {archive.name}", "tag", imported, name)
    return name


def _base_image() -> Path:
    """Return a base image in place of python's: this machine's Debian with its Python."""
    link = 'ln -s ../../bin/python3 "$1/usr/local/bin/{}"'
    step = [
        "mmdebstrap",
        "--variant=minbase",
        "--include=python3,ca-certificates,usr-is-merged",
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",  # else a package does it, with all of Perl
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "locale", "man")),
        *(f"--customize-hook={link.format(name)}" for name in ("python", "python3")),
        _suite(),
    ]

    def build(into: Path) -> None:
        with progress("making the images' base from Debian's packages, once"):
            cache.run([*step, into / "layer.tar"], "Making the images' base from Debian's packages")
        pack(into / "base.tar", "base", into / "layer.tar", {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]})

    return cache.entry("image-base", "\n".join(step), build) / "base.tar"


def _uv_image() -> Path:
    """Return an image in place of uv's own: the program from PyPI, of the version in the Dockerfile."""
    match = re.search(r"astral-sh/uv:([\d.]+)", (PROJECT / "Dockerfile").read_text())
    assert match, "the Dockerfile names uv's image and its version"
    version = match[1]

    def build(into: Path) -> None:
        pack_program(into / "uv.tar", "uv", wheel("uv", version) / "bin" / "uv")

    return cache.entry("image-uv", version, build) / "uv.tar"


def _suite() -> str:
    match = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    return match[1] if match else "stable"
