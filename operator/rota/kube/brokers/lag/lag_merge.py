"""Merges one broker's responses into samples of each group's queues, and computes each group's lag from them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, LagHistory, QueueLag, QueueSample
from rota.kube.brokers.topic_interest import OffsetSource, TopicInterest
from rota.kube.client.objects import ObjectKey
from rota.model import Queue
from rota.spec import StartFrom

START_EARLIEST = StartFrom(position="Earliest")  # where a retry topic starts, as in the reference client

# By queue of a topic on one broker: min_offset, of the oldest message, and max_offset, of the next one to be stored.
OffsetRanges = dict[int, tuple[int, int]]
CommittedOffsets = dict[str, dict[int, int]]  # committed by a group on one broker, by topic and queue
GroupSamples = dict[ObjectKey, dict[str, dict[int, QueueSample]]]  # by group, topic and queue
HistoryKey = tuple[ObjectKey, OffsetSource]  # a group, and the source of the offsets in its history


class RequestTime(NamedTuple):
    """When a group's offsets were requested."""

    loop_seconds: float  # on the loop's clock
    unix_seconds: float  # since 1970


RequestTimes = dict[ObjectKey, RequestTime]


@dataclass
class LagAtBroker:
    """One group's lag at one broker."""

    offset_source: OffsetSource
    queue_lags: dict[Queue, QueueLag] = field(default_factory=dict)
    dead_letters: int | None = None
    sampled_at: float | None = None  # time of the last answered request, in seconds since 1970; None: none was answered
    requested_at: float | None = None  # loop's time of that request; while none was answered, of the first request
    # Incoming messages a second, a mean over up to an hour; None: unknown. Only for groups whose policy needs weights.
    incoming_rates: Mapping[Queue, float | None] = field(default_factory=dict)
    is_known: bool = False  # whether the lag on each queue is known

    def matches(self, interest: TopicInterest) -> bool:
        """Whether this lag is of the offsets that `interest` names: the group's spec may have changed since."""
        return self.offset_source == interest.offset_source

    @property
    def responded_at(self) -> float:
        """Loop's time of the last answered request; 0 if there is none, so that the group is polled first."""
        return self.requested_at if self.sampled_at and self.requested_at else 0.0


@dataclass
class BrokerLag:
    """The lag of all groups at one broker, and the samples of their queues."""

    name: str
    lag_by_group: dict[ObjectKey, LagAtBroker] = field(default_factory=dict)  # empty while no topic's route lists it
    histories: dict[HistoryKey, dict[str, LagHistory]] = field(default_factory=dict)  # by topic

    def lag_of(self, key: ObjectKey, interest: TopicInterest) -> LagAtBroker | None:
        """Return the last lag of a group that has this interest."""
        lag = self.lag_by_group.get(key)
        return lag if lag and lag.matches(interest) else None

    def histories_of(self, key: ObjectKey, interest: TopicInterest) -> dict[str, LagHistory]:
        """Return a group's histories by topic; none if its earlier samples are of another offset source."""
        return self.histories.get((key, interest.offset_source), {})

    def unknown_lag(self, key: ObjectKey, interest: TopicInterest, now: float) -> LagAtBroker:
        """Return the lag of a group about which the broker does not respond: unknown on every queue.

        The previous incoming rates are kept: as means over up to an hour they change slowly, and without them the
        group's queue weights would be unknown.
        """
        previous = self.lag_of(key, interest)
        if previous is None:
            return LagAtBroker(interest.offset_source, requested_at=now)
        queue_lags = dict.fromkeys(previous.queue_lags, UNKNOWN_QUEUE_LAG)
        return replace(previous, queue_lags=queue_lags, dead_letters=None, is_known=False)


