"""The ground itself: start times of the real parts when their programs are cached, and ConfigMap propagation."""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial

from bench.measure import Row, Sample
from ground import java, programs
from ground.api import Api
from ground.cluster import Cluster
from ground.controlplane import ControlPlane
from ground.instance import temporary
from ground.local import LocalNode
from ground.node import RealNode
from ground.poll import eventually
from ground.report import Missing, say
from ground.rocketmq import RocketMQ

# Prints the time at which the mounted file first shows each new content.
WATCH = """
import pathlib, sys, time
file, seen = pathlib.Path(sys.argv[1]), None
while True:
    now = file.read_text()
    if now != seen:
        print(now, time.time(), flush=True)
        seen = now
    time.sleep(0.002)
"""
APART = 2.0  # seconds between pokes
PODS = "/api/v1/namespaces/default/pods"
MAPS = "/api/v1/namespaces/default/configmaps"


def rows() -> Iterator[Row]:
    """Measure start-up from cache, and the delay until a pod sees a changed ConfigMap on both kinds of node."""
    programs.ensure(*programs.CONTROL_PLANE)
    yield Row("control plane, all cached", _measure_starts(ControlPlane, 5), target="≤ 5 s")
    java.java()
    java.jars()
    yield Row("name server and broker, all cached", _measure_starts(RocketMQ, 3), target="≤ 20 s")
    real = _on_real_node()
    local = _on_local_node()
    yield Row("ConfigMap in a pod after an annotation patch: local pod, real node", local, real, "≤ 1 s")


def _measure_starts(part: type[ControlPlane | RocketMQ], runs: int) -> Sample:
    """Time `up` alone, each in a new instance: downloads and builds are cached, and stopping is not measured."""
    seconds = []
    for _ in range(runs):
        with temporary("bench-up") as instance:
            fresh = part(instance)
            began = time.perf_counter()
            fresh.up()
            seconds.append(time.perf_counter() - began)
    return Sample(seconds)


def _on_local_node() -> Sample:
    with temporary("bench") as instance:
        plane = ControlPlane(instance)
        plane.up()
        node = LocalNode(instance, plane)
        node.up()
        log = node.log("default", "watcher", "app")
        return _measure_propagation(plane, "python", node.selector, lambda: log.read_text() if log.exists() else "")


def _on_real_node() -> Sample | None:
    try:
        with temporary("bench-real") as instance:
            node = RealNode(instance)
            node.up()
            return _measure_propagation(
                node, node.build("sidecar"), {}, lambda: node.kubectl("logs", "watcher", check=False)
            )
    except Missing as missing:
        say(f"no real node to compare with: {missing}.")
        return None


def _measure_propagation(cluster: Cluster, image: str, selector: dict[str, str], log: Callable[[], str]) -> Sample:
    """Change a ConfigMap ten times, each with an annotation patch; time each until the pod's process reads it."""
    return Sample(asyncio.run(_delays(cluster, _watcher(image, selector), log)))


async def _delays(cluster: Cluster, spec: dict[str, object], log: Callable[[], str]) -> list[float]:
    async with Api.connect(cluster.kubeconfig) as api:
        await api.create(MAPS, {"metadata": {"name": "watched"}, "data": {"text": "start"}})
        await api.create(PODS, {"metadata": {"name": "watcher"}, "spec": spec})
        eventually(partial(_time_in_log, "start", log))
        delays = []
        for number in range(10):
            # A kubelet checks its containers once a second; a poke right after another waits for that check.
            await asyncio.sleep(APART)
            await api.patch(f"{MAPS}/watched", {"data": {"text": f"text{number}"}})
            patched = time.time()  # the pod prints its own time: the same clock, on one machine
            await api.patch(f"{PODS}/watcher", {"metadata": {"annotations": {"poke": str(number)}}})
            delays.append(eventually(partial(_time_in_log, f"text{number}", log), 120) - patched)
        return delays


def _time_in_log(text: str, log: Callable[[], str]) -> float:
    return _time_shown(text, log())


def _time_shown(text: str, log: str) -> float:
    """Return the time at which the pod read this text, or 0 if it has not yet."""
    return next((float(line.split()[1]) for line in log.splitlines() if line.startswith(f"{text} ")), 0)


def _watcher(image: str, selector: dict[str, str]) -> dict[str, object]:
    container = {
        "name": "app",
        "image": image,
        "command": ["python3", "-c", WATCH, "/watched/text"],
        "volumeMounts": [{"name": "watched", "mountPath": "/watched"}],
    }
    volume = {"name": "watched", "configMap": {"name": "watched"}}
    return {
        "nodeSelector": selector,
        "containers": [container],
        "volumes": [volume],
        "terminationGracePeriodSeconds": 0,
    }
