"""What brokers tell of groups: routes every few seconds, once for all groups of a topic; who is online, group by group.

Nothing is concluded from silence: a topic without an answer has no view, and then the planner changes nothing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rota.brokers.errors import BrokerError, Refused, Unknown, Unreachable
from rota.brokers.port import Brokers, Client, Settings, queues_of
from rota.kube.client.objects import Key
from rota.kube.state.broker_state import AtBroker
from rota.kube.state.queue_quota import QueueQuota
from rota.logs import of_group
from rota.model import RETRY, Queue, Reason, Verdict
from rota.planner import View
from rota.spec import StartFrom

ROUTES_SECONDS = 5.0
ONLINE_SECONDS, ONLINE_GROUPS = (5.0, 20.0), 50  # between two looks, at least and at most; groups a second in between
RETRIES_EVERY = 4  # looks at the routes
AT_ONCE = 16  # requests under way to one cluster
DEAD_SECONDS = 120.0  # for which brokers keep a connection of which they hear nothing any more


_log = logging.getLogger(__name__)


class Interest(NamedTuple):
    """What a group wants to know."""

    group: str  # at the broker
    topics: tuple[str, ...]
    broadcasting: bool
    begins: StartFrom = StartFrom()
    weighed: bool = False  # whether it matters how much comes to each queue


@dataclass
class _Topic:
    """What was last told of a topic, and since when it is that."""

    name: str
    counts: Mapping[str, int] | None = None  # of queues, by broker
    since: float = 0.0
    why: BrokerError | None = None
    brokers: frozenset[str] = field(init=False)  # once: each look at lag asks for them, of every topic

    def __post_init__(self) -> None:
        self.brokers = frozenset(self.counts or ())

    @cached_property
    def queues(self) -> tuple[Queue, ...] | None:
        """All queues; asked for only where the group's quota allows for them."""
        return None if self.counts is None else queues_of(self.name, self.counts)


@dataclass(frozen=True)
class _Online:
    """Who was last seen in a group, and what is wrong with it."""

    ids: tuple[str, ...] | None = None  # as often as one broker has them
    clients: Mapping[str, Client] = field(default_factory=dict)  # by id
    settings: Mapping[str, Settings] = field(default_factory=dict)  # by broker
    problems: tuple[Verdict, ...] = ()
    twice: Mapping[str, "_Twice"] = field(default_factory=dict)  # ids that one broker has more than once


class _Twice(NamedTuple):
    """Since when an id is worn twice, and whether at one address: then it may be one, and its old connection."""

    since: float
    alike: bool


