"""How far groups are behind, read from their brokers every few seconds: side by side, a slow one delays no other.

Where the group is, is asked before where a queue ends: so no end lies below it. Whatever a broker does not tell is not
known, and is not taken for what it said before.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from rota.brokers import BrokerError, Brokers, Unknown, Unreachable
from rota.kube.history import NOTHING, History, Judged, Seen
from rota.kube.views import Interest, Views, topics_of
from rota.model import RETRY, Queue
from rota.spec import StartFrom

LAG_SECONDS = 15.0
SOON = 0.5  # seconds after which to look again for brokers, where none is known yet
DEAD_EVERY = 4  # looks: dead letters come seldom
BELIEVED = 4  # looks for which an answer about one queue stands: that the group is at 0, or never was there
TOGETHER = 32  # groups that are asked about before their queues' ends are: what comes in between is not behind
KEPT_SECONDS = 600.0  # for which looks are kept at a broker that no route tells of
GONE_SECONDS = 60.0  # for which it is doubted that a broker is gone for good which has left a topic's route
AT_ONCE = 8  # requests under way to one broker
GENTLY = 16  # groups that are worked on in one turn of the loop
MOST_DOUBTS = 1000  # queues asked for one by one in a look; the others are not known until the next one

DEAD = "%DLQ%"
FROM_THE_OLDEST = StartFrom(position="Earliest")  # where a retry topic begins, as for the reference

Key = tuple[str, str]
_Ends = dict[int, tuple[int, int]]  # of a topic's queues on one broker: the first offset and the last one
_Offsets = dict[str, dict[int, int]]  # of a group there, by topic and queue
_Found = dict[Key, dict[str, dict[int, Seen]] | None]
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Lag(NamedTuple):
    """How far a group is behind, as far as its brokers told."""

    queues: Mapping[Queue, Judged]
    dead: int | None = None  # letters
    at: float | None = None  # seconds since 1970: when the broker that was asked longest ago told something
    asked: float | None = None  # the same on the loop's clock; of one that told nothing yet: when it was first asked
    missing: frozenset[str] = frozenset()  # topics whose route has lost a broker just now: it may be away for a while


@dataclass
class _Told:
    """What one broker told of one group."""

    group: str  # as brokers call it
    broadcasting: bool = False
    judged: dict[Queue, Judged] = field(default_factory=dict)
    dead: int | None = None
    at: float | None = None
    asked: float | None = None

    def tells_of(self, interest: Interest) -> bool:
        """Whether it is of this group: there may be another under the same name, or its spec is another."""
        return (self.group, self.broadcasting) == (interest.group, interest.broadcasting)


@dataclass
class _Broker:
    """What is known from one broker."""

    name: str
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    told: dict[Key, _Told] = field(default_factory=dict)
    histories: dict[tuple[Key, str], History] = field(default_factory=dict)
    resolved: dict[tuple[Key, Queue], tuple[int, int | None]] = field(
        default_factory=dict
    )  # at which look, and to what
    looks: int = 0
    wanted: float = 0.0  # when it last was one of those to ask
    running: asyncio.Task[None] | None = None


class Lags:
    """What the brokers of one cluster tell of how far groups are behind."""

    def __init__(
        self,
        brokers: Brokers,
        views: Views,
        worked: Callable[[Key], Collection[Queue]],
        news: Callable[[Collection[Key]], None] = lambda _: None,
        reported: Callable[[Key], Mapping[Queue, int]] = lambda _: {},
    ) -> None:
        """Ask nothing before `run`; `worked` tells which queues of a group somebody works, `news` is told of looks.

        Where a Broadcasting group is no broker knows: `reported` tells where its slowest member is.
        """
        self._brokers, self._views, self._worked, self._news = brokers, views, worked, news
        self._reported = reported
        self._routes: dict[str, dict[str, float]] = {}  # by topic and broker: when the one was last seen on the other
        self._known: dict[str, _Broker] = {}
        self.seconds = LAG_SECONDS

    async def run(self) -> None:
        """Look for ever; a broker that is not through with one look is not asked for the next."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                asked, now = self._wanted(), asyncio.get_running_loop().time()
                self._note_routes(now)
                self._known = {it.name: it for it in self._known.values() if now < it.wanted + KEPT_SECONDS}
                for name in self._known.keys() - asked.keys():
                    self._known[name].told = {}
                for name, groups in asked.items():
                    broker = self._known.setdefault(name, _Broker(name))
                    broker.wanted = now
                    if broker.running is None or broker.running.done():
                        broker.running = tasks.create_task(self._safely(broker, groups), name=f"lag {name}")
                await asyncio.sleep(self.seconds if self._known else SOON)

    def of(self, key: Key) -> Lag:
        """Return what is known of a group."""
        interest = self._views.interests.get(key)
        every = [it.told[key] for it in self._known.values() if key in it.told]
        told = [it for it in every if interest and it.tells_of(interest)]
        missing = frozenset(filter(self._has_lost_a_broker, topics_of(interest))) if interest else frozenset()
        queues: dict[Queue, Judged] = {}
        for it in told:
            queues |= it.judged
        dead = [it.dead for it in told if it.dead is not None]
        at = [it.at for it in told if it.at is not None]
        asked = [it.asked for it in told if it.asked is not None]
        letters = sum(dead) if told and len(dead) == len(told) and not missing else None
        return Lag(queues, letters, min(at, default=None), min(asked, default=None), missing)

    def _note_routes(self, now: float) -> None:
        """Remember which brokers topics were on: those that a route has lost for a while; where there is none, all."""
        found: dict[str, dict[str, float]] = {}
        for topic in {topic for it in self._views.interests.values() for topic in topics_of(it)}:
            there, before = self._views.where_is(topic), self._routes.get(topic, {})
            kept = {name: at if there else now for name, at in before.items() if not there or now < at + GONE_SECONDS}
            found[topic] = kept | dict.fromkeys(there, now)
        self._routes = found

    def _has_lost_a_broker(self, topic: str) -> bool:
        there = self._views.where_is(topic)
        return bool(there and self._routes.get(topic, {}).keys() - there)

    def _wanted(self) -> dict[str, dict[Key, Interest]]:
        """Return the groups that each broker can tell something of."""
        found: dict[str, dict[Key, Interest]] = {}
        for key, interest in self._views.interests.items():
            for name in self._views.where(interest):
                found.setdefault(name, {})[key] = interest
        return found

    async def _safely(self, broker: _Broker, groups: Mapping[Key, Interest]) -> None:
        try:
            await self._look(broker, groups)
        except Exception:  # noqa: BLE001 - of one look at one broker; the others go on
            _log.exception("What %s tells of lag was not understood", broker.name)

    async def _look(self, broker: _Broker, groups: Mapping[Key, Interest]) -> None:
        """Ask one broker about all groups, some at a time: first where they are, then where their queues end."""
        topics = {key: self._topics_at(broker.name, interest) async for key, interest in gently(groups.items())}
        found: _Found = dict.fromkeys(groups)
        doubts: list[tuple[Key, Queue]] = []
        asked = dict.fromkeys(groups, (asyncio.get_running_loop().time(), time()))
        keys = sorted(groups, key=topics.__getitem__)
        for some in (keys[start : start + TOGETHER] for start in range(0, len(keys), TOGETHER)):
            asked |= dict.fromkeys(some, (asyncio.get_running_loop().time(), time()))
            asking = {key: partial(self._offsets, broker.name, key, groups[key], topics[key]) for key in some}
            offsets = await _all(broker, asking)
            if not offsets:  # it is away, or lets nobody ask: the others need not wait for the same
                break
            wanted = sorted({topic for key in some for topic in topics[key]})
            ends = await _all(broker, {topic: partial(self._ends, broker.name, topic) for topic in wanted})
            put = partial(_put_together, everyones={key for key in some if groups[key].broadcasting})
            seen, open_ = await asyncio.to_thread(put, broker.name, some, topics, offsets, ends)
            found |= seen
            doubts += open_
        await self._resolve(broker, groups, found, doubts)
        dead = await self._dead(broker, groups)
        worked = {key: frozenset(self._worked(key)) async for key in gently(groups)}
        broker.told = await asyncio.to_thread(_judge, broker, groups, found, worked, asked)
        for key, told in broker.told.items():
            told.dead = None if found[key] is None else dead.get(key)
        broker.looks += 1
        self._news(broker.told.keys())

    def _topics_at(self, name: str, interest: Interest) -> list[str]:
        return [topic for topic in topics_of(interest) if name in self._views.where_is(topic)]

    # Of what brokers answer only numbers are kept: whole answers of all groups would be much for Python's garbage
    # collection to look through, and meanwhile nothing else is done.

    async def _offsets(self, broker: str, key: Key, interest: Interest, topics: Collection[str]) -> _Offsets:
        found: _Offsets = {}
        if interest.broadcasting:
            for queue, committed in self._reported(key).items():
                if queue.broker == broker:
                    found.setdefault(queue.topic, {})[queue.id] = committed
            return found
        for queue, it in (await self._brokers.progress(interest.group, broker, topics)).items():
            found.setdefault(queue.topic, {})[queue.id] = it.committed
        return found

    async def _ends(self, broker: str, topic: str) -> _Ends:
        try:
            found = await self._brokers.ends(topic, broker)
        except Unknown:
            return {}
        return {queue.id: (it.first, it.last) for queue, it in found.items()}

    async def _resolve(
        self,
        broker: _Broker,
        groups: Mapping[Key, Interest],
        found: _Found,
        doubts: Sequence[tuple[Key, Queue]],
    ) -> None:
        """Ask for queues of which the statistics do not tell whether the group ever was there."""
        believed = {it: known for it, known in broker.resolved.items() if broker.looks - known[0] < BELIEVED}
        asked = [it for it in doubts if it not in believed]
        ask = self._brokers.committed
        answers = await _all(broker, {it: partial(ask, groups[it[0]].group, it[1]) for it in asked[:MOST_DOUBTS]})
        broker.resolved = believed | {it: (broker.looks, committed) for it, committed in answers.items()}
        for it in doubts:
            key, queue = it
            seen = (found[key] or {})[queue.topic]
            _, committed = broker.resolved.get(it, (0, None))
            seen[queue.id] = replace(seen[queue.id], committed=committed, asked=it in broker.resolved)

    async def _dead(self, broker: _Broker, groups: Mapping[Key, Interest]) -> dict[Key, int | None]:
        """Return how many dead letters lie there; not each time."""
        if broker.looks % DEAD_EVERY:
            return {key: told.dead for key, told in broker.told.items()}
        found = await _all(
            broker, {key: partial(self._ends, broker.name, DEAD + it.group) for key, it in groups.items()}
        )
        return {key: sum(last - first for first, last in ends.values()) for key, ends in found.items()}


