"""Ten thousand members in one process: pods that kwok makes run, and one socket that answers for all of them.

They obey as sidecars do (the same machine), at once and on every poke. Documents and pods are each watched once.
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


class _One:
    """A member that does at once what it is told."""

    def __init__(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self.group = str(pod["metadata"]["labels"][LABEL])
        self.uid = uid
        self.member = Member(name, uid, group=f"{pod['metadata']['namespace']}/{self.group}")
        self.address = ""
        self.poke = ""
        self.changed = asyncio.Event()

    def carry(self, step: Effects, now: float) -> None:
        for command in step.commands:
            answer = {
                LeaseAction.FIND_START: LeaseEvent.START_FOUND,
                LeaseAction.STOP: LeaseEvent.DRAINED,
                LeaseAction.UNLOCK: LeaseEvent.UNLOCKED,
            }.get(command.action)
            if answer:
                self.carry(self.member.on_event(answer, command.queue, command.lease_number, now), now)
        self.changed.set()


class Crowd:
    """The members of all groups of a cluster."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.members: dict[str, _One] = {}  # by pod
        self.groups: dict[str, dict[str, _One]] = defaultdict(dict)
        self.generations: dict[str, int] = {}  # of each group's document
        self._texts: dict[str, str | bytes] = {}
        self._by_address: dict[str, _One] = {}
        self._keys: dict[str, GroupKey] = {}  # by group
        self._following: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _ON_LOOPBACK)  # every address of loopback only
        listening.bind(("", CONTROL_PORT))
        app = web.Application()
        app.add_routes([web.get("/v1/report", self._report), web.post("/v1/drain", self._drain)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.SockSite(self._runner, listening, backlog=1024).start()
        self._following = [asyncio.create_task(it) for it in (self._follow_records(), self._follow_pods())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._following:
            task.cancel()
        await self._runner.cleanup()

    def check(self) -> None:
        """Raise what ended a watch: without it we would wait in vain."""
        for task in self._following:
            if task.done():
                task.result()

    @property
    def addressed(self) -> int:
        """How many pods have an address."""
        return sum(bool(one.address) for one in self.members.values())

    def obey(self, groups: Iterable[str]) -> bool:
        """Whether everybody in these groups shows the newest document and works a share of the queues."""
        wanted = set(groups)
        theirs = [one for one in self.members.values() if one.group in wanted]
        return wanted <= self.generations.keys() and all(self._obeys(one) for one in theirs)

    def _obeys(self, one: _One) -> bool:
        return one.member.obeyed_generation > 0 and one.member.state == "serving" and bool(one.member.leases)

    async def _follow_records(self) -> None:
        async for event in self._api.follow("/api/v1/configmaps", labelSelector=LABEL):
            body = event["object"]
            group, data = body["metadata"]["labels"][LABEL], body.get("data") or {}
            packed = (body.get("binaryData") or {}).get("assignment.json.gz")
            self._texts[group] = base64.b64decode(packed) if packed else data.get("assignment.json", "")
            if not packed:
                self.generations[group] = msgspec.json.decode(self._texts[group])["generation"]

    async def _follow_pods(self) -> None:
        async for event in self._api.follow("/api/v1/pods", labelSelector=LABEL):
            pod = event["object"]
            name = pod["metadata"]["name"]
            if event["type"] == "DELETED":
                if gone := self.members.pop(name, None):
                    self._by_address.pop(gone.address, None)
                    del self.groups[gone.group][name]
                continue
            one = self.members.setdefault(name, _One(pod))
            self.groups[one.group][name] = one
            if address := pod.get("status", {}).get("podIP", ""):
                self._by_address.pop(one.address, None)  # kwok changes its mind now and then
                one.address, self._by_address[address] = address, one
            poke = (pod["metadata"].get("annotations") or {}).get("rota.dev/generation", "")
            if poke != one.poke and "deletionTimestamp" not in pod["metadata"]:
                one.poke = poke
                now = asyncio.get_running_loop().time()
                one.carry(one.member.apply_assignment(self._texts.get(one.group), now), now)

    def _asked(self, asked: web.Request) -> _One:
        transport = asked.transport
        one = self._by_address.get(transport.get_extra_info("sockname")[0]) if transport else None
        if one is None:
            raise web.HTTPNotFound
        return one

    def _key(self, one: _One) -> GroupKey:
        namespace = (one.member.group or "").partition("/")[0]
        return self._keys.setdefault(one.group, GroupKey(self._api, namespace, one.group))

    async def _report(self, asked: web.Request) -> web.Response:
        one = self._asked(asked)
        key = await self._key(one).check(asked, one.uid)
        return GroupKey.sign(asked, await report_response(asked, one.member, one.changed), key)

    async def _drain(self, asked: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        one = self._asked(asked)
        await self._key(one).check(asked, one.uid)
        one.carry(one.member.drain(final=True, now=now), now)
        return web.Response()
