"""The agent: a Node with its heartbeats, and one task for each pod bound to it."""

import asyncio
import contextlib
import fcntl
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ground.api import GONE, ApiError
from ground.local import processes
from ground.local.containers import Site
from ground.local.pod import Pod
from ground.local.status import stamp
from ground.report import say

Object = dict[str, Any]

LABEL = "rota.dev/ground"
_HEARTBEAT = 10
_LEASE = 40  # the node controller gives a node up after so many seconds without one
_ROOM = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "500"}
_NOT_ASKED = {
    "reason": "NodeNotChosen",
    "message": f"Local pods run with your rights, so only those that ask for it: set nodeSelector {LABEL}",
}


@dataclass(frozen=True)
class Addresses:
    """The pods' addresses, each given out as late after its last use as possible."""

    book: Path
    block: str

    def take(self) -> str:
        """Return the next one; agents that share a book share no address."""
        with self.book.open("a+") as book:
            fcntl.flock(book, fcntl.LOCK_EX)
            book.seek(0)
            number = int(book.read() or 0)
            book.truncate(0)
            book.write(str(number + 1))
        third, fourth = divmod(number % (255 * 254), 254)
        return f"{self.block}.{third + 1}.{fourth + 1}"


async def serve(site: Site, addresses: Addresses) -> None:
    """Be the node until SIGTERM."""
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    mark = f"{site.folder}/"
    await processes.clear(mark)  # of an agent that was killed together with its watcher
    pods: dict[str, Pod] = {}
    tasks: set[asyncio.Task[None]] = set()
    with _watcher(mark):
        working = [
            asyncio.create_task(_follow(site, addresses, pods, tasks)),
            asyncio.create_task(_beat(site)),
            asyncio.create_task(over.wait()),
        ]
        done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        for task in (*working, *tasks):  # first: nothing that happens now is to be reported
            task.cancel()
        await asyncio.gather(*working, *tasks, return_exceptions=True)
        await asyncio.gather(*(pod.shut() for pod in pods.values()))
    for task in done:
        task.result()  # raises if it was a bug that ended us


async def _follow(site: Site, addresses: Addresses, pods: dict[str, Pod], tasks: set[asyncio.Task[None]]) -> None:
    async for event in site.api.follow("/api/v1/pods", fieldSelector=f"spec.nodeName={site.node}"):
        uid = event["object"]["metadata"]["uid"]
        if event["type"] == "DELETED":
            if uid in pods:
                pods.pop(uid).vanish()
        elif uid in pods:
            pods[uid].update(event["object"])
        elif _meant(event["object"], site):
            pods[uid] = Pod(event["object"], addresses.take(), site)
            task = asyncio.create_task(pods[uid].run())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            await _turn_away(event["object"], site)


def _meant(pod: Object, site: Site) -> bool:
    """Whether a pod asked for this node: its commands run with our rights, so nobody's pod runs here by chance."""
    chosen: Object = pod["spec"].get("nodeSelector") or {}
    return LABEL in chosen or chosen.get("kubernetes.io/hostname") == site.node


async def _turn_away(pod: Object, site: Site) -> None:
    """Say why a pod that did not ask for this node does not run, and let it go once it is deleted."""
    metadata, told = pod["metadata"], pod.get("status", {}).get("reason")
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
    with contextlib.suppress(ApiError, *GONE):  # it is told of again with the next change of it
        if "deletionTimestamp" in metadata:
            await site.api.delete(path, {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}})
        elif told != _NOT_ASKED["reason"]:
            await site.api.patch(f"{path}/status", {"metadata": {"uid": metadata["uid"]}, "status": _NOT_ASKED})


@contextlib.contextmanager
def _watcher(mark: str) -> Iterator[None]:
    """Start a process that ends our containers if we cannot."""
    environment = {"ROTA_GROUND": f"{os.environ.get('ROTA_GROUND', '')}-watcher"}
    argv = [sys.executable, "-I", processes.__file__, mark]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment, start_new_session=True) as watcher:
        yield
        watcher.communicate()


async def _beat(site: Site) -> None:
    """Register the node, then renew its Lease and its Ready condition."""
    while True:
        try:
            await _renew(site, await _register(site))
        except (ApiError, *GONE) as trouble:
            say(f"heartbeat of {site.node}: {trouble}")
            await asyncio.sleep(1)
        else:
            await asyncio.sleep(_HEARTBEAT)


async def _register(site: Site) -> Object:
    labels = {"kubernetes.io/hostname": site.node, "kubernetes.io/os": "linux", LABEL: site.label}
    node: Object = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": site.node, "labels": labels}}
    if site.guarded:
        node["spec"] = {"taints": [{"key": LABEL, "value": site.label, "effect": "NoSchedule"}]}
    path = f"/api/v1/nodes/{site.node}"
    try:
        known = await site.api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        known = await site.api.create("/api/v1/nodes", node)
    now = stamp()
    before: Object = next((c for c in (known.get("status") or {}).get("conditions") or [] if c["type"] == "Ready"), {})
    since = before["lastTransitionTime"] if before.get("status") == "True" else now
    ready = {"type": "Ready", "status": "True", "reason": "AgentReady", "message": "local pods can run"}
    status = {
        "capacity": _ROOM,
        "allocatable": _ROOM,
        "addresses": [{"type": "InternalIP", "address": site.address}, {"type": "Hostname", "address": site.node}],
        "conditions": [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": since}],
        "nodeInfo": _about(),
    }
    return await site.api.patch(f"{path}/status", {"metadata": {"labels": labels}, "status": status}, "strategic")


async def _renew(site: Site, node: Object) -> None:
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    owner = {"apiVersion": "v1", "kind": "Node", "name": site.node, "uid": node["metadata"]["uid"]}
    lease = {
        "metadata": {"name": site.node, "ownerReferences": [owner]},
        "spec": {"holderIdentity": site.node, "leaseDurationSeconds": _LEASE, "renewTime": f"{stamp()[:-1]}.000000Z"},
    }
    try:
        await site.api.patch(f"{path}/{site.node}", lease)
    except ApiError as error:
        if error.status != 404:
            raise
        await site.api.create(path, {"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", **lease})


def _about() -> Object:
    """Describe the machine; `bootID` tells one run of the agent from another."""
    return {
        "bootID": boot(os.getpid()),
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        "operatingSystem": "linux",
        "osImage": "plain processes",
        "kernelVersion": platform.release(),
        "containerRuntimeVersion": "local://1",
        "kubeletVersion": "v1.34.3-local",
        "kubeProxyVersion": "",
        "machineID": "",
        "systemUUID": "",
    }


def boot(pid: int) -> str:
    """Return what an agent of that pid writes as its node's bootID."""
    return f"agent-{pid}"
