"""What the operator knows now, for whoever asks: the page, the command line, Prometheus."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from rota.kube import showing, shown
from rota.kube.brain import Brain, Done
from rota.kube.measures import Fact, Measures
from rota.kube.places import Places
from rota.kube.tally import Tally
from rota.model import Queue
from rota.planner import why

Key = tuple[str, str]


class Sight(NamedTuple):
    """Everything that is known of groups, put together when it is asked for."""

    brain: Brain
    places: Places
    measures: Measures
    identity: str
    version: str
    now: Callable[[], float]  # the loop's

    def keys(self) -> list[Key]:
        """Return all groups."""
        return [key for key, group in self.brain.groups.items() if group.body]

    def fact(self, key: Key) -> Fact | None:
        """Return what is known of a group."""
        group = self.brain.group(key)
        if group is None or group.body is None:
            return None
        tally = self.measures.tallies.get(key) or Tally()
        return Fact(group, tally, self.places.of(group, self.now()), self.places.lag(key))

    def worked(self, key: Key) -> Collection[Queue]:
        """Return the queues of a group that somebody works; beside consumers that are not ours, all that there are."""
        group = self.brain.group(key)
        if group is None:
            return ()
        broker = self.places.of(group, self.now())
        if broker.foreigners:
            return [queue for view in broker.views.values() if view for queue in view.queues]
        return [queue for queues in group.shares.values() for queue in queues]

    def take(self, done: Done) -> None:
        """Count what a round of a group did."""
        self.measures.take(done, self.now())

    @property
    def operator(self) -> shown.Operator:
        """Say who answers."""
        return shown.Operator(self.identity, self.version, self.brain.leads)

    def groups(self) -> shown.Groups:
        """Return every group in a line."""
        facts = [fact for key in sorted(self.keys()) if (fact := self.fact(key))]
        return shown.Groups(self.operator, [showing.summary(fact) for fact in facts])

    def group(self, namespace: str, name: str) -> shown.Detail | None:
        """Return everything about a group."""
        key = (namespace, name)
        fact = self.fact(key)
        return showing.detail(self.operator, fact, self.places.clients(key)) if fact else None

    def why(self, namespace: str, name: str, queue: str | None) -> shown.Reasons | None:
        """Say why queues have their owners."""
        fact = self.fact((namespace, name))
        if fact is None:
            return None
        asked = [showing.queue_of(queue)] if queue else []
        found = why(self.brain.snapshot(fact.group), self.brain.time(), asked)
        said = showing.summary(fact)
        reasons = [shown.Reason(*it.queue, it.owner, it.told) for it in found]
        return shown.Reasons(said.strategy, said.generation, reasons, said.last_rebalance)
