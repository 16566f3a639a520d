"""What others, brokers, disks and apps did meanwhile: nothing of it is undone, and all is told as it is."""

import asyncio
import errno
import json
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ground.poll import soon
from rota.brokers.errors import NotFoundError, RejectedError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.message import Message
from rota.brokers.port import PullResult
from rota.documents import Share
from rota.model import Queue, Reason
from rota.sidecar import agent, config_follower
from rota.sidecar.consume import broker_session, filter_counts
from rota.sidecar.delivery import http_post, push, settlement
from rota.sidecar.member import queue_lifecycle
from rota.sidecar.member.queue_lifecycle import LeaseState
from rota.sidecar.member.window import Commit, QueueWindow
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.local_offsets import LocalOffsetStore
from rota.sidecar.storage.offset_files import OffsetFiles
from rota.sidecar.storage.state_store import StateStore
from rota.spec.resolved import settings_digest
from sidecar.in_memory import DEAD, GROUP, TOPIC, Event, Gate, MemoryMember, a_member, port_of

FIRST, SECOND = (Queue(TOPIC, BROKER, number) for number in range(2))


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MONITOR_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.1)
    monkeypatch.setattr(config_follower, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(broker_session, "JOIN_RETRY_SECONDS", 0.02)


def texts(many: int) -> list[str]:
    return [str(number) for number in range(many)]


async def busy_with_the_first_of_ten(member: MemoryMember, gate: Gate) -> None:
    member.app.answer = gate
    member.settings["delivery"] = {"push": {"concurrency": 1}}
    await member.obeys([FIRST])
    await member.send(*texts(10), queue=0)
    await member.until(lambda it: it.inflight == 1)


def shown_settings(member: MemoryMember) -> bytes:
    return Path(member.who.config_folder, "..data", "group.json").read_bytes()


async def committed(member: MemoryMember, offset: int) -> None:
    async def so() -> bool:
        return member.offset(0) == offset

    await soon(so)


class Refusing(MemoryConsumer):
    """One whose broker takes nothing back."""

    async def send_back(self, *_: Any, **__: Any) -> None:
        raise RejectedError("its properties are too large")


async def wrong(_: Event) -> int:
    return 500


# Offsets.


@pytest.mark.parametrize("forced", [True, False], ids=["one that stood still is overruled", "an Immediate group"])
async def test_offset_is_not_put_back_by_a_member_that_lost_the_queue(tmp_path: Path, forced: bool) -> None:  # noqa: FBT001
    memory, gate = MemoryCluster(), Gate()
    async with a_member(tmp_path, memory) as one, a_member(tmp_path, memory, "b") as other:
        await busy_with_the_first_of_ten(one, gate)
        told: dict[str, Any] = {"forced": {FIRST: 5}} if forced else {}
        one.generation = other.generation = 4
        await other.obeys([FIRST], **told)
        await other.did(*texts(10))
        await committed(one, 10)
        one.show([], members={"a": Share("uid-a", ()), "b": Share("uid-b", (FIRST,))}, **told)
        await one.until(lambda it: it.generation == 5 and bool(it.releasing))
        gate.opens.set()
        await one.until(lambda it: not it.active_queues)
        assert one.offset(0) == 10


async def test_offset_of_finished_messages_is_committed_with_the_next_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 3600.0)
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        for done, body in enumerate(texts(3)):
            await member.send(body, queue=0)  # which is pulled at once; what is done goes along with the pull after it
            await member.did(*texts(done + 1))
            await committed(member, done)


async def test_offset_reset_overwritten_by_a_pull_is_restored_by_the_next_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, gate, taken = MemoryCluster(), Gate(), list[int | None]()

    class Unlucky(MemoryConsumer):
        async def pull(self, queue: Queue, offset: int, **more: Any) -> PullResult:
            commit = more.get("commit_offset")
            if commit == 1 and 1 not in taken:
                await memory.reset_offsets(GROUP, TOPIC, BROKER)
            taken.append(commit)
            return await super().pull(queue, offset, **more)

    monkeypatch.setattr(agent, "COMMIT_SECONDS", 3600.0)
    async with a_member(tmp_path, memory) as member:
        member.connect = Unlucky
        await member.obeys([FIRST])
        await member.send("1", queue=0)
        await member.did("1")
        member.app.answer = gate
        await member.send("2", queue=0)
        await committed(member, 2)
        assert {1, 2} <= {*taken}
        gate.opens.set()


