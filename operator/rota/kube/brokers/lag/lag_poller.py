"""How far groups are behind, read from their brokers every few seconds: side by side, a slow one delays no other.

Where the group is, is asked before where a queue ends: so no end lies below it. Whatever a broker does not tell is not
known, and is not taken for what it said before. One that lets a question wait for its whole time, and answers nothing
else meanwhile, is away: nothing that it told is known from then on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from rota.aio import gently
from rota.brokers.errors import BrokerError, Garbled, Unknown, Unreachable
from rota.brokers.port import Brokers
from rota.kube.brokers.lag.lag_history import Judged
from rota.kube.brokers.lag.lag_merge import Ends, Found, Known, Offsets, Told, judge, put_together, seen_of, unknown
from rota.kube.brokers.route_watcher import Interest, Views, topics_of
from rota.kube.client.objects import Key
from rota.model import Queue

LAG_SECONDS = 15.0
SOON = 0.5  # seconds after which to look again for brokers, where none is known yet
DEAD_EVERY = 4  # looks: dead letters come seldom
BELIEVED = 4  # looks for which an answer about one queue stands: that the group is at 0, or never was there
TOGETHER = 32  # groups whose offsets are read before the ends of their queues are, so that no offset is above an end
KEPT_SECONDS = 600.0  # for which looks are kept at a broker that no route tells of
MOST_KEPT = 1000  # of such brokers: as many as one group may have, for a name server may tell of others each time
GONE_SECONDS = 60.0  # for which it is doubted that a broker is gone for good which has left a topic's route
ANSWER_SECONDS = 15.0  # for which one question waits, whatever its own time-out: 10 s, and looking the broker up anew
LOOK_SECONDS = 60.0  # after which nothing more is asked in a look; those that it did not come to are first in the next
AT_ONCE = 8  # requests under way to one broker
MOST_DOUBTS = 1000  # queues asked for one by one in a look; the others are not known until the next one
MOST = 2**63 - 1  # brokers count in Java's longs: what is more, or less than nothing, is no offset

DEAD = "%DLQ%"

_Doubt = tuple[str, Queue]  # whether a group, by its name there, ever was at a queue
_Resolved = tuple[int, bool, int | None]  # at which look, whether nothing lay there, and to what
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Lag(NamedTuple):
    """How far a group is behind, as far as its brokers told."""

    queues: Mapping[Queue, Judged]
    dead: int | None = None  # letters
    at: float | None = None  # seconds since 1970: when the broker that was asked longest ago told something
    asked: float | None = None  # the same on the loop's clock; of one that told nothing yet: when it was first asked
    missing: frozenset[str] = frozenset()  # topics whose route has lost a broker just now: it may be away for a while
    flows: Mapping[Queue, float | None] = {}  # messages a second that came to each, where that is wanted


@dataclass
class _Broker(Known):
    """What is known from one broker, and how it is asked."""

    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    resolved: dict[_Doubt, _Resolved] = field(default_factory=dict)
    looks: int = 0
    began: float = 0.0  # when this look at it did
    heard: float = 0.0  # when it last answered
    away: bool = False  # it does not answer, in this look
    lost: Callable[[], None] = lambda: None  # is told so
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
        *,
        turned: Callable[[Key], None] = lambda _: None,
        begun: Callable[[Key], Mapping[str, float]] = lambda _: {},
    ) -> None:
        """Ask nothing before `run`; `worked` tells which queues of a group somebody works, `news` is told of looks.

        Where a Broadcasting group is no broker knows: `reported` tells where its slowest member is. `turned` is told of
        groups of which it was known how far behind they are and is not any more, or the other way round. `begun` tells
        since when topics are consumed: a group that starts at Latest is behind by everything that came later.
        """
        self._brokers, self._views, self._worked, self._news = brokers, views, worked, news
        self._reported, self._turned, self._begun = reported, turned, begun
        self._routes: dict[str, dict[str, float]] = {}  # by topic and broker: when the one was last seen on the other
        self._known: dict[str, _Broker] = {}
        self.seconds = LAG_SECONDS

    async def run(self) -> None:
        """Look for ever; a broker that is not through with one look is not asked for the next."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                asked, now = self._wanted(), asyncio.get_running_loop().time()
                self._note_routes(now)
                self._known = _kept(self._known, asked, now)
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
        flows: dict[Queue, float | None] = {}
        for it in told:
            queues |= it.judged
            flows |= it.flows
        dead = [it.dead for it in told if it.dead is not None]
        at = [it.at for it in told if it.at is not None]
        asked = [it.asked for it in told if it.asked is not None]
        letters = sum(dead) if told and len(dead) == len(told) and not missing else None
        return Lag(queues, letters, min(at, default=None), min(asked, default=None), missing, flows)

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
            self._lose(broker, groups)

    def _lose(self, broker: _Broker, groups: Mapping[Key, Interest]) -> None:
        """Know nothing any more of what a broker told, and say so at once."""
        now = asyncio.get_running_loop().time()
        self._tell(broker, {key: unknown(broker.told.get(key), interest, now) for key, interest in groups.items()})

    def _tell(self, broker: _Broker, told: dict[Key, Told]) -> None:
        before, broker.told = broker.told, told
        self._news(told.keys())
        for key, it in told.items():
            if it.known != (key in before and before[key].known):
                self._turned(key)

    async def _look(self, broker: _Broker, groups: Mapping[Key, Interest]) -> None:
        """Ask one broker about all groups, and say what its answers mean; nothing, if it falls silent meanwhile."""
        broker.began, broker.away = asyncio.get_running_loop().time(), False
        broker.lost = partial(self._lose, broker, groups)
        asked = dict.fromkeys(groups, (broker.began, time()))
        found = await self._ask(broker, groups, asked)
        dead = await self._dead(broker, groups)
        worked = {key: frozenset(self._worked(key)) async for key in gently(groups)}
        if not broker.away:
            told = await asyncio.to_thread(judge, broker, groups, found, worked, asked)
            for key, it in told.items():
                it.dead = None if found[key] is None else dead.get(key)
            self._tell(broker, told)
        broker.looks += 1

    async def _ask(
        self, broker: _Broker, groups: Mapping[Key, Interest], asked: dict[Key, tuple[float, float]]
    ) -> Found:
        """Ask about groups, some at a time: first where they are, then where their queues end; note when, in `asked`.

        Those come first that were told of longest ago: so none is left out for ever where there is no time for all, and
        one that a broker has no answer for is asked about beside others: these show whether it is only that.
        """
        topics = {key: self._topics_at(broker.name, interest) async for key, interest in gently(groups.items())}
        last = {key: it.asked if it.at and it.asked else 0.0 for key, it in broker.told.items()}
        keys = sorted(groups, key=lambda key: (last.get(key, 0.0), list(topics[key])))
        found: Found = dict.fromkeys(groups)
        doubts: list[tuple[Key, Queue]] = []
        for some in (keys[start : start + TOGETHER] for start in range(0, len(keys), TOGETHER)):
            asked |= dict.fromkeys(some, (asyncio.get_running_loop().time(), time()))
            offsets = await self._offsets(broker, {key: groups[key] for key in some}, topics)
            if broker.away:  # the others need not wait for the same
                break
            wanted = {topic: count for key in some for topic, count in sorted(topics[key].items())}
            asking = {topic: partial(self._ends, broker.name, topic, count) for topic, count in wanted.items()}
            ends = await _all(broker, asking)
            put = partial(put_together, everyones={key for key in some if groups[key].broadcasting})
            seen, open_ = await asyncio.to_thread(put, broker.name, some, topics, offsets, ends)
            found |= seen
            doubts += open_
        await self._resolve(broker, groups, found, doubts)
        return found

    def _topics_at(self, name: str, interest: Interest) -> dict[str, int]:
        """Return a group's topics on one broker, and how many queues each has there."""
        topics = [topic for topic in topics_of(interest) if name in self._views.where_is(topic)]
        return {topic: self._views.queue_count(topic, name) for topic in topics}

    # Of what brokers answer only numbers are kept: whole answers of all groups would be much for Python's garbage
    # collection to look through, and meanwhile nothing else is done. Of queues that no route tells of nothing is kept:
    # a broker may answer with any number of them.

    async def _offsets(
        self, broker: _Broker, groups: Mapping[Key, Interest], topics: Mapping[Key, Mapping[str, int]]
    ) -> dict[Key, Offsets]:
        """Return where groups are; of Broadcasting ones no broker is asked: it may be away all the same."""
        asking = {
            key: partial(self._progress, broker.name, interest.group, topics[key])
            for key, interest in groups.items()
            if not interest.broadcasting
        }
        answers = await _all(broker, asking)
        return answers | {key: self._members(broker.name, key) for key in groups if groups[key].broadcasting}

    def _members(self, broker: str, key: Key) -> Offsets:
        found: Offsets = {}
        for queue, committed in self._reported(key).items():
            if queue.broker == broker and 0 <= committed <= MOST:
                found.setdefault(queue.topic, {})[queue.id] = committed
        return found

    async def _progress(self, broker: str, group: str, topics: Mapping[str, int]) -> Offsets:
        found: Offsets = {}
        for queue, it in (await self._brokers.progress(group, broker, topics.keys())).items():
            if 0 <= it.committed <= MOST and 0 <= queue.id < topics.get(queue.topic, 0):
                found.setdefault(queue.topic, {})[queue.id] = it.committed
        return found

    async def _ends(self, broker: str, topic: str, count: int) -> Ends:
        try:
            found = await self._brokers.ends(topic, broker)
        except Unknown:
            return {}
        possible = {queue.id: it[:2] for queue, it in found.items() if 0 <= queue.id < count}
        return {number: it for number, it in possible.items() if min(it) >= 0 and max(it) <= MOST}

    async def _resolve(
        self,
        broker: _Broker,
        groups: Mapping[Key, Interest],
        found: Found,
        doubts: Sequence[tuple[Key, Queue]],
    ) -> None:
        """Ask for queues of which the statistics do not tell whether the group ever was there; last for empty ones."""
        names = {it: (groups[it[0]].group, it[1]) for it in doubts}
        empty = {names[it]: seen_of(found, it).first == seen_of(found, it).last for it in doubts}
        # An answer about a queue that was empty then does not hold now: the group may have started since.
        believed = {
            it: known
            for it, known in broker.resolved.items()
            if broker.looks - known[0] < BELIEVED and known[1] == empty.get(it, known[1])
        }
        asked = sorted((it for it in empty if it not in believed), key=empty.__getitem__)
        begun = {key: self._begun(key) for key in {key for key, _ in names} if groups[key].begins.position == "Latest"}
        since = {name: begun.get(key, {}).get(name[1].topic) for (key, _), name in names.items()}
        answers = await _all(broker, {it: partial(self._stands, *it, since[it]) for it in asked[:MOST_DOUBTS]})
        good = {it: told for it, told in answers.items() if told is None or 0 <= told <= MOST}
        broker.resolved = believed | {it: (broker.looks, empty[it], committed) for it, committed in good.items()}
        for it, name in names.items():
            *_, committed = broker.resolved.get(name, (None,))
            known = name in broker.resolved or empty[name]  # nobody is behind where nothing is
            (found[it[0]] or {})[it[1].topic][it[1].id] = replace(seen_of(found, it), committed=committed, asked=known)

    async def _stands(self, group: str, queue: Queue, since: float | None) -> int | None:
        """Return where a group is with a queue, or will begin; None where it never was and that is not known."""
        committed = await self._brokers.committed(group, queue)
        if committed is None and since is not None:
            return await self._brokers.at(queue, since)
        return committed

    async def _dead(self, broker: _Broker, groups: Mapping[Key, Interest]) -> dict[Key, int | None]:
        """Return numbers of dead letters; asked for rarely, but at once if a group's name or model has changed."""
        told = {} if not broker.looks % DEAD_EVERY else broker.told
        known = {key: it.dead for key, it in told.items() if key in groups and it.tells_of(groups[key])}
        asking = {key: partial(self._letters, broker.name, it.group) for key, it in groups.items() if key not in known}
        return known | await _all(broker, asking)

    async def _letters(self, broker: str, group: str) -> int | None:
        try:
            found = (await self._brokers.ends(DEAD + group, broker)).values()
        except Unknown:
            return 0
        return (
            sum(it.last - it.first for it in found) if all(0 <= it.first <= it.last <= MOST for it in found) else None
        )


