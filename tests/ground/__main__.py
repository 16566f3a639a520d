"""`python -m ground up|down|env|status|topic|build`: a ground for interactive use; it stays until it is taken down."""

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
from ground.s3 import S3Server
from ground.s3 import packages as s3_packages
from ground.spark import SparkCluster


class Startable(Protocol):
    """A part that can be started."""

    def up(self) -> None:
        """Start whichever processes do not run yet."""


@dataclass(frozen=True)
class Part:
    """One part by its name on the command line: how it is created, and the variables by which clients find it."""

    help: str
    make: Callable[[Instance], Startable]
    variables: Callable[[Any], Mapping[str, object]]


def _local(instance: Instance) -> LocalNode:
    return LocalNode(instance, cluster_of(instance))


def _kwok(instance: Instance) -> Kwok:
    return Kwok(instance, cluster_of(instance))


def _prometheus(instance: Instance) -> Prometheus:
    return Prometheus(instance, [])


def _s3_variables(server: S3Server) -> dict[str, str]:
    bucket = server.bucket("rota")
    return {**bucket.variables, "ROTA_BUCKET": bucket.uri}


# In the order of their dependencies.
PARTS = {
    "control-plane": Part(
        "etcd, API server, controller-manager, scheduler",
        cluster_of,
        lambda cluster: {"KUBECONFIG": cluster.kubeconfig},
    ),
    "local": Part("a node whose pods are processes", _local, lambda _: {}),
    "rocketmq": Part(
        "a name server and a broker", RocketMQ, lambda rocketmq: {"ROTA_NAME_SERVER": rocketmq.name_server}
    ),
    "kwok": Part("simulated nodes and pods", _kwok, lambda _: {}),
    "prometheus": Part("a Prometheus", _prometheus, lambda prometheus: {"ROTA_PROMETHEUS": prometheus.url}),
    "s3": Part("an S3 server", S3Server, _s3_variables),
    "spark": Part(
        "a Spark cluster: a master and two workers", SparkCluster, lambda cluster: {"ROTA_SPARK_MASTER": cluster.url}
    ),
    "node": Part(
        "another cluster, with a real node (root)", RealNode, lambda node: {"ROTA_NODE_KUBECONFIG": node.kubeconfig}
    ),
}
USUAL = ("control-plane", "local", "rocketmq")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    return plainly("ground", partial(options.run, options))


def up(options: argparse.Namespace) -> None:
    """Start the requested parts."""
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        raise Missing(f"There is no part {unknown[0]}; the parts are {', '.join(PARTS)}")
    sweep()
    with _locked(options.name):
        existing = Instance.find(options.name)
        instance = existing or Instance.open(options.name)
        try:
            for name in [name for name in PARTS if name in (options.parts or USUAL)]:
                _up(name, instance)
        except BaseException as error:
            if existing:
                raise
            logs = instance.keep_logs()
            instance.down()  # half a ground is of no use
            if isinstance(error, Missing):
                raise Missing(str(error).replace(f"{instance.folder}/log", str(logs))) from None
            raise
    option = "" if options.name == "default" else f" --name {shlex.quote(options.name)}"
    say(f'now: eval "$({sys.executable} -m ground env{option})"')


def build(_: argparse.Namespace) -> None:
    """Build and fetch everything that takes long, so that later commands need not wait; unavailable parts are named."""
    sources: dict[str, Callable[[], object]] = {
        "Kubernetes": partial(programs.ensure, *programs.CONTROL_PLANE, "helm"),
        "RocketMQ": java.jars,
        "the Java peers": java.classes,
        "Prometheus": promtool,
        "S3": s3_packages,
        "the real node": node.prepare,
    }
    for what, fetch in sources.items():
        try:
            fetch()
        except Missing as missing:
            say(f"without {what}: {missing}")


def _up(name: str, instance: Instance) -> None:
    part = PARTS[name].make(instance)
    part.up()
    added = {key: str(value) for key, value in PARTS[name].variables(part).items()}
    instance.write("variables.json", json.dumps(_variables(instance) | added))
    say(f"{name} is up")


def down(options: argparse.Namespace) -> None:
    """Take an instance down: every process, every file."""
    with _locked(options.name):
        instance = Instance.find(options.name)
        if instance:
            instance.down()
    say(f"the ground {options.name} is gone" if instance else f"no ground {options.name} stands")


def env(options: argparse.Namespace) -> None:
    """Print the shell commands that select the instance."""
    for key, value in _variables(_standing(options.name)).items():
        print(f"export {key}={shlex.quote(value)}")
    print(f"export PATH={shlex.quote(str(programs.program('kubectl').parent))}:$PATH")


def status(_: argparse.Namespace) -> None:
    """Print the running instances."""
    instances = standing()
    for instance in instances:
        print(f"{instance.name} (addresses {instance.block}.0.0/16, folder {instance.folder})")
        for process in instance.processes():
            print(f"  {process.pid:>8} {process.program}")
    if not instances:
        print("nothing stands; `python -m ground up` changes that")


def topic(options: argparse.Namespace) -> None:
    """Create a topic at the instance's broker, or change its number of queues."""
    if options.queues < 1:
        raise Missing(f"A topic has no fewer than 1 queue, and {options.queues} were asked for")
    instance = _standing(options.name)
    if not instance.process(NAME_SERVER):
        raise Missing(f"No broker runs in the ground {options.name}; `python -m ground up rocketmq` starts one")
    try:
        RocketMQ(instance).create_topic(options.topic, options.queues)
    except remoting.Refused as refusal:
        raise Missing(f"The topic {options.topic} was not made: {refusal}") from None
    say(f"topic {options.topic} has {options.queues} queues")


def _locked(name: str) -> AbstractContextManager[None]:
    return cache.locked(home() / f".{checked(name)}.lock", waiting_for=f"the ground {name}")


def _standing(name: str) -> Instance:
    instance = Instance.find(name)
    if not instance:
        raise Missing(f"No ground {name} stands; see `python -m ground status`")
    return instance


def _variables(instance: Instance) -> dict[str, str]:
    path = instance.folder / "variables.json"
    variables: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return variables


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ground", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    for run in (up, down, env, status, topic, build):
        verb = verbs.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        verb.add_argument("--name", default="default", help="which ground (default: %(default)s)")
        verb.set_defaults(run=run)
        if run is up:
            parts = "; ".join(f"{name}: {part.help}" for name, part in PARTS.items())
            verb.add_argument("parts", nargs="*", metavar="PART", help=f"{parts} (default: {', '.join(USUAL)})")
        if run is topic:
            verb.add_argument("topic", metavar="NAME", help="what it is called")
            verb.add_argument("queues", metavar="QUEUES", type=int, help="how many queues it has")
    return parser


if __name__ == "__main__":
    sys.exit(main())
