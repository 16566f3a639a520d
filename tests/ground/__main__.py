"""`python -m ground up|down|env|status|topic|build`: a ground for a person, that stays until it is taken down."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ground import cache, java, node, programs, remoting
from ground.clusters import cluster_of
from ground.instance import Instance, checked, home, standing, sweep
from ground.kwok import Kwok
from ground.local import LocalNode
from ground.node import RealNode
from ground.prometheus import Prometheus, promtool
from ground.report import Missing, plainly, say
from ground.rocketmq import NAME_SERVER, RocketMQ


class Thing(Protocol):
    """A real thing that can be stood up."""

    def up(self) -> None:
        """Start what does not run."""


@dataclass(frozen=True)
class Part:
    """A word of the command line, the thing it stands up, and how others find that."""

    help: str
    make: Callable[[Instance], Thing]
    variables: Callable[[Any], Mapping[str, object]]


def _local(instance: Instance) -> LocalNode:
    return LocalNode(instance, cluster_of(instance))


def _kwok(instance: Instance) -> Kwok:
    return Kwok(instance, cluster_of(instance))


def _prometheus(instance: Instance) -> Prometheus:
    return Prometheus(instance, [])


# In an order in which each finds what it needs.
PARTS = {
    "control-plane": Part(
        "etcd, API server, controller-manager, scheduler", cluster_of, lambda it: {"KUBECONFIG": it.kubeconfig}
    ),
    "local": Part("a node whose pods are processes", _local, lambda _: {}),
    "rocketmq": Part("a name server and a broker", RocketMQ, lambda it: {"ROTA_NAME_SERVER": it.name_server}),
    "kwok": Part("simulated nodes and pods", _kwok, lambda _: {}),
    "prometheus": Part("a Prometheus", _prometheus, lambda it: {"ROTA_PROMETHEUS": it.url}),
    "node": Part(
        "another cluster, with a real node (root)", RealNode, lambda it: {"ROTA_NODE_KUBECONFIG": it.kubeconfig}
    ),
}
USUAL = ("control-plane", "local", "rocketmq")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    asked = _parser().parse_args(arguments)
    return plainly("ground", partial(asked.run, asked))


def up(asked: argparse.Namespace) -> None:
    """Stand up the parts asked for."""
    unknown = sorted(set(asked.parts) - set(PARTS))
    if unknown:
        raise Missing(f"There is no part {unknown[0]}; the parts are {', '.join(PARTS)}")
    sweep()
    with _locked(asked.name):
        before = Instance.find(asked.name)
        instance = before or Instance.open(asked.name)
        try:
            for name in [name for name in PARTS if name in (asked.parts or USUAL)]:
                _up(name, instance)
        except BaseException as error:
            if before:
                raise
            logs = instance.keep_logs()
            instance.down()  # half a ground is of no use to anybody
            if isinstance(error, Missing):
                raise Missing(str(error).replace(f"{instance.folder}/log", str(logs))) from None
            raise
    option = "" if asked.name == "default" else f" --name {shlex.quote(asked.name)}"
    say(f'now: eval "$({sys.executable} -m ground env{option})"')


def build(_: argparse.Namespace) -> None:
    """Build and fetch all that takes long, so that nobody waits for it later; what cannot be had is named."""
    sources: dict[str, Callable[[], object]] = {
        "Kubernetes": partial(programs.ensure, *programs.CONTROL_PLANE, "helm"),
        "RocketMQ": java.jars,
        "the Java peers": java.classes,
        "Prometheus": promtool,
        "the real node": node.prepare,
    }
    for what, fetch in sources.items():
        try:
            fetch()
        except Missing as missing:
            say(f"without {what}: {missing}")


def _up(name: str, instance: Instance) -> None:
    thing = PARTS[name].make(instance)
    thing.up()
    found = {key: str(value) for key, value in PARTS[name].variables(thing).items()}
    instance.write("variables.json", json.dumps(_variables(instance) | found))
    say(f"{name} is up")


def down(asked: argparse.Namespace) -> None:
    """Take an instance down: every process, every file."""
    with _locked(asked.name):
        instance = Instance.find(asked.name)
        if instance:
            instance.down()
    say(f"the ground {asked.name} is gone" if instance else f"no ground {asked.name} stands")


def env(asked: argparse.Namespace) -> None:
    """Print what a shell needs to use the instance."""
    for key, value in _variables(_standing(asked.name)).items():
        print(f"export {key}={shlex.quote(value)}")
    print(f"export PATH={shlex.quote(str(programs.program('kubectl').parent))}:$PATH")


def status(_: argparse.Namespace) -> None:
    """Print what stands."""
    found = standing()
    for instance in found:
        print(f"{instance.name} (addresses {instance.block}.0.0/16, folder {instance.folder})")
        for process in instance.processes():
            print(f"  {process.pid:>8} {process.program}")
    if not found:
        print("nothing stands; `python -m ground up` changes that")


def topic(asked: argparse.Namespace) -> None:
    """Make a topic at the instance's broker, or change how many queues it has there."""
    if asked.queues < 1:
        raise Missing(f"A topic has no fewer than 1 queue, and {asked.queues} were asked for")
    instance = _standing(asked.name)
    if not instance.process(NAME_SERVER):
        raise Missing(f"No broker runs in the ground {asked.name}; `python -m ground up rocketmq` starts one")
    try:
        RocketMQ(instance).create_topic(asked.topic, asked.queues)
    except remoting.Refused as refusal:
        raise Missing(f"The topic {asked.topic} was not made: {refusal}") from None
    say(f"topic {asked.topic} has {asked.queues} queues")


def _locked(name: str) -> AbstractContextManager[None]:
    return cache.locked(home() / f".{checked(name)}.lock", waiting_for=f"the ground {name}")


def _standing(name: str) -> Instance:
    instance = Instance.find(name)
    if not instance:
        raise Missing(f"No ground {name} stands; see `python -m ground status`")
    return instance


def _variables(instance: Instance) -> dict[str, str]:
    path = instance.folder / "variables.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return known


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ground", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    for run in (up, down, env, status, topic, build):
        verb = verbs.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        verb.add_argument("--name", default="default", help="which ground (default: %(default)s)")
        verb.set_defaults(run=run)
        if run is up:
            told = "; ".join(f"{name}: {part.help}" for name, part in PARTS.items())
            verb.add_argument("parts", nargs="*", metavar="PART", help=f"{told} (default: {', '.join(USUAL)})")
        if run is topic:
            verb.add_argument("topic", metavar="NAME", help="what it is called")
            verb.add_argument("queues", metavar="QUEUES", type=int, help="how many queues it has")
    return parser


if __name__ == "__main__":
    sys.exit(main())
