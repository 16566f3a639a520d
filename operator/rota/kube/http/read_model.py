"""Read model: the operator's state as the page, the command line and Prometheus see it.

`site.py` serves its results as JSON, and `telemetry/operator_metrics.py` scrapes `facts_of` each group.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple

from rota.aio import yield_periodically
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.objects import ObjectKey
from rota.kube.http import presenters, schema
from rota.kube.http.access.access import MayRead
from rota.kube.reconcile.controller import Controller
from rota.kube.state.group import Group
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.rebalances import RebalanceTracker
from rota.model import Queue, parse_queue
from rota.planner import explain_owners
from rota.planner.record import seconds_since


class ReadModel(NamedTuple):
    """Assembles the state of groups on demand, from the controller, the brokers' data and the metrics."""

    controller: Controller
    registry: BrokerRegistry
    metrics: OperatorMetrics
    identity: str
    version: str
    loop_time: Callable[[], float]  # the event loop's clock
    explain_lock: asyncio.Lock  # held by the one `explain` that runs

    def keys(self) -> list[ObjectKey]:
        """Return the keys of all groups."""
        return [key for key, group in self.controller.groups.items() if group.body]

    def _existing_group(self, key: ObjectKey) -> Group | None:
        """Return a group; None if it does not exist, or the operator has seen only its pods or its assignment."""
        group = self.controller.group(key)
        return group if group and group.body else None

    def facts_of(self, key: ObjectKey) -> GroupFacts | None:
        """Return the present state of a group; None if it does not exist."""
        group = self._existing_group(key)
        if group is None:
            return None
        tracker = self.metrics.trackers.get(key) or RebalanceTracker()
        now = self.loop_time()
        return GroupFacts(
            group,
            tracker.copy_at(now),
            self.registry.state_of(group, now),
            self.registry.lag_of(key),
            self._oldest_handover_seconds(group),
            group.pods.delivery_tracker.uncommitted_messages,
        )

    def _oldest_handover_seconds(self, group: Group) -> float:
        """Return the age of the oldest handover in the stored assignment; it may have begun under an earlier leader."""
        document = group.stored_assignment.document
        if document is None:
            return 0.0
        now = self.controller.wall_time()
        handovers = [release for release in document.releasing.values() if release.to]
        return max((seconds_since(handover.at, now) for handover in handovers), default=0.0)

    def consumed_queues(self, key: ObjectKey) -> Collection[Queue]:
        """Return the queues of a group that have a consumer.

        Lag states depend on it: a queue whose offset does not move is Stalled with a consumer, and Stopped without one.
        If the group has unmanaged consumers, return all queues, since the queues of such consumers are unknown.
        """
        group = self.controller.group(key)
        if group is None:
            return ()
        broker_state = self.registry.state_of(group, self.loop_time())
        queues: list[Queue] = []
        if broker_state.unmanaged_ids:
            for view in filter(None, broker_state.views.values()):
                queues += view.queues
            return queues
        for holder, share in group.stored_assignment.shares.items():
            if not group.pods.has_ended(holder):
                queues += share
        return queues

    @property
    def operator(self) -> schema.OperatorInfo:
        """This operator, as responses name it."""
        return schema.OperatorInfo(self.identity, self.version, self.controller.is_leading)

    async def list_groups(self, may_read: MayRead | None = None) -> schema.GroupList:
        """Return a summary of every group; with `may_read`, of groups in namespaces for which it returns True.

        A thousand groups take a while, so other tasks run in between.
        """
        summaries: list[schema.GroupSummary] = []
        async for key in yield_periodically(sorted(self.keys())):
            is_readable = may_read is None or await may_read(key[0])
            if is_readable and (facts := self.facts_of(key)):
                summaries.append(presenters.present_summary(facts))
        return schema.GroupList(self.operator, summaries)

    def has_group(self, namespace: str, name: str) -> bool:
        """Whether the group exists."""
        return self._existing_group((namespace, name)) is not None

    def describe_group(self, namespace: str, name: str) -> schema.GroupDetail | None:
        """Return all details of a group; None if it does not exist."""
        key = (namespace, name)
        facts = self.facts_of(key)
        if facts is None:
            return None
        consumers = self.registry.consumers_of(key)
        settings_by_broker = self.registry.settings_of(key)
        return presenters.present_detail(self.operator, facts, consumers, settings_by_broker)

    async def explain(self, namespace: str, name: str, queue: str | None) -> schema.OwnerReasons | None:
        """Explain why queues have their owners; None if the group does not exist, ValueError for an unknown queue.

        It runs in a thread, for one request at a time, because it takes long for many queues.
        """
        facts = self.facts_of((namespace, name))
        if facts is None:
            return None
        queues = [] if queue is None else [parse_queue(queue)]
        async with self.explain_lock:
            explanations = await asyncio.to_thread(
                explain_owners, self.controller.reconciler.snapshot(facts.group), self.controller.wall_time(), queues
            )
        summary = presenters.present_summary(facts)
        reasons = [schema.QueueExplanation(*entry.queue, entry.owner, entry.sentence) for entry in explanations]
        return schema.OwnerReasons(summary.strategy, summary.generation, reasons, summary.last_rebalance)
