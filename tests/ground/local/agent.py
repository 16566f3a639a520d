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
from ground.local.status import timestamp
from ground.report import say

Object = dict[str, Any]

LABEL = "rota.dev/ground"
_HEARTBEAT = 10
_LEASE = 40  # seconds without a renewal until the node controller marks the node as not ready
_ROOM = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "500"}
_NOT_SELECTED = {
    "reason": "NodeNotChosen",
    "message": f"Local pods run with your rights, so only those that ask for it: set nodeSelector {LABEL}",
}


@dataclass(frozen=True)
class Addresses:
    """The pods' addresses; each is reused as late as possible."""

    book: Path
    block: str

    def take(self) -> str:
        """Return the next address; agents that share a book share no address."""
        with self.book.open("a+") as book:
            fcntl.flock(book, fcntl.LOCK_EX)
            book.seek(0)
            number = int(book.read() or 0)
            book.truncate(0)
            book.write(str(number + 1))
        third, fourth = divmod(number % (255 * 254), 254)
        return f"{self.block}.{third + 1}.{fourth + 1}"


async def serve(site: Site, addresses: Addresses) -> None:
    """Act as the node until SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    mark = f"{site.folder}/"
    await processes.kill_all(mark)  # processes of an agent that was killed together with its watcher
    pods: dict[str, Pod] = {}
    tasks: set[asyncio.Task[None]] = set()
    with _watcher(mark):
        own_tasks = [
            asyncio.create_task(_follow(site, addresses, pods, tasks)),
            asyncio.create_task(_send_heartbeats(site)),
            asyncio.create_task(stopped.wait()),
        ]
        done, _ = await asyncio.wait(own_tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in (*own_tasks, *tasks):  # before the pods end: their end must not be reported
            task.cancel()
        await asyncio.gather(*own_tasks, *tasks, return_exceptions=True)
        await asyncio.gather(*(pod.shut_down() for pod in pods.values()))
    for task in done:
        task.result()  # raises the error if a bug has ended the agent


async def _follow(site: Site, addresses: Addresses, pods: dict[str, Pod], tasks: set[asyncio.Task[None]]) -> None:
    async for event in site.api.follow("/api/v1/pods", fieldSelector=f"spec.nodeName={site.node}"):
        uid = event["object"]["metadata"]["uid"]
        if event["type"] == "DELETED":
            if uid in pods:
                pods.pop(uid).on_object_deleted()
        elif uid in pods:
            pods[uid].update(event["object"])
        elif _selects_node(event["object"], site):
            pods[uid] = Pod(event["object"], addresses.take(), site)
            task = asyncio.create_task(pods[uid].run())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            await _reject(event["object"], site)


def _selects_node(pod: Object, site: Site) -> bool:
    """Whether a pod selects this node: its commands run with our rights, so no pod may run here by chance."""
    selector: Object = pod["spec"].get("nodeSelector") or {}
    return LABEL in selector or selector.get("kubernetes.io/hostname") == site.node


async def _reject(pod: Object, site: Site) -> None:
    """Report why a pod that did not select this node does not run, and delete its object once it is to be deleted."""
    metadata = pod["metadata"]
    reason = pod.get("status", {}).get("reason")
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
    with contextlib.suppress(ApiError, *GONE):  # a failed request is repeated at the pod's next change
        if "deletionTimestamp" in metadata:
            await site.api.delete(path, {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}})
        elif reason != _NOT_SELECTED["reason"]:
            await site.api.patch(f"{path}/status", {"metadata": {"uid": metadata["uid"]}, "status": _NOT_SELECTED})


@contextlib.contextmanager
def _watcher(mark: str) -> Iterator[None]:
    """Start a process that kills our containers if we cannot."""
    environment = {"ROTA_GROUND": f"{os.environ.get('ROTA_GROUND', '')}-watcher"}
    argv = [sys.executable, "-I", processes.__file__, mark]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment, start_new_session=True) as watcher:
        yield
        watcher.communicate()


async def _send_heartbeats(site: Site) -> None:
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
        registered = await site.api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        registered = await site.api.create("/api/v1/nodes", node)
    now = timestamp()
    conditions = (registered.get("status") or {}).get("conditions") or []
    previous: Object = next((condition for condition in conditions if condition["type"] == "Ready"), {})
    since = previous["lastTransitionTime"] if previous.get("status") == "True" else now
    ready = {"type": "Ready", "status": "True", "reason": "AgentReady", "message": "local pods can run"}
    status = {
        "capacity": _ROOM,
        "allocatable": _ROOM,
        "addresses": [{"type": "InternalIP", "address": site.address}, {"type": "Hostname", "address": site.node}],
        "conditions": [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": since}],
        "nodeInfo": _node_info(),
    }
    return await site.api.patch(f"{path}/status", {"metadata": {"labels": labels}, "status": status}, "strategic")


async def _renew(site: Site, node: Object) -> None:
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    owner = {"apiVersion": "v1", "kind": "Node", "name": site.node, "uid": node["metadata"]["uid"]}
    now = f"{timestamp()[:-1]}.000000Z"
    lease = {
        "metadata": {"name": site.node, "ownerReferences": [owner]},
        "spec": {"holderIdentity": site.node, "leaseDurationSeconds": _LEASE, "renewTime": now},
    }
    try:
        await site.api.patch(f"{path}/{site.node}", lease)
    except ApiError as error:
        if error.status != 404:
            raise
        await site.api.create(path, {"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", **lease})


def _node_info() -> Object:
    """Describe the machine; `bootID` distinguishes the runs of the agent."""
    return {
        "bootID": boot_id(os.getpid()),
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


def boot_id(pid: int) -> str:
    """Return the bootID of the node whose agent has this pid."""
    return f"agent-{pid}"
