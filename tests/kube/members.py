"""Simulated members: their pods run nothing; the test's process speaks the sidecar's protocol for all of them.

The API server, its pods and all requests are real. A node that only renews its Lease keeps the pods from being
garbage-collected. Two members that consume a queue concurrently are recorded as an overlap.
"""

import asyncio
import base64
import gzip
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import msgspec
from aiohttp import web
from msgspec.structs import asdict

from ground.api import Api, ApiError, Object
from ground.handlers import cancel_at_cleanup
from ground.poll import soon
from rota.http_server import ServerLimits, listen
from rota.model import Queue
from rota.reports import QueueStatus
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent
from rota.sidecar.status.self_report import QueuesPage
from rota.signing import NONCE_PARAMETER, SIGNATURE_HEADER, SignedRequest, is_request_signed, sign_report
from rota.spec.resolved import settings_digest
from sidecar.whole_report import WholeReport

NODE = "simulated"
PORT, CONTROL_PORT = 9911, 9913
KEY = b"of operators inside of the tests"  # the operator's key in tests, for groups without a Secret
SECRET_READ_SECONDS = 0.5  # the least time between two reads of a group's Secret


@asynccontextmanager
async def a_node(api: Api) -> AsyncIterator[None]:
    """Keep a node Ready that runs no containers."""
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    await api.patch(f"/api/v1/nodes/{NODE}", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}, "apply")
    ready = {"type": "Ready", "status": "True", "reason": "Simulated", "message": "", "lastHeartbeatTime": _time()}
    await api.patch(f"/api/v1/nodes/{NODE}/status", {"status": {"conditions": [ready]}}, "strategic")

    async def beat() -> None:
        while True:
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NODE}}
            spec = {"holderIdentity": NODE, "leaseDurationSeconds": 40, "renewTime": _time()}
            with suppress(ApiError):
                await api.patch(f"{leases}/{NODE}", lease | {"spec": spec}, "apply")
            await asyncio.sleep(5)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()


def _time() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def a_pod(name: str, group: str, *, sidecar: bool = True, signs: bool = True) -> Object:
    """Return a pod with a sidecar; `signs=False`: as earlier versions injected it, without the key."""
    mounts = [{"name": "documents", "mountPath": "/etc/rota"}]
    container: Object = {"name": "rota-sidecar", "image": "rota", "restartPolicy": "Always", "volumeMounts": mounts}
    volumes: list[Object] = [{"name": "documents", "configMap": {"name": f"{group}-rota", "optional": True}}]
    if signs:
        mounts.append({"name": "key", "mountPath": "/etc/rota-key"})
        container["ports"] = [{"name": "rota-control", "containerPort": CONTROL_PORT}]
        volumes.append({"name": "key", "secret": {"secretName": f"{group}-rota-key", "optional": True}})
    return {
        "metadata": {"name": name, "labels": {"rota.dev/group": group}},
        "spec": {
            "nodeName": NODE,
            "terminationGracePeriodSeconds": 60,
            "initContainers": [container] if sidecar else [],
            "containers": [{"name": "app", "image": "app"}],
            "volumes": volumes,
            "tolerations": [{"operator": "Exists"}],
        },
    }


def running_status(address: str, *, ready: bool) -> Object:
    """Return the status that a kubelet writes for a pod whose sidecar runs."""
    container_status = {"name": "rota-sidecar", "started": True, "ready": ready, "state": {"running": {}}}
    container_status |= {"image": "rota", "imageID": "", "restartCount": 0}
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "initContainerStatuses": [container_status],
        "conditions": [{"type": "Ready", "status": str(ready)}],
    }


async def report_response(
    request: web.Request,
    member: Member,
    changed: asyncio.Event,
    troubles: Mapping[str, str] = MappingProxyType({}),
    offsets: Mapping[Queue, int] = MappingProxyType({}),
    *,
    settings: Callable[[], str] = str,
) -> web.Response:
    """Respond with a member's report; a long poll waits until its revision grows, at which `changed` is set."""
    revision = request.query.get("after")
    if revision is not None and int(revision) == member.revision:
        with suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["wait"].removesuffix("s"))):
                while int(revision) == member.revision:
                    changed.clear()
                    await changed.wait()
    report = asdict(member.report()) | {"troubles": {**troubles}, "settings": settings()}
    return web.Response(body=msgspec.json.encode(WholeReport(**report, queues=queue_statuses(offsets))))


