"""What a broker's answers mean: what was seen of each group's queues there, and what that says."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rota.kube.brokers.lag.lag_history import NOTHING, History, Judged, Seen
from rota.kube.brokers.route_watcher import Interest
from rota.kube.client.objects import Key
from rota.model import RETRY, Queue
from rota.spec import StartFrom

FROM_THE_OLDEST = StartFrom(position="Earliest")  # where a retry topic begins, as for the reference

Ends = dict[int, tuple[int, int]]  # of a topic's queues on one broker: the first offset and the last one
Offsets = dict[str, dict[int, int]]  # of a group there, by topic and queue
Found = dict[Key, dict[str, dict[int, Seen]] | None]


@dataclass
class Told:
    """What one broker told of one group."""

    group: str  # as brokers call it
    broadcasting: bool = False
    judged: dict[Queue, Judged] = field(default_factory=dict)
    dead: int | None = None
    at: float | None = None
    asked: float | None = None
    flows: Mapping[Queue, float | None] = field(default_factory=dict)
    known: bool = False  # how far behind the group is on each queue

    def tells_of(self, interest: Interest) -> bool:
        """Whether it is of this group: there may be another under the same name, or its spec is another."""
        return (self.group, self.broadcasting) == (interest.group, interest.broadcasting)


@dataclass
class Known:
    """What is known from one broker."""

    name: str
    told: dict[Key, Told] = field(default_factory=dict)
    histories: dict[tuple[Key, str], History] = field(default_factory=dict)  # by group and topic


def put_together(
    broker: str,
    keys: Sequence[Key],
    topics: Mapping[Key, Collection[str]],
    offsets: Mapping[Key, Offsets],
    ends: Mapping[str, Ends],
    *,
    everyones: Collection[Key],
) -> tuple[Found, list[tuple[Key, Queue]]]:
    """Return what was seen of each group, None where the broker was silent; and what is to be asked queue by queue.

    `everyones`: groups that are Broadcasting; of those there is nothing to ask, what is not told is not known.
    """
    found: Found = {}
    doubts: list[tuple[Key, Queue]] = []
    for key in keys:
        its = topics[key]
        if key not in offsets or not its or not all(topic in ends for topic in its):
            found[key] = None
            continue
        seen = found[key] = {}
        for topic in its:
            committed = offsets[key].get(topic, {})
            known = committed if key in everyones else ends[topic]
            seen[topic] = {
                number: Seen(*it, committed.get(number), number in known) for number, it in ends[topic].items()
            }
            if key not in everyones:
                # A 0 may mean that it never was there, and so may nothing.
                doubts += [
                    (key, Queue(topic, broker, number)) for number, it in seen[topic].items() if not it.committed
                ]
    return found, doubts


def unknown(before: Told | None, interest: Interest, now: float) -> Told:
    """Return what is known of a group whose broker does not answer; hourly rates are kept, as they change slowly."""
    if before is None or not before.tells_of(interest):
        return Told(interest.group, interest.broadcasting, asked=now)
    nothing = dict.fromkeys(before.judged, NOTHING)
    return replace(before, judged=nothing, dead=None, known=False)


def judge(
    broker: Known,
    groups: Mapping[Key, Interest],
    found: Found,
    worked: Mapping[Key, frozenset[Queue]],
    asked: Mapping[Key, tuple[float, float]],
) -> dict[Key, Told]:
    """Note what was seen, and say what it means; away from the loop, for it takes a while."""
    told: dict[Key, Told] = {}
    histories: dict[tuple[Key, str], History] = {}
    for key, interest in groups.items():
        before, known = broker.told.get(key), broker.histories
        seen, (now, today) = found[key], asked[key]
        if before is not None and not before.tells_of(interest):
            before, known = None, {}
        if seen is None:
            told[key] = unknown(before, interest, now)
            histories |= {it: history for it, history in known.items() if it[0] == key}
            continue
        judged: dict[Queue, Judged] = {}
        flows: dict[Queue, float | None] = {}
        for topic, queues in seen.items():
            history = histories[key, topic] = known.get((key, topic), History())
            working = frozenset(number for number in queues if (topic, broker.name, number) in worked[key])
            history.see(now, queues, working)
            begins = FROM_THE_OLDEST if topic == RETRY + interest.group else interest.begins
            judged |= {Queue(topic, broker.name, number): it for number, it in history.judged(begins).items()}
            if interest.weighed:
                flows |= {Queue(topic, broker.name, number): it for number, it in history.flows().items()}
        if interest.broadcasting:  # reports are older than looks: from these two no age and no trend can be told
            judged = {it: known._replace(delay=None, verdict=None, worked=None) for it, known in judged.items()}
        if before and judged.keys() == before.judged.keys():  # what is as before stays, for garbage collection's sake
            judged = {queue: it if it == judged[queue] else judged[queue] for queue, it in before.judged.items()}
        known_now = bool(judged) and all(it.lag is not None for it in judged.values())
        told[key] = Told(interest.group, interest.broadcasting, judged, None, today, now, flows, known_now)
    broker.histories = histories
    return told


def seen_of(found: Found, at: tuple[Key, Queue]) -> Seen:
    """Return what was seen of a group's queue."""
    return (found[at[0]] or {})[at[1].topic][at[1].id]
