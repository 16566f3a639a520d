"""Reads the state of groups that no watch reports, and refetches known state when it may be wrong.

That state is: routes and consumers at the brokers, members' reports, pods that left the watch, and labels of nodes. The
planner asks for a refetch when the stored assignment is missing or damaged.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rota.aio import BackgroundTasks, loop_time
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api, read_if_exists
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, Pod, assignment_name
from rota.kube.client.paths import collection_path, object_path
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.members.topology import Topology
from rota.kube.state.group import Group
from rota.kube.state.pod_state import PodState
from rota.model import Holder, Reason
from rota.spec.names import is_dns_subdomain

MAX_CONCURRENT_POLLS = 8  # groups that a new leader polls concurrently: more would only delay each other
# After which a silent deleted pod counts as ended. A sidecar under load may take this long to respond.
MAX_SILENCE_SECONDS = 5.0
POLL_SLOT_SECONDS = 1.0  # a group with unresponsive brokers or members delays other groups for at most so long


class PriorityLimiter:
    """Semaphore with a queue: groups wait first come, first served, but a group in a handover goes first."""

    def __init__(self, slots: int) -> None:
        self._free_slots = slots
        self._waiting: OrderedDict[Group, asyncio.Future[None]] = OrderedDict()

    @asynccontextmanager
    async def hold_slot(self, group: Group) -> AsyncIterator[None]:
        """Wait for a free slot, and hold it for the group."""
        if self._free_slots:
            self._free_slots -= 1
        else:
            turn = self._waiting[group] = asyncio.get_running_loop().create_future()
            if not group.is_at_rest:
                self.prioritize(group)
            try:
                await turn
            except asyncio.CancelledError:
                self._waiting.pop(group, None)
                if not turn.cancelled():  # the group had the slot already
                    self._release_slot()
                raise
        try:
            yield
        finally:
            self._release_slot()

    def prioritize(self, group: Group) -> None:
        """Move a waiting group to the front."""
        if group in self._waiting:
            self._waiting.move_to_end(group, last=False)

    def _release_slot(self) -> None:
        """Pass the slot on to the next waiting group; without one, the slot is free."""
        while self._waiting:
            _, turn = self._waiting.popitem(last=False)
            if not turn.done():  # done: the waiting task was cancelled
                turn.set_result(None)
                return
        self._free_slots += 1


class GroupStateReader:
    """Reads the state of groups from the API server, the brokers and the members."""

    def __init__(
        self, api: Api, reports: ReportClient, registry: BrokerRegistry, poll_limiter: PriorityLimiter
    ) -> None:
        self._api = api
        self._reports = reports
        self._registry = registry
        self.topology = Topology(api)
        self._poll_limiter = poll_limiter
        self._drain_requests = BackgroundTasks()

    async def refresh_state(self, group: Group) -> None:
        """Read state that no watch reports.

        After a change of leader, and after another client has written the assignment, poll brokers and members first.
        If either happens during that poll, or the group is recreated, the group stays unobserved.
        """
        if not group.was_observed:
            # The event of a ConfigMap that arrived before its ConsumerGroup may not have been kept.
            if not group.stored_assignment.resource_version:
                await self._read_assignment(group)
            resets_before = group.observation_resets
            await self._read_unwatched_pods(group)  # so that no ended member is polled
            await self._poll_in_slot(group)
            group.was_observed = group.observation_resets == resets_before
        if group.assignment.is_outdated or not group.stored_assignment.is_writable:
            await self._read_assignment(group)
        await self._read_unwatched_pods(group)
        if group.pods.surplus and group.pods.has_capacity:  # pods above the limit can replace members that have ended
            await self._list_pods(group)
        await self.topology.load_nodes(group)  # the labels of nodes may name the machine rooms of pods
        group.forget_deleted_pods()

    async def refetch_state(self, group: Group) -> None:
        """Read assignment, pods, routes and reports again, although they are known."""
        await self._read_assignment(group)
        await self._list_pods(group)
        await self._poll_group(group)

    async def _list_pods(self, group: Group) -> None:
        selector = {"labelSelector": f"{GROUP_LABEL}={group.name}"}
        pods, _ = await self._api.list(collection_path("pods", group.namespace), Pod, selector)
        group.pods.surplus.clear()
        listed_uids = {pod.metadata.uid for pod in pods}
        for state in list(group.pods.values()):
            if state.pod.metadata.uid not in listed_uids:
                group.mark_pod_missing(state.pod)
        for pod in pods:
            group.pods.upsert(pod, loop_time())

    async def _poll_in_slot(self, group: Group) -> None:
        """Poll brokers and members in a free slot; the slot is released afterwards, or after POLL_SLOT_SECONDS."""
        async with self._poll_limiter.hold_slot(group):
            task = asyncio.get_running_loop().create_task(self._poll_group(group))
            try:
                await asyncio.wait({task}, timeout=POLL_SLOT_SECONDS)
            except asyncio.CancelledError:
                task.cancel()
                raise
        await task

    async def _poll_group(self, group: Group) -> None:
        """Poll the brokers and every running member."""
        await self._registry.poll_group(group)
        running = [state for state in group.pods.values() if state.pod.is_running]
        await asyncio.gather(*(self._poll_member(group, state) for state in running))

    async def _poll_member(self, group: Group, state: PodState) -> None:
        holder = state.pod.holder
        response = await self._reports.read(Endpoint.from_pod(state.pod, group.uid))
        if current := group.pods.find(holder):
            current.record_report(response.report, loop_time(), response.silent_since, response.ignored_reason)

    async def _read_assignment(self, group: Group) -> None:
        path = object_path("configmaps", group.namespace, assignment_name(group.name))
        group.set_assignment(await read_if_exists(self._api, path, ConfigMap))

    async def _read_unwatched_pods(self, group: Group) -> None:
        """Read each pod that no watch reports, to learn whether it still exists; poll the deleted pods."""
        holders = sorted(group.pods.unwatched)
        pods = await asyncio.gather(*(self._read_pod(group.namespace, holder.name) for holder in holders))
        deleted: dict[Holder, Pod | None] = {}  # each with the pod that has its name now; None: no pod has it
        for holder, pod in zip(holders, pods, strict=True):
            if pod and pod.metadata.uid == holder.uid:
                group.pods.apply_read(holder, pod, loop_time())  # at once: after an await, a watch event may be newer
            else:
                deleted[holder] = pod
        responding = await asyncio.gather(*(self._poll_deleted(group, holder) for holder in deleted))
        for (holder, pod), is_responding in zip(deleted.items(), responding, strict=True):
            if not is_responding:
                group.pods.apply_read(holder, pod, loop_time())
        group.pods.verify_ended = ()

    async def _poll_deleted(self, group: Group, holder: Holder) -> bool:
        """Poll the sidecar of a deleted pod, as no object shows whether it has ended; return whether it may still run.

        The sidecar counts as ended in these cases:

        - It reports that it is drained.
        - Its address refuses connections or belongs to another server (`read_if_present` returns None).
        - It has sent no authenticated response for MAX_SILENCE_SECONDS. This proves nothing, but users assert that a
          pod has ended when they delete it by force.

        Until then its reports are recorded, it is asked to drain, and no other member gets its queues.
        """
        state = group.pods.find_possibly_running(holder)
        if state is None or not state.pod.status.pod_ip:
            return False
        member = Endpoint.from_pod(state.pod, group.uid)
        response = await self._reports.read_if_present(member)
        if response is None or (response.report and response.report.is_drained):
            return False
        is_too_large = response.ignored_reason is Reason.REPORT_TOO_LARGE  # nevertheless authenticated
        if response.report or is_too_large:
            state.unauthenticated_since = None
        else:
            # Silence and unauthenticated responses may take turns: the time since the first of either counts.
            unauthenticated_since = state.unauthenticated_since or response.silent_since
            unreachable_since = state.unreachable_since or response.silent_since
            state.unauthenticated_since = min(unauthenticated_since, unreachable_since)
            if loop_time() - state.unauthenticated_since >= MAX_SILENCE_SECONDS:
                return False
        state.observe_force_deleted(response.report, loop_time(), response.silent_since, response.ignored_reason)
        group.pods.missing.add(holder)  # so that the next reconcile polls it again
        if is_too_large or (response.report and not response.report.final):
            self._drain_requests.start(self._reports.drain(member))  # not awaited: the sidecar responds after the drain
        return True

    async def _read_pod(self, namespace: str, name: str) -> Pod | None:
        """Return the pod, or None if it does not exist.

        Tenants can write the ConfigMap that names the pod. A name that no pod can have is not requested.
        """
        if not is_dns_subdomain(name):
            return None
        return await read_if_exists(self._api, object_path("pods", namespace, name), Pod)
