"""Members without pods: one process answers for all of them, as sidecars would, and obeys as sidecars do.

The API server, the pods in it and all requests are real; a node that only gives signs of life keeps them from being
collected. Who works a queue that another one works is found at once.
"""

import asyncio
import base64
import gzip
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
KEY = b"of operators inside of the tests"  # whose groups have no Secret
LOOK_SECONDS = 0.5  # between two looks for a group's Secret


@asynccontextmanager
async def a_node(api: Api) -> AsyncIterator[None]:
    """Keep a node that runs nothing alive."""
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
    """Return a pod that carries a sidecar; one that does not sign is as earlier versions made it."""
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
    """Return the status that a kubelet writes of a pod whose sidecar runs."""
    running = {"name": "rota-sidecar", "started": True, "ready": ready, "state": {"running": {}}}
    running |= {"image": "rota", "imageID": "", "restartCount": 0}
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "initContainerStatuses": [running],
        "conditions": [{"type": "Ready", "status": str(ready)}],
    }


async def reported(
    asked: web.Request,
    member: Member,
    changed: asyncio.Event,
    troubles: Mapping[str, str] = MappingProxyType({}),
    offsets: Mapping[Queue, int] = MappingProxyType({}),
    *,
    settings: Callable[[], str] = str,
) -> web.Response:
    """Answer with a member's report, by long poll if that is asked for; `changed` is set with every change of it."""
    after = asked.query.get("after")
    if after is not None and int(after) == member.revision:
        with suppress(TimeoutError):
            async with asyncio.timeout(float(asked.query["wait"].removesuffix("s"))):
                while int(after) == member.revision:
                    changed.clear()
                    await changed.wait()
    said = asdict(member.report()) | {"troubles": {**troubles}, "settings": settings()}
    return web.Response(body=msgspec.json.encode(WholeReport(**said, queues=worked(offsets))))


def worked(offsets: Mapping[Queue, int]) -> list[QueueStatus]:
    """Return what a member says of its queues."""
    return [QueueStatus(*queue, committed, committed, 0, locked=False) for queue, committed in offsets.items()]


class GroupKey:
    """The key of a group, as its members have it: that in the group's Secret, once there is one, else KEY."""

    def __init__(self, api: Api, namespace: str, group: str) -> None:
        self._api, self._path = api, f"/api/v1/namespaces/{namespace}/secrets/{group}-rota-key"
        self._key = KEY
        self._look_again = 0.0

    async def check(self, request: web.Request, uid: str) -> bytes:
        """Return the key; raise the error for a request that is not signed with it."""
        if not self._signed(request, uid):
            await self._look()
            if not self._signed(request, uid):
                raise web.HTTPUnauthorized
        return self._key

    def _signed(self, request: web.Request, uid: str) -> bool:
        signed = SignedRequest(request.method, request.raw_path, uid)
        return is_request_signed([self._key], request.headers.get(SIGNATURE_HEADER, ""), signed)

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._look_again:
            self._look_again = now + LOOK_SECONDS
            with suppress(ApiError):
                self._key = base64.b64decode((await self._api.get(self._path))["data"]["current"])

    @staticmethod
    def sign(request: web.Request, response: web.Response, key: bytes) -> web.Response:
        """Sign a report."""
        assert isinstance(response.body, bytes)
        response.headers[SIGNATURE_HEADER] = sign_report(key, request.query[NONCE_PARAMETER], response.body)
        return response


