"""Merges one broker's responses into samples of each group's queues, and judges them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, LagHistory, QueueLag, QueueSample
from rota.kube.brokers.route_watcher import TopicInterest
from rota.kube.client.objects import ObjectKey
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.spec import StartFrom

START_EARLIEST = StartFrom(position="Earliest")  # where a retry topic starts, as in the reference client

OffsetRanges = dict[int, tuple[int, int]]  # by queue of a topic on one broker: offsets of the oldest and next message
CommittedOffsets = dict[str, dict[int, int]]  # committed by a group on one broker, by topic and queue
GroupSamples = dict[ObjectKey, dict[str, dict[int, QueueSample]] | None]


@dataclass
class LagAtBroker:
    """One group's lag at one broker."""

    consumer_group: str  # its name at the broker
    broadcasting: bool = False
    queue_lags: dict[Queue, QueueLag] = field(default_factory=dict)
    dead_letters: int | None = None
    sampled_at: float | None = None
    requested_at: float | None = None
    incoming_rates: Mapping[Queue, float | None] = field(default_factory=dict)
    is_known: bool = False  # whether the lag on each queue is known

    def matches(self, interest: TopicInterest) -> bool:
        """Whether this is the group's lag: the group may have been recreated, or its spec changed."""
        return (self.consumer_group, self.broadcasting) == (interest.consumer_group, interest.broadcasting)


@dataclass
class BrokerLag:
    """The lag of all groups at one broker, and the samples of their queues."""

    name: str
    lag_by_group: dict[ObjectKey, LagAtBroker] = field(default_factory=dict)
    histories: dict[ObjectKey, dict[str, LagHistory]] = field(default_factory=dict)  # of each group, by topic


def merge_responses(
    broker: str,
    keys: Sequence[ObjectKey],
    topics: Mapping[ObjectKey, Collection[str]],
    offsets: Mapping[ObjectKey, CommittedOffsets],
    ranges: Mapping[str, OffsetRanges],
    *,
    broadcasting_keys: Collection[ObjectKey],
) -> tuple[GroupSamples, list[tuple[ObjectKey, Queue]]]:
    """Return samples of each group, None if the broker did not respond; and the queues to ask about one by one.

    A broker has no offsets of Broadcasting groups (`broadcasting_keys`), so their missing offsets are unknown.
    """
    samples: GroupSamples = {}
    unresolved: list[tuple[ObjectKey, Queue]] = []
    for key in keys:
        group_topics = topics[key]
        if key not in offsets or not group_topics or not all(topic in ranges for topic in group_topics):
            samples[key] = None
            continue
        is_broadcasting = key in broadcasting_keys
        by_topic: dict[str, dict[int, QueueSample]] = {topic: {} for topic in group_topics}
        samples[key] = by_topic
        for topic in group_topics:
            committed = offsets[key].get(topic, {})
            for number, (first, last) in ranges[topic].items():
                offset = committed.get(number)
                is_known = not is_broadcasting or offset is not None
                by_topic[topic][number] = QueueSample(first, last, offset, is_known)
                # An offset that is 0 or missing may mean that the group never consumed the queue.
                if not offset and not is_broadcasting:
                    unresolved.append((key, Queue(topic, broker, number)))
    return samples, unresolved


def unknown_lag(previous: LagAtBroker | None, interest: TopicInterest, now: float) -> LagAtBroker:
    """Return an unknown lag, for a broker that does not respond; hourly rates are kept, as they change slowly."""
    if previous is None or not previous.matches(interest):
        return LagAtBroker(interest.consumer_group, interest.broadcasting, requested_at=now)
    queue_lags = dict.fromkeys(previous.queue_lags, UNKNOWN_QUEUE_LAG)
    return replace(previous, queue_lags=queue_lags, dead_letters=None, is_known=False)


def judge_samples(
    broker: BrokerLag,
    interests: Mapping[ObjectKey, TopicInterest],
    samples: GroupSamples,
    consumed: Mapping[ObjectKey, frozenset[Queue]],
    requested_at: Mapping[ObjectKey, tuple[float, float]],
) -> dict[ObjectKey, LagAtBroker]:
    """Add samples to the histories, and judge them; runs in a thread, as it takes a while."""
    lags: dict[ObjectKey, LagAtBroker] = {}
    histories: dict[ObjectKey, dict[str, LagHistory]] = {}
    for key, interest in interests.items():
        previous = broker.lag_by_group.get(key)
        earlier = broker.histories.get(key, {})
        if previous is not None and not previous.matches(interest):
            previous = None
            earlier = {}
        now, time_of_day = requested_at[key]
        group_samples = samples[key]
        if group_samples is None:
            lags[key] = unknown_lag(previous, interest, now)
            histories[key] = earlier
            continue
        histories[key] = {topic: earlier.get(topic, LagHistory()) for topic in group_samples}
        for topic, queues in group_samples.items():
            consumed_ids = frozenset(number for number in queues if (topic, broker.name, number) in consumed[key])
            histories[key][topic].add_sample(now, queues, consumed_ids)
        lag = _judge_group(broker.name, interest, histories[key], previous)
        lags[key] = replace(lag, sampled_at=time_of_day, requested_at=now)
    broker.histories = histories
    return lags


def _judge_group(
    broker: str, interest: TopicInterest, histories: Mapping[str, LagHistory], previous: LagAtBroker | None
) -> LagAtBroker:
    """Return a group's lag by the histories of its topics."""
    queue_lags: dict[Queue, QueueLag] = {}
    incoming_rates: dict[Queue, float | None] = {}
    for topic, history in histories.items():
        is_retry_topic = topic == RETRY_TOPIC_PREFIX + interest.consumer_group
        start_from = START_EARLIEST if is_retry_topic else interest.start_from
        for number, lag in history.judge_queues(start_from).items():
            queue_lags[Queue(topic, broker, number)] = _without_trend(lag) if interest.broadcasting else lag
        if interest.needs_weights:
            rates = history.incoming_rates()
            incoming_rates |= {Queue(topic, broker, number): rate for number, rate in rates.items()}
    if previous and queue_lags.keys() == previous.queue_lags.keys():
        equal = {queue: lag for queue, lag in previous.queue_lags.items() if lag == queue_lags[queue]}
        queue_lags |= equal  # keep the earlier objects, to spare garbage collection
    is_known = bool(queue_lags) and all(lag.lag is not None for lag in queue_lags.values())
    return LagAtBroker(
        interest.consumer_group, interest.broadcasting, queue_lags, incoming_rates=incoming_rates, is_known=is_known
    )


def _without_trend(lag: QueueLag) -> QueueLag:
    """Remove delay, lag state and rate, which need offsets as new as the ends: members report theirs less often."""
    return lag._replace(delay=None, lag_state=None, consumed_rate=None)


def sample_of(samples: GroupSamples, group_queue: tuple[ObjectKey, Queue]) -> QueueSample:
    """Return the sample of a group's queue."""
    key, queue = group_queue
    return (samples[key] or {})[queue.topic][queue.id]