async def test_offset_sent_with_a_slow_pull_does_not_undo_the_commit_at_queue_release(
    tmp_path: Path,
) -> None:
    under_way, lands, gate = asyncio.Event(), asyncio.Event(), Gate()

    class Overtaken(MemoryConsumer):
        """As a broker is that is slow to look for messages, and stores what came along after that."""

        async def pull(self, queue: Queue, offset: int, *, commit_offset: int | None = None, **more: Any) -> PullResult:
            found = await super().pull(queue, offset, **more)
            if commit_offset:
                under_way.set()
                await asyncio.shield(self._stores(queue, commit_offset))
            return found

        async def _stores(self, queue: Queue, commit: int) -> None:
            await lands.wait()
            await self.commit(queue, commit)

    async with a_member(tmp_path) as member:
        member.connect = Overtaken
        member.settings["delivery"] = {"push": {"concurrency": 1}}
        await member.obeys([FIRST])
        await member.send("1", queue=0)
        await member.did("1")
        member.app.answer = gate
        await member.send("2", queue=0)
        await under_way.wait()
        await member.until(lambda it: it.inflight == 1)
        member.show([])
        await member.until(lambda it: bool(it.releasing))
        gate.opens.set()
        await member.did("1", "2")
        assert (await member.report()).releasing, "what it commits now may be undone"
        lands.set()
        await member.until(lambda it: not it.active_queues)
        assert member.offset(0) == 2


async def test_offset_committed_with_pulls_and_by_the_timer_never_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []
    to_commit = QueueWindow.next_commit

    class Ordered(MemoryConsumer):
        async def pull(self, queue: Queue, offset: int, *, commit_offset: int | None = None, **more: Any) -> PullResult:
            if commit_offset:
                await asyncio.sleep(0.05)  # meanwhile the timer wants to commit, and waits for the answer
                stored.append(commit_offset)
            return await super().pull(queue, offset, commit_offset=commit_offset, **more)

        async def commit(self, queue: Queue, offset: int) -> None:
            if queue == FIRST:
                stored.append(offset)
            await super().commit(queue, offset)

    def finish_one_after(window: QueueWindow) -> Commit | None:
        found = to_commit(window)
        for delivery in [*window.open_deliveries][:1]:
            window.finish_message(delivery, next(iter(delivery.unsettled.values())))
        return found

    async def all_stored() -> bool:
        await member.send("more", queue=0)  # which is pulled at once, and so the next pull is sent
        return 10 in stored

    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.01)
    async with a_member(tmp_path) as member:
        member.connect, member.app.answer = Ordered, Gate()
        await member.obeys([FIRST])
        await member.send(*texts(10), queue=0)
        await member.until(lambda it: it.inflight == 10)
        monkeypatch.setattr(QueueWindow, "next_commit", finish_one_after)
        await soon(all_stored)
        monkeypatch.undo()
        member.app.answer.opens.set()
    assert stored == sorted(stored)


async def test_queue_release_waits_for_the_first_offset_commit_in_progress(tmp_path: Path) -> None:
    under_way, lands = asyncio.Event(), asyncio.Event()

    class Slow(MemoryConsumer):
        async def commit(self, queue: Queue, offset: int) -> None:
            under_way.set()
            await lands.wait()
            await super().commit(queue, offset)

    async with a_member(tmp_path) as member:
        member.connect = Slow
        member.show([FIRST])
        await under_way.wait()
        member.show([])
        report = await member.until(lambda it: it.generation == 2)
        assert report.releasing, "its offset would come after the next owner's"
        lands.set()
        await member.until(lambda it: not it.active_queues)
        assert member.offset(0) == 0


