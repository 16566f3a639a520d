"""Polls brokers for the lag of groups every few seconds, each broker on its own, so a slow one delays no other.

Committed offsets are read before the ends of queues, so that no end lies below them. What a broker does not report is
unknown; earlier values are not reused. A broker that lets a request wait until its timeout, and answers nothing else
meanwhile, is away: all lag that it reported becomes unknown.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from rota.aio import yield_periodically
from rota.brokers.errors import BrokerError, MalformedResponseError, NotFoundError, UnreachableError
from rota.brokers.port import Brokers
from rota.kube.brokers.lag.lag_history import QueueLag
from rota.kube.brokers.lag.lag_merge import (
    BrokerLag,
    Ends,
    Found,
    LagAtBroker,
    Offsets,
    judge,
    merge_responses,
    samples_of,
    unknown_lag,
)
from rota.kube.brokers.route_watcher import RouteWatcher, TopicInterest, topics_of
from rota.kube.client.objects import Key
from rota.model import Queue

LAG_SECONDS = 15.0
SOON = 0.5  # seconds until the next poll while no broker is known
DEAD_EVERY = 4  # polls; dead letters are rare
BELIEVED = 4  # polls in which an answer about one queue is reused: that the group is at 0, or never consumed it
TOGETHER = 32  # groups in a batch: offsets of all are read before the ends of their queues, so that no end is below
KEPT_SECONDS = 600.0  # for which the samples of a broker are kept that no route lists
MOST_KEPT = 1000  # such brokers: as many as one group may have, as a name server may list different ones each time
GONE_SECONDS = 60.0  # for which a broker that has left a topic's route may still come back
ANSWER_SECONDS = 15.0  # limit of one request: its own timeout of 10 s, and the time to look up the broker again
LOOK_SECONDS = 60.0  # after which a poll sends no more requests; groups left out are first in the next poll
AT_ONCE = 8  # requests under way to one broker
MOST_DOUBTS = 1000  # queues asked about one by one in a poll; the others stay unknown until the next one
MOST = 2**63 - 1  # brokers count in Java's longs: a larger or negative number is no offset

DEAD = "%DLQ%"

_Doubt = tuple[str, Queue]  # a queue that a group, by its name at the broker, may never have consumed
_Resolved = tuple[int, bool, int | None]  # number of the poll, whether the queue was empty, the offset
T = TypeVar("T")

_log = logging.getLogger(__name__)


class GroupLag(NamedTuple):
    """A group's lag, as far as its brokers reported it."""

    queues: Mapping[Queue, QueueLag]
    dead: int | None = None  # letters
    at: float | None = None  # seconds since 1970: when the broker with the oldest answer was asked for it
    asked: float | None = None  # the same on the loop's clock; for a broker without an answer, its first request
    missing: frozenset[str] = frozenset()  # topics with a route that has just lost a broker, which may come back
    flows: Mapping[Queue, float | None] = {}  # incoming messages a second of each queue, if needed


@dataclass
class _Broker(BrokerLag):
    """The lag of groups at one broker, and the state of its polls."""

    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    resolved: dict[_Doubt, _Resolved] = field(default_factory=dict)
    looks: int = 0
    began: float = 0.0  # start of the current poll
    heard: float = 0.0  # last answer
    away: bool = False  # whether it does not answer in this poll
    lost: Callable[[], None] = lambda: None  # called when it is away
    wanted: float = 0.0  # last time at which a group needed it
    running: asyncio.Task[None] | None = None


