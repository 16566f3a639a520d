"""Gathering: what no watch tells of a group is asked for, and asked anew where what is known cannot be believed."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from rota.kube.api import Api, ApiError
from rota.kube.group import Group
from rota.kube.known import Known
from rota.kube.objects import GROUP_LABEL, ConfigMap, Pod, path, record_of
from rota.kube.places import Places
from rota.kube.reports import Reports
from rota.kube.rooms import Rooms

T = TypeVar("T")

LOOKS_AT_ONCE = 20  # groups whose members a new leader hears at the same time
LOOK_SECONDS = 1.0  # a group whose brokers or members do not answer holds up no other for longer


class Gatherer:
    """Asks the API server, the brokers and the members about groups."""

    def __init__(self, api: Api, reports: Reports, places: Places) -> None:
        """Ask nobody yet."""
        self._api, self._reports, self._places = api, reports, places
        self.rooms = Rooms(api)
        self._looking = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def catch_up(self, group: Group) -> None:
        """Learn what no watch has told."""
        if not group.looked:
            if not group.record.version:  # it may have been seen before its group
                await self._ask_for_record(group)
            await self._in_turn(partial(self._ask_around, group))
            group.looked = True
        if group.outdated or not group.record.ours:
            await self._ask_for_record(group)
        await self._ask_for_unseen(group)
        await self.rooms.learn(group)
        group.forget_ended()

    async def ask_anew(self, group: Group) -> None:
        """Ask for record, pods, routes and reports, whatever is known of them."""
        await self._ask_for_record(group)
        selector = {"labelSelector": f"{GROUP_LABEL}={group.name}"}
        pods, _ = await self._api.list(path("pods", group.namespace), Pod, selector)
        there = {pod.metadata.uid for pod in pods}
        for known in [known for known in group.pods.values() if known.pod.metadata.uid not in there]:
            group.miss(known.pod)
        for pod in pods:
            group.see(pod, self._now)
        await self._ask_around(group)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do it when its turn comes; the next one's comes when it is done, or takes long."""
        async with self._looking:
            task = asyncio.get_running_loop().create_task(work())
            try:
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
            except asyncio.CancelledError:
                task.cancel()
                raise
        await task

    async def _ask_around(self, group: Group) -> None:
        """Ask the brokers and every member."""
        await self._places.look(group)
        there = [known for known in group.pods.values() if known.pod.started and not known.pod.ended]
        await asyncio.gather(*(self._ask_member(group, known) for known in there))

    async def _ask_member(self, group: Group, known: Known) -> None:
        uid = known.pod.metadata.uid
        report, asked = await self._reports.read(known.pod.status.pod_ip, uid)
        if (still := group.pods.get(known.pod.metadata.name)) and still.pod.metadata.uid == uid:
            still.hear(report, self._now, asked)

    async def _ask_for_record(self, group: Group) -> None:
        where = path("configmaps", group.namespace, record_of(group.name))
        group.keep(await self._found(where, ConfigMap))

    async def _ask_for_unseen(self, group: Group) -> None:
        """Ask for those who are not told of: a read of the one object tells whether they ended."""
        holders = sorted(group.unseen)
        asked = [self._found(path("pods", group.namespace, holder.name), Pod) for holder in holders]
        for holder, pod in zip(holders, await asyncio.gather(*asked), strict=True):
            group.read(holder, pod, self._now)
        group.unsure = ()

    async def _found(self, where: str, kind: type[T]) -> T | None:
        """Return the object, or nothing if there is none."""
        try:
            return await self._api.get(where, kind)
        except ApiError as error:
            if error.unknown:
                return None
            raise
