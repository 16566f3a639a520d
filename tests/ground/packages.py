"""Debian packages that parts of the ground need: checked, or installed where we are root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ground import cache
from ground.report import Missing, progress

# Packages start their daemons when installed, unless this file forbids it. After our end the script allows all again.
_POLICY = Path("/usr/sbin/policy-rc.d")
_FORBID = "#!/bin/sh\nkill -0 {pid} 2>/dev/null && exit 101\nexit 0\n"

_APT_GET = (
    "apt-get",
    "--yes",
    "--no-install-recommends",
    "--no-remove",  # Docker's own containerd must not give way to Debian's
    "-oDPkg::Lock::Timeout=300",
    "-oDpkg::Options::=--force-confold",
)


def debian(*names: str) -> None:
    """Install missing packages of these; none of their daemons is started."""
    absent = _absent(names)
    if not absent:
        return
    listed = " ".join(absent)
    if not shutil.which("apt-get"):
        raise Missing(
            f"The Debian packages {listed} are needed and there is no apt-get; use a Debian or Ubuntu machine"
        )
    if os.geteuid() != 0:
        raise Missing(f"The packages {listed} are not installed; run `apt-get install {listed}` as root")
    with cache.locked(cache.folder() / "apt.lock", waiting_for="packages"), progress(f"installing {listed}"), _quiet():
        try:
            _apt_get("install", *absent)
        except Missing:  # most often because the package lists are missing or old
            _apt_get("update")
            _apt_get("install", *absent)


def _absent(names: tuple[str, ...]) -> list[str]:
    if not shutil.which("dpkg-query"):
        return list(names)
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *names]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return [name for name in names if f"{name} installed" not in lines]


def _apt_get(verb: str, *names: str) -> None:
    env = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    cache.run([*_APT_GET, verb, *names], f"apt-get {verb} {' '.join(names)}".strip(), env=env)


@contextmanager
def _quiet() -> Iterator[None]:
    if _POLICY.exists():  # the machine's own policy
        yield
        return
    _POLICY.write_text(_FORBID.format(pid=os.getpid()))
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