async def gently(many: Iterable[T]) -> AsyncIterator[T]:
    """Yield one after the other, and let others on now and then: work on all of them takes a while."""
    for number, it in enumerate(many):
        if not number % GENTLY:
            await asyncio.sleep(0)
        yield it


def _put_together(
    broker: str,
    keys: Sequence[Key],
    topics: Mapping[Key, Sequence[str]],
    offsets: Mapping[Key, _Offsets],
    ends: Mapping[str, _Ends],
    *,
    everyones: Collection[Key],
) -> tuple[_Found, list[tuple[Key, Queue]]]:
    """Return what was seen of each group, None where the broker was silent; and what is to be asked queue by queue.

    `everyones`: groups that are Broadcasting; of those there is nothing to ask, what is not told is not known.
    """
    found: _Found = {}
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
                doubts += [(key, Queue(topic, broker, number)) for number, it in seen[topic].items() if _doubtful(it)]
    return found, doubts


def _doubtful(it: Seen) -> bool:
    """Whether it matters, and is not told, if the group ever was there: 0 may mean that, and so may nothing."""
    return it.last > it.first and not it.committed


async def _all(broker: _Broker, asked: Mapping[Any, Callable[[], Awaitable[T]]]) -> dict[Any, T]:
    """Ask a broker for several things and leave out what it does not answer; one that answers nothing is let be."""
    found: dict[Any, T] = {}
    silent = 0

    async def one(key: Any, ask: Callable[[], Awaitable[T]]) -> None:
        nonlocal silent
        async with broker.room:
            if silent >= AT_ONCE and not found:
                return
            try:
                found[key] = await ask()
            except BrokerError as error:
                silent += isinstance(error, Unreachable)
                _log.debug("No lag of %s: %s", key, error)

    await asyncio.gather(*(one(key, ask) for key, ask in asked.items()))
    return found