def _kept(known: Mapping[str, _Broker], asked: Collection[str], now: float) -> dict[str, _Broker]:
    """Return the brokers that are not forgotten: those that are asked, and those that were not long ago."""
    gone = sorted((it for it in known.values() if it.name not in asked), key=lambda it: it.wanted)
    forgotten = {it.name for it in gone[:-MOST_KEPT]} | {it.name for it in gone if now >= it.wanted + KEPT_SECONDS}
    return {name: it for name, it in known.items() if name not in forgotten}


async def _all(broker: _Broker, asked: Mapping[Any, Callable[[], Awaitable[T]]]) -> dict[Any, T]:
    """Ask a broker for several things and leave out what it does not answer.

    Where it let one wait for its whole time and answered nothing else since, it is away, and is asked nothing more.
    """
    found: dict[Any, T] = {}
    now = asyncio.get_running_loop().time

    async def one(key: Any, ask: Callable[[], Awaitable[T]]) -> None:
        async with broker.room:
            began = now()
            if broker.away or began >= broker.began + LOOK_SECONDS:
                return
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    found[key] = await ask()
                broker.heard = now()
            except (BrokerError, TimeoutError) as error:
                _log.debug("No lag of %s: %s", key, error)
                if _is_answer(error):
                    broker.heard = now()
                elif broker.heard <= began and not broker.away:
                    broker.away = True
                    broker.lost()

    await asyncio.gather(*(one(key, ask) for key, ask in asked.items()))
    return found


def _is_answer(error: Exception) -> bool:
    return isinstance(error, Garbled) or not isinstance(error, Unreachable | TimeoutError)
