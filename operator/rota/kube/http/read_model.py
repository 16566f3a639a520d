"""What the operator knows now, for whoever asks: the page, the command line, Prometheus."""

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple

from rota.aio import gently
from rota.kube.brokers.registry import Places
from rota.kube.client.objects import Key
from rota.kube.http import presenters, schema
from rota.kube.http.access.access import Reads
from rota.kube.reconcile.controller import Brain
from rota.kube.reconcile.reconciler import Done
from rota.kube.state.group import Group
from rota.kube.telemetry.group_gauges import Fact
from rota.kube.telemetry.operator_metrics import Measures
from rota.kube.telemetry.rebalances import News, Tally
from rota.model import Queue, queue_of
from rota.planner import why
from rota.planner.record import ago


class Sight(NamedTuple):
    """Everything that is known of groups, put together when it is asked for."""

    brain: Brain
    places: Places
    measures: Measures
    identity: str
    version: str
    now: Callable[[], float]  # the loop's
    one_at_a_time: asyncio.Lock

    def keys(self) -> list[Key]:
        """Return all groups."""
        return [key for key, group in self.brain.groups.items() if group.body]

    def fact(self, key: Key) -> Fact | None:
        """Return what is known of a group."""
        group = self.brain.group(key)
        if group is None or group.body is None:
            return None
        tally, now = self.measures.tallies.get(key) or Tally(), self.now()
        broker, lag = self.places.of(group, now), self.places.lag(key)
        return Fact(group, tally.seen(now), broker, lag, self._under_way(group), group.pods.given.messages)

    def _under_way(self, group: Group) -> float:
        """Return for how long the oldest handover on record has been under way: we may not have seen it begin."""
        document = group.record.document
        begun = [it.at for it in document.releasing.values() if it.to] if document else []
        return max((ago(at, self.brain.time()) for at in begun), default=0.0)

    def worked(self, key: Key) -> Collection[Queue]:
        """Return the queues of a group that somebody works; beside consumers that are not ours, all that there are."""
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

    def take(self, done: Done) -> News:
        """Count what a round of a group did, and return it."""
        return self.measures.take(done, self.now())

    @property
    def operator(self) -> schema.Operator:
        """Say who answers."""
        return schema.Operator(self.identity, self.version, self.brain.leads)

    async def groups(self, reads: Reads | None = None) -> schema.Groups:
        """Return every group in a line; with `reads`, those of the namespaces for which it returns True.

        A thousand groups take a while, in which other tasks have their turns.
        """
        lines: list[schema.Summary] = []
        async for key in gently(sorted(self.keys())):
            is_readable = reads is None or await reads(key[0])
            if is_readable and (fact := self.fact(key)):
                lines.append(presenters.summary(fact))
        return schema.Groups(self.operator, lines)

    def knows(self, namespace: str, name: str) -> bool:
        """Whether there is such a group."""
        group = self.brain.group((namespace, name))
        return group is not None and group.body is not None

    def group(self, namespace: str, name: str) -> schema.Detail | None:
        """Return everything about a group."""
        key = (namespace, name)
        fact = self.fact(key)
        told = (self.places.clients(key), self.places.settings(key))
        return presenters.detail(self.operator, fact, *told) if fact else None

    async def why(self, namespace: str, name: str, queue: str | None) -> schema.Reasons | None:
        """Say why queues have their owners; that takes a while for many, so aside, and for one who asks at a time."""
        fact = self.fact((namespace, name))
        if fact is None:
            return None
        asked = [] if queue is None else [queue_of(queue)]
        async with self.one_at_a_time:
            found = await asyncio.to_thread(why, self.brain.snapshot(fact.group), self.brain.time(), asked)
        said = presenters.summary(fact)
        reasons = [schema.Reason(*it.queue, it.owner, it.told) for it in found]
        return schema.Reasons(said.strategy, said.generation, reasons, said.last_rebalance)
