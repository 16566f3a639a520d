"""`make demo`: Rota's main job, live: a fleet that consumes, and is scaled and replaced under load; all of it real."""

import json
import os
import re
import sys
import time
from pathlib import Path
from threading import Event

from ground import peers
from ground.clusters import cluster_of
from ground.controlplane import Cluster
from ground.instance import temporary
from ground.local import LocalNode
from ground.ours import at_rest
from ground.peers import Peer
from ground.poll import eventually
from ground.report import plainly, say
from ground.rocketmq import RocketMQ

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/ground/fleet.yaml"
GROUP, QUEUES, RATE, SECONDS = "orders", 8, 100, 60
PATIENCE = 120


def main() -> int:
    """Stand the ground up, show a fleet on it, take it down."""
    seconds = os.environ.get("DEMO_SECONDS", "0")
    if not seconds.isdigit():
        print(f"demo: DEMO_SECONDS is {seconds!r}; give whole seconds.", file=sys.stderr)
        return 2
    return plainly("demo", lambda: run(int(seconds)))


def run(seconds: int) -> None:
    """Do it all in a ground of its own."""
    with temporary("demo") as instance:
        cluster = cluster_of(instance)
        cluster.up()
        LocalNode(instance, cluster).up()
        broker = RocketMQ(instance)
        broker.up()
        broker.create_topic(GROUP, QUEUES)
        cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        cluster.kubectl("wait", "--for=condition=Established", "crd", "-l", "!none", "--timeout=60s")
        argv = [sys.executable, "-m", "rota.cli", "operator", "--address", instance.address(99)]
        instance.start("operator", argv, env={"KUBECONFIG": str(cluster.kubeconfig)})
        show(cluster, broker)
        stay(cluster, seconds)


def show(cluster: Cluster, broker: RocketMQ) -> None:
    """Apply the example, scale it under load, end a pod, and say what became of the messages."""
    cluster.kubectl("apply", "-f", "-", feed=EXAMPLE.read_text().replace("rmq-namesrv:9876", broker.name_server))
    fleet(cluster, 2, f"two members share {QUEUES} queues")
    producer = peers.producer(broker, GROUP, RATE * SECONDS, rate=RATE)
    say(f"{RATE} messages a second are being sent")
    cluster.kubectl("scale", f"cg/{GROUP}", "--replicas=4")
    fleet(cluster, 4, "scaled to four: only what must move has moved")
    victim = cluster.kubectl("get", "pods", "-l", f"rota.dev/group={GROUP}", "-o", "name").split()[0]
    cluster.kubectl("delete", victim)
    fleet(cluster, 4, f"{victim} was deleted, and another one has come")
    cluster.kubectl("scale", f"cg/{GROUP}", "--replicas=1")
    fleet(cluster, 1, "scaled to one: it has them all")
    end(cluster, broker, producer)


def fleet(cluster: Cluster, members: int, title: str) -> None:
    """Wait until the fleet is whole and at rest, and print who works what."""
    eventually(lambda: _at_rest(cluster, members), PATIENCE)
    print(f"\n-- {title}\n{cluster.kubectl('get', 'cg', GROUP, '-o', 'wide')}", flush=True)
    record = json.loads(cluster.kubectl("get", "configmap", f"{GROUP}-rota", "-o", "json"))
    document = json.loads(record["data"]["assignment.json"])
    for name, share in document["members"].items():
        queues = ", ".join(ids for ids in share["queues"].get(GROUP, {}).values()) or "none"
        print(f"{name}: queues {queues}, by generation {document['generation']}", flush=True)


def _at_rest(cluster: Cluster, members: int) -> bool:
    group = json.loads(cluster.kubectl("get", "cg", GROUP, "-o", "json"))
    pods = cluster.kubectl("get", "pods", "-l", f"rota.dev/group={GROUP}", "-o", "name").split()
    return at_rest(group, members) and members == len(pods)


def end(cluster: Cluster, broker: RocketMQ, producer: Peer) -> None:
    """Wait until everything was sent and worked, and let RocketMQ's own tool say so."""
    eventually(lambda: producer.done, PATIENCE)
    time.sleep(6)  # offsets are committed every five seconds
    told = broker.mqadmin("consumerProgress", "-g", GROUP)
    total = re.search(r"Consume Diff Total: (\d+)", told)
    left = total[1] if total else "?"
    print(f"\n-- {RATE * SECONDS} messages were sent meanwhile; mqadmin sees {left} that nobody has worked\n{told}")
    print(cluster.kubectl("describe", "cg", GROUP), flush=True)


def stay(cluster: Cluster, seconds: int) -> None:
    """Leave it up for so long, or until Ctrl-C where somebody can press it."""
    if seconds or sys.stdin.isatty():
        until = f"for {seconds} s" if seconds else "until Ctrl-C"
        say(f"KUBECONFIG={cluster.kubeconfig} is yours {until}; then everything is taken down")
        Event().wait(seconds or None)


if __name__ == "__main__":
    sys.exit(main())
