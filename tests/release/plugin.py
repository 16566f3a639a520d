"""The plugin for krew: its archive and manifest, installed by krew itself, and run."""

import os
import tarfile
from io import BytesIO
from pathlib import Path

from ground.programs import program
from release.packages import wheel
from release.work import Failed, Work, repack, run, sha256, uv

MANIFEST = "kubectl-rota.yaml"


def build(work: Work) -> str:
    """Make the archive and the manifest, have krew install them, and run the plugin with the wheel of this release."""
    archive = work.into / f"kubectl-rota-{work.version}.tar.gz"
    _pack(work, archive)
    manifest = _filled(work, "rota.yaml").replace("@SHA256@", sha256(archive))
    (work.into / MANIFEST).write_text(manifest)
    told = _installed_and_run(work, archive)
    if "Usage: kubectl-rota" not in told:
        raise Failed(f"`kubectl-rota --help` as krew installed it shows no usage: {told[:200]}")
    return f"{archive.name} and {MANIFEST}: krew installs them, and `kubectl rota --help` runs"


def _pack(work: Work, archive: Path) -> None:
    loose = work.into.parent / "plugin.tar"
    with tarfile.open(loose, "w") as packed:
        script = _filled(work, "kubectl-rota").encode()
        member = tarfile.TarInfo("kubectl-rota")
        member.size, member.mode = len(script), 0o755
        packed.addfile(member, BytesIO(script))
        packed.add(work.source / "LICENSE", "LICENSE")
    repack(loose, archive, work.epoch)


def _filled(work: Work, name: str) -> str:
    return (work.source / "krew" / name).read_text().replace("@VERSION@", work.version)


def _installed_and_run(work: Work, archive: Path) -> str:
    """Install the plugin into a folder of its own, run it with the wheel, and return what it printed."""
    root = work.into.parent / "krew"
    manifest = work.into / MANIFEST
    asked = (program("krew"), "install", f"--manifest={manifest}", f"--archive={archive}")
    run(*asked, KREW_ROOT=str(root), KREW_NO_UPGRADE_CHECK="1")
    found = wheel(work)
    path = os.pathsep.join([str(Path(uv()).parent), os.environ["PATH"]])
    return run(
        root / "bin" / "kubectl-rota",
        "--help",
        cwd=root,
        PATH=path,
        UV_FIND_LINKS=str(found.parent),
        UV_PYTHON_DOWNLOADS="never",
    )