class One:
    """A member and its pod."""

    def __init__(self, fleet: "GroupMembers", name: str, address: str) -> None:
        self.fleet, self.name, self.address = fleet, name, address
        self.signs = fleet.signs
        self.uid = ""
        self.member = Member(name, "")
        self.frozen = False
        self.silent = False
        self.deaf = False  # to pokes
        self.forged = False  # whether its reports are not signed, as those of somebody else at its address
        self.troubles: dict[str, str] = {}
        self.offsets: dict[Queue, int] = {}  # of a Broadcasting group's member
        self._settings = ""  # the digest of those that it was shown
        self.takes = 0.0  # seconds that what is open takes to end
        self._stopping: list[Command] = []
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._poke = ""

    async def start(self, *, ready: bool = True) -> None:
        """Make the pod, answer at its address, and become ready."""
        pod = a_pod(self.name, self.fleet.group, signs=self.signs)
        made = await self.fleet.api.create(f"{self.fleet.namespaced}/pods", pod)
        await self.move_in(made["metadata"]["uid"], ready=ready)

    async def move_in(self, uid: str, *, ready: bool = True) -> None:
        """Answer at the address of a pod that is there, and become ready."""
        self.uid = uid
        group = f"{self.fleet.namespace}/{self.fleet.group}"
        self.member = Member(self.name, self.uid, group=group)
        app = web.Application()
        app.add_routes([web.get("/v1/report", self._report), web.post("/v1/drain", self._drain)])
        app.add_routes([web.get("/v1/report/queues", self._queues)] if self.signs else [])
        cancel_at_cleanup(app)
        port = CONTROL_PORT if self.signs else PORT
        self._runner = await listen(
            app, self.address, port, limits=ServerLimits(shutdown_seconds=0.1)
        )  # it is gone, whoever waits
        await self.becomes(ready=ready)

    async def becomes(self, *, ready: bool) -> None:
        """Write the pod's status as a kubelet does."""
        status = running_status(self.address, ready=ready)
        await self.fleet.api.patch(f"{self.path}/status", {"status": status}, "strategic")

    @property
    def path(self) -> str:
        """Where its pod is."""
        return f"{self.fleet.namespaced}/pods/{self.name}"

    @property
    def client_id(self) -> str:
        """By which brokers know it."""
        return f"{self.address}@{self.name}#{self.uid[:8]}"

    async def end(self) -> None:
        """Be gone, as a process is that was killed; the pod goes, too."""
        await self.hush()
        self.fleet.ended(self.name)
        await self.vanish()

    async def vanish(self) -> None:
        """Have the pod deleted by force: whatever its process does, the API server knows it no more."""
        with suppress(ApiError):
            await self.fleet.api.delete(self.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})

    async def hush(self) -> None:
        """Answer nobody any more."""
        self.frozen = True
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    def hang(self) -> None:
        """Stand still, as a process is that was stopped: whoever asks waits in vain."""
        self.frozen = self.silent = True

    async def leave(self) -> None:
        """Have the pod deleted by somebody; it drains when it is asked to."""
        await self.fleet.api.delete(self.path)

    def poked(self, pod: Object) -> None:
        """Notice that the pod's annotation changed: its volume shows the newest document now."""
        poke = (pod["metadata"].get("annotations") or {}).get("rota.dev/generation", "")
        if poke != self._poke and "deletionTimestamp" not in pod["metadata"]:
            self._poke = poke
            if not self.deaf:
                self.look()

    def reaches(self, **brokers: bool) -> None:
        """Say of brokers whether it reaches them."""
        self.member.set_broker_reachability(brokers)
        self._changed.set()

    def look(self) -> None:
        """Read the document."""
        if not self.frozen:
            self._settings = self.fleet.settings
            self.carry(self.member.apply_assignment(self.fleet.text, self._now))

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def carry(self, step: Effects) -> None:
        """Do what the member says; all of it succeeds."""
        loop = asyncio.get_running_loop()
        for command in step.commands:
            match command.action:
                case LeaseAction.FETCH:
                    self.fleet.fetches(self.name, command.queue)
                case LeaseAction.FIND_START:
                    loop.call_soon(self._answer, command, LeaseEvent.START_FOUND)
                case LeaseAction.LOCK:
                    loop.call_soon(self._answer, command, LeaseEvent.LOCKED, self._now)
                case LeaseAction.STOP:
                    self._stopping.append(command)
                    loop.call_later(self.takes, self._answer, command, LeaseEvent.DRAINED)
                case LeaseAction.ABORT:
                    loop.call_soon(self._answer, command, LeaseEvent.DRAINED)
                case LeaseAction.UNLOCK:
                    loop.call_soon(self._answer, command, LeaseEvent.UNLOCKED)
        self._changed.set()

    def finish(self) -> None:
        """End what is open in queues that were taken away."""
        for command in self._stopping:
            self._answer(command, LeaseEvent.DRAINED)

    def _answer(self, command: Command, event: LeaseEvent, sent: float | None = None) -> None:
        if self.frozen:
            return
        if event is LeaseEvent.DRAINED:
            self.fleet.stopped(self.name, command.queue)
        self.carry(self.member.on_event(event, command.queue, command.lease_number, self._now, sent))

    async def _report(self, asked: web.Request) -> web.Response:
        self.fleet.reads += 1
        if self.silent:
            await asyncio.Event().wait()  # until it is cancelled
        key = await self.fleet.key.check(asked, self.uid) if self.signs else None
        offsets = {} if self.signs else self.offsets
        response = await reported(
            asked, self.member, self._changed, self.troubles, offsets, settings=lambda: self._settings
        )
        return self.fleet.key.sign(asked, response, key) if key and not self.forged else response

    async def _queues(self, asked: web.Request) -> web.Response:
        """Say of one queue after the other how far it is."""
        key, start = await self.fleet.key.check(asked, self.uid), int(asked.query["from"])
        page = QueuesPage(worked(self.offsets)[start : start + 1], start + 1 if start + 1 < len(self.offsets) else None)
        return self.fleet.key.sign(asked, web.Response(body=msgspec.json.encode(page)), key)

    async def _drain(self, asked: web.Request) -> web.Response:
        if self.signs:
            await self.fleet.key.check(asked, self.uid)
        else:
            assert (await asked.json())["uid"] == self.uid
        self.carry(self.member.drain(final=True, now=self._now))
        while self._runner and not self.member.report().is_drained:  # noqa: ASYNC110 - polls clear the event
            await asyncio.sleep(0.05)
        return web.Response()


