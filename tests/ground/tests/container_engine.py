"""A stand-in for Docker, which tests of kind's clusters put on PATH: the node that it "runs" is the ground's own.

It is there because no container engine runs where these tests do. It records each command line, answers what kind asks
about containers and networks, builds images by buildah, and runs what kind executes on its node on the real node.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ground.instance import Instance
from ground.node.build import build_into
from ground.node.sandbox import Sandbox
from ground.programs import KUBERNETES

KUBECONFIG = "admin.kubeconfig"
_NETWORK = [{"Id": "kind", "Name": "kind", "Containers": {}}]


class UnknownCommandError(Exception):
    """A command that Docker may know and this does not."""


class Engine:
    """The state of the stand-in, in a folder: the commands so far, containers with their labels, archives of images."""

    def __init__(self, folder: Path, instance: Instance) -> None:
        """Take up the state in `folder`; `instance` is that of the real node."""
        self.folder, self.instance, self.sandbox = folder, instance, Sandbox(instance)
        self._containers = folder / "containers.json"

    @classmethod
    def install(cls, folder: Path, instance: Instance) -> "Engine":
        """Write a command `docker` into a folder."""
        script = folder / "docker"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} {instance.name} "$@"\n')
        script.chmod(0o755)
        return cls(folder, instance)

    @property
    def commands(self) -> list[list[str]]:
        """All command lines so far."""
        log = self.folder / "commands.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def containers(self) -> dict[str, dict[str, str]]:
        """The labels of each container, by the container's name."""
        known: dict[str, dict[str, str]] = {}
        if self._containers.exists():
            known = json.loads(self._containers.read_text())
        return known

    def run(self, *argv: str) -> str | int:
        """Record a command line, do it, and return what Docker would print, or an exit code."""
        with (self.folder / "commands.jsonl").open("a") as log:
            log.write(json.dumps(argv) + "\n")
        command, *rest = argv
        if command == "network":
            return self._network(*rest)
        if command == "image":
            return self._image_id(rest[-1])
        if command in {"-v", "info"}:
            return self._about(argv)
        found = getattr(self, f"_{command}", None)
        if found is None:
            raise UnknownCommandError
        answer: str | int = found(*rest)
        return answer

    # What kind asks.

    def _about(self, argv: tuple[str, ...]) -> str:
        if argv[0] == "-v":
            return "Docker version 28.0.0, build stand-in"
        limits = dict.fromkeys(("MemoryLimit", "PidsLimit", "CPUShares"), True)
        facts = {"CgroupDriver": "systemd", "CgroupVersion": "2", **limits, "SecurityOptions": []}
        by_format = {"{{json .}}": json.dumps(facts), "{{.Driver}}": "overlay2", "{{json .DriverStatus }}": "[]"}
        return by_format.get(argv[-1], "[]")

    def _network(self, verb: str, *rest: str) -> str:
        if verb == "ls":
            return "kind"
        if verb == "inspect":
            return self.sandbox.network.outside if "--format" in rest else json.dumps(_NETWORK)
        raise UnknownCommandError

    def _ps(self, *rest: str) -> str:
        name, _, value = rest[rest.index("--filter") + 1].removeprefix("label=").partition("=")
        wanted = {it: labels for it, labels in self.containers.items() if value in {labels.get(name), ""}}
        shows_names = "{{.Names}}" in rest
        return "\n".join(it if shows_names else labels[name] for it, labels in wanted.items())

    def _inspect(self, *rest: str) -> str:
        if rest[0] == "--type=image":
            return "[]"
        asked, container = rest[-2:]
        if label := re.search(r'\.Config\.Labels "([^"]+)"', asked):
            return self.containers[container].get(label[1], "")
        address = self.sandbox.network.inside
        return f"{address}\t6443" if ".NetworkSettings.Ports" in asked else f"{address},"

    def _run(self, *rest: str) -> str:
        name = rest[rest.index("--name") + 1]
        labels = dict(rest[at + 1].split("=", 1) for at, word in enumerate(rest) if word == "--label")
        self._containers.write_text(json.dumps(self.containers | {name: labels}))
        return hashlib.sha256(name.encode()).hexdigest()

    def _logs(self, *_: str) -> str:
        return "Reached target Multi-User System"

    def _rm(self, *rest: str) -> str:
        left = {name: labels for name, labels in self.containers.items() if name not in rest}
        self._containers.write_text(json.dumps(left))
        return ""

    def _exec(self, *rest: str) -> str | int:
        words = [word for word in rest if word not in {"--privileged", "-i"}]
        _, program, *arguments = words
        if program == "ctr":  # which finds containerd's socket where kind's node has it, too
            return subprocess.run([*self.sandbox.within, program, *arguments], check=False).returncode
        if "-i" in rest:
            sys.stdin.buffer.read()
        files = {
            "/kind/version": KUBERNETES,
            "/etc/kubernetes/admin.conf": (self.instance.folder / KUBECONFIG).read_text(),
        }
        if program == "cat":
            return files.get(arguments[0], "")
        if program == "containerd":
            return (self.instance.folder / "runtime" / "containerd.toml").read_text()
        return 1 if program == "crictl" else "True"  # the node has no image yet; all else of kubeadm's went well

    # Images.

    def _build(self, *rest: str) -> str:
        target, tag = (rest[rest.index(option) + 1] for option in ("--target", "--tag"))
        build_into(self.folder, target, tag, source=Path(rest[-1]))
        (self.folder / f"{target}.tar").rename(self._archive(tag))
        return tag

    def _save(self, *rest: str) -> str:
        _, into, image = rest
        shutil.copyfile(self._archive(image), into)
        return ""

    def _image_id(self, image: str) -> str | int:
        archive = self._archive(image)
        return f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}" if archive.exists() else 1

    def _archive(self, image: str) -> Path:
        return self.folder / f"{image.replace('/', '_')}.image"


def main(folder: str, instance: str, *argv: str) -> int:
    """Be Docker for one command line."""
    node = Instance.find(instance)
    if not node:
        raise SystemExit(f"The instance {instance} with the real node does not stand")
    try:
        answer = Engine(Path(folder), node).run(*argv)
    except UnknownCommandError:
        raise SystemExit(f"unknown docker command: {argv}") from None
    if isinstance(answer, int):
        return answer
    sys.stdout.write(f"{answer}\n" if answer else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