def queue_statuses(offsets: Mapping[Queue, int]) -> list[QueueStatus]:
    """Return the progress that a member reports for its queues."""
    return [QueueStatus(*queue, committed, committed, 0, locked=False) for queue, committed in offsets.items()]


class GroupKey:
    """The key of a group as its members mount it: from the group's Secret if that exists, else KEY."""

    def __init__(self, api: Api, namespace: str, group: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/secrets/{group}-rota-key"
        self._key = KEY
        self._next_read_at = 0.0

    async def check(self, request: web.Request, uid: str) -> bytes:
        """Return the key; raise HTTPUnauthorized for a request that is not signed with it."""
        if not self._signed(request, uid):
            await self._read_secret()
            if not self._signed(request, uid):
                raise web.HTTPUnauthorized
        return self._key

    def _signed(self, request: web.Request, uid: str) -> bool:
        signed = SignedRequest(request.method, request.raw_path, uid)
        return is_request_signed([self._key], request.headers.get(SIGNATURE_HEADER, ""), signed)

    async def _read_secret(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._next_read_at:
            self._next_read_at = now + SECRET_READ_SECONDS
            with suppress(ApiError):
                self._key = base64.b64decode((await self._api.get(self._path))["data"]["current"])

    @staticmethod
    def sign(request: web.Request, response: web.Response, key: bytes) -> web.Response:
        """Sign a report."""
        assert isinstance(response.body, bytes)
        response.headers[SIGNATURE_HEADER] = sign_report(key, request.query[NONCE_PARAMETER], response.body)
        return response


class MemberPod:
    """A member and its pod."""

    def __init__(self, fleet: "GroupMembers", name: str, address: str) -> None:
        self.fleet = fleet
        self.name = name
        self.address = address
        self.signs = fleet.signs
        self.uid = ""
        self.member = Member(name, "")
        self.frozen = False  # whether it processes no documents and no responses to commands
        self.silent = False  # whether it accepts requests for its report, and never answers
        self.ignores_pokes = False  # whether neither pokes nor sent assignments have an effect
        self.has_old_volume = False  # whether the kubelet does not update the volume: pokes have no effect
        self.forged = False  # whether its reports lack a signature, as those of another server at its address
        self.troubles: dict[str, str] = {}
        self.offsets: dict[Queue, int] = {}  # committed offsets; of a member of a Broadcasting group only
        self._settings = ""  # digest of the settings that it has read
        self.drain_seconds = 0.0  # how long draining a queue takes
        self._stopping: list[Command] = []
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._poke = ""

    async def start(self, *, ready: bool = True) -> None:
        """Create the pod, serve its report, and become ready."""
        pod = a_pod(self.name, self.fleet.group, signs=self.signs)
        created_pod = await self.fleet.api.create(f"{self.fleet.namespaced}/pods", pod)
        await self.adopt_pod(created_pod["metadata"]["uid"], ready=ready)

    async def adopt_pod(self, uid: str, *, ready: bool = True) -> None:
        """Serve the report of an existing pod, and become ready."""
        self.uid = uid
        group = f"{self.fleet.namespace}/{self.fleet.group}"
        self.member = Member(self.name, self.uid, group=group)
        app = web.Application()
        app.add_routes([web.get("/v1/report", self._report), web.post("/v1/drain", self._drain)])
        signed_routes = [
            web.get("/v1/report/queues", self._queues),
            web.put("/v1/assignment", self._receive_assignment),
        ]
        app.add_routes(signed_routes if self.signs else [])
        cancel_at_cleanup(app)
        port = CONTROL_PORT if self.signs else PORT
        self._runner = await listen(app, self.address, port, limits=ServerLimits(shutdown_seconds=0.1))
        await self.write_status(ready=ready)

    async def write_status(self, *, ready: bool) -> None:
        """Write the pod's status as a kubelet does."""
        status = running_status(self.address, ready=ready)
        await self.fleet.api.patch(f"{self.path}/status", {"status": status}, "strategic")

    @property
    def path(self) -> str:
        """The path of its pod."""
        return f"{self.fleet.namespaced}/pods/{self.name}"

    @property
    def client_id(self) -> str:
        """Its client id at brokers."""
        return f"{self.address}@{self.name}#{self.uid[:8]}"

    async def kill(self) -> None:
        """Stop at once, as a killed process does, and delete the pod."""
        await self.stop_server()
        self.fleet.mark_ended(self.name)
        await self.force_delete()

    async def force_delete(self) -> None:
        """Delete the pod by force: the API server forgets it although its process may still run."""
        with suppress(ApiError):
            await self.fleet.api.delete(self.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})

    async def stop_server(self) -> None:
        """Stop responding and stop processing commands."""
        self.frozen = True
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    def hang(self) -> None:
        """Stop processing as a suspended process does: connections are accepted, requests are never answered."""
        self.frozen = self.silent = True

    async def delete_pod(self) -> None:
        """Delete the pod gracefully; the member drains when the operator asks it to."""
        await self.fleet.api.delete(self.path)

    def on_pod_update(self, pod: Object) -> None:
        """Read the assignment if the poke annotation changed: the kubelet has updated the mounted ConfigMap."""
        poke = (pod["metadata"].get("annotations") or {}).get("rota.dev/generation", "")
        if poke != self._poke and "deletionTimestamp" not in pod["metadata"]:
            self._poke = poke
            if not self.ignores_pokes and not self.has_old_volume:
                self.apply_document()

    def set_broker_reachability(self, **brokers: bool) -> None:
        """Report for each broker whether the member reaches it."""
        self.member.set_broker_reachability(brokers)
        self._changed.set()

    def apply_document(self) -> None:
        """Apply the assignment that the volume shows now."""
        if not self.frozen:
            self._settings = self.fleet.settings
            self.run_effects(self.member.apply_assignment(self.fleet.text, self._now))

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def run_effects(self, step: Effects) -> None:
        """Run the commands of the state machine; all of them succeed."""
        loop = asyncio.get_running_loop()
        for command in step.commands:
            match command.action:
                case LeaseAction.FETCH:
                    self.fleet.on_fetch_started(self.name, command.queue)
                case LeaseAction.FIND_START:
                    loop.call_soon(self._send_event, command, LeaseEvent.START_FOUND)
                case LeaseAction.LOCK:
                    loop.call_soon(self._send_event, command, LeaseEvent.LOCKED, self._now)
                case LeaseAction.STOP:
                    self._stopping.append(command)
                    loop.call_later(self.drain_seconds, self._send_event, command, LeaseEvent.DRAINED)
                case LeaseAction.ABORT:
                    loop.call_soon(self._send_event, command, LeaseEvent.DRAINED)
                case LeaseAction.UNLOCK:
                    loop.call_soon(self._send_event, command, LeaseEvent.UNLOCKED)
        self._changed.set()

    def finish_drains(self) -> None:
        """Complete the drains of revoked queues now."""
        for command in self._stopping:
            self._send_event(command, LeaseEvent.DRAINED)

    def _send_event(self, command: Command, event: LeaseEvent, sent: float | None = None) -> None:
        if self.frozen:
            return
        if event is LeaseEvent.DRAINED:
            self.fleet.on_fetch_stopped(self.name, command.queue)
        self.run_effects(self.member.on_event(event, command.queue, command.lease_number, self._now, sent))

    async def _report(self, request: web.Request) -> web.Response:
        self.fleet.reads += 1
        if self.silent:
            await asyncio.Event().wait()  # until the request is cancelled
        key = await self.fleet.key.check(request, self.uid) if self.signs else None
        offsets = {} if self.signs else self.offsets
        response = await report_response(
            request, self.member, self._changed, self.troubles, offsets, settings=lambda: self._settings
        )
        return self.fleet.key.sign(request, response, key) if key and not self.forged else response

    async def _queues(self, request: web.Request) -> web.Response:
        """Respond with one page per queue, in turn."""
        key = await self.fleet.key.check(request, self.uid)
        start = int(request.query["from"])
        end = start + 1
        page = QueuesPage(queue_statuses(self.offsets)[start:end], end if end < len(self.offsets) else None)
        return self.fleet.key.sign(request, web.Response(body=msgspec.json.encode(page)), key)

    async def _receive_assignment(self, request: web.Request) -> web.Response:
        await self.fleet.key.check(request, self.uid)
        body = await request.read()
        assert request.query["sha256"] == hashlib.sha256(body).hexdigest()
        if request.query["settings"] == self._settings and not self.frozen and not self.ignores_pokes:
            self.run_effects(self.member.apply_sent_assignment(body, self._now))
        return web.Response(status=204)

    async def _drain(self, request: web.Request) -> web.Response:
        if self.signs:
            await self.fleet.key.check(request, self.uid)
        else:
            assert (await request.json())["uid"] == self.uid
        self.run_effects(self.member.drain(final=True, now=self._now))
        while self._runner and not self.member.report().is_drained:  # noqa: ASYNC110 - polls clear the event
            await asyncio.sleep(0.05)
        return web.Response()


class GroupMembers:
    """The members of one group."""

    def __init__(self, api: Api, namespace: str, group: str, addresses: Callable[[], str]) -> None:
        self.api = api
        self.namespace = namespace
        self.group = group
        self.addresses = addresses
        self.namespaced = f"/api/v1/namespaces/{namespace}"
        self.signs = True  # False: members of earlier versions
        self.key = GroupKey(api, namespace, group)
        self.members: dict[str, MemberPod] = {}
        self.text: str | bytes | None = None
        self.settings = ""  # the digest of the group's settings
        self.documents: list[Object] = []  # every assignment that was observed
        self.reads = 0
        self.is_broadcasting = False  # whether every member consumes every queue
        self._consumers: dict[Queue, str] = {}
        self.overlaps: list[str] = []
        self._following: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._following = [asyncio.create_task(self._follow_assignment()), asyncio.create_task(self._follow_pods())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._following:
            task.cancel()
        for member in self.members.values():
            await member.kill()
        assert not self.overlaps, self.overlaps

    async def add(self, *names: str) -> None:
        """Add members."""
        members = [MemberPod(self, name, self.addresses()) for name in names]
        self.members |= {member.name: member for member in members}
        await asyncio.gather(*(member.start() for member in members))

    async def adopt_pods(self, *names: str) -> None:
        """Serve pods that another client creates, as soon as each exists."""
        for name in names:
            member = self.members[name] = MemberPod(self, name, self.addresses())
            await member.adopt_pod(await soon(partial(self._pod_uid, member.path), 60))

    async def _pod_uid(self, path: str) -> str:
        try:
            return str((await self.api.get(path))["metadata"]["uid"])
        except ApiError as error:
            if error.status != 404:
                raise
            return ""

    async def _follow_assignment(self) -> None:
        only = f"metadata.name={self.group}-rota"
        async for event in self.api.follow(f"{self.namespaced}/configmaps", fieldSelector=only):
            body = event["object"]
            if event["type"] == "DELETED":
                continue  # a mounted file outlives its ConfigMap
            packed = (body.get("binaryData") or {}).get("assignment.json.gz")
            data = body.get("data") or {}
            self.settings = settings_digest(data.get("group.json", ""))
            self.text = base64.b64decode(packed) if packed else data.get("assignment.json", "")
            plain = gzip.decompress(self.text) if isinstance(self.text, bytes) else self.text
            with suppress(ValueError):
                self.documents.append(msgspec.json.decode(plain))

    async def _follow_pods(self) -> None:
        async for event in self.api.follow(f"{self.namespaced}/pods"):  # without a label selector, as a kubelet
            member = self.members.get(event["object"]["metadata"]["name"])
            if member and event["object"]["metadata"]["uid"] == member.uid and event["type"] != "DELETED":
                member.on_pod_update(event["object"])

    # Which member consumes which queue.

    def on_fetch_started(self, name: str, queue: Queue) -> None:
        """Record that a member starts consuming a queue."""
        current_owner = self._consumers.get(queue)
        if current_owner not in {None, name} and not self.is_broadcasting:
            self.overlaps.append(f"{queue} is consumed by {current_owner} and {name}")
        self._consumers[queue] = name

    def on_fetch_stopped(self, name: str, queue: Queue) -> None:
        """Record that a member has stopped consuming a queue."""
        if self._consumers.get(queue) == name:
            del self._consumers[queue]

    def mark_ended(self, name: str) -> None:
        """Record that a member's process has ended."""
        self._consumers = {queue: who for queue, who in self._consumers.items() if who != name}

    def queues_of(self, name: str) -> list[Queue]:
        """Return the queues that a member consumes."""
        return sorted(queue for queue, who in self._consumers.items() if who == name)

    @property
    def shares(self) -> dict[str, int]:
        """How many queues each member consumes now."""
        counts = dict.fromkeys(self.members, 0)
        for owner in self._consumers.values():
            counts[owner] = counts.get(owner, 0) + 1
        return {name: count for name, count in counts.items() if count or name in self.members}

    def owners(self) -> dict[str, Any]:
        """Return the consuming member of each queue, for comparisons."""
        return {str(queue): who for queue, who in sorted(self._consumers.items())}
