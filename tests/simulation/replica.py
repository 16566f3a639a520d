"""An operator of a simulated world: the real controller on virtual time, with stand-ins for what it talks to."""

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
    CustomResource,
    Metadata,
    ObjectKey,
    Pod,
    assignment_name,
)
from rota.kube.client.pod_status import SIDECAR_CONTAINER
from rota.kube.members.report_client import ReportClient
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.workload.deployments import Deployments
from rota.model import Queue
from simulation.clock import Process
from simulation.server import PodObject, Stored
from simulation.stand_ins import UID, Brokers, GroupOfTheWorld, Members, Server, as_config_map
from simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from simulation.world import Simulation


class Operator(Process):
    """One replica. Only the leader writes, as far as it knows."""

    def __init__(self, world: "Simulation", name: str) -> None:
        super().__init__(world.clock)
        self.world, self.chance = world, Random(f"{world.seed}/{name}")
        namespace, group = world.group.split("/")
        self.key: ObjectKey = (namespace, group)
        self.views: dict[str, tuple[tuple[Queue, ...] | None, float]] = {}
        self.leap = 0.0
        self.polls: dict[str, asyncio.Event] = {}  # set when a member's report has changed
        self._versions: dict[str, int] = {}  # of pods, the newest that was seen
        self._record: Stored | None = None
        self._group_seen: tuple[int, Mapping[str, Any]] | None = None  # the version and the status of the group
        self.loop = VirtualLoop(self)
        self.brain = self._controller()
        world.api.watchers.append(self.hear)
        world.api.on_record.append(self._record_changed)
        self.relist(stale=True)
        self.ask_routes()
        self.wake()
        self._follow_lease()

    def _controller(self) -> Controller:
        api, reports = cast("Api", Server(self)), cast("ReportClient", Members(self))
        with self.loop.running():
            brain = Controller(api, reports, cast("BrokerRegistry", Brokers(self)), Deployments(api))
            brain.on_reconciled = self._planned
            brain.wall_time = lambda: self.time
            brain.add_group(GroupOfTheWorld(self))
            brain.events.on_group_upsert(self.body())
        return brain

    @property
    def time(self) -> float:
        """The time of day as this machine tells it."""
        return self.world.epoch + self.clock.now + self.leap

    def wake(self) -> None:
        """Reconcile the group soon."""
        with self.loop.running():
            self.brain.enqueue(self.key)

    def _planned(self, _: ReconcileResult) -> None:
        self.world.judge.planned()

    def _follow_lease(self) -> None:
        """Begin or end to lead, and see the status as it is now."""
        leads, api = self.world.leads(self), self.world.api
        is_new = self._group_seen != (api.version, api.status)
        if is_new or leads != self.brain.is_leading:
            self._group_seen = (api.version, dict(api.status))
            with self.loop.running():
                if leads != self.brain.is_leading:
                    self.brain.set_leading(is_leading=leads)
                self.brain.events.on_group_upsert(self.body())
        self.after(0.1, self._follow_lease)

    # Watches.

    def hear(self, name: str, pod: PodObject | None, version: int) -> None:
        """Receive a change by the watch, later; while the network is bad some are lost, late or repeated."""
        for _ in range(2 if self.world.bad_watch and self.chance.random() < 0.1 else 1):
            if self.world.silent_watch or (self.world.bad_watch and self.chance.random() < 0.1):
                continue
            late = self.chance.uniform(0.0, 5.0 if self.world.bad_watch else 0.02)
            self.after(late, lambda: self._see(name, pod, version))

    def relist(self, *, stale: bool = False) -> None:
        """List all pods again; those that are missing have ended. The first list comes from a cache."""
        if not self.world.api.down:
            there = dict(self.world.api.pods)
            for name in [name for name in there if stale and self.world.is_new(name) and self.chance.random() < 0.5]:
                late = there.pop(name)
                self.after(self.chance.uniform(1, 8), partial(self._see, late.name, late, late.version))
            for name in [name for name in self.brain.groups[self.key].pods if name not in there]:
                self._see(name, None, self.world.api.version)
            for name, pod in there.items():
                self._see(name, pod, pod.version)
            self._keep(self.world.api.record, self.world.api.version)
            if self.world.api.record is None:
                self._report_missing_records()
        self.after(self.chance.uniform(20, 40), self.relist)

    def _report_missing_records(self) -> None:
        """Report the assignment as deleted, if the operator has written one that no watch has reported."""
        for expected in list(self.brain.events.expected_assignments()):
            metadata = msgspec.structs.replace(expected.metadata, resource_version=str(self.world.api.version))
            with self.loop.running():
                self.brain.events.on_assignment_delete(msgspec.structs.replace(expected, metadata=metadata))

    def _see(self, name: str, pod: PodObject | None, version: int) -> None:
        if version <= self._versions.get(name, 0):
            return
        self._versions[name] = version
        known = self.brain.groups[self.key].pods.get(name)
        with self.loop.running():
            if pod:
                self.brain.events.on_pod_upsert(self.shown(pod))
            elif known:
                self.brain.events.on_pod_delete(known.pod)

    def _record_changed(self, stored: Stored | None) -> None:
        """Receive a change of the assignment by its watch, later."""
        if not self.world.silent_watch:
            late = self.chance.uniform(0.0, 5.0 if self.world.bad_watch else 0.02)
            self.after(late, partial(self._keep, stored, self.world.api.version))

    def _keep(self, stored: Stored | None, version: int) -> None:
        """See the assignment as of a version; one that is deleted has that version, as in an event or by a list."""
        before, self._record = self._record, stored
        with self.loop.running():
            if stored:
                self.brain.events.on_assignment_upsert(as_config_map(self.key, stored))
            elif before:
                self.brain.events.on_assignment_delete(as_config_map(self.key, replace(before, version=version)))

    # Brokers and members.

    def ask_routes(self) -> None:
        """Ask the name server for every topic, and again in 5 s."""
        self.read_routes()
        self.wake()
        self.after(5, self.ask_routes)

    def read_routes(self) -> None:
        """Ask the name server for every topic once."""
        for topic in self.world.topics:
            queues = self.world.broker.told(topic)
            before = self.views.get(topic)
            if queues is None:
                self.views[topic] = (None, self.clock.now)
            elif before is None or before[0] != queues:
                self.views[topic] = (queues, self.clock.now)
        for topic in set(self.views) - set(self.world.topics):
            del self.views[topic]

    def reported(self, name: str) -> None:
        """Answer a member's long poll."""
        if name in self.polls:
            with self.loop.running():
                self.polls[name].set()

    # Objects as the API server has them.

    def body(self) -> CustomResource:
        """Return the ConsumerGroup."""
        namespace, name = self.key
        version = str(self.world.api.version)
        metadata = Metadata(name=name, namespace=namespace, uid=UID, resource_version=version)
        return CustomResource(metadata, {}, dict(self.world.api.status))

    def shown(self, pod: PodObject) -> Pod:
        """Return a pod."""
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
                    {"name": SIDECAR_CONTAINER, "volumeMounts": [{"name": "it", "mountPath": ASSIGNMENT_MOUNT_PATH}]}
                ],
                "volumes": [{"name": "it", "configMap": {"name": assignment_name(group)}}],
            },
            "status": {
                "phase": "Failed" if pod.ended else "Running",
                "podIP": pod.name,
                "conditions": [{"type": "Ready", "status": str(pod.ready)}],
                "initContainerStatuses": [{"name": SIDECAR_CONTAINER, **running}],
            },
        }
        return msgspec.convert(body, Pod)


def restarted(operator: Operator) -> Operator:
    """Replace an operator by a new process that remembers nothing."""
    operator.kill()
    operator.world.api.watchers.remove(operator.hear)
    fresh = Operator(operator.world, f"operator-{operator.chance.random():.6f}")
    fresh.leap = operator.leap
    return fresh
