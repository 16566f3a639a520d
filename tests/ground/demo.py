"""`make demo`: until the operator exists, the ground it is built on, live: a fleet of processes that comes and goes."""

import os
import sys
from pathlib import Path
from threading import Event

from ground.clusters import cluster_of
from ground.controlplane import Cluster
from ground.instance import temporary
from ground.local import LocalNode
from ground.report import plainly, say
from ground.rocketmq import RocketMQ

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "local-app.yaml"


def main() -> int:
    """Stand the ground up, show a fleet on it, take it down."""
    seconds = os.environ.get("DEMO_SECONDS", "0")
    if not seconds.isdigit():
        print(f"demo: DEMO_SECONDS is {seconds!r}; give whole seconds.", file=sys.stderr)
        return 2
    print("Rota's operator is still being built; this is the ground it is built on, all of it real.\n", flush=True)
    return plainly("demo", lambda: run(int(seconds)))


def run(seconds: int) -> None:
    """Do it all in a ground of its own."""
    with temporary("demo") as instance:
        cluster = cluster_of(instance)
        cluster.up()
        LocalNode(instance, cluster).up()
        broker = RocketMQ(instance)
        broker.up()
        broker.create_topic("orders", 8)
        say(f"a RocketMQ name server answers at {broker.name_server}; topic orders has 8 queues")
        show(cluster)
        stay(cluster, seconds)


def show(cluster: Cluster) -> None:
    """Apply the example, scale it, kill a pod, and say what became of it."""
    cluster.kubectl("apply", "-f", str(EXAMPLE))
    fleet(cluster, "three pods, each a process with an address of its own")
    cluster.kubectl("scale", "deployment/hello", "--replicas=6")
    fleet(cluster, "scaled to six")
    victim = cluster.kubectl("get", "pods", "-l", "app=hello", "-o", "name").split()[0]
    cluster.kubectl("delete", victim)
    fleet(cluster, f"{victim} was deleted and replaced")


def fleet(cluster: Cluster, title: str) -> None:
    """Wait until the fleet is whole and print it."""
    cluster.kubectl("rollout", "status", "deployment/hello", "--timeout=120s")
    columns = "NAME:.metadata.name,ADDRESS:.status.podIP,PHASE:.status.phase"
    print(
        f"\n-- {title}\n{cluster.kubectl('get', 'pods', '-l', 'app=hello', '-o', f'custom-columns={columns}')}",
        flush=True,
    )


def stay(cluster: Cluster, seconds: int) -> None:
    """Leave it up for so long, or until Ctrl-C where somebody can press it."""
    if seconds or sys.stdin.isatty():
        until = f"for {seconds} s" if seconds else "until Ctrl-C"
        say(f"KUBECONFIG={cluster.kubeconfig} is yours {until}; then everything is taken down")
        Event().wait(seconds or None)


if __name__ == "__main__":
    sys.exit(main())