def _judge(
    broker: _Broker,
    groups: Mapping[Key, Interest],
    found: _Found,
    worked: Mapping[Key, frozenset[Queue]],
    asked: Mapping[Key, tuple[float, float]],
) -> dict[Key, _Told]:
    """Note what was seen, and say what it means; away from the loop, for it takes a while."""
    told: dict[Key, _Told] = {}
    histories: dict[tuple[Key, str], History] = {}
    for key, interest in groups.items():
        before, known = broker.told.get(key), broker.histories
        seen, (now, today) = found[key], asked[key]
        if before is not None and not before.tells_of(interest):
            before, known = None, {}
        who = interest.group, interest.broadcasting
        before = before or _Told(*who, asked=now)
        told[key] = _Told(*who, dict.fromkeys(before.judged, NOTHING), None, before.at, before.asked)
        if seen is None:
            histories |= {it: history for it, history in known.items() if it[0] == key}
            continue
        judged: dict[Queue, Judged] = {}
        for topic, queues in seen.items():
            history = histories[key, topic] = known.get((key, topic), History())
            working = frozenset(number for number in queues if (topic, broker.name, number) in worked[key])
            history.see(now, queues, working)
            begins = FROM_THE_OLDEST if topic == RETRY + interest.group else interest.begins
            judged |= {Queue(topic, broker.name, number): it for number, it in history.judged(begins).items()}
        if interest.broadcasting:  # reports are older than looks: from these two no age and no trend can be told
            judged = {it: known._replace(delay=None, verdict=None, worked=None) for it, known in judged.items()}
        if judged.keys() == before.judged.keys():  # what is as before stays, for the garbage collection's sake again
            judged = {queue: it if it == judged[queue] else judged[queue] for queue, it in before.judged.items()}
        told[key] = _Told(*who, judged, None, today, now)
    broker.histories = histories
    return told
