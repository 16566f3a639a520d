"""Events during a member's requests, deliveries and writes: no newer state is overwritten, and reports stay correct."""

import asyncio
import errno
import json
import time
from base64 import b64decode
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ground.poll import soon
from rota import aio
from rota.brokers.errors import NotFoundError, RejectedError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.message import Message
from rota.brokers.port import PullResult
from rota.documents import Share
from rota.model import Queue, Reason
from rota.queue_offsets import decode_progress
from rota.sidecar import agent, config_follower
from rota.sidecar.consume import broker_session, filter_counts, lease_requests, offset_committer
from rota.sidecar.delivery import http_post, push, settlement
from rota.sidecar.member import queue_lifecycle
from rota.sidecar.member.queue_lifecycle import LeaseState
from rota.sidecar.member.window import Commit, QueueWindow
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.local_offsets import LocalOffsetStore
from rota.sidecar.storage.offset_files import OffsetFiles
from rota.sidecar.storage.state_store import StateStore
from rota.spec.resolved import settings_digest
from sidecar.in_memory import DEAD, GROUP, TOPIC, Event, Latch, MemoryMember, a_member, port_of

FIRST, SECOND = (Queue(TOPIC, BROKER, number) for number in range(2))


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MONITOR_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.1)
    monkeypatch.setattr(config_follower, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(broker_session, "JOIN_RETRY_SECONDS", 0.02)


def texts(many: int) -> list[str]:
    return [str(number) for number in range(many)]


async def deliver_the_first_of_ten(member: MemoryMember, latch: Latch) -> None:
    member.app.answer = latch
    member.settings["delivery"] = {"push": {"concurrency": 1}}
    await member.assign([FIRST])
    await member.send(*texts(10), queue=0)
    await member.wait_until(lambda report: report.inflight == 1)


def shown_settings(member: MemoryMember) -> bytes:
    return Path(member.identity.config_folder, "..data", "group.json").read_bytes()


async def committed(member: MemoryMember, offset: int) -> None:
    async def is_committed() -> bool:
        return member.offset(0) == offset

    await soon(is_committed)


class Refusing(MemoryConsumer):
    """A consumer of a broker that rejects every returned message."""

    async def send_back(self, *_: Any, **__: Any) -> None:
        raise RejectedError("its properties are too large")


async def wrong(_: Event) -> int:
    return 500


# Offsets.


@pytest.mark.parametrize("forced", [True, False], ids=["a forced grant", "an Immediate group"])
async def test_offset_is_not_put_back_by_a_member_that_lost_the_queue(tmp_path: Path, forced: bool) -> None:  # noqa: FBT001
    memory = MemoryCluster()
    latch = Latch()
    async with a_member(tmp_path, memory) as previous, a_member(tmp_path, memory, "b") as current:
        await deliver_the_first_of_ten(previous, latch)
        fields: dict[str, Any] = {"forced": {FIRST: 5}} if forced else {}
        previous.generation = current.generation = 4
        await current.assign([FIRST], **fields)
        await current.wait_until_done(*texts(10))
        await committed(previous, 10)
        previous.publish([], members={"a": Share("uid-a", ()), "b": Share("uid-b", (FIRST,))}, **fields)
        await previous.wait_until(lambda report: report.generation == 5 and bool(report.releasing))
        latch.opened.set()
        await previous.wait_until(lambda report: not report.active_queues)
        assert previous.offset(0) == 10


async def test_offset_of_finished_messages_is_committed_with_the_next_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled_commits = list[int | None]()

    class Counting(MemoryConsumer):
        async def pull(self, queue: Queue, offset: int, **more: Any) -> PullResult:
            if queue == FIRST:
                pulled_commits.append(more.get("commit_offset"))
            return await super().pull(queue, offset, **more)

    monkeypatch.setattr(agent, "COMMIT_SECONDS", 3600.0)
    async with a_member(tmp_path) as member:
        member.connect = Counting
        await member.assign([FIRST])
        for done, body in enumerate(texts(3)):
            await member.send(body, queue=0)  # pulled at once; the offset of finished messages goes with the next pull
            await member.wait_until_done(*texts(done + 1))
            await committed(member, done)
        assert pulled_commits == [None, None, 1, 2], "one pull for each message"


async def test_offset_reset_overwritten_by_a_pull_is_restored_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryCluster()
    latch = Latch()
    pulled_commits = list[int | None]()

    class Unlucky(MemoryConsumer):
        async def pull(self, queue: Queue, offset: int, **more: Any) -> PullResult:
            commit = more.get("commit_offset")
            if commit == 1 and 1 not in pulled_commits:
                await memory.reset_offsets(GROUP, TOPIC, BROKER)
            pulled_commits.append(commit)
            return await super().pull(queue, offset, **more)

    monkeypatch.setattr(agent, "COMMIT_SECONDS", 3600.0)
    async with a_member(tmp_path, memory) as member:
        member.connect = Unlucky
        await member.assign([FIRST])
        await member.send("1", queue=0)
        await member.wait_until_done("1")
        member.app.answer = latch
        await member.send("2", queue=0)
        await committed(member, 2)
        assert 1 in pulled_commits
        latch.opened.set()


class Overtaken(MemoryConsumer):
    """A consumer of a slow broker, which stores the offset of a pull only when the test permits that."""

    under_way: asyncio.Event
    store_permitted: asyncio.Event
    queries = 0
    stores: asyncio.Task[None] | None = None

    async def pull(self, queue: Queue, offset: int, *, commit_offset: int | None = None, **more: Any) -> PullResult:
        if commit_offset:
            Overtaken.stores = asyncio.create_task(self._stores(queue, commit_offset))
            self.under_way.set()
        return await super().pull(queue, offset, **more)

    async def _stores(self, queue: Queue, commit: int) -> None:
        await self.store_permitted.wait()
        await self.commit(queue, commit)

    async def committed_offset(self, queue: Queue) -> int | None:
        Overtaken.queries += 1
        return await super().committed_offset(queue)


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch) -> type[Overtaken]:
    for name, value in (("under_way", asyncio.Event()), ("store_permitted", asyncio.Event()), ("queries", 0)):
        monkeypatch.setattr(Overtaken, name, value, raising=False)
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 3600.0)
    return Overtaken