class LagPoller:
    """Polls the brokers of one cluster for the lag of groups."""

    def __init__(
        self,
        brokers: Brokers,
        views: RouteWatcher,
        worked: Callable[[Key], Collection[Queue]],
        on_poll: Callable[[Collection[Key]], None] = lambda _: None,
        reported: Callable[[Key], Mapping[Queue, int]] = lambda _: {},
        *,
        turned: Callable[[Key], None] = lambda _: None,
        begun: Callable[[Key], Mapping[str, float]] = lambda _: {},
    ) -> None:
        """`worked` returns the queues of a group that have a consumer; `on_poll` is called after each poll of a broker.

        Brokers do not know the offsets of a Broadcasting group: `reported` returns those of its slowest member.
        `turned` is called when a group's lag becomes known or unknown. `begun` returns since when topics are consumed:
        a group that starts at Latest is behind by everything that came later.
        """
        self._brokers, self._views, self._worked, self._news = brokers, views, worked, on_poll
        self._reported, self._turned, self._begun = reported, turned, begun
        self._routes: dict[str, dict[str, float]] = {}  # by topic and broker: when the topic was last on it
        self._known: dict[str, _Broker] = {}
        self.seconds = LAG_SECONDS

    async def run(self) -> None:
        """Poll until cancelled; leave out a broker while its previous poll still runs."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                groups_of_broker, now = self._wanted(), asyncio.get_running_loop().time()
                self._note_routes(now)
                self._known = _brokers_to_keep(self._known, groups_of_broker, now)
                for name in self._known.keys() - groups_of_broker.keys():
                    self._known[name].told = {}
                for name, groups in groups_of_broker.items():
                    broker = self._known.setdefault(name, _Broker(name))
                    broker.wanted = now
                    if broker.running is None or broker.running.done():
                        broker.running = tasks.create_task(self._safely(broker, groups), name=f"lag {name}")
                await asyncio.sleep(self.seconds if self._known else SOON)

    def of(self, key: Key) -> GroupLag:
        """Return a group's lag, merged from all brokers."""
        interest = self._views.interests.get(key)
        every = [broker.told[key] for broker in self._known.values() if key in broker.told]
        reports = [report for report in every if interest and report.tells_of(interest)]
        missing = frozenset(filter(self._has_lost_a_broker, topics_of(interest))) if interest else frozenset()
        queues: dict[Queue, QueueLag] = {}
        flows: dict[Queue, float | None] = {}
        for report in reports:
            queues |= report.judged
            flows |= report.flows
        dead = [report.dead for report in reports if report.dead is not None]
        times = [report.at for report in reports if report.at is not None]
        asked_at = [report.asked for report in reports if report.asked is not None]
        letters = sum(dead) if reports and len(dead) == len(reports) and not missing else None
        return GroupLag(queues, letters, min(times, default=None), min(asked_at, default=None), missing, flows)

    def _note_routes(self, now: float) -> None:
        """Remember each topic's brokers: a removed one for a while; all of them while the topic has no route."""
        routes: dict[str, dict[str, float]] = {}
        for topic in {topic for interest in self._views.interests.values() for topic in topics_of(interest)}:
            brokers, last = self._views.where_is(topic), self._routes.get(topic, {})
            past = {name: at if brokers else now for name, at in last.items() if not brokers or now < at + GONE_SECONDS}
            routes[topic] = past | dict.fromkeys(brokers, now)
        self._routes = routes

    def _has_lost_a_broker(self, topic: str) -> bool:
        brokers = self._views.where_is(topic)
        return bool(brokers and self._routes.get(topic, {}).keys() - brokers)

    def _wanted(self) -> dict[str, dict[Key, TopicInterest]]:
        """Return the groups with a topic on each broker."""
        groups_of_broker: dict[str, dict[Key, TopicInterest]] = {}
        for key, interest in self._views.interests.items():
            for name in self._views.where(interest):
                groups_of_broker.setdefault(name, {})[key] = interest
        return groups_of_broker

    async def _safely(self, broker: _Broker, groups: Mapping[Key, TopicInterest]) -> None:
        try:
            await self._look(broker, groups)
        except Exception:  # noqa: BLE001 - one broker's failed poll must not stop the others
            _log.exception("What %s tells of lag was not understood", broker.name)
            self._lose(broker, groups)

    def _lose(self, broker: _Broker, groups: Mapping[Key, TopicInterest]) -> None:
        """Make the lag of all groups at a broker unknown, and report that at once."""
        now = asyncio.get_running_loop().time()
        self._tell(broker, {key: unknown_lag(broker.told.get(key), interest, now) for key, interest in groups.items()})

    def _tell(self, broker: _Broker, lags: dict[Key, LagAtBroker]) -> None:
        previous, broker.told = broker.told, lags
        self._news(lags.keys())
        for key, lag in lags.items():
            if lag.known != (key in previous and previous[key].known):
                self._turned(key)

    async def _look(self, broker: _Broker, groups: Mapping[Key, TopicInterest]) -> None:
        """Ask one broker about all groups and judge its answers; discard them if it falls silent meanwhile."""
        broker.began, broker.away = asyncio.get_running_loop().time(), False
        broker.lost = partial(self._lose, broker, groups)
        asked_at = dict.fromkeys(groups, (broker.began, time()))
        samples = await self._ask(broker, groups, asked_at)
        dead = await self._dead(broker, groups)
        worked = {key: frozenset(self._worked(key)) async for key in yield_periodically(groups)}
        if not broker.away:
            lags = await asyncio.to_thread(judge, broker, groups, samples, worked, asked_at)
            for key, lag in lags.items():
                lag.dead = None if samples[key] is None else dead.get(key)
            self._tell(broker, lags)
        broker.looks += 1

    async def _ask(
        self, broker: _Broker, groups: Mapping[Key, TopicInterest], asked_at: dict[Key, tuple[float, float]]
    ) -> Found:
        """Ask about groups in batches: for their offsets, then for the ends of their queues; set times in `asked_at`.

        Groups with the oldest answers come first, so that none is left out for ever if the time is too short. A group
        without an answer is asked about together with others, which show whether the broker answers at all.
        """
        topics = {
            key: self._topics_at(broker.name, interest) async for key, interest in yield_periodically(groups.items())
        }
        last = {key: lag.asked if lag.at and lag.asked else 0.0 for key, lag in broker.told.items()}
        keys = sorted(groups, key=lambda key: (last.get(key, 0.0), list(topics[key])))
        samples: Found = dict.fromkeys(groups)
        doubts: list[tuple[Key, Queue]] = []
        for batch in (keys[start : start + TOGETHER] for start in range(0, len(keys), TOGETHER)):
            asked_at |= dict.fromkeys(batch, (asyncio.get_running_loop().time(), time()))
            offsets = await self._offsets(broker, {key: groups[key] for key in batch}, topics)
            if broker.away:  # requests for other groups would time out, too
                break
            counts = {topic: count for key in batch for topic, count in sorted(topics[key].items())}
            requests = {topic: partial(self._ends, broker.name, topic, count) for topic, count in counts.items()}
            ends = await _send_all(broker, requests)
            merge = partial(merge_responses, everyones={key for key in batch if groups[key].broadcasting})
            merged, open_ = await asyncio.to_thread(merge, broker.name, batch, topics, offsets, ends)
            samples |= merged
            doubts += open_
        await self._resolve(broker, groups, samples, doubts)
        return samples

    def _topics_at(self, name: str, interest: TopicInterest) -> dict[str, int]:
        """Return a group's topics on one broker, and how many queues each has there."""
        topics = [topic for topic in topics_of(interest) if name in self._views.where_is(topic)]
        return {topic: self._views.queue_count(topic, name) for topic in topics}

    # Only numbers of the answers are kept: the objects of all groups' answers would prolong garbage collection, which
    # blocks the event loop. Queues that no route lists are dropped: a broker may answer with any number of them.

    async def _offsets(
        self, broker: _Broker, groups: Mapping[Key, TopicInterest], topics: Mapping[Key, Mapping[str, int]]
    ) -> dict[Key, Offsets]:
        """Return committed offsets; a Broadcasting group's come from its members, even if the broker is away."""
        requests = {
            key: partial(self._progress, broker.name, interest.group, topics[key])
            for key, interest in groups.items()
            if not interest.broadcasting
        }
        answers = await _send_all(broker, requests)
        return answers | {key: self._members(broker.name, key) for key in groups if groups[key].broadcasting}

    def _members(self, broker: str, key: Key) -> Offsets:
        offsets: Offsets = {}
        for queue, committed in self._reported(key).items():
            if queue.broker == broker and 0 <= committed <= MOST:
                offsets.setdefault(queue.topic, {})[queue.id] = committed
        return offsets

    async def _progress(self, broker: str, group: str, topics: Mapping[str, int]) -> Offsets:
        offsets: Offsets = {}
        for queue, progress in (await self._brokers.progress(group, broker, topics.keys())).items():
            if 0 <= progress.committed <= MOST and 0 <= queue.id < topics.get(queue.topic, 0):
                offsets.setdefault(queue.topic, {})[queue.id] = progress.committed
        return offsets

    async def _ends(self, broker: str, topic: str, count: int) -> Ends:
        try:
            ends = await self._brokers.ends(topic, broker)
        except NotFoundError:
            return {}
        possible = {queue.id: end[:2] for queue, end in ends.items() if 0 <= queue.id < count}
        return {number: end for number, end in possible.items() if min(end) >= 0 and max(end) <= MOST}

    async def _resolve(
        self,
        broker: _Broker,
        groups: Mapping[Key, TopicInterest],
        samples: Found,
        doubts: Sequence[tuple[Key, Queue]],
    ) -> None:
        """Ask one by one for queues that the group may never have consumed by the statistics; empty ones last."""
        names = {doubt: (groups[doubt[0]].group, doubt[1]) for doubt in doubts}
        empty = {names[doubt]: samples_of(samples, doubt).first == samples_of(samples, doubt).last for doubt in doubts}
        # An answer from when the queue was empty does not hold once it is not: the group may have started since.
        reusable = {
            name: resolved
            for name, resolved in broker.resolved.items()
            if broker.looks - resolved[0] < BELIEVED and resolved[1] == empty.get(name, resolved[1])
        }
        to_ask = sorted((name for name in empty if name not in reusable), key=empty.__getitem__)
        begun = {key: self._begun(key) for key in {key for key, _ in names} if groups[key].begins.position == "Latest"}
        since = {name: begun.get(key, {}).get(name[1].topic) for (key, _), name in names.items()}
        answers = await _send_all(
            broker, {name: partial(self._stands, *name, since[name]) for name in to_ask[:MOST_DOUBTS]}
        )
        valid = {name: offset for name, offset in answers.items() if offset is None or 0 <= offset <= MOST}
        broker.resolved = reusable | {name: (broker.looks, empty[name], offset) for name, offset in valid.items()}
        for doubt, name in names.items():
            *_, committed = broker.resolved.get(name, (None,))
            is_known = name in broker.resolved or empty[name]  # an empty queue has no lag
            (samples[doubt[0]] or {})[doubt[1].topic][doubt[1].id] = replace(
                samples_of(samples, doubt), committed=committed, asked=is_known
            )

    async def _stands(self, group: str, queue: Queue, since: float | None) -> int | None:
        """Return a group's committed offset on a queue, or where it will start; None if neither is known."""
        committed = await self._brokers.committed(group, queue)
        if committed is None and since is not None:
            return await self._brokers.at(queue, since)
        return committed

    async def _dead(self, broker: _Broker, groups: Mapping[Key, TopicInterest]) -> dict[Key, int | None]:
        """Return the groups' numbers of dead letters; asked for rarely, but at once for a changed name or model."""
        previous = {} if not broker.looks % DEAD_EVERY else broker.told
        counts = {key: lag.dead for key, lag in previous.items() if key in groups and lag.tells_of(groups[key])}
        calls = {key: partial(self._letters, broker.name, it.group) for key, it in groups.items() if key not in counts}
        return counts | await _send_all(broker, calls)

    async def _letters(self, broker: str, group: str) -> int | None:
        try:
            ends = (await self._brokers.ends(DEAD + group, broker)).values()
        except NotFoundError:
            return 0
        return sum(it.last - it.first for it in ends) if all(0 <= it.first <= it.last <= MOST for it in ends) else None


