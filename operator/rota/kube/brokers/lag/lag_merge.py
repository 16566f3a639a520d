"""Merges one broker's responses into samples of each group's queues, and judges them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, LagHistory, QueueLag, QueueSample
from rota.kube.brokers.topic_routes import TopicInterest
from rota.kube.client.objects import ObjectKey
from rota.model import Queue
from rota.spec import StartFrom

START_EARLIEST = StartFrom(position="Earliest")  # where a retry topic starts, as in the reference client

OffsetRanges = dict[int, tuple[int, int]]  # by queue of a topic on one broker: offsets of the oldest and next message
CommittedOffsets = dict[str, dict[int, int]]  # committed by a group on one broker, by topic and queue
GroupSamples = dict[ObjectKey, dict[str, dict[int, QueueSample]]]  # by group, topic and queue
# A group, and its `TopicInterest.offset_source`: if that changes, earlier samples are of other offsets.
HistoryKey = tuple[ObjectKey, tuple[str, bool]]
RequestTimes = dict[ObjectKey, tuple[float, float]]  # when each group was asked about: loop's clock, and since 1970


@dataclass
class LagAtBroker:
    """One group's lag at one broker."""

    consumer_group: str  # its name at the broker
    broadcasting: bool = False
    queue_lags: dict[Queue, QueueLag] = field(default_factory=dict)
    dead_letters: int | None = None
    sampled_at: float | None = None  # seconds since 1970: time of the last request with a response
    requested_at: float | None = None  # the same time on the loop's clock; before any response: of the first request
    # Incoming messages a second, a mean over up to an hour; None: unknown. Only for groups whose policy needs weights.
    incoming_rates: Mapping[Queue, float | None] = field(default_factory=dict)
    is_known: bool = False  # whether the lag on each queue is known

    def matches(self, interest: TopicInterest) -> bool:
        """Whether the offsets have the interest's source: the group may have been recreated, or its spec changed."""
        return (self.consumer_group, self.broadcasting) == interest.offset_source

    @property
    def responded_at(self) -> float:
        """Time of the last request with a response, on the loop's clock; 0 without one: polled first."""
        return self.requested_at if self.sampled_at and self.requested_at else 0.0


@dataclass
class BrokerLag:
    """The lag of all groups at one broker, and the samples of their queues."""

    name: str
    lag_by_group: dict[ObjectKey, LagAtBroker] = field(default_factory=dict)  # empty while no route lists the broker
    histories: dict[HistoryKey, dict[str, LagHistory]] = field(default_factory=dict)  # by topic

    def lag_of(self, key: ObjectKey, interest: TopicInterest) -> LagAtBroker | None:
        """Return the last lag of a group that has this interest."""
        lag = self.lag_by_group.get(key)
        return lag if lag and lag.matches(interest) else None

    def histories_of(self, key: ObjectKey, interest: TopicInterest) -> dict[str, LagHistory]:
        """Return the histories of a group with this interest, by topic; none if its spec was another one so far."""
        return self.histories.get((key, interest.offset_source), {})

    def unknown_lag(self, key: ObjectKey, interest: TopicInterest, now: float) -> LagAtBroker:
        """Return the lag of a group about which the broker does not respond: unknown on every queue.

        The previous incoming rates are kept: as means over up to an hour they change slowly, and without them the
        group's queue weights would be unknown.
        """
        previous = self.lag_of(key, interest)
        if previous is None:
            return LagAtBroker(interest.consumer_group, interest.broadcasting, requested_at=now)
        queue_lags = dict.fromkeys(previous.queue_lags, UNKNOWN_QUEUE_LAG)
        return replace(previous, queue_lags=queue_lags, dead_letters=None, is_known=False)


def merge_responses(
    broker: str,
    groups: Mapping[ObjectKey, TopicInterest],
    topics: Mapping[ObjectKey, Collection[str]],
    offsets: Mapping[ObjectKey, CommittedOffsets],
    ranges: Mapping[str, OffsetRanges],
) -> tuple[GroupSamples, dict[ObjectKey, list[Queue]]]:
    """Return samples of the groups that the broker responded about, and queues whose offsets `QueueResolver` requests.

    `topics` are those of a group on the broker. In `offsets`, a Broadcasting group has those that its members reported,
    as brokers have none; missing ones are unknown.
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
            samples[key][topic] = topic_samples = {}
            for number, (first, last) in ranges[topic].items():
                offset = committed.get(number)
                is_known = offset is not None or not interest.broadcasting
                topic_samples[number] = QueueSample(first, last, offset, is_known)
                # An offset that is 0 or missing may mean that the group never consumed the queue.
                if not offset and not interest.broadcasting:
                    unresolved[key].append(Queue(topic, broker, number))
    return samples, unresolved


def judge_samples(
    broker: BrokerLag,
    interests: Mapping[ObjectKey, TopicInterest],
    samples: GroupSamples,
    consumed: Mapping[ObjectKey, frozenset[Queue]],
    requested_at: RequestTimes,
) -> dict[ObjectKey, LagAtBroker]:
    """Add samples to the broker's histories, judge these, and forget the histories of groups and topics that are gone.

    `consumed` are the queues that have a consumer. Runs in a thread, as it takes a while.
    """
    lags: dict[ObjectKey, LagAtBroker] = {}
    histories: dict[HistoryKey, dict[str, LagHistory]] = {}
    for key, interest in interests.items():
        now, time_of_day = requested_at[key]
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
        lag = _judge_group(broker.name, interest, group_histories, broker.lag_of(key, interest))
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
        start_from = START_EARLIEST if topic == interest.retry_topic else interest.start_from
        for number, lag in history.judge_queues(start_from).items():
            queue_lags[Queue(topic, broker, number)] = _without_trend(lag) if interest.broadcasting else lag
        if interest.needs_weights:
            for number, rate in history.incoming_rates().items():
                incoming_rates[Queue(topic, broker, number)] = rate
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