class GroupMembers:
    """The members of one group."""

    def __init__(self, api: Api, namespace: str, group: str, addresses: Callable[[], str]) -> None:
        self.api, self.namespace, self.group, self.addresses = api, namespace, group, addresses
        self.namespaced = f"/api/v1/namespaces/{namespace}"
        self.signs = True  # False: as members of earlier versions
        self.key = GroupKey(api, namespace, group)
        self.members: dict[str, One] = {}
        self.text: str | bytes | None = None
        self.settings = ""  # the digest of the group's settings
        self.version = ""
        self.documents: list[Object] = []  # every document that was seen
        self.reads = 0
        self.everyone = False  # whether everybody works every queue
        self._works: dict[Queue, str] = {}
        self.overlaps: list[str] = []
        self._following: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._following = [asyncio.create_task(self._follow_record()), asyncio.create_task(self._follow_pods())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._following:
            task.cancel()
        for one in self.members.values():
            await one.end()
        assert not self.overlaps, self.overlaps

    async def add(self, *names: str) -> None:
        """Add members."""
        made = [One(self, name, self.addresses()) for name in names]
        self.members |= {one.name: one for one in made}
        await asyncio.gather(*(one.start() for one in made))

    async def move_in(self, *names: str) -> None:
        """Add members in pods that somebody else makes, as soon as each is there."""
        for name in names:
            one = self.members[name] = One(self, name, self.addresses())
            await one.move_in(await soon(partial(self._made, one.path), 60))

    async def _made(self, path: str) -> str:
        try:
            return str((await self.api.get(path))["metadata"]["uid"])
        except ApiError as error:
            if error.status != 404:
                raise
            return ""

    async def _follow_record(self) -> None:
        only = f"metadata.name={self.group}-rota"
        async for event in self.api.follow(f"{self.namespaced}/configmaps", fieldSelector=only):
            body = event["object"]
            if event["type"] == "DELETED":
                continue  # a mounted file stays
            packed = (body.get("binaryData") or {}).get("assignment.json.gz")
            data = body.get("data") or {}
            self.settings = settings_digest(data.get("group.json", ""))
            self.text = base64.b64decode(packed) if packed else data.get("assignment.json", "")
            plain = gzip.decompress(self.text) if isinstance(self.text, bytes) else self.text
            with suppress(ValueError):
                self.documents.append(msgspec.json.decode(plain))

    async def _follow_pods(self) -> None:
        async for event in self.api.follow(f"{self.namespaced}/pods"):  # a kubelet does not care for labels
            one = self.members.get(event["object"]["metadata"]["name"])
            if one and event["object"]["metadata"]["uid"] == one.uid and event["type"] != "DELETED":
                one.poked(event["object"])

    # Who works what.

    def fetches(self, name: str, queue: Queue) -> None:
        """Note that somebody begins to work a queue."""
        other = self._works.get(queue)
        if other not in {None, name} and not self.everyone:
            self.overlaps.append(f"{queue} is worked by {other} and {name}")
        self._works[queue] = name

    def stopped(self, name: str, queue: Queue) -> None:
        """Note that somebody works a queue no more."""
        if self._works.get(queue) == name:
            del self._works[queue]

    def ended(self, name: str) -> None:
        """Note that somebody is no more."""
        self._works = {queue: who for queue, who in self._works.items() if who != name}

    def worked_by(self, name: str) -> list[Queue]:
        """Return what somebody works."""
        return sorted(queue for queue, who in self._works.items() if who == name)

    @property
    def shares(self) -> dict[str, int]:
        """How many queues each member works now."""
        found = dict.fromkeys(self.members, 0)
        for who in self._works.values():
            found[who] = found.get(who, 0) + 1
        return {name: count for name, count in found.items() if count or name in self.members}

    def as_value(self) -> dict[str, Any]:
        """Return what can be compared: who works what."""
        return {str(queue): who for queue, who in sorted(self._works.items())}