async def test_offset_sent_with_a_held_pull_is_reported_as_committed(
    tmp_path: Path, overtaken: type[Overtaken]
) -> None:
    async def reported_offset() -> int | None:
        page = decode_progress((await member.request("/v1/report/queues"))[1])
        assert page
        return page.queues[FIRST].committed_offset

    async with a_member(tmp_path) as member:
        member.connect = overtaken
        await member.assign([FIRST])
        await member.send("1", queue=0)
        await member.wait_until_done("1")
        assert await reported_offset() == 0, "no pull carries it"
        await member.send("2", queue=0)
        await overtaken.under_way.wait()
        assert (await reported_offset(), member.offset(0)) == (1, 0)
    assert overtaken.stores
    overtaken.stores.cancel()


async def release_after_a_slow_pull(member: MemoryMember, broker: type[Overtaken]) -> None:
    """Release a queue while a pull carries offset 1 that is not stored yet, and offset 2 is finished."""
    member.connect = broker
    await member.assign([FIRST])
    for done in (["1"], ["1", "2"]):
        await member.send(done[-1], queue=0)
        await member.wait_until_done(*done)
    await broker.under_way.wait()
    broker.queries = 0
    member.publish([])


async def test_offset_sent_with_a_slow_pull_does_not_undo_the_commit_at_queue_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overtaken: type[Overtaken]
) -> None:
    async def is_awaited() -> bool:
        return overtaken.queries > 2

    monkeypatch.setattr(offset_committer, "QUERY_PAUSES_SECONDS", repeat(0.01))
    async with a_member(tmp_path) as member:
        await release_after_a_slow_pull(member, overtaken)
        await soon(is_awaited)
        assert (await member.report()).releasing, "the slow pull may overwrite a commit"
        assert member.offset(0) == 0
        overtaken.store_permitted.set()
        await member.wait_until(lambda report: not report.active_queues)
        assert member.offset(0) == 2
    assert overtaken.stores
    await overtaken.stores


async def test_offset_sent_with_a_lost_pull_delays_a_queue_release_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overtaken: type[Overtaken]
) -> None:
    monkeypatch.setattr(offset_committer, "QUERY_PAUSES_SECONDS", (0.01, 0.01))
    async with a_member(tmp_path) as member:
        await release_after_a_slow_pull(member, overtaken)
        await member.wait_until(lambda report: not report.active_queues)
        assert (overtaken.queries, member.offset(0)) == (3, 2)
    assert overtaken.stores
    overtaken.stores.cancel()


