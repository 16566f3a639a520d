"""The krew plugin: builds its archive and manifest, installs both by krew itself, and runs the plugin."""

import os
import tarfile
from io import BytesIO
from pathlib import Path

from ground.programs import program
from release.packages import wheel
from release.work import CheckFailedError, Work, repack, run, sha256, uv

MANIFEST = "kubectl-rota.yaml"


def build(work: Work) -> str:
    """Build archive and manifest, install them by krew, and run the plugin with the wheel of this release."""
    archive = work.into / f"kubectl-rota-{work.version}.tar.gz"
    _pack(work, archive)
    manifest = _render(work, "rota.yaml").replace("@SHA256@", sha256(archive))
    (work.into / MANIFEST).write_text(manifest)
    output = _install_and_run(work, archive)
    if "Usage: kubectl-rota" not in output:
        raise CheckFailedError(f"`kubectl-rota --help` as krew installed it shows no usage: {output[:200]}")
    return f"{archive.name} and {MANIFEST}: krew installs them, and `kubectl rota --help` runs"


def _pack(work: Work, archive: Path) -> None:
    loose = work.into.parent / "plugin.tar"
    with tarfile.open(loose, "w") as packed:
        script = _render(work, "kubectl-rota").encode()
        member = tarfile.TarInfo("kubectl-rota")
        member.size = len(script)
        member.mode = 0o755
        packed.addfile(member, BytesIO(script))
        packed.add(work.source / "LICENSE", "LICENSE")
    repack(loose, archive, work.epoch)


def _render(work: Work, name: str) -> str:
    return (work.source / "krew" / name).read_text().replace("@VERSION@", work.version)


def _install_and_run(work: Work, archive: Path) -> str:
    """Install the plugin into an empty folder, run it with the wheel, and return its output."""
    root = work.into.parent / "krew"
    manifest = work.into / MANIFEST
    command = (program("krew"), "install", f"--manifest={manifest}", f"--archive={archive}")
    run(*command, KREW_ROOT=str(root), KREW_NO_UPGRADE_CHECK="1")
    built_wheel = wheel(work)
    path = os.pathsep.join([str(Path(uv()).parent), os.environ["PATH"]])
    return run(
        root / "bin" / "kubectl-rota",
        "--help",
        cwd=root,
        PATH=path,
        UV_FIND_LINKS=str(built_wheel.parent),
        UV_PYTHON_DOWNLOADS="never",
    )
