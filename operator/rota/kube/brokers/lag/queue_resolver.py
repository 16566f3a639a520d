"""Requests groups' offsets on single queues that they may never have consumed.

A broker's statistics of a group show 0, or nothing, for such a queue: neither says where the group will start.
"""

from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from rota.brokers.port import Brokers
from rota.kube.brokers.lag.lag_merge import GroupSamples
from rota.kube.brokers.lag.polled_broker import OffsetQuestion, PolledBroker, ResolvedOffset, send_all
from rota.kube.brokers.topic_interest import TopicInterest
from rota.kube.client.objects import ObjectKey
from rota.model import Queue

REUSE_POLLS = 4  # polls for which a response about one queue is reused
MAX_QUEUES_ASKED = 1000  # requests for single queues in a poll; the other queues stay unknown until the next poll
MAX_OFFSET = 2**63 - 1  # brokers count in Java's longs: a larger or negative number is no offset


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

        Empty queues come last, as they have no lag. ConsumerGroups share a request if they have the same consumer group
        and start at the same time.
        """
        questions = self._questions(groups, unresolved)
        is_empty: dict[OffsetQuestion, bool] = {}
        for key, questions_of_group in questions.items():
            for question in questions_of_group:
                is_empty[question] = samples[key][question.queue.topic][question.queue.id].is_empty
        resolved = _reusable_responses(broker, is_empty)
        to_ask = [question for question in is_empty if question not in resolved]
        to_ask.sort(key=is_empty.__getitem__)
        requests = {question: partial(self._read_position, question) for question in to_ask[:MAX_QUEUES_ASKED]}
        for question, offset in (await send_all(broker, requests)).items():
            if offset is None or is_valid_offset(offset):
                resolved[question] = ResolvedOffset(broker.polls, is_empty[question], offset)
        broker.resolved = resolved
        for key, questions_of_group in questions.items():
            for question in questions_of_group:
                response = resolved.get(question)
                topic_samples = samples[key][question.queue.topic]
                topic_samples[question.queue.id] = replace(
                    topic_samples[question.queue.id],
                    committed=response.offset if response else None,
                    is_known=response is not None or is_empty[question],  # an empty queue has no lag in any case
                )

    def _questions(
        self, groups: Mapping[ObjectKey, TopicInterest], unresolved: Mapping[ObjectKey, list[Queue]]
    ) -> dict[ObjectKey, list[OffsetQuestion]]:
        """Return what to ask for each group."""
        questions: dict[ObjectKey, list[OffsetQuestion]] = {}
        for key, queues in unresolved.items():
            interest = groups[key]
            starts = self._topic_starts(key) if queues and interest.start_from.position == "Latest" else {}
            questions[key] = [
                OffsetQuestion(interest.consumer_group, queue, starts.get(queue.topic)) for queue in queues
            ]
        return questions

    async def _read_position(self, question: OffsetQuestion) -> int | None:
        """Return the group's committed offset on the queue, or where it will start; None if neither is known."""
        committed = await self._brokers.committed_offset(question.consumer_group, question.queue)
        if committed is None and question.starts_at is not None:
            return await self._brokers.offset_at_time(question.queue, question.starts_at)
        return committed


def _reusable_responses(
    broker: PolledBroker, is_empty: Mapping[OffsetQuestion, bool]
) -> dict[OffsetQuestion, ResolvedOffset]:
    """Return recent responses, without those about a queue that was empty and is not any more, or the reverse."""
    reusable: dict[OffsetQuestion, ResolvedOffset] = {}
    for question, response in broker.resolved.items():
        is_recent = broker.polls - response.poll < REUSE_POLLS
        is_as_empty = is_empty.get(question, response.was_empty) == response.was_empty
        if is_recent and is_as_empty:
            reusable[question] = response
    return reusable


def is_valid_offset(offset: int) -> bool:
    """Whether a number that a broker or a member reports can be an offset."""
    return 0 <= offset <= MAX_OFFSET
