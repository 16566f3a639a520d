"""A fleet at a real broker: pods, a producer, and a minimal operator that hands queues over in two phases.

Everything is recorded for the checker: a grant before it is written, a release after it was read.
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
from sidecar.checker import Commit, Delivery, Fact, FleetHistory, Sent, violations
from sidecar.pods import APP_PORT, SIDECAR, Pod, now
from sidecar.whole_report import WholeReport

BROKER = "broker-0"
ISSUED_AT = "2026-11-21T08:00:00.000Z"
PATIENCE_SECONDS = 60.0
# Runs the sidecar with its intervals for commits, locks and backoff divided by ten.
FAST_CLOCKS = """
from rota import aio
from rota.sidecar import agent
from rota.sidecar.member import queue_lifecycle
locks = "LOCK_TRUST_SECONDS", "LOCK_RENEWAL_SECONDS", "LOCK_RETRY_SECONDS", "LOCK_EXPIRY_SECONDS", "LOCK_HOLD_SECONDS"
for name in (*locks, "MAX_BACKOFF_SECONDS"):
    setattr(queue_lifecycle, name, getattr(queue_lifecycle, name) / 10)
aio.STALL_SECONDS /= 5
agent.MONITOR_INTERVAL_SECONDS /= 5
agent.COMMIT_SECONDS /= 10
import sys
from rota.sidecar.__main__ import main
sys.exit(main())
"""


class SidecarFleet:
    """One group and its pods; created by `a_fleet`."""

    def __init__(self, rocketmq: RocketMQ, site: ConnectionConfig, session: ClientSession, folder: Path) -> None:
        self.rocketmq = rocketmq
        self.site = site
        self.session = session
        self.folder = folder
        self.cluster = AdminClient(site)
        self.topic = f"orders-{secrets.token_hex(3)}"
        self.group = f"shop-{secrets.token_hex(3)}"
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
        self.variables: dict[str, str] = {}  # additional environment of sidecars that start from now on
        self.facts: list[Fact] = []
        self.sent: list[Sent] = []
        self.commits: list[Commit] = []
        self.dead_letters: set[int] = set()
        self._numbers = count()

    async def wait_for_queues(self, number: int) -> None:
        """Wait until the name server knows all queues of the topic."""

        async def are_known() -> bool:
            with suppress(NotFoundError):
                self.queues = [*await self.cluster.queues(self.topic)]
            return len(self.queues) == number

        await soon(are_known, PATIENCE_SECONDS)

    @property
    def is_pull(self) -> bool:
        """Whether the group's delivery mode is Pull."""
        return bool(self.settings["delivery"].get("mode") == "Pull")

    # Pods.

    async def add(self, name: str, *, app: bool = True) -> Pod:
        """Start a pod without queues."""
        pod = self.pods[name] = Pod(
            self.rocketmq.instance, f"{self.group}-{name}", self.folder / name, is_pull=self.is_pull
        )
        if app:
            pod.start_app()
        pod.start_sidecar(self.program, **self.variables)
        await pod.wait_for_report(self.session)
        return pod

    def kill(self, name: str, *containers: str) -> None:
        """Kill a pod's sidecar, its app, or both."""
        for container in containers:
            {"sidecar": self.pods[name].kill_sidecar, "app": self.pods[name].kill_app}[container]()
            self.note(container, name)

    def kill_pod(self, name: str) -> None:
        """Kill a whole pod for good, as the failure of its node does."""
        self.kill(name, "sidecar", "app")
        self.note("ended", name)
        self.ended.add(name)

    def kill_broker(self, number: int = 0) -> None:
        """Kill a broker, which loses its latest commits."""
        self.rocketmq.kill_broker(number)
        self.facts.append(Fact(now(), "broker"))
        self.commits.clear()

    def note(self, kind: str, name: str, queues: Iterable[Queue] = (), generation: int = 0) -> None:
        """Record a fact."""
        self.facts.append(Fact(now(), kind, self.pods[name].name, frozenset(queues), generation))

    # The minimal operator.

    def queues_of(self, name: str) -> list[Queue]:
        """Return the queues that a pod owns."""
        return [queue for queue, owner in self.owners.items() if owner == name]

    def files(self) -> dict[str, str | bytes]:
        """Return the files of the current generation."""
        broker = {"rocketmq": {"nameServers": [self.rocketmq.name_server]}}
        defaults = {"broker": broker, "subscriptions": [{"topic": self.topic}], "startFrom": {"position": "Earliest"}}
        spec = a_spec(**{**defaults, **self.settings})
        shares = {pod.name: Share(pod.uid, tuple(sorted(self.queues_of(name)))) for name, pod in self.pods.items()}
        broadcasting = self.settings.get("messageModel") == "Broadcasting"
        assignment = Assignment(
            group=f"shop/{self.group}",
            generation=self.generation,
            issued_at=ISSUED_AT,
            members=shares,
            releasing=self.releasing,
            forced=self.forced,
            everyone=tuple(self.queues) if broadcasting else None,
        )
        return {
            "group.json": encode_settings(self.group, spec, self.drain_timeout, None),
            **encode_assignment(assignment),
        }

    def publish(self, *, hide: Collection[str] = ()) -> None:
        """Publish the next generation to all pods except `hide`."""
        self.generation += 1
        for name in self.pods.keys() - self.ended:
            self.note("granted", name, self.queues_of(name))
        files = self.files()
        for name in self.pods.keys() - self.ended - {*hide}:
            self.pods[name].mount(files)

    async def grant(self, **shares: Iterable[Queue]) -> None:
        """Grant queues that have no owner, and wait until the members obey."""
        for name, queues in shares.items():
            for queue in queues:
                assert queue not in self.owners, "hand it over"
                self.owners[queue] = name
        self.releasing = {queue: release for queue, release in self.releasing.items() if queue not in self.owners}
        self.publish()
        for name in shares:
            await self.wait_until_obeyed(name)

    async def revoke(self, queues: Iterable[Queue]) -> None:
        """Revoke queues from their owners, without waiting for a release."""
        for queue in queues:
            holder = self.pods[self.owners.pop(queue)]
            self.releasing[queue] = Release(Holder(holder.name, holder.uid), None, self.generation + 1, ISSUED_AT)
        self.publish()

    async def hand_over(self, **shares: Iterable[Queue]) -> None:
        """Hand queues over to the named pods, in two phases."""
        queues = [queue for share in shares.values() for queue in share]
        previous_owners = {queue: self.owners[queue] for queue in queues}
        await self.revoke(previous_owners)
        for name in {*previous_owners.values()}:
            await self.wait_until_released(name, [queue for queue, owner in previous_owners.items() if owner == name])
        await self.grant(**shares)

    async def wait_until_released(self, name: str, queues: Iterable[Queue]) -> None:
        """Wait until a member reports the release of queues."""

        async def are_released() -> bool:
            report = await self.read_report(name)
            return bool(report and report.generation >= self.generation and report.active_queues.isdisjoint(queues))

        await soon(are_released, PATIENCE_SECONDS)
        self.note("released", name, queues)

    async def force_grant(self, source: str, target: str, queues: Iterable[Queue]) -> None:
        """Grant queues of an unreachable member to another one; they are contested until `wait_until_settled`."""
        forced = [*queues]
        self.note("forced", source, forced)
        for queue in forced:
            self.owners[queue] = target
            self.forced[queue] = self.generation + 1
        self.publish()

    async def wait_until_settled(self, name: str) -> None:
        """Wait until a member obeys that lost queues by a forced grant."""
        await self.wait_until_obeyed(name)
        self.note("settled", name)

    async def wait_until_obeyed(self, name: str, state: str = "") -> WholeReport:
        """Wait until a member obeys the current generation, and is in `state` if one is named."""

        async def matching_report() -> WholeReport | None:
            report = await self.read_report(name)
            matches = report and report.generation >= self.generation and (not state or report.state == state)
            return report if matches else None

        report = await soon(matching_report, PATIENCE_SECONDS)
        assert report
        return report

    async def read_report(self, name: str) -> WholeReport | None:
        """Read a member's report."""
        report = await self.pods[name].report(self.session)
        if report:
            self.note("reported", name, generation=report.generation)
        return report

    # The producer.

    async def send(self, count: int, queues: Sequence[Queue] = (), *, concurrency: int = 32) -> list[int]:
        """Send messages to queues in turns, in order of their numbers within each queue; return the numbers."""
        targets = [*(queues or self.queues)]
        numbers = [next(self._numbers) for _ in range(count)]
        semaphore = asyncio.Semaphore(concurrency)

        async def send_share(queue: Queue, share: list[int]) -> None:
            for number in share:
                async with semaphore:
                    await self._send(number, queue)

        shares = (numbers[index :: len(targets)] for index in range(len(targets)))
        await asyncio.gather(*map(send_share, targets, shares))
        return numbers

    async def _send(self, number: int, queue: Queue) -> None:
        at = now()
        acked = True
        try:
            await self.cluster.send(self.topic, b"%d %s" % (number, b"x" * 100), queue=queue)
        except BrokerError:
            acked = False
            await asyncio.sleep(0.2)
        self.sent.append(Sent(number, queue, at, acked))

    @asynccontextmanager
    async def traffic(self, queues: Sequence[Queue] = (), pause: float = 0.01) -> AsyncIterator[None]:
        """Send a message to each queue, and again after each pause, until the context is left."""

        async def send_repeatedly() -> None:
            while not stop_requested.is_set():
                await self.send(len(queues or self.queues), queues)
                await asyncio.sleep(pause)

        stop_requested = asyncio.Event()
        sender = asyncio.create_task(send_repeatedly())
        try:
            yield
        finally:
            stop_requested.set()
            await sender

    # Results.

    def delivered(self) -> list[Delivery]:
        """Return every delivery, in the order in which they began."""
        orderly = self.settings.get("ordering") == "Orderly"
        deliveries = [
            delivery for pod in self.pods.values() for delivery in pod.deliveries(self.group, orderly=orderly)
        ]
        return sorted(deliveries, key=lambda delivery: delivery.begin)

    def done(self) -> set[int]:
        """Return the numbers of messages that an app accepted or rejected for good."""
        return {delivery.number for delivery in self.delivered() if delivery.done or delivery.dead}

    async def wait_until(self, predicate: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until `predicate` holds; check it ten times a second, as it reads logs."""

        async def holds() -> bool:
            await asyncio.sleep(0.1)
            return bool(predicate())

        await soon(holds, seconds)

    async def wait_for_deliveries(self, count: int) -> None:
        """Wait until `count` further messages were delivered."""
        previous = len(self.delivered())
        await self.wait_until(lambda: len(self.delivered()) > previous + count)

    async def wait_for_log(self, name: str, text: str) -> None:
        """Wait until a sidecar has logged a text."""
        await self.wait_until(lambda: text in self.pods[name].log.read_text())

    async def wait_until_all_done(self, numbers: Iterable[int] | None = None) -> None:
        """Wait until apps are done with these messages; by default with all acknowledged ones."""
        expected = {message.number for message in self.sent if message.acked} if numbers is None else {*numbers}
        try:
            await self.wait_until(lambda: expected <= self.done())
        except TimeoutError:
            missing = sorted(expected - self.done())
            raise TimeoutError(f"{len(missing)} of {len(expected)} messages are not done: {missing[:20]}") from None

    async def sample(self) -> Mapping[Queue, int]:
        """Read the group's committed offsets from the brokers, and record them; faults call it before they kill."""
        offsets: dict[Queue, BrokerOffsets] = {}
        for broker in {queue.broker for queue in self.queues}:
            offsets |= await self.cluster.group_offsets(self.group, broker, [self.topic, self.retry.topic])
        committed = {queue: offset.committed_offset for queue, offset in offsets.items()}
        self.commits += [Commit(now(), queue, offset) for queue, offset in committed.items()]
        return committed

    async def wait_until_all_committed(self) -> None:
        """Wait until the group has committed the end of each queue."""
        missing: dict[Queue, tuple[int | None, int]] = {}  # the committed offset and the queue's end
        error: UnreachableError | None = None

        async def reached_the_end() -> bool:
            nonlocal error
            ends: dict[Queue, OffsetRange] = {}
            missing.clear()
            try:
                committed = await self.sample()
                for broker in {queue.broker for queue in self.queues}:
                    ends |= await self.cluster.offset_ranges(self.topic, broker)
            except UnreachableError as unreachable:  # the broker may be restarting
                error = unreachable
                return False
            for queue, offset_range in ends.items():
                if committed.get(queue) != offset_range.max_offset:
                    missing[queue] = committed.get(queue), offset_range.max_offset
            return not missing

        try:
            await soon(reached_the_end, PATIENCE_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"not committed to the end: {missing}; last error: {error}") from None

    async def read_dead_letters(self) -> set[int]:
        """Return the numbers in the dead-letter topic, and record them for the checker."""
        # They are read as a separate group would.
        from rota.brokers.port import Membership  # noqa: PLC0415
        from rota.brokers.rocketmq.consumer import RocketMQConsumer  # noqa: PLC0415
        from rota.spec import Subscription  # noqa: PLC0415

        queue = Queue(f"%DLQ%{self.group}", BROKER, 0)
        membership = Membership(group="undertaker", client_id="1@1", subscriptions=[Subscription(topic=queue.topic)])
        reader = RocketMQConsumer(self.site, membership)
        try:
            offset = await reader.min_offset(queue)
            while (pulled := await reader.pull(queue, offset, wait_seconds=0)).messages:
                self.dead_letters |= {int(message.body.split()[0]) for message in pulled.messages}
                offset = pulled.next_offset
        except NotFoundError:
            pass
        finally:
            await reader.leave()
        return self.dead_letters

    def history(self) -> FleetHistory:
        """Return everything that was recorded."""
        delivery = self.settings["delivery"]
        push, pull = delivery["push"], delivery.get("pull", {})
        timeout = pull.get("visibilityTimeout", "30s") if self.is_pull else push.get("timeout", "30s")
        return FleetHistory(
            sent=self.sent,
            delivered=self.delivered(),
            facts=self.facts,
            commits=self.commits,
            orderly=self.settings.get("ordering") == "Orderly",
            timeout=float(timeout.removesuffix("s")),
            max_in_flight=push.get("concurrency", 16) * push.get("maxBatch", 1),
            dead_letters=frozenset(self.dead_letters),
        )

    async def check(self) -> None:
        """Check that no guarantee is broken and no sidecar logged an error."""
        await self.sample()
        broken = violations(self.history())
        assert not broken, "\n".join([f"{len(broken)} violations:", *broken[:20]])
        for pod in self.pods.values():
            assert not pod.complaints(), pod.complaints()[0]


async def _has_group(fleet: SidecarFleet, broker: str) -> bool:
    """Create the group at a broker; return False while the broker still starts."""
    try:
        await fleet.cluster.update_group(fleet.group, broker)
    except UnreachableError:
        return False
    return True


@asynccontextmanager
async def a_fleet(
    rocketmq: RocketMQ, folder: Path, *, queues: int = 4, site: ConnectionConfig | None = None, **settings: Any
) -> AsyncIterator[SidecarFleet]:
    """Create a topic, a group and its fleet; `push` stands for the setting `delivery.push`."""
    push = {"port": APP_PORT, **settings.pop("push", {})}
    delivery = {**settings.pop("delivery", {}), "push": push}
    async with ClientSession() as session:
        fleet = SidecarFleet(rocketmq, site or ConnectionConfig([rocketmq.name_server]), session, folder)
        fleet.settings = {"delivery": delivery, **settings}
        try:
            brokers = await fleet.cluster.broker_names()
            for broker in brokers:
                await fleet.cluster.create_topic(fleet.topic, broker, queues)
                await soon(partial(_has_group, fleet, broker), PATIENCE_SECONDS)
            await fleet.wait_for_queues(queues * len(brokers))
            yield fleet
        finally:
            for pod in fleet.pods.values():
                pod.end()
            await fleet.cluster.close()