async def consume_one(member: MemoryMember, broker: type[MemoryConsumer]) -> None:
    """Let a member consume one message through a consumer of this class."""
    member.connect = broker
    await member.assign([FIRST])
    await member.send("1", queue=0)
    await member.wait_until_done("1")


async def test_offset_that_the_broker_has_forgotten_is_committed_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = list[int]()

    class Losing(MemoryConsumer):
        """A consumer of a broker that loses the first commit after a restart, because another one arrives with it."""

        async def commit(self, queue: Queue, offset: int) -> None:
            commits.append(offset)
            if commits != [0, 1]:
                await super().commit(queue, offset)

    monkeypatch.setattr(agent, "COMMIT_SECONDS", 3600.0)
    async with a_member(tmp_path) as member:
        await consume_one(member, Losing)
        member.memory.groups.committed_offsets[GROUP].clear()
        await member.assign([])
        assert (commits, member.offset(0)) == ([0, 1, 1], 1)


async def test_offset_is_not_committed_by_a_member_that_stalled_after_it_read_the_stored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = list[int]()

    class Stalling(MemoryConsumer):
        async def committed_offset(self, queue: Queue) -> int | None:
            stored = await super().committed_offset(queue)
            if stored == 0 and member.app.done:
                sidecar = member.sidecar
                sidecar.member.mark_stalled()
                asyncio.get_running_loop().call_later(0.1, sidecar.member.apply_assignment, None, sidecar.host.now())
                await self.commit(queue, 5)  # by the queue's next owner
            return stored

        async def commit(self, queue: Queue, offset: int) -> None:
            commits.append(offset)
            await super().commit(queue, offset)

    monkeypatch.setattr(lease_requests, "COMMIT_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 3600.0)
    async with a_member(tmp_path) as member:
        await consume_one(member, Stalling)
        await member.assign([])
        assert (commits, member.offset(0)) == ([0, 5], 5)


async def test_offset_committed_with_pulls_and_by_the_timer_never_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []
    to_commit = QueueWindow.next_commit

    class Ordered(MemoryConsumer):
        async def pull(self, queue: Queue, offset: int, *, commit_offset: int | None = None, **more: Any) -> PullResult:
            if commit_offset:
                await asyncio.sleep(0.05)  # meanwhile the timer's commit waits for the response
                stored.append(commit_offset)
            return await super().pull(queue, offset, commit_offset=commit_offset, **more)

        async def commit(self, queue: Queue, offset: int) -> None:
            if queue == FIRST:
                stored.append(offset)
            await super().commit(queue, offset)

    def finish_one_after(window: QueueWindow) -> Commit | None:
        commit = to_commit(window)
        for delivery in [*window.open_deliveries][:1]:
            window.finish_message(delivery, next(iter(delivery.unsettled.values())))
        return commit

    async def all_stored() -> bool:
        await member.send("more", queue=0)  # pulled at once, so the next pull is sent
        return max(stored, default=0) >= 10

    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.01)
    async with a_member(tmp_path) as member:
        member.connect = Ordered
        member.app.answer = Latch()
        await member.assign([FIRST])
        await member.send(*texts(10), queue=0)
        await member.wait_until(lambda report: report.inflight == 10)
        monkeypatch.setattr(QueueWindow, "next_commit", finish_one_after)
        await soon(all_stored)
        monkeypatch.undo()
        member.app.answer.opened.set()
    assert stored == sorted(stored)


async def test_queue_release_waits_for_the_first_offset_commit_in_progress(tmp_path: Path) -> None:
    under_way, commit_permitted = asyncio.Event(), asyncio.Event()

    class Slow(MemoryConsumer):
        async def commit(self, queue: Queue, offset: int) -> None:
            under_way.set()
            await commit_permitted.wait()
            await super().commit(queue, offset)

    async with a_member(tmp_path) as member:
        member.connect = Slow
        member.publish([FIRST])
        await under_way.wait()
        member.publish([])
        report = await member.wait_until(lambda report: report.generation == 2)
        assert report.releasing, "its commit would follow the next owner's"
        commit_permitted.set()
        await member.wait_until(lambda report: not report.active_queues)
        assert member.offset(0) == 0


