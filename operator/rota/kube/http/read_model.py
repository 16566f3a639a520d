"""Read model of the operator's state, for the page, the command line and Prometheus."""

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple

from rota.aio import yield_periodically
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.objects import Key
from rota.kube.http import presenters, schema
from rota.kube.http.access.access import Reads
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.state.group import Group
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.rebalances import RebalanceChange, RebalanceTracker
from rota.model import Queue, queue_of
from rota.planner import reason_for_no_change
from rota.planner.record import seconds_since


class ReadModel(NamedTuple):
    """Assembles the state of groups on demand, from the controller, the brokers' data and the metrics."""

    brain: Controller
    places: BrokerRegistry
    measures: OperatorMetrics
    identity: str
    version: str
    now: Callable[[], float]  # the event loop's clock
    one_at_a_time: asyncio.Lock

    def keys(self) -> list[Key]:
        """Return the keys of all groups."""
        return [key for key, group in self.brain.groups.items() if group.body]

    def fact(self, key: Key) -> GroupFacts | None:
        """Return the present state of a group; None if it does not exist."""
        group = self.brain.group(key)
        if group is None or group.body is None:
            return None
        tally, now = self.measures.tallies.get(key) or RebalanceTracker(), self.now()
        broker, lag = self.places.of(group, now), self.places.lag(key)
        return GroupFacts(group, tally.seen(now), broker, lag, self._under_way(group), group.pods.given.messages)

    def _under_way(self, group: Group) -> float:
        """Return the age of the oldest handover in the stored assignment; it may have begun under an earlier leader."""
        document = group.record.document
        begun = [release.at for release in document.releasing.values() if release.to] if document else []
        return max((seconds_since(at, self.brain.time()) for at in begun), default=0.0)

    def worked(self, key: Key) -> Collection[Queue]:
        """Return the queues that have a consumer; if the group has unmanaged consumers, all its queues."""
        group = self.brain.group(key)
        if group is None:
            return ()
        broker = self.places.of(group, self.now())
        if broker.foreigners:
            return [queue for view in broker.views.values() if view for queue in view.queues]
        return [
            queue
            for holder, queues in group.record.shares.items()
            if not group.pods.has_ended(holder)
            for queue in queues
        ]

    def take(self, done: ReconcileResult) -> RebalanceChange:
        """Count the result of a group's reconcile in the metrics; return what changed in its rebalances."""
        return self.measures.take(done, self.now())

    @property
    def operator(self) -> schema.Operator:
        """This operator, as responses name it."""
        return schema.Operator(self.identity, self.version, self.brain.leads)

    async def groups(self, reads: Reads | None = None) -> schema.Groups:
        """Return a summary of every group; with `reads`, of groups in namespaces for which it returns True.

        A thousand groups take a while, so other tasks run in between.
        """
        lines: list[schema.Summary] = []
        async for key in yield_periodically(sorted(self.keys())):
            is_readable = reads is None or await reads(key[0])
            if is_readable and (fact := self.fact(key)):
                lines.append(presenters.summary(fact))
        return schema.Groups(self.operator, lines)

    def knows(self, namespace: str, name: str) -> bool:
        """Whether the group exists."""
        group = self.brain.group((namespace, name))
        return group is not None and group.body is not None

    def group(self, namespace: str, name: str) -> schema.Detail | None:
        """Return all details of a group; None if it does not exist."""
        key = (namespace, name)
        fact = self.fact(key)
        broker_data = (self.places.clients(key), self.places.settings(key))
        return presenters.detail(self.operator, fact, *broker_data) if fact else None

    async def why(self, namespace: str, name: str, queue: str | None) -> schema.Reasons | None:
        """Explain why queues have their owners, in a thread and for one request at a time: many queues take long."""
        fact = self.fact((namespace, name))
        if fact is None:
            return None
        queues = [] if queue is None else [queue_of(queue)]
        async with self.one_at_a_time:
            explanations = await asyncio.to_thread(
                reason_for_no_change, self.brain.snapshot(fact.group), self.brain.time(), queues
            )
        summary = presenters.summary(fact)
        reasons = [schema.Reason(*entry.queue, entry.owner, entry.told) for entry in explanations]
        return schema.Reasons(summary.strategy, summary.generation, reasons, summary.last_rebalance)