async def test_orderly_delivery_that_ends_after_its_lock_expired_counts_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    for name, seconds in (
        ("LOCK_TRUST_SECONDS", 0.5),
        ("LOCK_RENEWAL_SECONDS", 10.0),
        ("LOCK_RETRY_SECONDS", 10.0),
        ("LOCK_HOLD_SECONDS", 0.05),
    ):
        monkeypatch.setattr(queue_lifecycle, name, seconds)
    async with a_member(tmp_path, ordering="Orderly") as member:
        member.app.answer = gate
        await member.send("1", "2", queue=0)
        await member.obeys([FIRST])
        await member.until(lambda it: it.inflight == 1)
        life = member.sidecar.member.leases[FIRST]

        async def begins_anew() -> bool:
            return life.state is LeaseState.STARTING

        await soon(begins_anew)
        monkeypatch.setattr(queue_lifecycle, "LOCK_TRUST_SECONDS", 30.0)
        await asyncio.sleep(0.3)
        gate.opens.set()
        await committed(member, 2)
        assert [it.body for it in member.app.heard] == ["1", "2"]


@pytest.mark.parametrize("still", [False, True])
async def test_push_awaiting_a_connection_is_sent_unless_the_queue_left_during_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, still: bool
) -> None:
    connected, asked, gate = http_post.HttpPoster._connect, asyncio.Event(), Gate()

    async def late(self: http_post.HttpPoster, until: float) -> Any:
        asked.set()
        await gate.opens.wait()
        return await connected(self, until)

    async with a_member(tmp_path) as member:
        monkeypatch.setattr(http_post.HttpPoster, "_connect", late)
        monkeypatch.setattr(agent, "STALL_SECONDS", 0.5)
        await member.send("1", queue=0)
        await member.obeys([FIRST])
        await asked.wait()
        member.show([])
        if still:
            time.sleep(1)  # noqa: ASYNC251 - so all of it stands still
        await member.until(lambda it: bool(it.releasing))
        gate.opens.set()
        await member.until(lambda it: not it.active_queues)
        assert len(member.app.heard) == (0 if still else 1)
        assert await counts(member) == {"cut" if still else "done": 1}
        await member.obeys([FIRST])
        await member.did("1")
        assert [it.attempt for it in member.app.heard] == [1]


@pytest.mark.parametrize("still", [False, True], ids=["running", "stalled"])
async def test_retry_of_a_timed_out_push_is_sent_unless_the_queue_left_during_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, still: bool
) -> None:
    gate, sent_back = Gate(), list[int]()

    class Noting(MemoryConsumer):
        async def send_back(self, message: Message, **more: Any) -> None:
            sent_back.append(message.offset)
            await super().send_back(message, **more)

    monkeypatch.setattr(agent, "STALL_SECONDS", 0.5)
    async with a_member(tmp_path, delivery={"push": {"timeout": "1s"}}) as member:
        member.app.answer, member.connect = gate, Noting
        await member.send("1", queue=0)
        await member.obeys([FIRST])
        await member.until(lambda it: it.inflight == 1)
        member.show([])
        if still:
            time.sleep(2)  # noqa: ASYNC251 - the whole process stands still
        await member.until(lambda it: not it.active_queues)
        assert sent_back == ([] if still else [0])
        assert await counts(member) == {"cut" if still else "later": 1}
        gate.opens.set()


async def test_disk_writes_never_overlap_though_a_waiting_commit_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, inside, most = OffsetFiles.store_offsets, [0], [0]

    def slowly(self: OffsetFiles, offsets: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.1)
        keep(self, offsets)
        inside[0] -= 1

    monkeypatch.setattr(OffsetFiles, "store_offsets", slowly)
    local = LocalOffsetStore(OffsetFiles(tmp_path, GROUP))
    first = asyncio.create_task(local.commit(FIRST, 1))
    while not inside[0]:  # noqa: ASYNC110 - a thread tells
        await asyncio.sleep(0.005)
    first.cancel()
    await local.commit(SECOND, 5)
    assert most == [1]
    assert OffsetFiles(tmp_path, GROUP).load(TOPIC) == {FIRST: 1, SECOND: 5}


