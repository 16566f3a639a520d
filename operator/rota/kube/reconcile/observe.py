"""Gathering: what no watch tells of a group is asked for, and asked anew where what is known cannot be believed."""

import asyncio
from typing import TypeVar

from rota.kube.brokers.registry import Places
from rota.kube.client.api import Api, ApiError
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, Pod, record_of
from rota.kube.client.paths import collection_path, object_path
from rota.kube.members.report_client import Endpoint, Reports
from rota.kube.members.topology import Rooms
from rota.kube.reconcile.limiter import Turns
from rota.kube.state.group import Group
from rota.kube.state.pod_state import Known
from rota.model import Holder, Reason
from rota.spec.names import is_dns_subdomain

T = TypeVar("T")

LOOKS_AT_ONCE = 8  # groups whose members a new leader hears at the same time: more only wait for each other
SILENCE_SECONDS = 5.0  # a sidecar that has no time for an answer may take so long
LOOK_SECONDS = 1.0  # a group whose brokers or members do not answer holds up no other for longer


class Gatherer:
    """Asks the API server, the brokers and the members about groups."""

    def __init__(self, api: Api, reports: Reports, places: Places) -> None:
        """Ask nobody yet."""
        self._api, self._reports, self._places = api, reports, places
        self.rooms = Rooms(api)
        self._looks = Turns(LOOKS_AT_ONCE)
        self._draining: set[asyncio.Task[None]] = set()

    def hurry(self, group: Group) -> None:
        """Look at a group before others: something happened to it, while most of them only are to be known."""
        self._looks.hurry(group)

    async def catch_up(self, group: Group) -> None:
        """Learn what no watch has told."""
        if not group.looked:
            if not group.record.version:  # it may have been seen before its group
                await self._ask_for_record(group)
            await self._ask_for_unseen(group)  # who has ended is not to be waited for
            await self._in_turn(group)
            group.looked = True
        if group.outdated or not group.record.ours:
            await self._ask_for_record(group)
        await self._ask_for_unseen(group)
        if group.pods.surplus and group.pods.has_room:
            await self._list_pods(group)
        await self.rooms.learn(group)
        group.forget_ended()

    async def ask_anew(self, group: Group) -> None:
        """Ask for record, pods, routes and reports, whatever is known of them."""
        await self._ask_for_record(group)
        await self._list_pods(group)
        await self._ask_around(group)

    async def _list_pods(self, group: Group) -> None:
        selector = {"labelSelector": f"{GROUP_LABEL}={group.name}"}
        pods, _ = await self._api.list(collection_path("pods", group.namespace), Pod, selector)
        group.pods.surplus.clear()
        there = {pod.metadata.uid for pod in pods}
        for known in [known for known in group.pods.values() if known.pod.metadata.uid not in there]:
            group.miss(known.pod)
        for pod in pods:
            group.pods.see(pod, self._now)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _in_turn(self, group: Group) -> None:
        """Ask around when its turn comes; the next one's comes when that is done, or takes long."""
        async with self._looks.of(group):
            task = asyncio.get_running_loop().create_task(self._ask_around(group))
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
        report, asked, doubt = await self._reports.read(Endpoint.of(known.pod, group.uid))
        if (still := group.pods.get(known.pod.metadata.name)) and still.pod.metadata.uid == uid:
            still.hear(report, self._now, asked, doubt)

    async def _ask_for_record(self, group: Group) -> None:
        path = object_path("configmaps", group.namespace, record_of(group.name))
        group.keep(await self._read_object(path, ConfigMap))

    async def _ask_for_unseen(self, group: Group) -> None:
        """Ask for those who are not told of: a read of the one object tells whether they ended."""
        holders = sorted(group.pods.unseen)
        asked = [self._read_pod(group.namespace, holder.name) for holder in holders]
        found = dict(zip(holders, await asyncio.gather(*asked), strict=True))
        gone = [holder for holder, pod in found.items() if pod is None or pod.metadata.uid != holder.uid]
        for holder in found.keys() - gone:  # at once: what is told meanwhile is newer
            group.pods.read(holder, found[holder], self._now)
        lingers = await asyncio.gather(*(self._lingers(group, holder) for holder in gone))
        for holder in (holder for holder, it in zip(gone, lingers, strict=True) if not it):
            group.pods.read(holder, found[holder], self._now)
        group.pods.unsure = ()

    async def _lingers(self, group: Group, holder: Holder) -> bool:
        """Whether the sidecar of a pod that is no more answers: it was deleted by force, and nobody knows of its end.

        As long as it does it is heard, and asked to drain; what it works is nobody else's. One that is silent for a
        while is taken to have ended: who deletes a pod by force says so.
        """
        known = group.pods.in_doubt(holder)
        member = Endpoint.of(known.pod, group.uid) if known and known.pod.status.pod_ip else None
        said = await self._reports.last_words(member) if member else None
        if known is None or member is None or said is None or (said.report and said.report.drained):
            return False
        if said.report is None and said.doubt is not Reason.REPORT_TOO_LARGE:
            known.unproved_since = min(known.unproved_since or said.asked, known.unheard_since or said.asked)
            if self._now - known.unproved_since >= SILENCE_SECONDS:
                return False
        else:
            known.unproved_since = None
        known.linger(said.report, self._now, said.asked, said.doubt)
        group.pods.missed.add(holder)
        if said.doubt is Reason.REPORT_TOO_LARGE or (said.report and not said.report.final):
            self._drain(member)
        return True

    def _drain(self, member: Endpoint) -> None:
        """Ask for the final drain: a member answers when it is done, and nobody waits here for that."""
        task = asyncio.get_running_loop().create_task(self._reports.drain(member))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def _read_pod(self, namespace: str, name: str) -> Pod | None:
        """Return the pod, or None if it does not exist.

        Tenants can write the ConfigMap that names the pod. A name that no pod can have is not requested.
        """
        return await self._read_object(object_path("pods", namespace, name), Pod) if is_dns_subdomain(name) else None

    async def _read_object(self, path: str, kind: type[T]) -> T | None:
        """Return the object, or None if it does not exist."""
        try:
            return await self._api.get(path, kind)
        except ApiError as error:
            if error.unknown:
                return None
            raise