async def test_orderly_delivery_that_ends_after_its_lock_expired_counts_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch()
    for name, seconds in (
        ("LOCK_TRUST_SECONDS", 0.5),
        ("LOCK_RENEWAL_SECONDS", 10.0),
        ("LOCK_RETRY_SECONDS", 10.0),
        ("LOCK_HOLD_SECONDS", 0.05),
    ):
        monkeypatch.setattr(queue_lifecycle, name, seconds)
    async with a_member(tmp_path, ordering="Orderly") as member:
        member.app.answer = latch
        await member.send("1", "2", queue=0)
        await member.assign([FIRST])
        await member.wait_until(lambda report: report.inflight == 1)
        lease = member.sidecar.member.leases[FIRST]

        async def is_starting() -> bool:
            return lease.state is LeaseState.STARTING

        await soon(is_starting)
        monkeypatch.setattr(queue_lifecycle, "LOCK_TRUST_SECONDS", 30.0)
        await asyncio.sleep(0.3)
        latch.opened.set()
        await committed(member, 2)
        assert [event.body for event in member.app.events] == ["1", "2"]


@pytest.mark.parametrize("stalled", [False, True])
async def test_push_awaiting_a_connection_is_sent_unless_the_queue_was_lost_during_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stalled: bool
) -> None:
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    requested = asyncio.Event()
    latch = Latch()

    async def connect_late(factory: Callable[[], Any], *args: Any, **options: Any) -> Any:
        if factory is http_post._Connection:
            requested.set()
            await latch.opened.wait()
        return await connect(factory, *args, **options)

    async with a_member(tmp_path) as member:
        monkeypatch.setattr(loop, "create_connection", connect_late)
        monkeypatch.setattr(aio, "STALL_SECONDS", 0.5)
        await member.send("1", queue=0)
        await member.assign([FIRST])
        await requested.wait()
        member.publish([])
        if stalled:
            time.sleep(1)  # noqa: ASYNC251 - stalls the whole process
        await member.wait_until(lambda report: bool(report.releasing))
        latch.opened.set()
        await member.wait_until(lambda report: not report.active_queues)
        assert len(member.app.events) == (0 if stalled else 1)
        assert await counts(member) == {"cut" if stalled else "done": 1}
        await member.assign([FIRST])
        await member.wait_until_done("1")
        assert [event.attempt for event in member.app.events] == [1]


@pytest.mark.parametrize("stalled", [False, True], ids=["running", "stalled"])
async def test_retry_of_a_timed_out_push_is_sent_unless_the_queue_was_lost_during_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stalled: bool
) -> None:
    latch = Latch()
    sent_back = list[int]()

    class Noting(MemoryConsumer):
        async def send_back(self, message: Message, **more: Any) -> None:
            sent_back.append(message.offset)
            await super().send_back(message, **more)

    monkeypatch.setattr(aio, "STALL_SECONDS", 0.5)
    async with a_member(tmp_path, delivery={"push": {"timeout": "1s"}}) as member:
        member.app.answer = latch
        member.connect = Noting
        await member.send("1", queue=0)
        await member.assign([FIRST])
        await member.wait_until(lambda report: report.inflight == 1)
        member.publish([])
        if stalled:
            time.sleep(2)  # noqa: ASYNC251 - stalls the whole process
        await member.wait_until(lambda report: not report.active_queues)
        assert sent_back == ([] if stalled else [0])
        assert await counts(member) == {"cut" if stalled else "later": 1}
        latch.opened.set()


async def test_disk_writes_never_overlap_though_a_waiting_commit_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_offset = OffsetFiles.store_offset
    active_writes = [0]
    max_active_writes = [0]

    def slowly(self: OffsetFiles, queue: Queue, offset: int) -> None:
        active_writes[0] += 1
        max_active_writes[0] = max(max_active_writes[0], active_writes[0])
        time.sleep(0.1)
        store_offset(self, queue, offset)
        active_writes[0] -= 1

    monkeypatch.setattr(OffsetFiles, "store_offset", slowly)
    local = LocalOffsetStore(OffsetFiles(tmp_path, GROUP))
    first = asyncio.create_task(local.commit(FIRST, 1))
    while not active_writes[0]:  # noqa: ASYNC110 - set by a thread
        await asyncio.sleep(0.005)
    first.cancel()
    await local.commit(SECOND, 5)
    assert max_active_writes == [1]
    assert OffsetFiles(tmp_path, GROUP).load(TOPIC) == {FIRST: 1, SECOND: 5}