# Documents.


async def test_drain_timeout_published_with_a_revocation_applies_to_it(tmp_path: Path) -> None:
    gate = Gate()
    async with a_member(tmp_path) as member:
        member.drain_timeout = 0.05
        await busy_with_the_first_of_ten(member, gate)
        member.drain_timeout = 60.0
        member.show([])
        await member.until(lambda it: it.generation == 2)
        await asyncio.sleep(0.3)
        assert (await member.report()).releasing
        gate.opens.set()
        await member.until(lambda it: not it.active_queues)


async def test_settings_in_force_are_named_in_the_report_and_change_its_revision(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        before = await member.obeys([FIRST])
        member.settings["delivery"] = {"push": {"concurrency": 7}}
        member.show([FIRST])
        report = await member.until(lambda it: it.settings != before.settings)
        assert report.settings == settings_digest(shown_settings(member))
        assert report.revision > before.revision


async def test_settings_that_need_a_rejoin_are_in_force_only_after_it(tmp_path: Path) -> None:
    gate = Gate()
    async with a_member(tmp_path) as member:
        await busy_with_the_first_of_ten(member, gate)
        before = await member.report()
        member.settings["subscriptions"] = [{"topic": TOPIC, "expression": "paid"}]
        member.show([FIRST])
        report = await member.until(lambda it: it.generation == before.generation + 1)
        assert (report.settings, bool(report.releasing)) == (before.settings, True)
        gate.opens.set()
        await member.until(lambda it: it.settings != before.settings)


async def test_topic_assigned_under_unreadable_settings_is_consumed_once_they_are_readable(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        await member.memory.create_topic("bills", BROKER, 1)
        bills = Queue("bills", BROKER, 0)
        await member.memory.send("bills", b"1")
        member.generation += 1
        member.put("{}", member.assignment([FIRST, bills]))
        await member.until(lambda it: it.generation == 2 and "UnsupportedSettings" in it.troubles)
        member.settings["subscriptions"] = [{"topic": TOPIC}, {"topic": "bills"}]
        await member.obeys([FIRST, bills])
        await member.did("1")


async def test_member_that_has_left_does_not_rejoin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = push.PushDelivery.close

    def full(_: StateStore) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def slowly(self: push.PushDelivery) -> None:
        await asyncio.sleep(0.2)
        await close(self)

    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        monkeypatch.setattr(StateStore, "check_space", full)
        monkeypatch.setattr(push.PushDelivery, "close", slowly)
        member.show([SECOND])
        await member.until(lambda it: "StateWriteFailed" in it.troubles)
        await member.end()
        assert member.memory.members[GROUP] == []


async def test_disk_full_problem_stays_until_the_start_of_the_process_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have room for a generation, but not for this note."""
    start, troubles = StateStore.store_incarnation, list[str]()
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
        member.show([FIRST])
        await member.until(lambda it: "StateWriteFailed" in it.troubles)

        async def has_tried_again() -> bool:
            return len(troubles) >= 4

        await soon(has_tried_again)
        assert all("its process number cannot be written" in message for message in troubles)
        monkeypatch.setattr(StateStore, "store_incarnation", start)
        await member.obeys([FIRST])
        assert (await member.report()).troubles == {}


# What is told.


async def test_topic_that_does_not_exist_is_reported_as_unknown_and_not_as_an_unreachable_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent(MemoryConsumer):
        async def check_subscriptions(self) -> None:
            raise NotFoundError("There is no topic orders")

    async with a_member(tmp_path) as member:
        member.connect = Absent
        member.show([])
        report = await member.until(lambda it: bool(it.troubles))
        assert report.troubles == {"UnknownTopic": "There is no topic orders"}
        monkeypatch.setattr(Absent, "check_subscriptions", MemoryConsumer.check_subscriptions)
        await member.until(lambda it: it.troubles == {})


async def test_broker_that_was_never_reached_is_reported_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.sidecar.status.problems.UNREACHABLE_SECONDS", 0.1)
    async with a_member(tmp_path) as member:
        await member.obeys([])
        member.memory.take_down(BROKER)
        member.show([FIRST])
        await member.until(lambda it: it.brokers == {BROKER: False})
        assert not await member.ready()


async def test_dead_letter_of_a_batch_is_counted_once(tmp_path: Path) -> None:
    async def answer(asked: web.Request) -> web.Response:
        bodies = [b64decode(it["data_base64"]) for it in json.loads(await asked.read())]
        return web.Response(status=422 if b"2" in bodies else 204)

    app = web.Application()
    app.add_routes([web.post("/", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with a_member(tmp_path, delivery={"push": {"maxBatch": 8}}) as member:
        member.port = port_of(runner)
        await member.send(*texts(5), queue=0)
        await member.obeys([FIRST])
        await committed(member, 5)
        assert len(await member.memory.messages_of(DEAD)) == 1
        assert await counts(member) == {"split": 5, "dead": 1, "done": 4}
    await runner.cleanup()


async def test_dead_letter_is_counted_when_the_last_attempt_fails(tmp_path: Path) -> None:
    async with a_member(tmp_path, delivery={"retry": {"maxAttempts": 1}}) as member:
        member.app.answer = wrong
        await member.send("1", queue=0)
        await member.obeys([FIRST])
        await committed(member, 1)
        assert await counts(member) == {"dead": 1}


async def test_retry_rejected_by_the_broker_counts_attempts_locally_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asyncio.Event()

    async def third(event: Event) -> int:
        if event.attempt < 3:
            return 500
        await seen.wait()  # once it is done, nothing is reported any more
        return 204

    monkeypatch.setattr(settlement, "SEND_BACK_RETRY_SECONDS", 0.02)
    async with a_member(tmp_path) as member:
        member.connect, member.app.answer = Refusing, third
        await member.send("1", queue=0)
        member.show([FIRST])
        report = await member.until(lambda it: "RetryRejected" in it.troubles)
        told = report.troubles["RetryRejected"]
        assert "offset 0 of orders/memory/0" in told
        assert "its properties are too large; have the app accept it" in told
        seen.set()
        await committed(member, 1)
        assert [it.attempt for it in member.app.heard] == [1, 2, 3]
        assert (await member.report()).troubles == {}


async def test_retry_rejected_by_the_broker_is_not_reported_after_a_reset_past_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "SEND_BACK_RETRY_SECONDS", 0.02)
    async with a_member(tmp_path) as member:
        member.connect, member.app.answer = Refusing, wrong
        await member.send("1", queue=0)
        member.show([FIRST])
        await member.until(lambda it: "RetryRejected" in it.troubles)
        membership = member.memory.members[GROUP][0]
        membership.on_offsets_reset({FIRST: 1})
        await member.until(lambda it: it.troubles == {})


async def counts(member: MemoryMember) -> dict[str, int]:
    """Return the messages that are counted, by what came of them."""
    lines = [it.split() for it in (await member.ask("/metrics"))[1].splitlines() if "messages_total{" in it]
    return {labels.partition('outcome="')[2].partition('"')[0]: int(float(count)) for labels, count in lines}


async def test_filter_that_lets_nothing_through_is_reported_until_a_message_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_counts, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(filter_counts, "MIN_FILTERED_MESSAGES", 3)
    async with a_member(tmp_path, subscriptions=[{"topic": TOPIC, "expression": "paid"}]) as member:
        await member.obeys([FIRST])
        await member.send(*texts(3), queue=0)
        report = await member.until(lambda it: "NothingMatches" in it.troubles)
        assert report.troubles["NothingMatches"].startswith("None of the last 3 messages of orders matches")
        await member.memory.send(TOPIC, b"4", {"TAGS": "paid"}, queue=FIRST)
        await member.did("4")
        await member.until(lambda it: it.troubles == {})
