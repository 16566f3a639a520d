"""Requests groups' offsets on single queues that they may never have consumed.

A broker's statistics of a group show 0, or nothing, for such a queue: neither says where the group will start.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from rota.brokers.port import Brokers
from rota.kube.brokers.lag.lag_merge import GroupSamples
from rota.kube.brokers.lag.polled_broker import GroupQueue, PolledBroker, ResolvedOffset, send_all
from rota.kube.brokers.topic_interest import TopicInterest
from rota.kube.client.objects import ObjectKey
from rota.model import Queue

REUSE_POLLS = 4  # polls for which a response about one queue is reused
MAX_QUEUES_ASKED = 1000  # requests for single queues in a poll; the other queues stay unknown until the next poll
MAX_OFFSET = 2**63 - 1  # brokers count in Java's longs: a larger or negative number is no offset


class _Question(NamedTuple):
    """A queue whose offset is to be requested, as its sample and its topic describe it."""

    is_empty: bool
    # If the group starts at Latest: since when it consumes the topic, in seconds since 1970; otherwise None.
    starts_at: float | None


class QueueResolver:
    """Requests the offsets on queues that may never have been consumed, from the brokers of one cluster."""

    def __init__(self, brokers: Brokers, topic_starts: Callable[[ObjectKey], Mapping[str, float]]) -> None:
        self._brokers = brokers
        self._topic_starts = topic_starts

    async def resolve(
        self,
        broker: PolledBroker,
        groups: Mapping[ObjectKey, TopicInterest],
        samples: GroupSamples,
        unresolved: Mapping[ObjectKey, list[Queue]],
    ) -> None:
        """Request the offsets on these queues, and put them into the queues' samples.

        Empty queues come last, as they have no lag. ConsumerGroups with the same consumer group share a request.
        """
        questions: dict[GroupQueue, _Question] = {}
        for key, queues in unresolved.items():
            interest = groups[key]
            starts = self._topic_starts(key) if queues and interest.start_from.position == "Latest" else {}
            for queue in queues:
                is_empty = samples[key][queue.topic][queue.id].is_empty
                questions[interest.consumer_group, queue] = _Question(is_empty, starts.get(queue.topic))
        resolved = _reusable_responses(broker, questions)
        to_ask = [group_queue for group_queue in questions if group_queue not in resolved]
        to_ask.sort(key=lambda group_queue: questions[group_queue].is_empty)
        requests = {
            group_queue: partial(self._read_position, *group_queue, questions[group_queue])
            for group_queue in to_ask[:MAX_QUEUES_ASKED]
        }
        for group_queue, offset in (await send_all(broker, requests)).items():
            if offset is None or is_valid_offset(offset):
                resolved[group_queue] = ResolvedOffset(broker.polls, questions[group_queue].is_empty, offset)
        broker.resolved = resolved
        for key, queues in unresolved.items():
            for queue in queues:
                group_queue = (groups[key].consumer_group, queue)
                has_response = group_queue in resolved
                committed = resolved[group_queue].offset if has_response else None
                is_known = has_response or questions[group_queue].is_empty  # an empty queue has no lag in any case
                topic_samples = samples[key][queue.topic]
                topic_samples[queue.id] = replace(topic_samples[queue.id], committed=committed, is_known=is_known)

    async def _read_position(self, group: str, queue: Queue, question: _Question) -> int | None:
        """Return a group's committed offset on a queue, or where it will start; None if neither is known."""
        committed = await self._brokers.committed_offset(group, queue)
        if committed is None and question.starts_at is not None:
            return await self._brokers.offset_at_time(queue, question.starts_at)
        return committed


def _reusable_responses(
    broker: PolledBroker, questions: Mapping[GroupQueue, _Question]
) -> dict[GroupQueue, ResolvedOffset]:
    """Return recent responses, without those about a queue that was empty and is not any more, or the reverse."""
    reusable: dict[GroupQueue, ResolvedOffset] = {}
    for group_queue, response in broker.resolved.items():
        is_recent = broker.polls - response.poll < REUSE_POLLS
        is_as_empty = group_queue not in questions or questions[group_queue].is_empty == response.was_empty
        if is_recent and is_as_empty:
            reusable[group_queue] = response
    return reusable


def is_valid_offset(offset: int) -> bool:
    """Whether a number that a broker or a member reports can be an offset."""
    return 0 <= offset <= MAX_OFFSET
