"""An operator of a simulation: the real controller on virtual time, with stand-ins for its clients."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api
from rota.kube.client.objects import (
    ASSIGNMENT_MOUNT_PATH,
    GROUP_LABEL,
    KEY_MOUNT_PATH,
    CustomResource,
    Metadata,
    ObjectKey,
    Pod,
    assignment_name,
)
from rota.kube.client.pod_status import SIDECAR_CONTAINER
from rota.kube.members.report_client import ReportClient
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.workload.deployments import Deployments
from rota.model import Queue
from simulation.clock import Process
from simulation.server import PodObject, StoredConfigMap
from simulation.stand_ins import UID, Brokers, Members, Server, SimulatedGroup, as_config_map
from simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from simulation.world import Simulation


class Operator(Process):
    """One replica of the operator. It writes while it believes to be the leader."""

    def __init__(self, world: "Simulation", name: str) -> None:
        super().__init__(world.clock)
        self.world = world
        self.random = Random(f"{world.seed}/{name}")
        namespace, group = world.group.split("/")
        self.key: ObjectKey = (namespace, group)
        self.views: dict[str, tuple[tuple[Queue, ...] | None, float]] = {}
        self.clock_offset = 0.0
        self.polls: dict[str, asyncio.Event] = {}  # set when a member's report has changed
        self._versions: dict[str, int] = {}  # the newest observed version of each pod
        self._config_map: StoredConfigMap | None = None
        self._observed_group: tuple[int, Mapping[str, Any]] | None = None  # version and status
        self.loop = VirtualLoop(self)
        self.controller = self._create_controller()
        world.api.watchers.append(self.on_pod_event)
        world.api.on_config_map_change.append(self._on_config_map_change)
        self.relist(stale=True)
        self.poll_routes()
        self.enqueue()
        self._follow_lease()

    def _create_controller(self) -> Controller:
        api = cast("Api", Server(self))
        reports = cast("ReportClient", Members(self))
        with self.loop.running():
            registry = cast("BrokerRegistry", Brokers(self))
            controller = Controller(api, reports, registry, Deployments(api), wall_time=lambda: self.time)
            controller.reconciler.on_reconciled = self._on_reconciled
            self.events = EventHandlers(controller)
            controller.add_group(SimulatedGroup(self))
            self.events.groups.on_upsert(self.group_resource())
        return controller

    @property
    def time(self) -> float:
        """The wall clock of this operator's machine."""
        return self.world.epoch + self.clock.now + self.clock_offset

    def enqueue(self) -> None:
        """Reconcile the group soon."""
        with self.loop.running():
            self.controller.queue.enqueue(self.key)

    def _on_reconciled(self, _: ReconcileResult) -> None:
        self.world.judge.on_plan()

    def _follow_lease(self) -> None:
        """Follow the Lease: start or stop to lead; observe the group's present status."""
        leads = self.world.leads(self)
        api = self.world.api
        is_new = self._observed_group != (api.version, api.status)
        if is_new or leads != self.controller.is_leading:
            self._observed_group = (api.version, dict(api.status))
            with self.loop.running():
                if leads != self.controller.is_leading:
                    self.controller.set_leading(is_leading=leads)
                self.events.groups.on_upsert(self.group_resource())
        self.after(0.1, self._follow_lease)

    # Watches.

    def on_pod_event(self, name: str, pod: PodObject | None, version: int) -> None:
        """Receive a pod event by the watch, later; with a bad watch some events are lost, late or duplicated."""
        for _ in range(2 if self.world.bad_watch and self.random.random() < 0.1 else 1):
            if self.world.silent_watch or (self.world.bad_watch and self.random.random() < 0.1):
                continue
            delay = self.random.uniform(0.0, 5.0 if self.world.bad_watch else 0.02)
            self.after(delay, lambda: self._observe_pod(name, pod, version))

    def relist(self, *, stale: bool = False) -> None:
        """List all pods again; missing pods have ended. The first list comes from a stale cache."""
        if not self.world.api.down:
            pods = dict(self.world.api.pods)
            is_new = self.world.is_new
            # All draws come before the first delay is drawn, or each seed would be another run.
            unknown_names = [name for name in pods if stale and is_new(name) and self.random.random() < 0.5]
            for name in unknown_names:
                pod = pods.pop(name)
                self.after(self.random.uniform(1, 8), partial(self._observe_pod, pod.name, pod, pod.version))
            for name in [name for name in self.controller.groups[self.key].pods if name not in pods]:
                self._observe_pod(name, None, self.world.api.version)
            for name, pod in pods.items():
                self._observe_pod(name, pod, pod.version)
            self._observe_config_map(self.world.api.config_map, self.world.api.version)
            if self.world.api.config_map is None:
                self._report_missing_records()
        self.after(self.random.uniform(20, 40), self.relist)

    def _report_missing_records(self) -> None:
        """Report the assignment as deleted, if the operator has written an assignment that no watch has reported."""
        for expected in list(self.events.assignments.expected()):
            metadata = msgspec.structs.replace(expected.metadata, resource_version=str(self.world.api.version))
            with self.loop.running():
                self.events.assignments.on_delete(msgspec.structs.replace(expected, metadata=metadata))

    def _observe_pod(self, name: str, pod: PodObject | None, version: int) -> None:
        if version <= self._versions.get(name, 0):
            return
        self._versions[name] = version
        pod_state = self.controller.groups[self.key].pods.get(name)
        with self.loop.running():
            if pod:
                self.events.pods.on_upsert(self.pod_body(pod))
            elif pod_state:
                self.events.pods.on_delete(pod_state.pod)

    def _on_config_map_change(self, stored: StoredConfigMap | None) -> None:
        """Receive a change of the assignment by its watch, later."""
        if not self.world.silent_watch:
            delay = self.random.uniform(0.0, 5.0 if self.world.bad_watch else 0.02)
            self.after(delay, partial(self._observe_config_map, stored, self.world.api.version))

    def _observe_config_map(self, stored: StoredConfigMap | None, version: int) -> None:
        """Observe the stored assignment at a version; a deletion has that version, as in an event or a list."""
        previous, self._config_map = self._config_map, stored
        with self.loop.running():
            if stored:
                self.events.assignments.on_upsert(as_config_map(self.key, stored))
            elif previous:
                self.events.assignments.on_delete(as_config_map(self.key, replace(previous, version=version)))

    # Brokers and members.

    def poll_routes(self) -> None:
        """Read all routes now and every 5 s."""
        self.read_routes()
        self.enqueue()
        self.after(5, self.poll_routes)

    def read_routes(self) -> None:
        """Read the route of every topic from the name server."""
        for topic in self.world.topics:
            queues = self.world.broker.visible_queues(topic)
            view = self.views.get(topic)
            if queues is None:
                self.views[topic] = (None, self.clock.now)
            elif view is None or view[0] != queues:
                self.views[topic] = (queues, self.clock.now)
        for topic in set(self.views) - set(self.world.topics):
            del self.views[topic]

    def notify_report(self, name: str) -> None:
        """Complete a long poll of a member."""
        if name in self.polls:
            with self.loop.running():
                self.polls[name].set()

    # Objects as the API server has them.

    def group_resource(self) -> CustomResource:
        """Return the ConsumerGroup as the API server has it."""
        namespace, name = self.key
        version = str(self.world.api.version)
        metadata = Metadata(name=name, namespace=namespace, uid=UID, resource_version=version)
        return CustomResource(metadata, {}, dict(self.world.api.status))

    def pod_body(self, pod: PodObject) -> Pod:
        """Return a pod as the API server has it."""
        namespace, group = self.key
        running = {"started": pod.started, "state": {"running": {}} if pod.started else {}}
        body = {
            "metadata": {
                "name": pod.name,
                "namespace": namespace,
                "uid": pod.uid,
                "resourceVersion": str(pod.version),
                "labels": {GROUP_LABEL: group},
                "annotations": pod.annotations,
                "deletionTimestamp": "2026-11-21T08:00:00Z" if pod.terminating else None,
            },
            "spec": {
                "initContainers": [
                    {
                        "name": SIDECAR_CONTAINER,
                        "volumeMounts": [
                            {"name": "assignment", "mountPath": ASSIGNMENT_MOUNT_PATH},
                            {"name": "key", "mountPath": KEY_MOUNT_PATH},
                        ],
                    }
                ],
                "volumes": [{"name": "assignment", "configMap": {"name": assignment_name(group)}}],
            },
            "status": {
                "phase": "Failed" if pod.ended else "Running",
                "podIP": pod.name,
                "conditions": [{"type": "Ready", "status": str(pod.ready)}],
                "initContainerStatuses": [{"name": SIDECAR_CONTAINER, **running}],
            },
        }
        return msgspec.convert(body, Pod)


def restart(operator: Operator) -> Operator:
    """Replace an operator by a new process without memory."""
    operator.kill()
    operator.world.api.watchers.remove(operator.on_pod_event)
    successor = Operator(operator.world, f"operator-{operator.random.random():.6f}")
    successor.clock_offset = operator.clock_offset
    return successor
