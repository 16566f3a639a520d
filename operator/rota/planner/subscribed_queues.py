"""Queues that a group consumes: those in its topics' routes and, while a route may be incomplete, in its assignment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from rota.documents import Assignment
from rota.model import RETRY_TOPIC_PREFIX, Holder, Queue
from rota.planner.snapshot import Snapshot

SHRINK_PATIENCE_SECONDS = 40.0  # brokers register every 30 s: a new name server knows only some of them


@dataclass(frozen=True)
class SubscribedQueues:
    """The topics and queues of a group's subscriptions; each fact is computed once, on first use.

    `snapshot.views` has the last route of each topic, and for how many seconds it has been the same (`stable_for`). A
    topic that name servers have not reported has the view None, or no view.
    """

    snapshot: Snapshot
    document: Assignment
    owners: Mapping[Queue, Holder]

    @cached_property
    def queues(self) -> list[Queue]:
        """Every queue to consume: those in the routes and, while a route may be incomplete, those in the assignment."""
        return list(chain.from_iterable(map(self._queues_of, self._topics)))

    @cached_property
    def unassigned(self) -> list[Queue]:
        """The queues to consume that are not in the assignment, neither owned nor being released."""
        releasing = self.document.releasing
        return [queue for queue in self.queues if queue not in self.owners and queue not in releasing]

    @cached_property
    def unsubscribed(self) -> list[Queue]:
        """The queues in the assignment, owned or being released, that the group no longer consumes."""
        assigned_count = len(self.owners) + len(self.document.releasing)
        if assigned_count + len(self.unassigned) == len(self.queues):  # then every assigned queue is in `queues`
            return []
        group_queues = frozenset(self.queues)
        return [queue for queue in (*self.owners, *self.document.releasing) if queue not in group_queues]

    @cached_property
    def postponable(self) -> frozenset[Queue]:
        """The queues whose revoke a gate may postpone even if the policy gives them to no member.

        All queues that the group consumes. But none with unmanaged consumers: a queue that no member gets is theirs,
        and they consume it already.
        """
        return frozenset() if self.snapshot.unmanaged_consumers else frozenset(self.queues)

    @cached_property
    def assigned_by_topic(self) -> dict[str, set[Queue]]:
        """The queues in the assignment, owned or being released, by topic."""
        by_topic: dict[str, set[Queue]] = {}
        for queue in (*self.owners, *self.document.releasing):
            by_topic.setdefault(queue.topic, set()).add(queue)
        return by_topic

    @cached_property
    def missing_metadata(self) -> list[str]:
        """What brokers did not return: routes of topics (the retry topic is optional), or the group's consumers.

        While something is missing, no queue may move.
        """
        names = [f"topic {topic}" for topic in self._topics if self._is_metadata_missing(topic)]
        if self.snapshot.unmanaged_consumers is None:
            names.append("the group's members")
        return names

    @property
    def retry_topic(self) -> str:
        """The group's own retry topic; those of other groups may be subscribed to like any topic."""
        spec = self.snapshot.spec
        if spec and spec.group:  # the consumer group at the broker, if it has another name than the ConsumerGroup
            return RETRY_TOPIC_PREFIX + spec.group
        _, _, name = self.snapshot.group.partition("/")
        return RETRY_TOPIC_PREFIX + name

    @property
    def _topics(self) -> list[str]:
        """The topics to consume: the subscribed ones, and the retry topic if the snapshot has a view of it."""
        if self.snapshot.spec is None or self.snapshot.must_release_all:
            return []
        topics = self.snapshot.subscribed_topics
        has_retry_view = self.retry_topic in self.snapshot.views
        return [*topics, self.retry_topic] if has_retry_view and self.retry_topic not in topics else topics

    def _routed(self, topic: str) -> Sequence[Queue]:
        """Return the queues in the topic's route; none without a response."""
        view = self.snapshot.views.get(topic)
        return view.queues if view else ()

    def _is_metadata_missing(self, topic: str) -> bool:
        return topic != self.retry_topic and not self._routed(topic)

    def _queues_of(self, topic: str) -> Sequence[Queue]:
        """Return the queues of a topic: those in its route, and until that is stable also those in the assignment."""
        view = self.snapshot.views.get(topic)
        if view and view.queues and view.stable_for >= SHRINK_PATIENCE_SECONDS:
            return view.queues
        assigned = self.assigned_by_topic.get(topic, set())
        routed = self._routed(topic)
        if routed:
            # Leave out queues that are released without a next owner: they were missing in a stable route at an earlier
            # plan. Without any route, nothing confirms that they are still gone.
            assigned = {queue for queue in assigned if not self._is_released_for_good(queue)}
        return sorted(assigned.union(routed))

    def _is_released_for_good(self, queue: Queue) -> bool:
        release = self.document.releasing.get(queue)
        return release is not None and release.to is None
