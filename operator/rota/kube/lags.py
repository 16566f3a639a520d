"""How far groups are behind, read from their brokers every few seconds: side by side, a slow one delays no other.

Where the group is, is asked before where a queue ends: so no end lies below it. Whatever a broker does not tell is not
known, and is not taken for what it said before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from time import time
from typing import Any, NamedTuple, TypeVar

from rota.brokers import BrokerError, Brokers, Ends, Progress, Unknown, Unreachable
from rota.kube.history import NOTHING, History, Judged, Seen
from rota.kube.views import Interest, Views, topics_of
from rota.model import RETRY, Queue
from rota.spec import StartFrom

LAG_SECONDS = 15.0
SOON = 0.5  # seconds after which to look again for brokers, where none is known yet
DEAD_EVERY = 4  # looks: dead letters come seldom
NEVER_EVERY = 4  # looks for which it is believed that a group never was at a queue
AT_ONCE = 8  # requests under way to one broker
MOST_DOUBTS = 1000  # queues asked for one by one in a look; the others are not known until the next one

DEAD = "%DLQ%"
FROM_THE_OLDEST = StartFrom(position="Earliest")  # where a retry topic begins, as for the reference

Key = tuple[str, str]
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Lag(NamedTuple):
    """How far a group is behind, as far as its brokers told."""

    queues: Mapping[Queue, Judged]
    dead: int | None = None  # letters
    at: float | None = None  # seconds since 1970: when the broker that was asked longest ago told something
    asked: float | None = None  # the same on the loop's clock


@dataclass
class _Told:
    """What one broker told of one group."""

    judged: dict[Queue, Judged] = field(default_factory=dict)
    dead: int | None = None
    at: float | None = None
    asked: float | None = None


@dataclass
class _Broker:
    """What is known from one broker."""

    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    told: dict[Key, _Told] = field(default_factory=dict)
    histories: dict[tuple[Key, str], History] = field(default_factory=dict)
    never: dict[tuple[Key, Queue], int] = field(default_factory=dict)  # at which look a group was told to be nowhere
    looks: int = 0
    running: asyncio.Task[None] | None = None


class Lags:
    """What the brokers of one cluster tell of how far groups are behind."""

    def __init__(
        self,
        brokers: Brokers,
        views: Views,
        worked: Callable[[Key], Collection[Queue]],
        news: Callable[[Collection[Key]], None] = lambda _: None,
    ) -> None:
        """Ask nothing before `run`; `worked` tells which queues of a group somebody works, `news` is told of looks."""
        self._brokers, self._views, self._worked, self._news = brokers, views, worked, news
        self._known: dict[str, _Broker] = {}
        self.seconds = LAG_SECONDS

    async def run(self) -> None:
        """Look for ever; a broker that is not through with one look is not asked for the next."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                asked = self._wanted()
                self._known = {name: it for name, it in self._known.items() if name in asked}
                for name, groups in asked.items():
                    broker = self._known.setdefault(name, _Broker())
                    if broker.running is None or broker.running.done():
                        broker.running = tasks.create_task(self._safely(name, broker, groups), name=f"lag {name}")
                await asyncio.sleep(self.seconds if self._known else SOON)

    def of(self, key: Key) -> Lag:
        """Return what is known of a group."""
        told = [it.told[key] for it in self._known.values() if key in it.told]
        queues = {queue: judged for it in told for queue, judged in it.judged.items()}
        dead = [it.dead for it in told if it.dead is not None]
        at = [it.at for it in told if it.at is not None]
        asked = [it.asked for it in told if it.asked is not None]
        letters = sum(dead) if told and len(dead) == len(told) else None
        return Lag(queues, letters, min(at, default=None), min(asked, default=None))

    def _wanted(self) -> dict[str, dict[Key, Interest]]:
        """Return the groups that each broker can tell something of."""
        found: dict[str, dict[Key, Interest]] = {}
        for key, interest in self._views.interests.items():
            if not interest.broadcasting:
                for name in self._views.where(interest):
                    found.setdefault(name, {})[key] = interest
        return found

    async def _safely(self, name: str, broker: _Broker, groups: Mapping[Key, Interest]) -> None:
        try:
            await self._look(name, broker, groups)
        except Exception:  # noqa: BLE001 - of one look at one broker; the others go on
            _log.exception("What %s tells of lag was not understood", name)

    async def _look(self, name: str, broker: _Broker, groups: Mapping[Key, Interest]) -> None:
        """Ask one broker about all groups: first where they are, then where queues end."""
        topics = {key: self._topics_at(name, interest) for key, interest in groups.items()}
        ask = self._brokers.progress
        progress = await _all(broker, {key: partial(ask, it.group, name, topics[key]) for key, it in groups.items()})
        wanted = sorted({topic for some in topics.values() for topic in some})
        ends = await _all(broker, {topic: partial(self._ends, topic, name) for topic in wanted})
        found: dict[Key, dict[Queue, Seen] | None] = {}
        doubts: list[tuple[Key, Queue]] = []
        for key in groups:
            done, there = progress.get(key), [ends.get(topic) for topic in topics[key]]
            if done is None or None in there:
                found[key] = None
                continue
            queues = {queue: it for some in there if some for queue, it in some.items()}
            found[key] = {queue: _seen(it, done.get(queue)) for queue, it in queues.items()}
            doubts += [(key, queue) for queue, it in queues.items() if _doubtful(it, done.get(queue))]
        await self._resolve(broker, groups, found, doubts)
        dead = await self._dead(name, broker, groups)
        now = asyncio.get_running_loop().time(), time()
        worked = {key: frozenset(self._worked(key)) for key in groups}
        broker.told = await asyncio.to_thread(_judge, broker, groups, found, worked, now)
        for key, told in broker.told.items():
            told.dead = dead.get(key)
        broker.looks += 1
        self._news(broker.told.keys())

    def _topics_at(self, name: str, interest: Interest) -> list[str]:
        return [topic for topic in topics_of(interest) if name in self._views.where_is(topic)]

    async def _ends(self, topic: str, broker: str) -> dict[Queue, Ends]:
        try:
            return await self._brokers.ends(topic, broker)
        except Unknown:
            return {}

    async def _resolve(
        self,
        broker: _Broker,
        groups: Mapping[Key, Interest],
        found: Mapping[Key, dict[Queue, Seen] | None],
        doubts: Sequence[tuple[Key, Queue]],
    ) -> None:
        """Ask for queues of which the statistics do not tell whether the group ever was there."""
        believed = {it: at for it, at in broker.never.items() if broker.looks - at < NEVER_EVERY}
        asked = [it for it in doubts if it not in believed]
        ask = self._brokers.committed
        answers = await _all(broker, {it: partial(ask, groups[it[0]].group, it[1]) for it in asked[:MOST_DOUBTS]})
        for it in doubts:
            key, queue = it
            seen = found[key] or {}
            known = it in answers or it in believed
            seen[queue] = seen[queue]._replace(committed=answers.get(it), asked=known)
        broker.never = believed | {it: broker.looks for it, committed in answers.items() if committed is None}

    async def _dead(self, name: str, broker: _Broker, groups: Mapping[Key, Interest]) -> dict[Key, int | None]:
        """Return how many dead letters lie there; not each time."""
        if broker.looks % DEAD_EVERY:
            return {key: told.dead for key, told in broker.told.items()}
        found = await _all(broker, {key: partial(self._ends, DEAD + it.group, name) for key, it in groups.items()})
        return {key: sum(it.last - it.first for it in ends.values()) for key, ends in found.items()}


