"""Merges one broker's responses into samples of each group's queues, and judges them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, LagHistory, QueueLag, QueueSample
from rota.kube.brokers.route_watcher import TopicInterest
from rota.kube.client.objects import ObjectKey
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.spec import StartFrom

START_EARLIEST = StartFrom(position="Earliest")  # where a retry topic starts, as in the reference client

OffsetRanges = dict[int, tuple[int, int]]  # first and last offset of a topic's queues on one broker
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
    histories: dict[tuple[ObjectKey, str], LagHistory] = field(default_factory=dict)  # by group and topic


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
        by_topic = samples[key] = {}
        for topic in group_topics:
            committed = offsets[key].get(topic, {})
            known_queues = committed if key in broadcasting_keys else ranges[topic]
            by_topic[topic] = {
                number: QueueSample(*end, committed.get(number), number in known_queues)
                for number, end in ranges[topic].items()
            }
            if key not in broadcasting_keys:
                # An offset that is 0 or missing may mean that the group never consumed the queue.
                unresolved += [
                    (key, Queue(topic, broker, number)) for number, row in by_topic[topic].items() if not row.committed
                ]
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
    histories: dict[tuple[ObjectKey, str], LagHistory] = {}
    for key, interest in interests.items():
        previous, earlier = broker.lag_by_group.get(key), broker.histories
        group_samples, (now, time_of_day) = samples[key], requested_at[key]
        if previous is not None and not previous.matches(interest):
            previous, earlier = None, {}
        if group_samples is None:
            lags[key] = unknown_lag(previous, interest, now)
            histories |= {id_: history for id_, history in earlier.items() if id_[0] == key}
            continue
        judged: dict[Queue, QueueLag] = {}
        flows: dict[Queue, float | None] = {}
        for topic, queues in group_samples.items():
            history = histories[key, topic] = earlier.get((key, topic), LagHistory())
            working = frozenset(number for number in queues if (topic, broker.name, number) in consumed[key])
            history.add_sample(now, queues, working)
            begins = START_EARLIEST if topic == RETRY_TOPIC_PREFIX + interest.consumer_group else interest.start_from
            judged |= {
                Queue(topic, broker.name, number): state for number, state in history.judge_queues(begins).items()
            }
            if interest.needs_weights:
                flows |= {Queue(topic, broker.name, number): rate for number, rate in history.incoming_rates().items()}
        if interest.broadcasting:  # members' offsets are older than the ends, so delay and trend cannot be derived
            unknown = {"delay": None, "lag_state": None, "consumed_rate": None}
            judged = {queue: lag._replace(**unknown) for queue, lag in judged.items()}
        if previous and judged.keys() == previous.queue_lags.keys():  # keep equal objects, to spare garbage collection
            judged = {queue: it if it == judged[queue] else judged[queue] for queue, it in previous.queue_lags.items()}
        known_now = bool(judged) and all(state.lag is not None for state in judged.values())
        lags[key] = LagAtBroker(
            interest.consumer_group, interest.broadcasting, judged, None, time_of_day, now, flows, known_now
        )
    broker.histories = histories
    return lags


def sample_of(samples: GroupSamples, group_queue: tuple[ObjectKey, Queue]) -> QueueSample:
    """Return the sample of a group's queue."""
    return (samples[group_queue[0]] or {})[group_queue[1].topic][group_queue[1].id]
