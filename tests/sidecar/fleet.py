"""A fleet at a real broker: pods, a producer, and an operator in miniature that hands queues over in two phases.

Everything is noted for the checker. A grant is noted before it is written, a release once it was read.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from builders import a_spec
from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.brokers.errors import BrokerError, NotFoundError, UnreachableError
from rota.brokers.port import BrokerOffsets, OffsetRange
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.documents import Assignment, Release, Share, encode_assignment
from rota.model import RETRY_TOPIC_PREFIX, Holder, Queue
from rota.spec.resolved import encode_settings
from sidecar.checker import Commit, Delivery, Fact, Sent, Story, violations
from sidecar.pods import APP_PORT, SIDECAR, Pod, now
from sidecar.whole_report import WholeReport

BROKER, AT = "broker-0", "2026-11-21T08:00:00.000Z"
PATIENCE = 60.0
# A program of the sidecar whose clocks for commits, locks and pauses run ten times as fast.
HURRIED = """
from rota.sidecar import agent
from rota.sidecar.member import queue_lifecycle
locks = "LOCK_TRUST_SECONDS", "LOCK_RENEWAL_SECONDS", "LOCK_RETRY_SECONDS", "LOCK_EXPIRY_SECONDS", "LOCK_HOLD_SECONDS"
for name in (*locks, "MAX_BACKOFF_SECONDS"):
    setattr(queue_lifecycle, name, getattr(queue_lifecycle, name) / 10)