def _seen(ends: Ends, progress: Progress | None) -> Seen:
    return Seen(ends.first, ends.last, progress.committed if progress else None)


def _doubtful(ends: Ends, progress: Progress | None) -> bool:
    """Whether it matters, and is not told, if the group ever was there: 0 may mean that, and so may nothing."""
    return ends.last > ends.first and not (progress and progress.committed)


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
    found: Mapping[Key, dict[Queue, Seen] | None],
    worked: Mapping[Key, frozenset[Queue]],
    now: tuple[float, float],
) -> dict[Key, _Told]:
    """Note what was seen, and say what it means; away from the loop, for it takes a while."""
    told: dict[Key, _Told] = {}
    histories: dict[tuple[Key, str], History] = {}
    for key, interest in groups.items():
        before = broker.told.get(key, _Told())
        told[key] = _Told(dict.fromkeys(before.judged, NOTHING), None, before.at, before.asked)
        seen = found[key]
        if seen is not None:
            told[key] = _Told({}, None, now[1], now[0])
            for topic, some in groupby(sorted(seen), key=lambda queue: queue.topic):
                queues = {queue.id: queue for queue in some}
                history = broker.histories.get((key, topic), History())
                working = frozenset(number for number, queue in queues.items() if queue in worked[key])
                history.see(now[0], {number: seen[queue] for number, queue in queues.items()}, working)
                begins = FROM_THE_OLDEST if topic.startswith(RETRY) else interest.begins
                told[key].judged |= {queues[number]: it for number, it in history.judged(begins).items()}
                histories[key, topic] = history
        else:
            histories |= {it: history for it, history in broker.histories.items() if it[0] == key}
    broker.histories = histories
    return told
