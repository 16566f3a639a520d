"""What a member makes of its documents, settings and disk, and where and how it delivers, at a cluster in memory."""

import asyncio
import errno
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from builders import a_spec
from ground.poll import PATIENCE_SECONDS, soon
from rota.brokers.errors import RejectedError, UnreachableError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Consumer, Membership, PullResult
from rota.documents import Share
from rota.model import RETRY_TOPIC_PREFIX, Queue, Reason
from rota.queue_offsets import QueueProgress, decode_offsets, decode_progress
from rota.reports import Report, decode_report
from rota.sidecar import agent, config_follower, effects
from rota.sidecar.consume import broker_session
from rota.sidecar.delivery import push, settlement
from rota.sidecar.storage.mounted_config import MountedConfig, MountedFiles
from rota.sidecar.storage.offset_files import OffsetFiles
from rota.sidecar.storage.state_store import StateStore
from rota.spec import Subscription
from rota.spec.resolved import encode_settings
from sidecar.in_memory import DEAD, GROUP, RETRIES, TOPIC, Clock, Gate, MemoryMember, a_member, turn

FIRST, SECOND, THIRD, FOURTH = QUEUES = [Queue(TOPIC, BROKER, number) for number in range(4)]
EARLIEST = {"position": "Earliest"}


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MONITOR_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.1)
    monkeypatch.setattr(effects, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(config_follower, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(broker_session, "JOIN_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(push, "IN_PLACE_RETRY_SECONDS", 0.02)


def texts(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last)]


async def joined(member: MemoryMember) -> Membership:
    """Return what the cluster knows of a member."""
    await soon(lambda: _is(len(member.memory.members[GROUP]) == 1))
    return member.memory.members[GROUP][0]


async def _is(so: bool) -> bool:  # noqa: FBT001 - all that is asked
    return so


# Documents.


async def test_assignment_delivers_only_messages_of_assigned_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST, SECOND])
        for queue in range(4):
            await member.send(f"{queue}", queue=queue)
        await member.did("0", "1")
        await member.obeys(QUEUES)
        await member.did("0", "1", "2", "3")
        assert Counter(it.body for it in member.app.heard) == Counter("0123")