# Documents.


async def test_drain_timeout_published_with_a_revocation_applies_to_it(tmp_path: Path) -> None:
    latch = Latch()
    async with a_member(tmp_path) as member:
        member.drain_timeout = 0.05
        await deliver_the_first_of_ten(member, latch)
        member.drain_timeout = 60.0
        member.publish([])
        await member.wait_until(lambda report: report.generation == 2)
        await asyncio.sleep(0.3)
        assert (await member.report()).releasing
        latch.opened.set()
        await member.wait_until(lambda report: not report.active_queues)


async def test_settings_in_force_are_named_in_the_report_and_change_its_revision(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        previous = await member.assign([FIRST])
        member.settings["delivery"] = {"push": {"concurrency": 7}}
        member.publish([FIRST])
        report = await member.wait_until(lambda report: report.settings != previous.settings)
        assert report.settings == settings_digest(shown_settings(member))
        assert report.revision > previous.revision


async def test_settings_that_need_a_rejoin_are_in_force_only_after_it(tmp_path: Path) -> None:
    latch = Latch()
    async with a_member(tmp_path) as member:
        await deliver_the_first_of_ten(member, latch)
        previous = await member.report()
        member.settings["subscriptions"] = [{"topic": TOPIC, "expression": "paid"}]
        member.publish([FIRST])
        report = await member.wait_until(lambda report: report.generation == previous.generation + 1)
        assert (report.settings, bool(report.releasing)) == (previous.settings, True)
        latch.opened.set()
        await member.wait_until(lambda report: report.settings != previous.settings)


async def test_topic_assigned_under_unreadable_settings_is_consumed_once_they_are_readable(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        await member.memory.create_topic("bills", BROKER, 1)
        bills = Queue("bills", BROKER, 0)
        await member.memory.send("bills", b"1")
        member.generation += 1
        member.mount("{}", member.assignment([FIRST, bills]))
        await member.wait_until(lambda report: report.generation == 2 and "UnsupportedSettings" in report.troubles)
        member.settings["subscriptions"] = [{"topic": TOPIC}, {"topic": "bills"}]
        await member.assign([FIRST, bills])
        await member.wait_until_done("1")


async def test_member_that_has_left_does_not_rejoin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = push.PushDelivery.close

    def full(_: StateStore) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def slowly(self: push.PushDelivery) -> None:
        await asyncio.sleep(0.2)
        await close(self)

    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        monkeypatch.setattr(StateStore, "check_space", full)
        monkeypatch.setattr(push.PushDelivery, "close", slowly)
        member.publish([SECOND])
        await member.wait_until(lambda report: "StateWriteFailed" in report.troubles)
        await member.end()
        assert member.memory.groups.members[GROUP] == []


async def test_disk_full_problem_stays_until_the_start_of_the_process_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may have space for the generation, but not for the process number."""
    start = StateStore.store_incarnation
    troubles = list[str]()
    report_trouble = Problems.set_problem

    def full(_: StateStore) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def noting(self: Problems, reason: Reason, message: str) -> None:
        if reason is Reason.STATE_WRITE_FAILED:
            troubles.append(message)
        report_trouble(self, reason, message)

    monkeypatch.setattr(config_follower, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(StateStore, "store_incarnation", full)
    monkeypatch.setattr(Problems, "set_problem", noting)
    async with a_member(tmp_path) as member:
        member.publish([FIRST])
        await member.wait_until(lambda report: "StateWriteFailed" in report.troubles)

        async def has_tried_again() -> bool:
            return len(troubles) >= 4

        await soon(has_tried_again)
        assert all("its process number cannot be written" in message for message in troubles)
        monkeypatch.setattr(StateStore, "store_incarnation", start)
        await member.assign([FIRST])
        assert (await member.report()).troubles == {}


# Reports and counts.


async def test_topic_that_does_not_exist_is_reported_as_unknown_and_not_as_an_unreachable_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent(MemoryConsumer):
        async def check_subscriptions(self) -> None:
            raise NotFoundError("There is no topic orders")

    async with a_member(tmp_path) as member:
        member.connect = Absent
        member.publish([])
        report = await member.wait_until(lambda report: bool(report.troubles))
        assert report.troubles == {"UnknownTopic": "There is no topic orders"}
        monkeypatch.setattr(Absent, "check_subscriptions", MemoryConsumer.check_subscriptions)
        await member.wait_until(lambda report: report.troubles == {})


async def test_broker_that_was_never_reached_is_reported_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.sidecar.status.problems.UNREACHABLE_SECONDS", 0.1)
    async with a_member(tmp_path) as member:
        await member.assign([])
        member.memory.take_down(BROKER)
        member.publish([FIRST])
        await member.wait_until(lambda report: report.brokers == {BROKER: False})
        assert not await member.ready()


async def test_dead_letter_of_a_batch_is_counted_once(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        bodies = [b64decode(event["data_base64"]) for event in json.loads(await request.read())]
        return web.Response(status=422 if b"2" in bodies else 204)

    app = web.Application()
    app.add_routes([web.post("/", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with a_member(tmp_path, delivery={"push": {"maxBatch": 8}}) as member:
        member.port = port_of(runner)
        await member.send(*texts(5), queue=0)
        await member.assign([FIRST])
        await committed(member, 5)
        assert len(await member.memory.messages_of(DEAD)) == 1
        assert await counts(member) == {"split": 5, "dead": 1, "done": 4}
    await runner.cleanup()


async def test_dead_letter_is_counted_when_the_last_attempt_fails(tmp_path: Path) -> None:
    async with a_member(tmp_path, delivery={"retry": {"maxAttempts": 1}}) as member:
        member.app.answer = wrong
        await member.send("1", queue=0)
        await member.assign([FIRST])
        await committed(member, 1)
        assert await counts(member) == {"dead": 1}


async def test_retry_rejected_by_the_broker_counts_attempts_locally_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reported = asyncio.Event()

    async def third(event: Event) -> int:
        if event.attempt < 3:
            return 500
        await is_reported.wait()  # the problem is cleared once the message is done
        return 204

    monkeypatch.setattr(settlement, "SEND_BACK_RETRY_SECONDS", 0.02)
    async with a_member(tmp_path) as member:
        member.connect = Refusing
        member.app.answer = third
        await member.send("1", queue=0)
        member.publish([FIRST])
        report = await member.wait_until(lambda report: "RetryRejected" in report.troubles)
        sentence = report.troubles["RetryRejected"]
        assert "offset 0 of orders/memory/0" in sentence
        assert "its properties are too large; have the app accept it" in sentence
        is_reported.set()
        await committed(member, 1)
        assert [event.attempt for event in member.app.events] == [1, 2, 3]
        assert (await member.report()).troubles == {}


async def test_retry_rejected_by_the_broker_is_not_reported_after_a_reset_past_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "SEND_BACK_RETRY_SECONDS", 0.02)
    async with a_member(tmp_path) as member:
        member.connect = Refusing
        member.app.answer = wrong
        await member.send("1", queue=0)
        member.publish([FIRST])
        await member.wait_until(lambda report: "RetryRejected" in report.troubles)
        membership = member.memory.groups.members[GROUP][0]
        membership.on_offsets_reset({FIRST: 1})
        await member.wait_until(lambda report: report.troubles == {})


async def counts(member: MemoryMember) -> dict[str, int]:
    """Return the counted messages by outcome."""
    lines = [line.split() for line in (await member.request("/metrics"))[1].splitlines() if "messages_total{" in line]
    return {labels.partition('outcome="')[2].partition('"')[0]: int(float(count)) for labels, count in lines}


async def test_filter_that_lets_nothing_through_is_reported_until_a_message_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_counts, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(filter_counts, "MIN_FILTERED_MESSAGES", 3)
    async with a_member(tmp_path, subscriptions=[{"topic": TOPIC, "expression": "paid"}]) as member:
        await member.assign([FIRST])
        await member.send(*texts(3), queue=0)
        report = await member.wait_until(lambda report: "NothingMatches" in report.troubles)
        assert report.troubles["NothingMatches"].startswith("None of the last 3 messages of orders matches")
        await member.memory.send(TOPIC, b"4", {"TAGS": "paid"}, queue=FIRST)
        await member.wait_until_done("4")
        await member.wait_until(lambda report: report.troubles == {})