class Views:
    """What one cluster of brokers tells."""

    def __init__(self, brokers: Brokers, news: Callable[[Key], None], quota: QueueQuota | None = None) -> None:
        """Ask nothing before `run`; `news` is told of each group of which something is told anew."""
        self._brokers = brokers
        self._news = news
        self._quota = quota or QueueQuota()
        self._interests: dict[Key, Interest] = {}
        self._within_quota: dict[Key, Interest] = {}
        self._topics: dict[str, _Topic] = {}
        self._groups_of_topic: Counter[str] = Counter()  # how many groups want each topic
        self._online: dict[Key, _Online] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._looks = 0

    @property
    def interests(self) -> Mapping[Key, Interest]:
        """The interests of the groups that are within the queue quota."""
        return self._within_quota

    def where_is(self, topic: str) -> frozenset[str]:
        """Return the brokers that a topic was last seen on."""
        return self._topics[topic].brokers if topic in self._topics else frozenset()

    def queue_count(self, topic: str, broker: str) -> int:
        """Return how many queues of a topic a broker was last seen to have."""
        counts = self._topics[topic].counts if topic in self._topics else None
        return counts.get(broker, 0) if counts else 0

    def where(self, interest: Interest) -> frozenset[str]:
        """Return the brokers of a group's topics."""
        return frozenset().union(*map(self.where_is, topics_of(interest)))

    @property
    def idle(self) -> bool:
        """Whether no group wants to know anything any more."""
        return not self._interests

    def want(self, key: Key, interest: Interest | None) -> None:
        """Set what a group wants to know from now on; None ends its interest."""
        previous = self._interests.get(key)
        if previous == interest:
            return
        if interest is None:
            del self._interests[key]
            self._within_quota.pop(key, None)
            self._quota.release(key)
            self._online.pop(key, None)
        else:
            self._interests[key] = interest
            self._groups_of_topic.update(topics_of(interest))
            self._claim_queues(key)
        if previous is not None:
            self._forget_topics(topics_of(previous))

    def _claim_queues(self, key: Key) -> None:
        """Claim a group's queues; a group above the quota is left out of lag polling."""
        interest = self._interests[key]
        topics = [self._topics[topic] for topic in topics_of(interest) if topic in self._topics]
        self._quota.claim(key, [topic.counts for topic in topics if topic.counts])
        if self._quota.rejection(key):
            self._within_quota.pop(key, None)
        else:
            self._within_quota[key] = interest

    def _forget_topics(self, topics: Collection[str]) -> None:
        """Drop the routes of topics that no group wants any more."""
        self._groups_of_topic.subtract(topics)
        for topic in topics:
            if not self._groups_of_topic[topic]:
                del self._groups_of_topic[topic]
                self._topics.pop(topic, None)

    async def run(self) -> None:
        """Ask for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._again(lambda: ROUTES_SECONDS, self._look_at_routes))
            tasks.create_task(self._again(self.online_pause, self._look_who_is_there))

    def online_pause(self) -> float:
        """Return when to look again who is there: soon, for foreigners that come read beside us; many groups cost."""
        soonest, latest = ONLINE_SECONDS
        return min(max(soonest, len(self._interests) / ONLINE_GROUPS), latest)

    async def _again(self, pause: Callable[[], float], look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(pause())
            try:
                await look()
            except Exception:  # noqa: BLE001 - of one look; who ends here sees nothing any more
                _log.exception("What brokers tell was not understood")

    async def look(self, key: Key) -> None:
        """Ask everything about one group now."""
        if interest := self._interests.get(key):
            await asyncio.gather(*(self._ask(topic) for topic in topics_of(interest)))
            await self._ask_online(key, interest)

    async def look_who_is_there(self, key: Key) -> None:
        """Ask now who is online in one group."""
        interest = self._interests.get(key)
        if interest and await self._ask_online(key, interest):
            self._news(key)

    async def _look_at_routes(self) -> None:
        """Ask for every topic; for retries, one topic a group, only now and then: they come once, and stay."""
        self._looks += 1
        retries = not self._looks % RETRIES_EVERY
        wanted = {topic for it in self._interests.values() for topic in (topics_of(it) if retries else it.topics)}
        await asyncio.gather(*map(self._ask, wanted))
        self._retry_claims()

    def _retry_claims(self) -> None:
        """Claim again for groups that were rejected: others may have released queues since."""
        for key in [key for key in self._interests if self._quota.rejection(key)]:
            self._claim_queues(key)
            if not self._quota.rejection(key):
                self._news(key)

    async def _look_who_is_there(self) -> None:
        asked = list(self._interests.items())
        found = await asyncio.gather(*(self._ask_online(key, interest) for key, interest in asked))
        for (key, _), new in zip(asked, found, strict=True):
            if new:
                self._news(key)

    async def _ask(self, topic: str) -> None:
        """Ask for a topic's queues; if something else is told than before, tell all whom it concerns."""
        before = self._topics.setdefault(topic, _Topic(topic))
        counts: Mapping[str, int] | None = None
        why: BrokerError | None = None
        async with self._room:
            try:
                counts = await self._brokers.queue_counts(topic)
            except BrokerError as error:
                why = error
        if (counts, type(why)) == (before.counts, type(before.why)) and before.since:
            return
        if topic not in self._topics:  # nobody wants to know any more
            return
        self._topics[topic] = _Topic(topic, counts, asyncio.get_running_loop().time(), why)
        for key in [key for key, interest in self._interests.items() if topic in topics_of(interest)]:
            self._claim_queues(key)
            self._news(key)

    async def _ask_online(self, key: Key, interest: Interest) -> bool:
        """Ask every broker of a group's topics who is online; return whether it is not as before."""
        topics = () if self._quota.rejection(key) else interest.topics
        brokers = sorted({broker for topic in topics for broker in self.where_is(topic)})
        try:
            told = await asyncio.gather(*(self._of_one_broker(interest, broker) for broker in brokers))
            twice = self._online.get(key, _Online()).twice
            now = _online(told, twice, asyncio.get_running_loop().time()) if brokers else _Online()
        except BrokerError as error:
            _log.info("The broker refused or did not answer: %s", error, extra=of_group(*key))
            refused = isinstance(error, Refused)
            now = _Online(problems=(Verdict(Reason.BROKER_REFUSES, str(error)),) if refused else ())
        if self._interests.get(key) != interest:  # it went, or wants to know something else by now
            return False
        before, self._online[key] = self._online.get(key), now
        return before != now

    async def _of_one_broker(self, interest: Interest, broker: str) -> "_OneBroker":
        async with self._room:
            there = await self._brokers.clients(interest.group, broker)
        try:
            async with self._room:
                return _OneBroker(broker, there, await self._brokers.settings(interest.group, broker))
        except Unknown:
            return _OneBroker(broker, there, None)  # nobody has joined at this one yet

    def settings(self, key: Key) -> Mapping[str, Settings]:
        """Return a group's settings as they were last seen, by broker."""
        return self._online.get(key, _Online()).settings

    def is_accepted(self, key: Key) -> bool | None:
        """Whether the brokers of a group's topics let it in, and told who is in it; None: they did not answer."""
        online = self._online.get(key, _Online())
        is_refused = any(problem.reason is Reason.BROKER_REFUSES for problem in online.problems)
        return True if online.ids is not None else False if is_refused else None

    def clients(self, key: Key) -> Mapping[str, Client]:
        """Return who was last seen in a group, by id."""
        return self._online.get(key, _Online()).clients

    def of(self, key: Key, now: float, ours: Collection[str]) -> AtBroker:
        """Return what is known of a group; `ours`: how its own pods' client ids end."""
        interest = self._interests.get(key)
        if interest is None:
            return AtBroker()
        views: dict[str, View | None] = {}
        rejection = self._quota.rejection(key)
        problems = [rejection] if rejection else []
        for topic in topics_of(interest):
            it = self._topics.get(topic) or _Topic(topic)
            views[topic] = None if rejection or it.queues is None else View(it.queues, now - it.since)
            if isinstance(it.why, Unknown) and topic in interest.topics:
                problems.append(Verdict(Reason.UNKNOWN_TOPIC, f"{it.why}; create it, or mend spec.subscriptions"))
            elif isinstance(it.why, Unreachable) and topic in interest.topics:
                problems.append(Verdict(Reason.BROKER_UNREACHABLE, str(it.why)))
            elif isinstance(it.why, Refused):
                problems.append(Verdict(Reason.BROKER_REFUSES, str(it.why)))
        online = self._online.get(key, _Online())
        foreigners = None if online.ids is None else tuple(it for it in online.ids if it.partition("@")[2] not in ours)
        problems += [*online.problems, *_worn_twice(online, now, ours)]
        return AtBroker(views, () if interest.broadcasting else foreigners, tuple(problems))