async def test_document_that_is_invalid_old_or_missing_changes_nothing(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        settings = encode_settings(GROUP, a_spec(**member.spec()), 30.0, None)
        member.generation = 9
        good = member.assignment([SECOND])
        bad = {
            "older": member.assignment([SECOND], generation=0),
            "another text": member.assignment([SECOND], generation=1),
            "torn": good[:-30],
            "changed": good.replace('"a":', '"b":'),
            "of another group": member.assignment([SECOND], group="ns/bills"),
            "missing": None,
        }
        for number, text in enumerate(bad.values()):
            member.put(settings, text)
            member.sidecar._read_config()
            await member.send(str(number), queue=0)
            await member.did(*texts(0, number + 1))
            report = await member.report()
            assert (report.generation, report.active_queues, report.troubles) == (1, frozenset({FIRST}), {})
        member.put(None, None)
        member.sidecar._read_config()
        assert (await member.report()).active_queues == {FIRST}
        member.put(settings, good)
        await member.until(lambda it: it.generation == 9 and it.active_queues == {SECOND})


async def test_document_with_another_uid_or_pod_name_assigns_no_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        await member.obeys([], members={"a": Share("uid-of-before", (FIRST,))})
        await member.obeys([FIRST])
        await member.obeys([], members={"b": Share("uid-a", (FIRST,))})


async def test_member_without_an_assignment_reports_no_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        report = await member.report()
        assert (report.generation, report.state, report.active_queues) == (0, "serving", frozenset())
        settings = encode_settings(GROUP, a_spec(**member.spec()), 30.0, None)
        member.put(settings, None)
        await soon(member.ready)
        assert (await member.report()).generation == 0


async def test_restart_resumes_where_the_previous_process_stopped(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys(QUEUES)
        await member.send(*texts(0, 40))
        await member.did(*texts(0, 40))
        await member.end()
        assert member.memory.members[GROUP] == []
        await member.send(*texts(40, 50))
        await member.start()
        await member.did(*texts(0, 50))
        assert len(member.app.heard) == 50
        assert (await member.report()).generation == 1


# Settings.


async def test_settings_of_push_change_at_runtime_without_rejoining(tmp_path: Path) -> None:
    async with a_member(tmp_path, delivery={"push": {"concurrency": 1}}) as member:
        other = await member.app.serve()
        await member.obeys([FIRST])
        known = await joined(member)
        await member.send("1", queue=0)
        await member.did("1")
        before, after = member.port, int(other.addresses[0][1])
        member.settings["delivery"] = {"push": {"concurrency": 8, "path": "/orders", "port": after}}
        await member.obeys([FIRST])
        member.app.answer = gate = Gate()
        await member.send(*texts(2, 9), queue=0)
        await member.until(lambda it: it.inflight > 5)
        gate.opens.set()
        await member.did(*texts(1, 9))
        assert [(it.path, it.port) for it in member.app.heard] == [("/", before)] + [("/orders", after)] * 7
        assert member.app.most == 6, "the last two are kept for other queues"
        assert await joined(member) is known, "for this nobody leaves"
        await other.cleanup()


async def test_settings_with_other_subscriptions_rejoin_without_lost_or_repeated_messages(
    tmp_path: Path,
) -> None:
    async with a_member(tmp_path) as member:
        await member.memory.create_topic("bills", BROKER, 2)
        bills = list(await member.memory.queues("bills"))
        await member.obeys(QUEUES)
        sent = 0
        for topics in (["orders", "bills"], ["orders"], ["bills", "orders"]):
            before = await joined(member)
            member.settings["subscriptions"] = [{"topic": topic} for topic in topics]
            member.show([*QUEUES, *(bills if "bills" in topics else [])])
            while before in member.memory.members[GROUP]:
                await member.send(str(sent))
                sent += 1
                await asyncio.sleep(0)
            assert set((await joined(member)).topics) == {*topics, RETRIES.topic}
            await member.until(lambda it: it.state == "serving" and it.generation == member.generation)
        await member.memory.send("bills", b"bill")
        await member.did(*texts(0, sent), "bill")
        assert len(member.app.heard) == sent + 1


async def test_member_terminated_while_it_rejoins_leaves_the_group(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.app.answer = gate = Gate()
        await member.obeys([FIRST])
        await member.send("1", queue=0)
        await member.until(lambda it: it.inflight == 1)
        member.settings["subscriptions"] = [{"topic": TOPIC, "expression": "a"}]
        member.show([FIRST])
        await member.until(lambda it: it.state == "draining")
        ending = asyncio.create_task(member.end())
        await asyncio.sleep(0)
        gate.opens.set()
        await ending
        assert (member.memory.members[GROUP], member.offset(0)) == ([], 1)


async def test_orderly_can_be_switched_on_and_off_at_runtime(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        for ordering, locked in (("Concurrent", False), ("Orderly", True), ("Concurrent", False)):
            member.settings["ordering"] = ordering
            member.show([FIRST])
            locks = [locked]
            await member.until(lambda it: it.generation == member.generation and it.state == "serving")
            await soon(lambda: member.so(lambda it: [queue.locked for queue in it.queues] == locks))  # noqa: B023 - now
            assert bool(member.memory.locks) == locked
            assert (await joined(member)).orderly == locked


async def test_settings_that_cannot_be_read_are_reported_and_the_previous_ones_stay(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.put("{", member.assignment([FIRST], generation=1))
        report = await member.until(lambda it: "UnsupportedSettings" in it.troubles)
        assert (report.generation, report.active_queues) == (0, frozenset())
        await member.obeys([FIRST])
        member.generation += 1
        member.put('{"schema": 9}', member.assignment([FIRST, SECOND]))
        report = await member.until(lambda it: "UnsupportedSettings" in it.troubles)
        assert report.troubles["UnsupportedSettings"] == (
            "The settings in group.json cannot be read: its schema is 9; this version reads schema 1"
        )
        await member.until(lambda it: it.active_queues == {FIRST, SECOND})
        await member.send("1", queue=1)
        await member.did("1")
        assert (await member.obeys([FIRST])).troubles == {}


async def test_credentials_that_cannot_be_read_are_reported_and_read_again(tmp_path: Path) -> None:
    mounted = False

    def connect(memory: MemoryCluster, membership: Membership) -> Consumer:
        if not mounted:
            raise ValueError("The credentials cannot be read; correct the Secret")
        return MemoryConsumer(memory, membership)

    async with a_member(tmp_path) as member:
        member.connect = connect
        await member.send("1", queue=0)
        member.show([FIRST])
        report = await member.until(lambda it: bool(it.troubles))
        assert report.troubles == {"MissingSecret": "The credentials cannot be read; correct the Secret"}
        assert (report.generation, report.active_queues) == (0, frozenset())
        mounted = True
        await member.did("1")
        mounted = False
        member.settings["subscriptions"] = [{"topic": TOPIC}, {"topic": "bills"}]
        member.show([FIRST, SECOND])
        report = await member.until(lambda it: "MissingSecret" in it.troubles)
        assert (report.state, report.active_queues) == ("drained", frozenset())
        mounted = True
        report = await member.until(lambda it: it.active_queues == {FIRST, SECOND})
        await member.send("2", queue=1)
        await member.did("1", "2")
        assert (await member.report()).troubles == {}


# Its disk, and its clock.


def full(_: StateStore, **__: object) -> None:
    """Keep nothing, as a disk without room does."""
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_disk_full_keeps_a_new_generation_from_being_applied_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.send("1", queue=0)
        with monkeypatch.context() as patched:
            patched.setattr(StateStore, "store_state", full)
            member.show([FIRST])
            report = await member.until(lambda it: "StateWriteFailed" in it.troubles)
            assert (report.generation, report.active_queues, report.queues) == (0, frozenset(), [])
            assert "generation 1 is not applied yet: [Errno 28] No space left" in report.troubles["StateWriteFailed"]
        await member.until(lambda it: it.generation == 1 and it.active_queues == {FIRST})
        await member.did("1")
        with monkeypatch.context() as patched:
            patched.setattr(StateStore, "store_state", full)
            for _ in range(2):
                member.show([SECOND])
            report = await member.until(lambda it: "StateWriteFailed" in it.troubles)
            await member.send("2", queue=1)
            draining = asyncio.create_task(member.ask("/v1/drain", "POST", json.dumps({"uid": "uid-a"})))
            report = await member.report()
            assert (report.generation, report.state, report.final, report.active_queues) == (
                1,
                "serving",
                False,
                frozenset({FIRST}),
            )
            assert not draining.done()
        assert await draining == (200, "drained permanently\n")
        report = await member.report()
        assert (report.generation, report.final, report.troubles) == (3, True, {})
        assert member.app.done == ["1"]


async def test_drain_final_that_cannot_be_stored_does_not_prevent_termination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        monkeypatch.setattr(StateStore, "store_state", full)
        final = asyncio.create_task(member.ask("/v1/drain", "POST", json.dumps({"uid": "uid-a"})))
        report = await member.until(lambda it: "StateWriteFailed" in it.troubles)
        assert "so the final drain is postponed: [Errno 28] No space left" in report.troubles["StateWriteFailed"]
        app = asyncio.create_task(member.ask("/v1/drained"))
        await asyncio.wait_for(member.end(), PATIENCE_SECONDS)
        assert [await final, await app] == [(200, "drained permanently\n"), (200, "drained\n")]


async def test_document_that_fails_to_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failures = MountedConfig.read, [None]

    def fails_once(volume: MountedConfig) -> MountedFiles | None:
        return failures.pop() if failures else read(volume)

    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        monkeypatch.setattr(MountedConfig, "read", fails_once)
        await member.obeys([SECOND])
        assert not failures


async def test_broker_rejection_is_reported_until_the_rejected_request_succeeds(tmp_path: Path) -> None:
    refusals = ["The key is unknown (code 16)"]

    class Moody(MemoryConsumer):
        async def pull(self, queue: Queue, offset: int, **more: Any) -> PullResult:
            if refusals and queue == SECOND:
                raise RejectedError(refusals[0])
            return await super().pull(queue, offset, **more)

    async with a_member(tmp_path) as member:
        member.connect = Moody
        member.show([FIRST, SECOND])
        report = await member.until(lambda it: bool(it.troubles))
        assert report.troubles == {"BrokerRefuses": refusals[0]}
        await member.send("1", queue=0)
        await member.did("1")  # another queue's broker takes what is asked
        assert (await member.report()).troubles == {"BrokerRefuses": refusals.pop()}
        await member.until(lambda it: it.troubles == {})
        refusals.append("Again")
        await member.send("2", queue=1)
        await member.until(lambda it: it.troubles == {"BrokerRefuses": "Again"})
        await member.obeys([FIRST])
        assert (await member.report()).troubles == {}


async def test_member_without_queues_reports_no_problem_of_its_app(tmp_path: Path) -> None:
    async with a_member(tmp_path, delivery={"push": {"port": 1}}) as member:
        await member.obeys([FIRST])
        await member.send("1", queue=0)
        await member.until(lambda it: it.troubles.keys() == {Reason.APP_NOT_LISTENING})
        await member.obeys([])
        report = await member.until(lambda it: it.troubles == {})
        assert report.uncommitted == [], "the app was given nothing, so nothing comes again"


async def test_message_deleted_at_the_broker_is_delivered_if_buffered_and_skipped_otherwise(tmp_path: Path) -> None:
    few = {"buffer": {"messagesPerQueue": 4}, "push": {"concurrency": 1}}
    async with a_member(tmp_path, delivery=few) as member:
        gate = Gate()
        member.app.answer = gate
        await member.send(*texts(0, 4), queue=0)
        await member.obeys([FIRST])
        await soon(lambda: _is(member.sidecar.readers[FIRST].window.unfinished_count == 4))
        await member.send(*texts(4, 10), queue=0)
        member.memory.min_offsets[FIRST] = 8
        gate.opens.set()
        await member.did("0", "1", "2", "3", "8", "9")
        await soon(lambda: _is(member.offset(0) == 10))


async def test_sidecar_that_stalled_rereads_its_document_before_delivering_or_committing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST, SECOND])
        sidecar, before = member.sidecar, member.sidecar.now
        for ask in (sidecar.may_deliver, sidecar.may_commit):
            member.show([SECOND])  # from here on nothing is awaited, so that nobody hears of it
            obeyed = sidecar.obeyed_generation
            assert ask(SECOND)
            assert sidecar.obeyed_generation == obeyed < member.generation
            ahead = sidecar.now() - before() + agent.STALL_SECONDS + 1
            monkeypatch.setattr(sidecar, "now", lambda ahead=ahead: before() + ahead)
            assert ask(SECOND)
            assert sidecar.obeyed_generation == member.generation
            assert not sidecar.may_deliver(FIRST)
            await member.until(lambda it: it.active_queues == {SECOND})


# Broadcasting.


async def test_broadcasting_member_reads_every_queue_and_resumes_at_its_own_offsets(tmp_path: Path) -> None:
    memory, told = MemoryCluster(), {"messageModel": "Broadcasting"}
    async with a_member(tmp_path, memory, **told) as one, a_member(tmp_path, memory, "b", **told) as other:
        for member in (one, other):
            await member.obeys(QUEUES)
        await one.send(*texts(0, 20))
        for member in (one, other):
            await member.did(*texts(0, 20))
        await one.end()
        await one.send(*texts(20, 30))
        await other.did(*texts(0, 30))
        await one.start()
        await one.did(*texts(0, 30))
        assert [len(it.app.heard) for it in (one, other)] == [30, 30]
        assert memory.committed_offsets[GROUP] == {}


async def test_broadcasting_drops_and_counts_a_failed_message(tmp_path: Path) -> None:
    async with a_member(tmp_path, messageModel="Broadcasting") as member:
        member.app.answer = lambda it: _is_status(500 if it.body == "1" else 204)
        await member.obeys([FIRST])
        await member.send("0", "1", "2", queue=0)
        await member.did("0", "2")
        await member.until(lambda it: it.inflight == 0)
        assert 'rota_sidecar_messages_total{outcome="later",topic="orders"} 1.0' in (await member.ask("/metrics"))[1]
        await member.end()
        await member.start()
        await member.until(lambda it: [it.committed for it in it.queues] == [3])
        assert len(member.app.heard) == 3


async def _is_status(status: int) -> int:
    return status


# Where a queue begins.


@pytest.mark.parametrize(
    ("start", "committed", "old"),
    [
        (EARLIEST, None, ["0", "1", "2", "3"]),
        ({"position": "Latest"}, None, []),
        ({"position": "Timestamp", "timestamp": "2025-11-21T08:00:15Z"}, None, ["2", "3"]),
        (EARLIEST, 3, ["3"]),
        ({"position": "Latest"}, 3, ["3"]),
        ({"position": "Latest"}, 0, ["0", "1", "2", "3"]),
        ({"position": "Timestamp", "timestamp": "2025-11-21T08:00:15Z"}, 0, ["0", "1", "2", "3"]),
    ],
)
async def test_start_from_applies_only_to_a_queue_without_a_committed_offset(
    tmp_path: Path, start: dict[str, Any], committed: int | None, old: list[str]
) -> None:
    memory = MemoryCluster(clock=(clock := Clock()))
    async with a_member(tmp_path, memory, startFrom=start) as member:
        for body in texts(0, 4):
            await member.send(body, queue=0)
            await turn(memory, clock, 10.0)
        if committed is not None:
            memory.committed_offsets[GROUP][FIRST] = committed
        await member.obeys([FIRST])
        await soon(lambda: _is(member.offset(0) is not None))
        await member.send("new", queue=0)
        await member.did(*old, "new")
        await member.end()
        assert (member.offset(0), len(member.app.heard)) == (5, len(old) + 1)


async def test_start_from_offset_is_committed_at_once_so_the_next_owner_misses_nothing(
    tmp_path: Path,
) -> None:
    async with a_member(tmp_path, startFrom={"position": "Latest"}) as member:
        await member.send("old", queue=0)
        await member.obeys([FIRST])
        await soon(lambda: _is(member.offset(0) == 1))
        await member.obeys([])
        await member.send("between", queue=0)
        await member.obeys([FIRST])
        await member.did("between")


async def test_start_from_latest_misses_nothing_of_a_queue_added_to_a_consumed_topic(
    tmp_path: Path,
) -> None:
    memory, begun = MemoryCluster(clock=(clock := Clock())), {TOPIC: "2025-11-21T08:00:05Z"}
    async with a_member(tmp_path, memory, startFrom={"position": "Latest"}) as member:
        await member.send("old", queue=0)
        await member.obeys([FIRST], begun=begun)
        await soon(lambda: _is(member.offset(0) == 1))
        await turn(memory, clock, 10.0)
        await memory.create_topic(TOPIC, BROKER, 5)
        await member.send("before anybody has it", queue=4)
        await member.obeys([FIRST, Queue(TOPIC, BROKER, 4)], begun=begun)
        await member.did("before anybody has it")
        await member.obeys([FIRST, SECOND], begun={"others": begun[TOPIC]})  # nobody says since when
        await soon(lambda: _is(member.offset(1) == 0))


async def test_broadcasting_member_misses_nothing_of_a_queue_added_later(tmp_path: Path) -> None:
    async with a_member(tmp_path, startFrom={"position": "Latest"}, messageModel="Broadcasting") as member:
        await member.send("old", queue=0)
        await turn_of_the_millisecond()
        await member.obeys([FIRST])
        await member.until(lambda it: bool(it.queues) and it.queues[0].committed == 1)
        await member.end()
        await member.memory.create_topic(TOPIC, BROKER, 5)
        await member.send("while it was away", queue=4)
        await member.start()
        await member.obeys([FIRST, Queue(TOPIC, BROKER, 4)])
        await member.did("while it was away")


async def turn_of_the_millisecond() -> None:
    """Wait until what is stored from now on bears another time."""
    at = time.time()
    await soon(lambda: _is(time.time() > at + 0.002))


async def test_retry_topic_is_read_from_its_first_offset_whatever_start_from_says(tmp_path: Path) -> None:
    memory = MemoryCluster(clock=(clock := Clock()))
    async with a_member(tmp_path, memory, startFrom={"position": "Latest"}) as member:
        member.app.answer = lambda it: _is_status(500 if it.attempt == 1 else 204)
        await member.obeys([FIRST])
        await soon(lambda: _is(member.offset(0) == 0))
        await member.send("1", queue=0)
        await member.until(lambda it: it.queues[0].pulled == 1 and not it.inflight)
        await turn(memory, clock, 60.0)
        await member.obeys([FIRST, RETRIES])
        await member.did("1")
        assert [it.attempt for it in member.app.heard] == [1, 2]


async def test_report_is_a_new_revision_when_a_broker_says_that_consumers_came_or_went(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        before = await member.report()
        subscriptions = [Subscription(TOPIC)]
        java = MemoryConsumer(
            member.memory, Membership(group=GROUP, client_id="10.0.0.9@java", subscriptions=subscriptions)
        )
        await java.join()
        report: Report = before
        while report.consumers_changed == before.consumers_changed:
            answer = await member.ask(f"/v1/report?after={report.revision}&wait=30s")
            report = msgspec.json.decode(answer[1], type=Report)
        assert report.revision > before.revision
        await java.leave()


async def test_start_from_applies_to_the_retry_topic_of_another_group(tmp_path: Path) -> None:
    memory, others = MemoryCluster(), Queue(f"{RETRY_TOPIC_PREFIX}others", BROKER, 0)
    memory.create_queues(others.topic, BROKER, 1)
    await memory.send(others.topic, b"old", queue=others)
    wanted = [{"topic": TOPIC}, {"topic": others.topic}]
    async with a_member(tmp_path, memory, startFrom={"position": "Latest"}, subscriptions=wanted) as member:
        await member.obeys([others])
        await soon(lambda: _is(memory.committed_offsets[GROUP].get(others) == 1))
        await memory.send(others.topic, b"new", queue=others)
        await member.did("new")


async def test_report_gives_the_operator_the_offsets_of_a_broadcasting_member(tmp_path: Path) -> None:
    async with a_member(tmp_path, messageModel="Broadcasting") as member:
        await member.send(*texts(0, 3), queue=0)
        await member.obeys([FIRST])
        await member.did("0", "1", "2")

        async def told() -> bool:
            return decode_offsets((await member.ask("/v1/report/queues"))[1]) == ({FIRST: 3}, None)

        await soon(told)


async def test_report_page_tells_the_operator_where_reading_began_and_what_the_app_was_given(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.send(*texts(0, 3), queue=0)
        await member.obeys([FIRST])
        await member.did("0", "1", "2")

        async def told() -> bool:
            page = decode_progress((await member.ask("/v1/report/queues"))[1])
            report = decode_report((await member.ask("/v1/report"))[1])
            assert page is not None
            assert page.incarnation == report.incarnation != ""
            return page.queues[FIRST] == QueueProgress(start_offset=0, delivered_offset=2, committed_offset=3)

        await soon(told)


@pytest.mark.parametrize("model", ["Clustering", "Broadcasting"])
async def test_offset_read_error_is_never_taken_for_no_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    asked = 0

    async def silent(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise UnreachableError("It does not answer")

    def unreadable(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise OSError(errno.EIO, "Input/output error")

    async with a_member(tmp_path, startFrom={"position": "Latest"}, messageModel=model) as member:
        if model == "Clustering":
            member.memory.committed_offsets[GROUP][FIRST] = 1
        else:
            OffsetFiles(Path(member.who.state_folder), GROUP).store_offsets({FIRST: 1})
        await member.send(*texts(0, 3), queue=0)
        with monkeypatch.context() as patched:
            patched.setattr(MemoryConsumer, "committed_offset", silent)
            patched.setattr(OffsetFiles, "load", unreadable)
            member.show([FIRST])
            await member.until(lambda it: it.active_queues == {FIRST} and asked > 0)
            assert member.sidecar.member.leases[FIRST].state in {"Starting", "Stuck"}
        await member.did("1", "2")


# Orderly.


async def test_orderly_failed_message_is_retried_in_place_and_then_a_dead_letter(
    tmp_path: Path,
) -> None:
    retry = {"retry": {"maxAttempts": 3}}
    async with a_member(tmp_path, ordering="Orderly", delivery=retry) as member:
        member.app.answer = lambda it: _is_status(500 if it.body == "1" else 204)
        await member.obeys([FIRST])
        assert (GROUP, FIRST) in member.memory.locks
        await member.send(*texts(0, 5), queue=0)
        await member.did("0", "2", "3", "4")
        told = [("0", 1), ("1", 1), ("1", 2), ("1", 3), ("2", 1), ("3", 1), ("4", 1)]
        assert [(it.body, it.attempt) for it in member.app.heard] == told
        assert member.app.most == 1
        assert [it.body for it in await member.memory.messages_of(DEAD)] == [b"1"]
        await member.obeys([])
        assert (member.memory.locks, member.offset(0)) == ({}, 5)


async def test_orderly_queues_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with a_member(tmp_path, ordering="Orderly") as member:
        member.app.answer = gate = Gate()
        await member.obeys(QUEUES)
        for queue in range(4):
            await member.send(f"{queue}a", f"{queue}b", queue=queue)
        await member.until(lambda it: it.inflight == 4)
        assert {it.body for it in member.app.heard} == {"0a", "1a", "2a", "3a"}
        gate.opens.set()
        await member.did(*(f"{queue}{letter}" for queue in range(4) for letter in "ab"))
        for queue in range(4):
            assert [it.body[1] for it in member.app.heard if it.queue == queue] == ["a", "b"]


async def test_orderly_queue_locked_by_another_consumer_waits_and_is_reported(tmp_path: Path) -> None:
    async with a_member(tmp_path, ordering="Orderly") as member:
        member.memory.locks[GROUP, FIRST] = "somebody else", member.memory.clock() + 60
        await member.send("1", queue=0)
        await member.obeys([FIRST])
        report = await member.until(lambda it: "QueueStartFailed" in it.troubles)
        assert "such as orders/memory/0: another consumer has its lock" in report.troubles["QueueStartFailed"]
        assert [it.locked for it in report.queues] == [False]
        del member.memory.locks[GROUP, FIRST]
        await member.did("1")
        await member.until(lambda it: it.troubles == {})


# What brokers ask and tell.


async def test_broker_query_returns_offsets_and_times_of_the_members_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path, ordering="Orderly") as member:
        began = time.time()
        await member.obeys([FIRST, SECOND])
        await member.send("1", "2", queue=0)
        await member.did("1", "2")
        await member.until(lambda it: it.queues[0].buffered == 0)
        working = (await joined(member)).get_queues()
        assert working.keys() == {FIRST, SECOND}
        told = working[FIRST]
        assert (told.min_buffered_offset, told.buffered_messages, told.locked) == (2, 0, True)
        for at in (told.pulled_at, told.delivered_at, told.locked_at):
            assert began - 1 < at < time.time() + 1
        assert working[SECOND].delivered_at == 0


async def test_offset_reset_is_applied_at_once(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.obeys([FIRST])
        await member.send("0", "1", "2", queue=0)
        await member.did("0", "1", "2")
        (await joined(member)).on_offsets_reset({FIRST: 1, FOURTH: 0})
        await member.did("0", "1", "1", "2", "2")
        await soon(lambda: _is(member.offset(0) == 3))


# Flow.


async def test_push_to_a_slow_app_stops_reading_at_the_buffer_limit(tmp_path: Path) -> None:
    settings = {"buffer": {"messagesPerQueue": 40}, "push": {"concurrency": 2}}
    async with a_member(tmp_path, delivery=settings) as member:
        member.app.answer = gate = Gate()
        await member.send(*texts(0, 300), queue=0)
        await member.send(*texts(300, 310), queue=1)
        await member.obeys([FIRST])
        await member.until(lambda it: it.queues[0].buffered >= 40)
        for _ in range(20):
            [found] = (await member.report()).queues
            assert (found.buffered, found.pulled) == (64, 64), "two pulls: the last may go beyond the limit"
        gate.opens.set()
        await member.did(*texts(0, 300))


async def test_topic_buffer_limit_is_divided_among_the_members_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path, delivery={"buffer": {"messagesPerTopic": 100}}) as member:
        await member.obeys([FIRST])
        limits = [member.sidecar.readers[FIRST].limits.max_messages]
        await member.obeys(QUEUES)
        limits.append(member.sidecar.readers[FIRST].limits.max_messages)
        member.settings["delivery"] = {"buffer": {"messagesPerTopic": 20}}
        await member.obeys([FIRST, SECOND])
        limits.append(member.sidecar.readers[FIRST].limits.max_messages)
        assert limits == [100, 25, 10]


async def test_retry_at_an_unreachable_broker_delivers_the_message_again_locally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "SEND_BACK_RETRY_SECONDS", 0.02)

    async def refuse(*_: object, **__: object) -> None:
        raise UnreachableError("It does not answer")

    async with a_member(tmp_path) as member:
        member.app.answer = lambda _: _is_status(500 if len(member.app.heard) < 3 else 204)
        await member.obeys([FIRST])
        with monkeypatch.context() as patched:
            patched.setattr(MemoryConsumer, "send_back", refuse)
            await member.send("1", queue=0)
            await member.did("1")
        assert [it.attempt for it in member.app.heard] == [1, 1, 1]
        assert await member.memory.messages_of(RETRIES) == []
