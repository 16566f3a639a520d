"""A stand-in for Docker, which tests of kind's clusters put on PATH: the node that it "runs" is the ground's own.

No container engine runs where these tests do. The stand-in records each command line, answers kind's queries about
containers and networks, builds images by buildah, and runs the commands for kind's node on the real node.
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
    """A command that Docker may support and this stand-in does not."""


class Engine:
    """The state of the stand-in, in a folder: the commands so far, containers with their labels, archives of images."""

    def __init__(self, folder: Path, instance: Instance) -> None:
        """Use the state in `folder`; `instance` is that of the real node."""
        self.folder = folder
        self.instance = instance
        self.sandbox = Sandbox(instance)
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
        labels_by_name: dict[str, dict[str, str]] = {}
        if self._containers.exists():
            labels_by_name = json.loads(self._containers.read_text())
        return labels_by_name

    def run(self, *argv: str) -> str | int:
        """Record a command line, run it, and return Docker's output, or an exit code."""
        with (self.folder / "commands.jsonl").open("a") as log:
            log.write(json.dumps(argv) + "\n")
        command, *arguments = argv
        if command == "network":
            return self._network(*arguments)
        if command == "image":
            return self._image_id(arguments[-1])
        if command in {"-v", "info"}:
            return self._describe_engine(argv)
        method = getattr(self, f"_{command}", None)
        if method is None:
            raise UnknownCommandError
        output: str | int = method(*arguments)
        return output

    # Queries.

    def _describe_engine(self, argv: tuple[str, ...]) -> str:
        if argv[0] == "-v":
            return "Docker version 28.0.0, build stand-in"
        limits = dict.fromkeys(("MemoryLimit", "PidsLimit", "CPUShares"), True)
        facts = {"CgroupDriver": "systemd", "CgroupVersion": "2", **limits, "SecurityOptions": []}
        by_format = {"{{json .}}": json.dumps(facts), "{{.Driver}}": "overlay2", "{{json .DriverStatus }}": "[]"}
        return by_format.get(argv[-1], "[]")

    def _network(self, verb: str, *arguments: str) -> str:
        if verb == "ls":
            return "kind"
        if verb == "inspect":
            return self.sandbox.network.outside if "--format" in arguments else json.dumps(_NETWORK)
        raise UnknownCommandError

    def _ps(self, *arguments: str) -> str:
        label, _, value = arguments[arguments.index("--filter") + 1].removeprefix("label=").partition("=")
        matching = {name: labels for name, labels in self.containers.items() if value in {labels.get(label), ""}}
        shows_names = "{{.Names}}" in arguments
        return "\n".join(name if shows_names else labels[label] for name, labels in matching.items())

    def _inspect(self, *arguments: str) -> str:
        if arguments[0] == "--type=image":
            return "[]"
        template, container = arguments[-2:]
        if label := re.search(r'\.Config\.Labels "([^"]+)"', template):
            return self.containers[container].get(label[1], "")
        address = self.sandbox.network.inside
        return f"{address}\t6443" if ".NetworkSettings.Ports" in template else f"{address},"

    def _run(self, *arguments: str) -> str:
        name = arguments[arguments.index("--name") + 1]
        labels = dict(
            arguments[position + 1].split("=", 1) for position, word in enumerate(arguments) if word == "--label"
        )
        self._containers.write_text(json.dumps(self.containers | {name: labels}))
        return hashlib.sha256(name.encode()).hexdigest()

    def _logs(self, *_: str) -> str:
        return "Reached target Multi-User System"

    def _rm(self, *names: str) -> str:
        remaining = {name: labels for name, labels in self.containers.items() if name not in names}
        self._containers.write_text(json.dumps(remaining))
        return ""

    def _exec(self, *options: str) -> str | int:
        words = [word for word in options if word not in {"--privileged", "-i"}]
        _, program, *arguments = words
        if program == "ctr":  # kind's node has containerd's socket at the same path
            return subprocess.run([*self.sandbox.prefix, program, *arguments], check=False).returncode
        if "-i" in options:
            sys.stdin.buffer.read()
        files = {
            "/kind/version": KUBERNETES,
            "/etc/kubernetes/admin.conf": (self.instance.folder / KUBECONFIG).read_text(),
        }
        if program == "cat":
            return files.get(arguments[0], "")
        if program == "containerd":
            return (self.instance.folder / "runtime" / "containerd.toml").read_text()
        return (
            1 if program == "crictl" else "True"
        )  # crictl: the node has no image yet; every step of kubeadm succeeded

    # Images.

    def _build(self, *arguments: str) -> str:
        target, tag = (arguments[arguments.index(option) + 1] for option in ("--target", "--tag"))
        build_into(self.folder, target, tag, source=Path(arguments[-1]))
        (self.folder / f"{target}.tar").rename(self._archive(tag))
        return tag

    def _save(self, *arguments: str) -> str:
        _, into, image = arguments
        shutil.copyfile(self._archive(image), into)
        return ""

    def _image_id(self, image: str) -> str | int:
        archive = self._archive(image)
        return f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}" if archive.exists() else 1

    def _archive(self, image: str) -> Path:
        return self.folder / f"{image.replace('/', '_')}.image"


def main(folder: str, instance: str, *argv: str) -> int:
    """Act as Docker for one command line."""
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
