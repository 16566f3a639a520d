"""Reads the state of groups that no watch reports, and refetches known state when it may be wrong."""

import asyncio
from typing import TypeVar

from rota.aio import loop_time
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api, ApiError
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, Pod, assignment_name
from rota.kube.client.paths import collection_path, object_path
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.members.topology import Topology
from rota.kube.reconcile.limiter import PriorityLimiter
from rota.kube.state.group import Group
from rota.kube.state.pod_state import PodState
from rota.model import Holder, Reason
from rota.spec.names import is_dns_subdomain

T = TypeVar("T")

MAX_CONCURRENT_POLLS = 8  # groups that a new leader polls concurrently: more would only delay each other
MAX_SILENCE_SECONDS = 5.0  # a sidecar under load may take this long to respond
POLL_SLOT_SECONDS = 1.0  # a group with unresponsive brokers or members delays no other for longer


class GroupStateReader:
    """Reads the state of groups from the API server, the brokers and the members."""

    def __init__(self, api: Api, reports: ReportClient, registry: BrokerRegistry) -> None:
        self._api = api
        self._reports = reports
        self._registry = registry
        self.topology = Topology(api)
        self._poll_limiter = PriorityLimiter(MAX_CONCURRENT_POLLS)
        self._drain_tasks: set[asyncio.Task[None]] = set()

    def prioritize(self, group: Group) -> None:
        """Observe a group before those that only wait for their first observation: it has changed."""
        self._poll_limiter.prioritize(group)

    async def refresh_state(self, group: Group) -> None:
        """Read state that no watch reports; after a change of leader, poll brokers and members first.

        If leadership changes or the group is recreated during that poll, the group stays unobserved.
        """
        if not group.was_observed:
            resets = group.observation_resets
            if not group.stored_assignment.resource_version:  # a ConfigMap that came before its group may be dropped
                await self._read_assignment(group)
            await self._read_unwatched_pods(group)  # so that no ended member is polled
            await self._poll_in_slot(group)
            group.was_observed = group.observation_resets == resets
        if group.assignment_outdated or not group.stored_assignment.is_ours:
            await self._read_assignment(group)
        await self._read_unwatched_pods(group)
        if group.pods.surplus and group.pods.has_capacity:
            await self._list_pods(group)
        await self.topology.load_nodes(group)
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
        uids = {pod.metadata.uid for pod in pods}
        for state in [state for state in group.pods.values() if state.pod.metadata.uid not in uids]:
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
        running = [state for state in group.pods.values() if state.pod.started and not state.pod.ended]
        await asyncio.gather(*(self._poll_member(group, state) for state in running))

    async def _poll_member(self, group: Group, state: PodState) -> None:
        uid = state.pod.metadata.uid
        report, requested_at, ignored_reason = await self._reports.read(Endpoint.from_pod(state.pod, group.uid))
        current = group.pods.get(state.pod.metadata.name)
        if current and current.pod.metadata.uid == uid:
            current.record_report(report, loop_time(), requested_at, ignored_reason)

    async def _read_assignment(self, group: Group) -> None:
        path = object_path("configmaps", group.namespace, assignment_name(group.name))
        group.set_assignment(await self._read_object(path, ConfigMap))

    async def _read_unwatched_pods(self, group: Group) -> None:
        """Read each pod that no watch reports, to learn whether it still exists; poll the deleted ones."""
        holders = sorted(group.pods.unwatched)
        requests = [self._read_pod(group.namespace, holder.name) for holder in holders]
        pods = dict(zip(holders, await asyncio.gather(*requests), strict=True))
        deleted = [holder for holder, pod in pods.items() if pod is None or pod.metadata.uid != holder.uid]
        for holder in pods.keys() - deleted:  # before the next await: watch events during it are newer
            group.pods.apply_read(holder, pods[holder], loop_time())
        responding = await asyncio.gather(*(self._poll_deleted(group, holder) for holder in deleted))
        for holder, is_responding in zip(deleted, responding, strict=True):
            if not is_responding:
                group.pods.apply_read(holder, pods[holder], loop_time())
        group.pods.verify_ended = ()

    async def _poll_deleted(self, group: Group, holder: Holder) -> bool:
        """Poll the sidecar of a deleted pod, as no object shows whether it has ended; return whether it still runs.

        While it responds, its reports are recorded, it is asked to drain, and no other member gets its queues. If no
        authenticated response comes for MAX_SILENCE_SECONDS, it counts as ended: that is what the user asserts by
        deleting a pod by force.
        """
        state = group.pods.find_possibly_running(holder)
        member = Endpoint.from_pod(state.pod, group.uid) if state and state.pod.status.pod_ip else None
        response = await self._reports.read_if_present(member) if member else None
        if state is None or member is None or response is None or (response.report and response.report.is_drained):
            return False
        is_too_large = response.ignored_reason is Reason.REPORT_TOO_LARGE
        if response.report or is_too_large:
            state.unauthenticated_since = None
        else:
            requested_at = response.requested_at
            since = min(state.unauthenticated_since or requested_at, state.unreachable_since or requested_at)
            state.unauthenticated_since = since
            if loop_time() - since >= MAX_SILENCE_SECONDS:
                return False
        state.observe_force_deleted(response.report, loop_time(), response.requested_at, response.ignored_reason)
        group.pods.missing.add(holder)  # so that the next reconcile polls it again
        if is_too_large or (response.report and not response.report.final):
            self._request_drain(member)
        return True

    def _request_drain(self, member: Endpoint) -> None:
        """Request the final drain, without waiting: the member responds only when the drain is done."""
        task = asyncio.get_running_loop().create_task(self._reports.drain(member))
        self._drain_tasks.add(task)
        task.add_done_callback(self._drain_tasks.discard)

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
            if error.is_not_found:
                return None
            raise
