"""Simulates ten thousand members in one process: kwok runs their pods, and one socket serves all their reports.

They obey assignments as sidecars do (by the same state machine), immediately and on every poke. One watch follows the
ConfigMaps, another one the pods.
"""

import asyncio
import base64
import socket
from collections import defaultdict
from collections.abc import Iterable
from typing import Self

import msgspec
from aiohttp import web

from ground.api import Api, Object
from kube.members import CONTROL_PORT, GroupKey, report_response
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import LeaseAction, LeaseEvent

LABEL = "rota.dev/group"
_ON_LOOPBACK = b"lo\0"


class _SimulatedMember:
    """A member whose queues start and drain without delay."""

    def __init__(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        uid = pod["metadata"]["uid"]
        self.group = str(pod["metadata"]["labels"][LABEL])
        self.uid = uid
        self.logic = Member(name, uid, group=f"{pod['metadata']['namespace']}/{self.group}")
        self.address = ""
        self.poke = ""
        self.changed = asyncio.Event()

    def apply_effects(self, effects: Effects, now: float) -> None:
        for command in effects.commands:
            event = {
                LeaseAction.FIND_START: LeaseEvent.START_FOUND,
                LeaseAction.STOP: LeaseEvent.DRAINED,
                LeaseAction.UNLOCK: LeaseEvent.UNLOCKED,
            }.get(command.action)
            if event:
                self.apply_effects(self.logic.on_event(event, command.queue, command.lease_number, now), now)
        self.changed.set()


class Crowd:
    """The members of all groups of a cluster."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.members: dict[str, _SimulatedMember] = {}  # by pod
        self.groups: dict[str, dict[str, _SimulatedMember]] = defaultdict(dict)
        self.generations: dict[str, int] = {}  # of each group's document
        self._texts: dict[str, str | bytes] = {}
        self._by_address: dict[str, _SimulatedMember] = {}
        self._keys: dict[str, GroupKey] = {}  # by group
        self._following: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _ON_LOOPBACK)  # only addresses of loopback
        listener.bind(("", CONTROL_PORT))
        app = web.Application()
        app.add_routes([web.get("/v1/report", self._serve_report), web.post("/v1/drain", self._serve_drain)])
        app.add_routes([web.put("/v1/assignment", self._receive_assignment)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=1024).start()
        self._following = [asyncio.create_task(watch) for watch in (self._follow_assignments(), self._follow_pods())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._following:
            task.cancel()
        await self._runner.cleanup()

    def raise_watch_error(self) -> None:
        """Raise the error that ended a watch: without a watch the benchmark would wait forever."""
        for task in self._following:
            if task.done():
                task.result()

    @property
    def address_count(self) -> int:
        """The number of pods that have an address."""
        return sum(bool(member.address) for member in self.members.values())

    def all_obey(self, groups: Iterable[str]) -> bool:
        """Whether each of these groups has an assignment, and all its members have obeyed one and own queues."""
        group_names = set(groups)
        members = [member for member in self.members.values() if member.group in group_names]
        return group_names <= self.generations.keys() and all(self._has_obeyed(member) for member in members)

    def _has_obeyed(self, member: _SimulatedMember) -> bool:
        return member.logic.obeyed_generation > 0 and member.logic.state == "serving" and bool(member.logic.leases)

    async def _follow_assignments(self) -> None:
        async for event in self._api.follow("/api/v1/configmaps", labelSelector=LABEL):
            body = event["object"]
            group = body["metadata"]["labels"][LABEL]
            data = body.get("data") or {}
            packed = (body.get("binaryData") or {}).get("assignment.json.gz")
            self._texts[group] = base64.b64decode(packed) if packed else data.get("assignment.json", "")
            if not packed:
                self.generations[group] = msgspec.json.decode(self._texts[group])["generation"]

    async def _follow_pods(self) -> None:
        async for event in self._api.follow("/api/v1/pods", labelSelector=LABEL):
            pod = event["object"]
            name = pod["metadata"]["name"]
            if event["type"] == "DELETED":
                if deleted := self.members.pop(name, None):
                    self._by_address.pop(deleted.address, None)
                    del self.groups[deleted.group][name]
                continue
            member = self.members.setdefault(name, _SimulatedMember(pod))
            self.groups[member.group][name] = member
            if address := pod.get("status", {}).get("podIP", ""):
                self._by_address.pop(member.address, None)  # kwok sometimes changes a pod's address
                member.address = address
                self._by_address[address] = member
            poke = (pod["metadata"].get("annotations") or {}).get("rota.dev/generation", "")
            if poke != member.poke and "deletionTimestamp" not in pod["metadata"]:
                member.poke = poke
                now = asyncio.get_running_loop().time()
                member.apply_effects(member.logic.apply_assignment(self._texts.get(member.group), now), now)

    def _find_member(self, request: web.Request) -> _SimulatedMember:
        transport = request.transport
        member = self._by_address.get(transport.get_extra_info("sockname")[0]) if transport else None
        if member is None:
            raise web.HTTPNotFound
        return member

    def _key_of(self, member: _SimulatedMember) -> GroupKey:
        namespace = (member.logic.group or "").partition("/")[0]
        return self._keys.setdefault(member.group, GroupKey(self._api, namespace, member.group))

    async def _serve_report(self, request: web.Request) -> web.Response:
        member = self._find_member(request)
        key = await self._key_of(member).check(request, member.uid)
        return GroupKey.sign(request, await report_response(request, member.logic, member.changed), key)

    async def _receive_assignment(self, request: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        member = self._find_member(request)
        await self._key_of(member).check(request, member.uid)
        member.apply_effects(member.logic.apply_sent_assignment(await request.read(), now), now)
        return web.Response(status=204)

    async def _serve_drain(self, request: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        member = self._find_member(request)
        await self._key_of(member).check(request, member.uid)
        member.apply_effects(member.logic.drain(final=True, now=now), now)
        return web.Response()