def _brokers_to_keep(brokers: Mapping[str, _Broker], needed: Collection[str], now: float) -> dict[str, _Broker]:
    """Return the brokers to remember: all that groups need now or needed recently."""
    unused = sorted((it for it in brokers.values() if it.name not in needed), key=lambda it: it.wanted)
    forgotten = {it.name for it in unused[:-MOST_KEPT]} | {it.name for it in unused if now >= it.wanted + KEPT_SECONDS}
    return {name: it for name, it in brokers.items() if name not in forgotten}


async def _send_all(broker: _Broker, requests: Mapping[Any, Callable[[], Awaitable[T]]]) -> dict[Any, T]:
    """Send several requests to a broker; return the answers, leaving out failed requests.

    If a request gets no answer, and none arrived since it began, the broker is away and gets no more requests.
    """
    answers: dict[Any, T] = {}
    now = asyncio.get_running_loop().time

    async def one(key: Any, ask: Callable[[], Awaitable[T]]) -> None:
        async with broker.room:
            started_at = now()
            if broker.away or started_at >= broker.began + LOOK_SECONDS:
                return
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answers[key] = await ask()
                broker.heard = now()
            except (BrokerError, TimeoutError) as error:
                _log.debug("No lag of %s: %s", key, error)
                if _is_answer(error):
                    broker.heard = now()
                elif broker.heard <= started_at and not broker.away:
                    broker.away = True
                    broker.lost()

    await asyncio.gather(*(one(key, ask) for key, ask in requests.items()))
    return answers


def _is_answer(error: Exception) -> bool:
    return isinstance(error, MalformedResponseError) or not isinstance(error, UnreachableError | TimeoutError)
