"""Merges one broker's answers into samples of each group's queues, and judges them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rota.kube.brokers.lag.lag_history import NOTHING, LagHistory, QueueLag, QueueSample
from rota.kube.brokers.route_watcher import TopicInterest
from rota.kube.client.objects import Key
from rota.model import RETRY, Queue
from rota.spec import StartFrom

FROM_THE_OLDEST = StartFrom(position="Earliest")  # where a retry topic starts, as in the reference client

Ends = dict[int, tuple[int, int]]  # first and last offset of a topic's queues on one broker
Offsets = dict[str, dict[int, int]]  # committed by a group on one broker, by topic and queue
Found = dict[Key, dict[str, dict[int, QueueSample]] | None]


@dataclass
class LagAtBroker:
    """One group's lag at one broker."""

    group: str  # its name at the broker
    broadcasting: bool = False
    judged: dict[Queue, QueueLag] = field(default_factory=dict)
    dead: int | None = None
    at: float | None = None
    asked: float | None = None
    flows: Mapping[Queue, float | None] = field(default_factory=dict)
    known: bool = False  # whether the lag on each queue is known

    def tells_of(self, interest: TopicInterest) -> bool:
        """Whether this is the group's lag: the group may have been recreated, or its spec changed."""
        return (self.group, self.broadcasting) == (interest.group, interest.broadcasting)


@dataclass
class BrokerLag:
    """The lag of all groups at one broker, and the samples of their queues."""

    name: str
    told: dict[Key, LagAtBroker] = field(default_factory=dict)
    histories: dict[tuple[Key, str], LagHistory] = field(default_factory=dict)  # by group and topic


def merge_responses(
    broker: str,
    keys: Sequence[Key],
    topics: Mapping[Key, Collection[str]],
    offsets: Mapping[Key, Offsets],
    ends: Mapping[str, Ends],
    *,
    everyones: Collection[Key],
) -> tuple[Found, list[tuple[Key, Queue]]]:
    """Return samples of each group, None if the broker did not answer; and the queues to ask about one by one.

    `everyones` are the Broadcasting groups: a broker cannot be asked for their offsets, so a missing one is unknown.
    """
    samples: Found = {}
    doubts: list[tuple[Key, Queue]] = []
    for key in keys:
        group_topics = topics[key]
        if key not in offsets or not group_topics or not all(topic in ends for topic in group_topics):
            samples[key] = None
            continue
        by_topic = samples[key] = {}
        for topic in group_topics:
            committed = offsets[key].get(topic, {})
            answered = committed if key in everyones else ends[topic]
            by_topic[topic] = {
                number: QueueSample(*end, committed.get(number), number in answered)
                for number, end in ends[topic].items()
            }
            if key not in everyones:
                # An offset that is 0 or missing may mean that the group never consumed the queue.
                doubts += [
                    (key, Queue(topic, broker, number)) for number, row in by_topic[topic].items() if not row.committed
                ]
    return samples, doubts


def unknown_lag(previous: LagAtBroker | None, interest: TopicInterest, now: float) -> LagAtBroker:
    """Return an unknown lag, for a broker that does not answer; hourly rates are kept, as they change slowly."""
    if previous is None or not previous.tells_of(interest):
        return LagAtBroker(interest.group, interest.broadcasting, asked=now)
    nothing = dict.fromkeys(previous.judged, NOTHING)
    return replace(previous, judged=nothing, dead=None, known=False)


def judge(
    broker: BrokerLag,
    groups: Mapping[Key, TopicInterest],
    samples: Found,
    worked: Mapping[Key, frozenset[Queue]],
    asked_at: Mapping[Key, tuple[float, float]],
) -> dict[Key, LagAtBroker]:
    """Add samples to the histories, and judge them; runs in a thread, as it takes a while."""
    lags: dict[Key, LagAtBroker] = {}
    histories: dict[tuple[Key, str], LagHistory] = {}
    for key, interest in groups.items():
        previous, earlier = broker.told.get(key), broker.histories
        group_samples, (now, time_of_day) = samples[key], asked_at[key]
        if previous is not None and not previous.tells_of(interest):
            previous, earlier = None, {}
        if group_samples is None:
            lags[key] = unknown_lag(previous, interest, now)
            histories |= {id_: history for id_, history in earlier.items() if id_[0] == key}
            continue
        judged: dict[Queue, QueueLag] = {}
        flows: dict[Queue, float | None] = {}
        for topic, queues in group_samples.items():
            history = histories[key, topic] = earlier.get((key, topic), LagHistory())
            working = frozenset(number for number in queues if (topic, broker.name, number) in worked[key])
            history.see(now, queues, working)
            begins = FROM_THE_OLDEST if topic == RETRY + interest.group else interest.begins
            judged |= {Queue(topic, broker.name, number): state for number, state in history.judged(begins).items()}
            if interest.weighed:
                flows |= {Queue(topic, broker.name, number): rate for number, rate in history.flows().items()}
        if interest.broadcasting:  # members' offsets are older than the ends, so delay and trend cannot be derived
            judged = {queue: it._replace(delay=None, verdict=None, worked=None) for queue, it in judged.items()}
        if previous and judged.keys() == previous.judged.keys():  # keep equal objects, to spare garbage collection
            judged = {queue: it if it == judged[queue] else judged[queue] for queue, it in previous.judged.items()}
        known_now = bool(judged) and all(state.lag is not None for state in judged.values())
        lags[key] = LagAtBroker(interest.group, interest.broadcasting, judged, None, time_of_day, now, flows, known_now)
    broker.histories = histories
    return lags


def samples_of(samples: Found, doubt: tuple[Key, Queue]) -> QueueSample:
    """Return the sample of a group's queue."""
    return (samples[doubt[0]] or {})[doubt[1].topic][doubt[1].id]