def merge_responses(
    broker: str,
    groups: Mapping[ObjectKey, TopicInterest],
    topics: Mapping[ObjectKey, Collection[str]],
    offsets: Mapping[ObjectKey, CommittedOffsets],
    ranges: Mapping[str, OffsetRanges],
) -> tuple[GroupSamples, dict[ObjectKey, list[Queue]]]:
    """Return samples of the groups that the broker responded about, and their queues that may never have been consumed.

    `topics`: each group's topics on this broker.
    `offsets`: committed offsets; of a Broadcasting group, those that its members reported, because brokers store none.
    The second result has the queues with the offset 0 or none, which `QueueResolver` then requests one by one.
    """
    samples: GroupSamples = {}
    unresolved: dict[ObjectKey, list[Queue]] = {}
    for key, interest in groups.items():
        has_all_ranges = ranges.keys() >= {*topics[key]}
        if key not in offsets or not topics[key] or not has_all_ranges:
            continue
        samples[key] = {}
        unresolved[key] = []
        for topic in topics[key]:
            committed = offsets[key].get(topic, {})
            topic_samples: dict[int, QueueSample] = {}
            for number, (min_offset, max_offset) in ranges[topic].items():
                offset = committed.get(number)
                # If the members report no offset, it is unknown; if the broker has none, the group never committed.
                is_known = offset is not None or not interest.broadcasting
                topic_samples[number] = QueueSample(min_offset, max_offset, offset, is_known)
                # An offset that is 0 or missing may mean that the group never consumed the queue.
                if not offset and not interest.broadcasting:
                    unresolved[key].append(Queue(topic, broker, number))
            samples[key][topic] = topic_samples
    return samples, unresolved


def update_lags(
    broker: BrokerLag,
    interests: Mapping[ObjectKey, TopicInterest],
    samples: GroupSamples,
    consumed: Mapping[ObjectKey, frozenset[Queue]],
    requested_at: RequestTimes,
) -> dict[ObjectKey, LagAtBroker]:
    """Add samples to `broker.histories`, and return each group's lag; drop the histories of deleted groups and topics.

    `consumed`: for each group, the queues that a member or an unmanaged consumer consumes.
    Runs in a thread, because it would block the event loop for too long.
    """
    lags: dict[ObjectKey, LagAtBroker] = {}
    histories: dict[HistoryKey, dict[str, LagHistory]] = {}
    for key, interest in interests.items():
        now, unix_seconds = requested_at[key]
        earlier = broker.histories_of(key, interest)
        group_histories = histories.setdefault((key, interest.offset_source), {})
        if key not in samples:
            lags[key] = broker.unknown_lag(key, interest, now)
            group_histories |= earlier
            continue
        for topic in samples[key]:
            group_histories[topic] = earlier.get(topic, LagHistory())
        for topic, queues in samples[key].items():
            # A tuple equals the Queue of its values, and is created faster.
            consumed_ids = frozenset(number for number in queues if (topic, broker.name, number) in consumed[key])
            group_histories[topic].add_sample(now, queues, consumed_ids)
        lag = _compute_group_lag(broker.name, interest, group_histories, broker.lag_of(key, interest))
        lags[key] = replace(lag, sampled_at=unix_seconds, requested_at=now)
    broker.histories = histories
    return lags


def _compute_group_lag(
    broker: str, interest: TopicInterest, histories: Mapping[str, LagHistory], previous: LagAtBroker | None
) -> LagAtBroker:
    """Return a group's lag by the histories of its topics."""
    queue_lags: dict[Queue, QueueLag] = {}
    incoming_rates: dict[Queue, float | None] = {}
    for topic, history in histories.items():
        # Where the group starts determines the lag of a queue without a committed offset.
        start_from = START_EARLIEST if topic == interest.retry_topic else interest.start_from
        for number, lag in history.compute_queue_lags(start_from).items():
            queue_lags[Queue(topic, broker, number)] = _without_trend(lag) if interest.broadcasting else lag
        if interest.needs_weights:
            for number, rate in history.incoming_rates().items():
                incoming_rates[Queue(topic, broker, number)] = rate
    if previous and queue_lags.keys() == previous.queue_lags.keys():
        equal = {queue: lag for queue, lag in previous.queue_lags.items() if lag == queue_lags[queue]}
        queue_lags |= equal  # keep the equal objects of the last poll: fewer new ones mean shorter garbage collections
    is_known = bool(queue_lags) and all(lag.lag is not None for lag in queue_lags.values())
    return LagAtBroker(interest.offset_source, queue_lags, incoming_rates=incoming_rates, is_known=is_known)


def _without_trend(lag: QueueLag) -> QueueLag:
    """Remove delay, lag state and consumed rate of a Broadcasting group's queue.

    Members report their offsets less often than the broker is asked for max_offset, so these values would be wrong.
    """
    return lag._replace(delay=None, lag_state=None, consumed_rate=None)