class _OneBroker(NamedTuple):
    """What one broker tells of a group."""

    broker: str
    there: tuple[Client, ...]
    settings: Settings | None


def _online(told: Collection[_OneBroker], twice: Mapping[str, _Twice], now: float) -> _Online:
    """Put together what brokers tell; `twice`: the ids that one of them had twice before."""
    problems: list[Verdict] = []
    settings = {it.broker: it.settings for it in told if it.settings}
    off = [broker for broker, it in settings.items() if not it.enabled]
    if off:
        told_so = f"The group is switched off at {', '.join(off)}; consumeEnable switches it on"
        problems.append(Verdict(Reason.SWITCHED_OFF, told_so))
    worn: dict[str, _Twice] = {}
    times = Counter[str]()
    for _, there, _ in told:
        here = Counter(it.id for it in there)
        times |= here  # each consumer is online at every broker
        for name in (name for name, many in here.items() if many > 1):
            since, alike = worn.get(name) or _Twice(twice[name].since if name in twice else now, alike=True)
            hosts = {it.address.rpartition(":")[0] for it in there if it.id == name}
            worn[name] = _Twice(since, alike and len(hosts) == 1)
    clients = {it.id: it for _, there, _ in told for it in there}
    return _Online(tuple(sorted(times.elements())), clients, settings, tuple(problems), worn)


def _worn_twice(online: _Online, now: float, ours: Collection[str]) -> list[Verdict]:
    """Tell of ids that several wear; of a member of ours whose old connection the broker still holds there is one."""
    several = sorted(
        name
        for name, (since, alike) in online.twice.items()
        if not alike or name.partition("@")[2] not in ours or now - since > DEAD_SECONDS
    )
    if not several:
        return []
    said = f"Several consumers call themselves {', '.join(several[:3])}; of queues that are theirs some stay unread"
    return [Verdict(Reason.DUPLICATE_CLIENT_IDS, said)]


def topics_of(interest: Interest) -> tuple[str, ...]:
    """Return what the members read: what is subscribed to, and what is to be tried again."""
    return interest.topics if interest.broadcasting else (*interest.topics, RETRY + interest.group)
