"""Observer of groups: reads state that no watch reports, and reads known state again when it may be wrong."""

import asyncio
from typing import TypeVar

from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api, ApiError
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, Pod, record_of
from rota.kube.client.paths import collection_path, object_path
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.members.topology import Topology
from rota.kube.reconcile.limiter import PriorityLimiter
from rota.kube.state.group import Group
from rota.kube.state.pod_state import PodState
from rota.model import Holder, Reason
from rota.spec.names import is_dns_subdomain

T = TypeVar("T")

LOOKS_AT_ONCE = 8  # groups that a new leader polls concurrently: more would only delay each other
SILENCE_SECONDS = 5.0  # a sidecar under load may take this long to respond
LOOK_SECONDS = 1.0  # a group with unresponsive brokers or members delays no other for longer


class Gatherer:
    """Reads the state of groups from the API server, the brokers and the members."""

    def __init__(self, api: Api, reports: ReportClient, places: BrokerRegistry) -> None:
        self._api, self._reports, self._places = api, reports, places
        self.rooms = Topology(api)
        self._looks = PriorityLimiter(LOOKS_AT_ONCE)
        self._draining: set[asyncio.Task[None]] = set()

    def hurry(self, group: Group) -> None:
        """Observe a group before others: it has changed, while most others only wait for their first observation."""
        self._looks.hurry(group)

    async def catch_up(self, group: Group) -> None:
        """Read state that no watch reports; after a change of leader, poll brokers and members first."""
        if not group.looked:
            if not group.record.version:  # the watch may have reported it before its group
                await self._ask_for_record(group)
            await self._ask_for_unseen(group)  # so that no ended member is polled
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
        """Read assignment, pods, routes and reports again, although they are known."""
        await self._ask_for_record(group)
        await self._list_pods(group)
        await self._ask_around(group)

    async def _list_pods(self, group: Group) -> None:
        selector = {"labelSelector": f"{GROUP_LABEL}={group.name}"}
        pods, _ = await self._api.list(collection_path("pods", group.namespace), Pod, selector)
        group.pods.surplus.clear()
        uids = {pod.metadata.uid for pod in pods}
        for state in [state for state in group.pods.values() if state.pod.metadata.uid not in uids]:
            group.miss(state.pod)
        for pod in pods:
            group.pods.see(pod, self._now)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _in_turn(self, group: Group) -> None:
        """Poll brokers and members in a free slot; the slot is free again when that ends, or after LOOK_SECONDS."""
        async with self._looks.of(group):
            task = asyncio.get_running_loop().create_task(self._ask_around(group))
            try:
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
            except asyncio.CancelledError:
                task.cancel()
                raise
        await task

    async def _ask_around(self, group: Group) -> None:
        """Poll the brokers and every running member."""
        await self._places.look(group)
        running = [state for state in group.pods.values() if state.pod.started and not state.pod.ended]
        await asyncio.gather(*(self._ask_member(group, state) for state in running))

    async def _ask_member(self, group: Group, state: PodState) -> None:
        uid = state.pod.metadata.uid
        report, requested_at, doubt = await self._reports.read(Endpoint.of(state.pod, group.uid))
        if (current := group.pods.get(state.pod.metadata.name)) and current.pod.metadata.uid == uid:
            current.hear(report, self._now, requested_at, doubt)

    async def _ask_for_record(self, group: Group) -> None:
        path = object_path("configmaps", group.namespace, record_of(group.name))
        group.keep(await self._read_object(path, ConfigMap))

    async def _ask_for_unseen(self, group: Group) -> None:
        """Read each pod that no watch reports, to learn whether it still exists."""
        holders = sorted(group.pods.unseen)
        requests = [self._read_pod(group.namespace, holder.name) for holder in holders]
        pods = dict(zip(holders, await asyncio.gather(*requests), strict=True))
        deleted = [holder for holder, pod in pods.items() if pod is None or pod.metadata.uid != holder.uid]
        for holder in pods.keys() - deleted:  # before the next await: watch events during it are newer
            group.pods.read(holder, pods[holder], self._now)
        responding = await asyncio.gather(*(self._lingers(group, holder) for holder in deleted))
        for holder in (holder for holder, responds in zip(deleted, responding, strict=True) if not responds):
            group.pods.read(holder, pods[holder], self._now)
        group.pods.unsure = ()

    async def _lingers(self, group: Group, holder: Holder) -> bool:
        """Whether the sidecar of a force-deleted pod still responds; no object shows whether it has ended.

        While it responds, its reports are recorded, it is asked to drain, and no other member gets its queues. If it
        is silent for SILENCE_SECONDS, it counts as ended: that is what the user asserts by deleting a pod by force.
        """
        state = group.pods.in_doubt(holder)
        member = Endpoint.of(state.pod, group.uid) if state and state.pod.status.pod_ip else None
        response = await self._reports.last_words(member) if member else None
        if state is None or member is None or response is None or (response.report and response.report.drained):
            return False
        if response.report is None and response.doubt is not Reason.REPORT_TOO_LARGE:
            state.unproved_since = min(state.unproved_since or response.asked, state.unheard_since or response.asked)
            if self._now - state.unproved_since >= SILENCE_SECONDS:
                return False
        else:
            state.unproved_since = None
        state.observe_force_deleted(response.report, self._now, response.asked, response.doubt)
        group.pods.missed.add(holder)
        if response.doubt is Reason.REPORT_TOO_LARGE or (response.report and not response.report.final):
            self._drain(member)
        return True

    def _drain(self, member: Endpoint) -> None:
        """Request the final drain, without waiting: the member responds only when the drain is done."""
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