agent.STALL_SECONDS /= 5
agent.MONITOR_INTERVAL_SECONDS /= 5
agent.COMMIT_SECONDS /= 10
import sys
from rota.sidecar.__main__ import main
sys.exit(main())
"""


class SidecarFleet:
    """One group and its pods; `a_fleet` makes one."""

    def __init__(self, rocketmq: RocketMQ, site: ConnectionConfig, session: ClientSession, folder: Path) -> None:
        """Make nothing yet."""
        self.rocketmq, self.site, self.session, self.folder = rocketmq, site, session, folder
        self.cluster = AdminClient(site)
        self.topic, self.group = (f"{it}-{secrets.token_hex(3)}" for it in ("orders", "shop"))
        self.retry = Queue(RETRY_TOPIC_PREFIX + self.group, BROKER, 0)
        self.queues: list[Queue] = []
        self.pods: dict[str, Pod] = {}
        self.ended: set[str] = set()
        self.owners: dict[Queue, str] = {}
        self.forced: dict[Queue, int] = {}
        self.releasing: dict[Queue, Release] = {}
        self.generation = 0
        self.settings: dict[str, Any] = {}
        self.drain_timeout = 30.0
        self.program: Sequence[str] = SIDECAR
        self.variables: dict[str, str] = {}  # more of them, for sidecars that are started from now on
        self.facts: list[Fact] = []
        self.sent: list[Sent] = []
        self.commits: list[Commit] = []
        self.dead: set[int] = set()
        self._numbers = count()

    async def known(self, many: int) -> None:
        """Wait until the topic's queues can be asked for."""

        async def so() -> bool:
            with suppress(NotFoundError):
                self.queues = [*await self.cluster.queues(self.topic)]
            return len(self.queues) == many

        await soon(so, PATIENCE)

    @property
    def asks(self) -> bool:
        """Whether apps ask for messages."""
        return bool(self.settings["delivery"].get("mode") == "Pull")

    # Pods.

    async def add(self, name: str, *, app: bool = True) -> Pod:
        """Start a pod that is given nothing yet."""
        pod = self.pods[name] = Pod(self.rocketmq.instance, f"{self.group}-{name}", self.folder / name, asks=self.asks)
        if app:
            pod.start_app()
        pod.start_sidecar(self.program, **self.variables)
        await pod.heard(self.session)
        return pod

    def kill(self, name: str, *what: str) -> None:
        """Kill a pod's sidecar or app."""
        for it in what:
            {"sidecar": self.pods[name].kill_sidecar, "app": self.pods[name].kill_app}[it]()
            self.note(it, name)

    def end(self, name: str) -> None:
        """Kill all of a pod for good, as if its node went."""
        self.kill(name, "sidecar", "app")
        self.note("ended", name)
        self.ended.add(name)

    def kill_broker(self, number: int = 0) -> None:
        """Kill a broker, which forgets what it was told last."""
        self.rocketmq.kill_broker(number)
        self.facts.append(Fact(now(), "broker"))
        self.commits.clear()

    def note(self, kind: str, name: str, queues: Iterable[Queue] = (), generation: int = 0) -> None:
        """Note a fact."""
        self.facts.append(Fact(now(), kind, self.pods[name].name, frozenset(queues), generation))

    # The operator in miniature.

    def files(self) -> dict[str, str | bytes]:
        """Return the documents of the present generation."""
        broker = {"rocketmq": {"nameServers": [self.rocketmq.name_server]}}
        wanted = {"broker": broker, "subscriptions": [{"topic": self.topic}], "startFrom": {"position": "Earliest"}}
        spec = a_spec(**{**wanted, **self.settings})
        shares = {
            pod.name: Share(pod.uid, tuple(sorted(queue for queue, owner in self.owners.items() if owner == name)))
            for name, pod in self.pods.items()
        }
        broadcasting = self.settings.get("messageModel") == "Broadcasting"
        assignment = Assignment(
            group=f"shop/{self.group}",
            generation=self.generation,
            issued_at=AT,
            members=shares,
            releasing=self.releasing,
            forced=self.forced,
            everyone=tuple(self.queues) if broadcasting else None,
        )
        return {
            "group.json": encode_settings(self.group, spec, self.drain_timeout, None),
            **encode_assignment(assignment),
        }

    def show(self, *, hide: Collection[str] = ()) -> None:
        """Write the next generation, and show it to all pods but those."""
        self.generation += 1
        for name in self.pods.keys() - self.ended:
            self.note("given", name, [queue for queue, owner in self.owners.items() if owner == name])
        files = self.files()
        for name in self.pods.keys() - self.ended - {*hide}:
            self.pods[name].show(files)

    async def give(self, **shares: Iterable[Queue]) -> None:
        """Grant queues that nobody has, and wait until that is obeyed."""
        for name, queues in shares.items():
            for queue in queues:
                assert queue not in self.owners, "hand it over"
                self.owners[queue] = name
        self.releasing = {queue: it for queue, it in self.releasing.items() if queue not in self.owners}
        self.show()
        for name in shares:
            await self.obeys(name)

    async def revoke(self, queues: Iterable[Queue]) -> None:
        """Take queues from their owners, without waiting for anything."""
        for queue in queues:
            holder = self.pods[self.owners.pop(queue)]
            self.releasing[queue] = Release(Holder(holder.name, holder.uid), None, self.generation + 1, AT)
        self.show()

    async def hand_over(self, **shares: Iterable[Queue]) -> None:
        """Give queues to others, in two phases."""
        wanted = {queue: name for name, queues in shares.items() for queue in queues}
        before = {queue: self.owners[queue] for queue in wanted}
        await self.revoke(wanted)
        for name in {*before.values()}:
            await self.released(name, [queue for queue in wanted if before[queue] == name])
        await self.give(**shares)

    async def released(self, name: str, queues: Iterable[Queue]) -> None:
        """Wait until a member says that it has released queues."""

        async def so() -> bool:
            report = await self.hear(name)
            return bool(report and report.generation >= self.generation and report.active_queues.isdisjoint(queues))

        await soon(so, PATIENCE)
        self.note("released", name, queues)

    async def force(self, source: str, target: str, queues: Iterable[Queue]) -> None:
        """Take queues from a member that is not heard, who is not shown it before `forgive`."""
        taken = [*queues]
        self.note("forced", source, taken)
        for queue in taken:
            self.owners[queue], self.forced[queue] = target, self.generation + 1
        self.show()

    async def forgiven(self, name: str) -> None:
        """Wait until a member that was overruled obeys."""
        await self.obeys(name)
        self.note("settled", name)

    async def obeys(self, name: str, state: str = "") -> WholeReport:
        """Wait until a member obeys the present generation."""

        async def so() -> WholeReport | None:
            report = await self.hear(name)
            fits = report and report.generation >= self.generation and (not state or report.state == state)
            return report if fits else None

        report = await soon(so, PATIENCE)
        assert report
        return report

    async def hear(self, name: str) -> WholeReport | None:
        """Read a member's report."""
        report = await self.pods[name].report(self.session)
        if report:
            self.note("heard", name, generation=report.generation)
        return report

    # The producer.

    async def send(self, many: int, queues: Sequence[Queue] = (), *, at_once: int = 32) -> list[int]:
        """Send messages to queues in turns, in order of their numbers within each queue; return the numbers."""
        places = [*(queues or self.queues)]
        numbers = [next(self._numbers) for _ in range(many)]
        lock = asyncio.Semaphore(at_once)

        async def to(queue: Queue, share: list[int]) -> None:
            for number in share:
                async with lock:
                    await self._send(number, queue)

        await asyncio.gather(*(to(queue, numbers[place :: len(places)]) for place, queue in enumerate(places)))
        return numbers

    async def _send(self, number: int, queue: Queue) -> None:
        at, acked = now(), True
        try:
            await self.cluster.send(self.topic, b"%d %s" % (number, b"x" * 100), queue=queue)
        except BrokerError:
            acked = False
            await asyncio.sleep(0.2)
        self.sent.append(Sent(number, queue, at, acked))

    @asynccontextmanager
    async def traffic(self, queues: Sequence[Queue] = (), pause: float = 0.01) -> AsyncIterator[None]:
        """Send all the while, a message to each queue and then a pause."""

        async def without_end() -> None:
            while not over.is_set():
                await self.send(len(queues or self.queues), queues)
                await asyncio.sleep(pause)

        over = asyncio.Event()
        sending = asyncio.create_task(without_end())
        try:
            yield
        finally:
            over.set()
            await sending

    # What came of it.

    def delivered(self) -> list[Delivery]:
        """Return every delivery, in the order of their beginnings."""
        orderly = self.settings.get("ordering") == "Orderly"
        found = [it for pod in self.pods.values() for it in pod.deliveries(self.group, orderly=orderly)]
        return sorted(found, key=lambda it: it.begin)

    def done(self) -> set[int]:
        """Return which numbers some app is done with, be it that it never will take them."""
        return {it.number for it in self.delivered() if it.done or it.dead}

    async def until(self, so: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait until something is so, looking at it not too often."""

        async def looked() -> bool:
            await asyncio.sleep(0.1)
            return bool(so())

        await soon(looked, seconds)

    async def more(self, many: int) -> None:
        """Wait until so many more messages were delivered than now."""
        before = len(self.delivered())
        await self.until(lambda: len(self.delivered()) > before + many)

    async def logged(self, name: str, text: str) -> None:
        """Wait until a sidecar has said something."""
        await self.until(lambda: text in self.pods[name].log.read_text())

    async def all_done(self, numbers: Iterable[int] | None = None) -> None:
        """Wait until apps are done with these numbers; or with all that were acknowledged."""
        wanted = {it.number for it in self.sent if it.acked} if numbers is None else {*numbers}
        try:
            await self.until(lambda: wanted <= self.done())
        except TimeoutError:
            left = sorted(wanted - self.done())
            raise TimeoutError(f"{len(left)} of {len(wanted)} messages are not done: {left[:20]}") from None

    async def sample(self) -> Mapping[Queue, int]:
        """Ask the broker where the group is."""
        found: dict[Queue, BrokerOffsets] = {}
        for broker in {queue.broker for queue in self.queues}:
            found |= await self.cluster.group_offsets(self.group, broker, [self.topic, self.retry.topic])
        self.commits += [Commit(now(), queue, it.committed_offset) for queue, it in found.items()]
        return {queue: it.committed_offset for queue, it in found.items()}

    async def all_committed(self) -> None:
        """Wait until the group is at the end of the topic's queues."""
        missing: dict[Queue, tuple[int | None, int]] = {}  # the committed offset and the queue's end
        error: UnreachableError | None = None

        async def so() -> bool:
            nonlocal error
            ends: dict[Queue, OffsetRange] = {}
            missing.clear()
            try:
                committed = await self.sample()
                for broker in {queue.broker for queue in self.queues}:
                    ends |= await self.cluster.offset_ranges(self.topic, broker)
            except UnreachableError as unreachable:  # it may only just come back
                error = unreachable
                return False
            for queue, it in ends.items():
                if committed.get(queue) != it.max_offset:
                    missing[queue] = committed.get(queue), it.max_offset
            return not missing

        try:
            await soon(so, PATIENCE)
        except TimeoutError:
            raise TimeoutError(f"not committed to the end: {missing}; last error: {error}") from None

    async def dead_letters(self) -> set[int]:
        """Return the numbers among the dead letters, of which the checker takes note."""
        # What a broker keeps of them is read as a group of its own would.
        from rota.brokers.port import Membership  # noqa: PLC0415
        from rota.brokers.rocketmq.consumer import RocketMQConsumer  # noqa: PLC0415
        from rota.spec import Subscription  # noqa: PLC0415

        queue = Queue(f"%DLQ%{self.group}", BROKER, 0)
        wanted = Membership(group="undertaker", client_id="1@1", subscriptions=[Subscription(topic=queue.topic)])
        reader = RocketMQConsumer(self.site, wanted)
        try:
            offset = await reader.min_offset(queue)
            while (found := await reader.pull(queue, offset, wait_seconds=0)).messages:
                self.dead |= {int(it.body.split()[0]) for it in found.messages}
                offset = found.next_offset
        except NotFoundError:
            pass
        finally:
            await reader.leave()
        return self.dead

    def story(self) -> Story:
        """Return all that was noted."""
        delivery = self.settings["delivery"]
        push, pull = delivery["push"], delivery.get("pull", {})
        patience = pull.get("visibilityTimeout", "30s") if self.asks else push.get("timeout", "30s")
        return Story(
            sent=self.sent,
            delivered=self.delivered(),
            facts=self.facts,
            commits=self.commits,
            orderly=self.settings.get("ordering") == "Orderly",
            timeout=float(patience[:-1]),
            at_once=push.get("concurrency", 16) * push.get("maxBatch", 1),
            dead=frozenset(self.dead),
        )

    async def check(self) -> None:
        """Have no promise broken, and no sidecar with anything to complain of."""
        await self.sample()
        found = violations(self.story())
        assert not found, "\n".join([f"{len(found)} violations:", *found[:20]])
        for pod in self.pods.values():
            assert not pod.complaints(), pod.complaints()[0]


async def _has_group(fleet: SidecarFleet, broker: str) -> bool:
    """Make the group at a broker; one that has only just started may take its time."""
    try:
        await fleet.cluster.update_group(fleet.group, broker)
    except UnreachableError:
        return False
    return True


@asynccontextmanager
async def a_fleet(
    rocketmq: RocketMQ, folder: Path, *, queues: int = 4, site: ConnectionConfig | None = None, **settings: Any
) -> AsyncIterator[SidecarFleet]:
    """Make a topic and a group of its own; what is set of `delivery.push` may be named `push`."""
    push = {"port": APP_PORT, **settings.pop("push", {})}
    delivery = {**settings.pop("delivery", {}), "push": push}
    async with ClientSession() as session:
        fleet = SidecarFleet(rocketmq, site or ConnectionConfig([rocketmq.name_server]), session, folder)
        fleet.settings = {"delivery": delivery, **settings}
        try:
            brokers = await fleet.cluster.broker_names()
            for broker in brokers:
                await fleet.cluster.create_topic(fleet.topic, broker, queues)
                await soon(partial(_has_group, fleet, broker), PATIENCE)
            await fleet.known(queues * len(brokers))
            yield fleet
        finally:
            for pod in fleet.pods.values():
                pod.end()
            await fleet.cluster.close()
