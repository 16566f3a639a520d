"""A whole agent at a cluster in memory: its documents, settings, disk and start offsets, and its deliveries."""

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
from rota import aio
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
from rota.sidecar.member.member import RESUME_SECONDS
from rota.sidecar.storage.mounted_config import MountedConfig, MountedFiles
from rota.sidecar.storage.offset_files import OffsetFiles
from rota.sidecar.storage.state_store import StateStore
from rota.spec import Subscription
from rota.spec.resolved import encode_settings
from sidecar.in_memory import DEAD, GROUP, RETRIES, TOPIC, Clock, Latch, MemoryMember, a_member, advance_clock

FIRST, SECOND, THIRD, FOURTH = QUEUES = [Queue(TOPIC, BROKER, number) for number in range(4)]
EARLIEST = {"position": "Earliest"}


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MONITOR_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.1)
    monkeypatch.setattr(effects, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(config_follower, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(broker_session, "JOIN_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(push, "IN_PLACE_RETRY_SECONDS", 0.02)


def texts(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last)]


async def joined(member: MemoryMember) -> Membership:
    """Return the membership of the only consumer in the group."""
    await soon(lambda: as_awaitable(len(member.memory.groups.members[GROUP]) == 1))
    return member.memory.groups.members[GROUP][0]


async def as_awaitable(value: bool) -> bool:  # noqa: FBT001 - the only argument
    return value


# Documents.


async def test_assignment_delivers_only_messages_of_assigned_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST, SECOND])
        for queue in range(4):
            await member.send(f"{queue}", queue=queue)
        await member.wait_until_done("0", "1")
        await member.assign(QUEUES)
        await member.wait_until_done("0", "1", "2", "3")
        assert Counter(event.body for event in member.app.events) == Counter("0123")


async def test_document_that_is_invalid_old_or_missing_changes_nothing(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
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
            member.mount(settings, text)
            member.sidecar._read_config()
            await member.send(str(number), queue=0)
            await member.wait_until_done(*texts(0, number + 1))
            report = await member.report()
            assert (report.generation, report.active_queues, report.troubles) == (1, frozenset({FIRST}), {})
        member.mount(None, None)
        member.sidecar._read_config()
        assert (await member.report()).active_queues == {FIRST}
        member.mount(settings, good)
        await member.wait_until(lambda report: report.generation == 9 and report.active_queues == {SECOND})


async def test_assignment_that_is_sent_is_obeyed_before_the_volume_shows_it(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        digest = member.sidecar.status.settings_digest
        member.generation = 2
        document = member.assignment([SECOND])
        assert not member.sidecar.receive_assignment(document.encode(), "the digest of other settings")
        assert not member.sidecar.receive_assignment(document[:-30].encode(), digest)
        assert (await member.report()).active_queues == {FIRST}
        assert member.sidecar.receive_assignment(document.encode(), digest)
        await member.send("1", queue=1)
        await member.wait_until_done("1")
        member.sidecar._read_config()
        assert not member.sidecar.receive_assignment(member.assignment([FIRST], generation=1).encode(), digest)
        report = await member.report()
        assert report.generation == 2
        assert report.active_queues == {SECOND}, "the volume still shows generation 1"


async def test_assignment_that_is_sent_is_not_obeyed_by_a_member_that_has_not_joined_its_group(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.generation = 1
        assert not member.sidecar.receive_assignment(member.assignment([FIRST]).encode(), "")
        assert (await member.report()).generation == 0


async def test_assignment_that_is_sent_is_not_obeyed_while_its_generation_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        member.generation = 2
        document = member.assignment([SECOND]).encode()
        with monkeypatch.context() as patched:
            patched.setattr(StateStore, "check_space", full)
            assert not member.sidecar.receive_assignment(document, member.sidecar.status.settings_digest)
            assert (await member.report()).active_queues == {FIRST}
        assert member.sidecar.receive_assignment(document, member.sidecar.status.settings_digest)
        await member.wait_until(lambda report: report.active_queues == {SECOND})


async def test_assignment_that_waited_for_a_stalled_sidecar_is_not_obeyed_before_the_mounted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        sidecar = member.sidecar
        member.generation = 2
        sent = member.assignment(QUEUES).encode()
        member.publish([SECOND])  # without an await from here on, no task of the sidecar can notice it
        real_now = sidecar.host.now
        monkeypatch.setattr(sidecar.host, "now", lambda: real_now() + aio.STALL_SECONDS + 1)
        assert not sidecar.receive_assignment(sent, sidecar.status.settings_digest)
        assert (sidecar.member.obeyed_generation, member.generation) == (3, 3)
        await member.wait_until(lambda report: report.active_queues == {SECOND})


async def test_document_with_another_uid_or_pod_name_assigns_no_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        await member.assign([], members={"a": Share("uid-of-before", (FIRST,))})
        await member.assign([FIRST])
        await member.assign([], members={"b": Share("uid-a", (FIRST,))})


async def test_member_without_an_assignment_reports_no_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        report = await member.report()
        assert (report.generation, report.state, report.active_queues) == (0, "serving", frozenset())
        settings = encode_settings(GROUP, a_spec(**member.spec()), 30.0, None)
        member.mount(settings, None)
        await soon(member.ready)
        assert (await member.report()).generation == 0


async def test_restart_resumes_where_the_previous_process_stopped(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign(QUEUES)
        await member.send(*texts(0, 40))
        await member.wait_until_done(*texts(0, 40))
        await member.end()
        assert member.memory.groups.members[GROUP] == []
        await member.send(*texts(40, 50))
        await member.start()
        await member.wait_until_done(*texts(0, 50))
        assert len(member.app.events) == 50
        assert (await member.report()).generation == 1


# Settings.


async def test_settings_of_push_change_at_runtime_without_rejoining(tmp_path: Path) -> None:
    async with a_member(tmp_path, delivery={"push": {"concurrency": 1}}) as member:
        second_app = await member.app.serve()
        await member.assign([FIRST])
        membership = await joined(member)
        await member.send("1", queue=0)
        await member.wait_until_done("1")
        old_port, new_port = member.port, int(second_app.addresses[0][1])
        member.settings["delivery"] = {"push": {"concurrency": 8, "path": "/orders", "port": new_port}}
        await member.assign([FIRST])
        member.app.answer = latch = Latch()
        await member.send(*texts(2, 9), queue=0)
        await member.wait_until(lambda report: report.inflight > 5)
        latch.opened.set()
        await member.wait_until_done(*texts(1, 9))
        assert [(event.path, event.port) for event in member.app.events] == [("/", old_port)] + [
            ("/orders", new_port)
        ] * 7
        assert member.app.max_in_flight == 6, "the last two are reserved for other queues"
        assert await joined(member) is membership, "this change needs no rejoin"
        await second_app.cleanup()


async def test_settings_with_other_subscriptions_rejoin_without_lost_or_repeated_messages(
    tmp_path: Path,
) -> None:
    async with a_member(tmp_path) as member:
        await member.memory.create_topic("bills", BROKER, 2)
        bills = list(await member.memory.queues("bills"))
        await member.assign(QUEUES)
        sent = 0
        for topics in (["orders", "bills"], ["orders"], ["bills", "orders"]):
            previous = await joined(member)
            member.settings["subscriptions"] = [{"topic": topic} for topic in topics]
            member.publish([*QUEUES, *(bills if "bills" in topics else [])])
            while previous in member.memory.groups.members[GROUP]:
                await member.send(str(sent))
                sent += 1
                await asyncio.sleep(0)
            assert set((await joined(member)).subscriptions_by_topic) == {*topics, RETRIES.topic}
            await member.wait_until(lambda report: report.state == "serving" and report.generation == member.generation)
        await member.memory.send("bills", b"bill")
        await member.wait_until_done(*texts(0, sent), "bill")
        assert len(member.app.events) == sent + 1


async def test_member_terminated_while_it_rejoins_leaves_the_group(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.app.answer = latch = Latch()
        await member.assign([FIRST])
        await member.send("1", queue=0)
        await member.wait_until(lambda report: report.inflight == 1)
        member.settings["subscriptions"] = [{"topic": TOPIC, "expression": "a"}]
        member.publish([FIRST])
        await member.wait_until(lambda report: report.state == "draining")
        ending = asyncio.create_task(member.end())
        await asyncio.sleep(0)
        latch.opened.set()
        await ending
        assert (member.memory.groups.members[GROUP], member.offset(0)) == ([], 1)


async def test_settings_that_need_a_rejoin_and_are_reverted_apply_before_an_assignment_sent_with_them(
    tmp_path: Path,
) -> None:
    """Meanwhile the member joins with the settings that its volume shows: their filter would skip messages."""
    async with a_member(tmp_path) as member:
        member.app.answer = latch = Latch()
        await member.assign([FIRST])
        digest = member.sidecar.status.settings_digest
        await member.send("1", queue=0)
        await member.wait_until(lambda report: report.inflight == 1)
        member.settings["subscriptions"] = [{"topic": TOPIC, "expression": "a"}]
        member.publish([FIRST])
        await member.wait_until(lambda report: report.state == "draining")
        sent = member.assignment([FIRST, SECOND], generation=3).encode()
        assert not member.sidecar.receive_assignment(sent, digest)
        latch.opened.set()
        report = await member.wait_until(lambda report: report.state == "serving" and bool(report.active_queues))
        assert report.generation == 2
        assert report.active_queues == {FIRST}
        del member.settings["subscriptions"]
        await member.assign([FIRST, SECOND])
        assert member.sidecar.status.settings_digest == digest


async def test_orderly_can_be_switched_on_and_off_at_runtime(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        for ordering, locked in (("Concurrent", False), ("Orderly", True), ("Concurrent", False)):
            member.settings["ordering"] = ordering
            member.publish([FIRST])
            locks = [locked]
            await member.wait_until(lambda report: report.generation == member.generation and report.state == "serving")
            await member.wait_until(lambda report: [queue.locked for queue in report.queues] == locks)  # noqa: B023 - awaited in this advance_clock
            assert bool(member.memory.groups.locks) == locked
            assert (await joined(member)).orderly == locked


async def test_settings_that_cannot_be_read_are_reported_and_the_previous_ones_stay(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.mount("{", member.assignment([FIRST], generation=1))
        report = await member.wait_until(lambda report: "UnsupportedSettings" in report.troubles)
        assert (report.generation, report.active_queues) == (0, frozenset())
        await member.assign([FIRST])
        member.generation += 1
        member.mount('{"schema": 9}', member.assignment([FIRST, SECOND]))
        report = await member.wait_until(lambda report: "UnsupportedSettings" in report.troubles)
        assert report.troubles["UnsupportedSettings"] == (
            "The settings in group.json cannot be read: its schema is 9; this version reads schema 1"
        )
        await member.wait_until(lambda report: report.active_queues == {FIRST, SECOND})
        await member.send("1", queue=1)
        await member.wait_until_done("1")
        assert (await member.assign([FIRST])).troubles == {}


async def test_credentials_that_cannot_be_read_are_reported_and_read_again(tmp_path: Path) -> None:
    mounted = False

    def connect(memory: MemoryCluster, membership: Membership) -> Consumer:
        if not mounted:
            raise ValueError("The credentials cannot be read; correct the Secret")
        return MemoryConsumer(memory, membership)

    async with a_member(tmp_path) as member:
        member.connect = connect
        await member.send("1", queue=0)
        member.publish([FIRST])
        report = await member.wait_until(lambda report: bool(report.troubles))
        assert report.troubles == {"MissingSecret": "The credentials cannot be read; correct the Secret"}
        assert (report.generation, report.active_queues) == (0, frozenset())
        mounted = True
        await member.wait_until_done("1")
        mounted = False
        member.settings["subscriptions"] = [{"topic": TOPIC}, {"topic": "bills"}]
        member.publish([FIRST, SECOND])
        report = await member.wait_until(lambda report: "MissingSecret" in report.troubles)
        assert (report.state, report.active_queues) == ("drained", frozenset())
        mounted = True
        report = await member.wait_until(lambda report: report.active_queues == {FIRST, SECOND})
        await member.send("2", queue=1)
        await member.wait_until_done("1", "2")
        assert (await member.report()).troubles == {}


# Disk and clock.


def full(_: StateStore, **__: object) -> None:
    """Fail as a write to a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_disk_full_keeps_a_new_generation_from_being_applied_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.send("1", queue=0)
        with monkeypatch.context() as patched:
            patched.setattr(StateStore, "store_state", full)
            member.publish([FIRST])
            report = await member.wait_until(lambda report: "StateWriteFailed" in report.troubles)
            assert (report.generation, report.active_queues, report.queues) == (0, frozenset(), [])
            assert "generation 1 is not applied yet: [Errno 28] No space left" in report.troubles["StateWriteFailed"]
        await member.wait_until(lambda report: report.generation == 1 and report.active_queues == {FIRST})
        await member.wait_until_done("1")
        with monkeypatch.context() as patched:
            patched.setattr(StateStore, "store_state", full)
            for _ in range(2):
                member.publish([SECOND])
            report = await member.wait_until(lambda report: "StateWriteFailed" in report.troubles)
            await member.send("2", queue=1)
            draining = asyncio.create_task(member.request("/v1/drain", "POST", json.dumps({"uid": "uid-a"})))
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


async def test_disk_full_keeps_a_sent_assignment_from_being_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        digest = member.sidecar.status.settings_digest
        with monkeypatch.context() as patched:
            patched.setattr(StateStore, "store_state", full)
            sent = member.assignment([SECOND], generation=2).encode()
            for _ in range(2):
                assert not member.sidecar.receive_assignment(sent, digest)
            report = await member.report()
            assert report.generation == 1
            assert report.active_queues == {FIRST}
        await member.wait_until(lambda report: report.generation == 2 and report.active_queues == {SECOND})
        assert member.sidecar.receive_assignment(sent, digest)


async def test_restart_after_a_sent_assignment_consumes_nothing_until_the_volume_shows_it(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST, SECOND])
        sent = member.assignment([SECOND, THIRD], generation=2).encode()
        assert member.sidecar.receive_assignment(sent, member.sidecar.status.settings_digest)
        await member.wait_until(lambda report: report.generation == 2 and report.active_queues == {SECOND, THIRD})
        await member.end()
        await member.start()
        report = await member.wait_until(lambda report: report.incarnation == "2")
        assert (report.generation, report.active_queues) == (2, frozenset())
        _, text = await member.request("/v1/report")
        assert not decode_report(text.encode()).settings, "so the operator pokes the pod again"
        await member.assign([SECOND, THIRD])


async def test_drain_final_that_cannot_be_stored_does_not_prevent_termination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        monkeypatch.setattr(StateStore, "store_state", full)
        final = asyncio.create_task(member.request("/v1/drain", "POST", json.dumps({"uid": "uid-a"})))
        report = await member.wait_until(lambda report: "StateWriteFailed" in report.troubles)
        assert "so the final drain is postponed: [Errno 28] No space left" in report.troubles["StateWriteFailed"]
        app = asyncio.create_task(member.request("/v1/drained"))
        await asyncio.wait_for(member.end(), PATIENCE_SECONDS)
        assert [await final, await app] == [(200, "drained permanently\n"), (200, "drained\n")]


async def test_document_that_fails_to_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MountedConfig.read
    failures = [None]

    def fails_once(volume: MountedConfig) -> MountedFiles | None:
        return failures.pop() if failures else read(volume)

    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        monkeypatch.setattr(MountedConfig, "read", fails_once)
        await member.assign([SECOND])
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
        member.publish([FIRST, SECOND])
        report = await member.wait_until(lambda report: bool(report.troubles))
        assert report.troubles == {"BrokerRefuses": refusals[0]}
        await member.send("1", queue=0)
        await member.wait_until_done("1")  # the broker accepts requests for the other queue
        assert (await member.report()).troubles == {"BrokerRefuses": refusals.pop()}
        await member.wait_until(lambda report: report.troubles == {})
        refusals.append("Again")
        await member.send("2", queue=1)
        await member.wait_until(lambda report: report.troubles == {"BrokerRefuses": "Again"})
        await member.assign([FIRST])
        assert (await member.report()).troubles == {}


async def test_member_without_queues_reports_no_problem_of_its_app(tmp_path: Path) -> None:
    async with a_member(tmp_path, delivery={"push": {"port": 1}}) as member:
        await member.assign([FIRST])
        await member.send("1", queue=0)
        await member.wait_until(lambda report: report.troubles.keys() == {Reason.APP_NOT_LISTENING})
        await member.assign([])
        report = await member.wait_until(lambda report: report.troubles == {})
        assert report.uncommitted == [], "nothing was delivered, so nothing is repeated"


async def test_message_deleted_at_the_broker_is_delivered_if_buffered_and_skipped_otherwise(tmp_path: Path) -> None:
    few = {"buffer": {"messagesPerQueue": 4}, "push": {"concurrency": 1}}
    async with a_member(tmp_path, delivery=few) as member:
        latch = Latch()
        member.app.answer = latch
        await member.send(*texts(0, 4), queue=0)
        await member.assign([FIRST])
        await soon(lambda: as_awaitable(member.sidecar.readers[FIRST].window.unfinished_count == 4))
        await member.send(*texts(4, 10), queue=0)
        member.memory.store.min_offsets[FIRST] = 8
        latch.opened.set()
        await member.wait_until_done("0", "1", "2", "3", "8", "9")
        await soon(lambda: as_awaitable(member.offset(0) == 10))


async def test_sidecar_that_stalled_rereads_its_document_before_delivering_or_committing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST, SECOND])
        sidecar = member.sidecar
        real_now = member.sidecar.host.now
        for is_permitted in (sidecar.host.may_deliver, sidecar.host.may_commit):
            member.publish([SECOND])  # without an await from here on, no task of the sidecar can notice it
            obeyed = sidecar.member.obeyed_generation
            assert is_permitted(SECOND)
            assert sidecar.member.obeyed_generation == obeyed < member.generation
            ahead = sidecar.host.now() - real_now() + aio.STALL_SECONDS + 1
            monkeypatch.setattr(sidecar.host, "now", lambda ahead=ahead: real_now() + ahead)
            assert is_permitted(SECOND)
            assert sidecar.member.obeyed_generation == member.generation
            assert not sidecar.host.may_deliver(FIRST)
            await member.wait_until(lambda report: report.active_queues == {SECOND})


async def test_sidecar_that_stalled_delivers_nothing_while_its_documents_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile, the queue may have been granted to another member by force."""
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        sidecar = member.sidecar
        real_now = sidecar.host.now
        with monkeypatch.context() as patched:
            patched.setattr(MountedConfig, "read", lambda _: None)
            monkeypatch.setattr(sidecar.host, "now", lambda: real_now() + aio.STALL_SECONDS + 1)
            assert not sidecar.host.may_deliver(FIRST)
            assert not sidecar.host.may_commit(FIRST)
        await member.send("1", queue=0)
        await member.wait_until_done("1")


async def test_sidecar_that_stalled_with_its_node_does_not_obey_an_assignment_sent_before_the_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet, which stalled too, has not mounted the document that then gave the queue to another member."""
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        sidecar = member.sidecar
        digest = sidecar.status.settings_digest
        sent = member.assignment([FIRST, SECOND], generation=2).encode()
        real_now = sidecar.host.now
        monkeypatch.setattr(sidecar.host, "now", lambda: real_now() + aio.STALL_SECONDS + 1)
        assert not sidecar.receive_assignment(sent, digest)
        assert sidecar.member.leases.keys() == {FIRST}
        later = aio.STALL_SECONDS + 1 + agent.SENT_BEFORE_STALL_SECONDS
        monkeypatch.setattr(sidecar.host, "now", lambda: real_now() + later)
        assert sidecar.receive_assignment(sent, digest)
        assert sidecar.member.leases.keys() == {FIRST, SECOND}


async def test_sidecar_that_stalled_with_its_node_does_not_resume_its_predecessors_queues_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet, which stalled too, may not have mounted the document that gives the queues to another member."""
    async with a_member(tmp_path) as member:
        await member.end()
        await member.start()  # the second process of the pod
        share = Share(member.identity.uid, (FIRST,), incarnation=1)
        member.publish([FIRST], members={member.identity.name: share}, incarnations_since=1)
        await member.wait_until(lambda report: report.generation == 1 and report.incarnation == "2")
        sidecar = member.sidecar
        real_now = sidecar.host.now
        monkeypatch.setattr(sidecar.host, "now", lambda: real_now() + RESUME_SECONDS + 1)
        sidecar._on_timer()  # without an await since the stall, no task of the sidecar has noticed it
        assert sidecar.member.leases == {}
        monkeypatch.setattr(sidecar.host, "now", lambda: real_now() + 2 * RESUME_SECONDS + 2)
        sidecar.host.stall_detector.observe(sidecar.host.now())  # no stall, but no request for the report either
        sidecar._on_timer()
        assert sidecar.member.leases.keys() == {FIRST}


# Broadcasting.


async def test_broadcasting_member_reads_every_queue_and_resumes_at_its_own_offsets(tmp_path: Path) -> None:
    memory = MemoryCluster()
    settings = {"messageModel": "Broadcasting"}
    async with a_member(tmp_path, memory, **settings) as first, a_member(tmp_path, memory, "b", **settings) as second:
        for member in (first, second):
            await member.assign(QUEUES)
        await first.send(*texts(0, 20))
        for member in (first, second):
            await member.wait_until_done(*texts(0, 20))
        await first.end()
        await first.send(*texts(20, 30))
        await second.wait_until_done(*texts(0, 30))
        await first.start()
        await first.wait_until_done(*texts(0, 30))
        assert [len(member.app.events) for member in (first, second)] == [30, 30]
        assert memory.groups.committed_offsets[GROUP] == {}


async def test_broadcasting_drops_and_counts_a_failed_message(tmp_path: Path) -> None:
    async with a_member(tmp_path, messageModel="Broadcasting") as member:
        member.app.answer = lambda event: _is_status(500 if event.body == "1" else 204)
        await member.assign([FIRST])
        await member.send("0", "1", "2", queue=0)
        await member.wait_until_done("0", "2")
        await member.wait_until(lambda report: report.inflight == 0)
        assert (
            'rota_sidecar_messages_total{outcome="later",topic="orders"} 1.0' in (await member.request("/metrics"))[1]
        )
        await member.end()
        await member.start()
        await member.wait_until(lambda queue: [queue.committed for queue in queue.queues] == [3])
        assert len(member.app.events) == 3


async def _is_status(status: int) -> int:
    return status


# Start offsets.


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
    clock = Clock()
    memory = MemoryCluster(clock=clock)
    async with a_member(tmp_path, memory, startFrom=start) as member:
        for body in texts(0, 4):
            await member.send(body, queue=0)
            await advance_clock(memory, clock, 10.0)
        if committed is not None:
            memory.groups.committed_offsets[GROUP][FIRST] = committed
        await member.assign([FIRST])
        await soon(lambda: as_awaitable(member.offset(0) is not None))
        await member.send("new", queue=0)
        await member.wait_until_done(*old, "new")
        await member.end()
        assert (member.offset(0), len(member.app.events)) == (5, len(old) + 1)


async def test_start_from_offset_is_committed_at_once_so_the_next_owner_misses_no_message(
    tmp_path: Path,
) -> None:
    async with a_member(tmp_path, startFrom={"position": "Latest"}) as member:
        await member.send("old", queue=0)
        await member.assign([FIRST])
        await soon(lambda: as_awaitable(member.offset(0) == 1))
        await member.assign([])
        await member.send("between", queue=0)
        await member.assign([FIRST])
        await member.wait_until_done("between")


async def test_start_from_latest_misses_no_message_of_a_queue_added_to_a_consumed_topic(
    tmp_path: Path,
) -> None:
    clock = Clock()
    memory = MemoryCluster(clock=clock)
    begun = {TOPIC: "2025-11-21T08:00:05Z"}
    async with a_member(tmp_path, memory, startFrom={"position": "Latest"}) as member:
        await member.send("old", queue=0)
        await member.assign([FIRST], begun=begun)
        await soon(lambda: as_awaitable(member.offset(0) == 1))
        await advance_clock(memory, clock, 10.0)
        await memory.create_topic(TOPIC, BROKER, 5)
        await member.send("before it has an owner", queue=4)
        await member.assign([FIRST, Queue(TOPIC, BROKER, 4)], begun=begun)
        await member.wait_until_done("before it has an owner")
        await member.assign([FIRST, SECOND], begun={"others": begun[TOPIC]})  # no start time for this topic
        await soon(lambda: as_awaitable(member.offset(1) == 0))


async def test_broadcasting_member_misses_no_message_of_a_queue_added_later(tmp_path: Path) -> None:
    async with a_member(tmp_path, startFrom={"position": "Latest"}, messageModel="Broadcasting") as member:
        await member.send("old", queue=0)
        await wait_for_next_millisecond()
        await member.assign([FIRST])
        await member.wait_until(lambda report: bool(report.queues) and report.queues[0].committed == 1)
        await member.end()
        await member.memory.create_topic(TOPIC, BROKER, 5)
        await member.send("while it was away", queue=4)
        await member.start()
        await member.assign([FIRST, Queue(TOPIC, BROKER, 4)])
        await member.wait_until_done("while it was away")


async def wait_for_next_millisecond() -> None:
    """Wait until newly stored messages get another timestamp."""
    started_at = time.time()
    await soon(lambda: as_awaitable(time.time() > started_at + 0.002))


async def test_retry_topic_is_read_from_its_first_offset_regardless_of_start_from(tmp_path: Path) -> None:
    clock = Clock()
    memory = MemoryCluster(clock=clock)
    async with a_member(tmp_path, memory, startFrom={"position": "Latest"}) as member:
        member.app.answer = lambda event: _is_status(500 if event.attempt == 1 else 204)
        await member.assign([FIRST])
        await soon(lambda: as_awaitable(member.offset(0) == 0))
        await member.send("1", queue=0)
        await member.wait_until(lambda report: report.queues[0].pulled == 1 and not report.inflight)
        await advance_clock(memory, clock, 60.0)
        await member.assign([FIRST, RETRIES])
        await member.wait_until_done("1")
        assert [event.attempt for event in member.app.events] == [1, 2]


async def test_report_gets_a_new_revision_when_a_broker_notifies_of_changed_consumers(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        previous = await member.report()
        subscriptions = [Subscription(TOPIC)]
        java = MemoryConsumer(
            member.memory, Membership(group=GROUP, client_id="10.0.0.9@java", subscriptions=subscriptions)
        )
        await java.join()
        report: Report = previous
        while report.consumers_changed == previous.consumers_changed:
            _, text = await member.request(f"/v1/report?after={report.revision}&wait=30s")
            report = msgspec.json.decode(text, type=Report)
        assert report.revision > previous.revision
        await java.leave()


async def test_start_from_applies_to_the_retry_topic_of_another_group(tmp_path: Path) -> None:
    memory = MemoryCluster()
    other_retries = Queue(f"{RETRY_TOPIC_PREFIX}others", BROKER, 0)
    memory.store.create_queues(other_retries.topic, BROKER, 1)
    await memory.send(other_retries.topic, b"old", queue=other_retries)
    subscriptions = [{"topic": TOPIC}, {"topic": other_retries.topic}]
    async with a_member(tmp_path, memory, startFrom={"position": "Latest"}, subscriptions=subscriptions) as member:
        await member.assign([other_retries])
        await soon(lambda: as_awaitable(memory.groups.committed_offsets[GROUP].get(other_retries) == 1))
        await memory.send(other_retries.topic, b"new", queue=other_retries)
        await member.wait_until_done("new")


async def test_report_gives_the_operator_the_offsets_of_a_broadcasting_member(tmp_path: Path) -> None:
    async with a_member(tmp_path, messageModel="Broadcasting") as member:
        await member.send(*texts(0, 3), queue=0)
        await member.assign([FIRST])
        await member.wait_until_done("0", "1", "2")

        async def offsets_are_reported() -> bool:
            return decode_offsets((await member.request("/v1/report/queues"))[1]) == ({FIRST: 3}, None)

        await soon(offsets_are_reported)


async def test_report_page_gives_the_operator_the_start_delivered_and_committed_offsets(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.send(*texts(0, 3), queue=0)
        await member.assign([FIRST])
        await member.wait_until_done("0", "1", "2")

        async def progress_is_reported() -> bool:
            page = decode_progress((await member.request("/v1/report/queues"))[1])
            report = decode_report((await member.request("/v1/report"))[1])
            assert page is not None
            assert page.incarnation == report.incarnation != ""
            return page.queues[FIRST] == QueueProgress(start_offset=0, delivered_offset=2, committed_offset=3)

        await soon(progress_is_reported)


@pytest.mark.parametrize("model", ["Clustering", "Broadcasting"])
async def test_offset_read_error_is_never_taken_for_no_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    requests = 0

    async def silent(*_: object) -> None:
        nonlocal requests
        requests += 1
        raise UnreachableError("It does not answer")

    def unreadable(*_: object) -> None:
        nonlocal requests
        requests += 1
        raise OSError(errno.EIO, "Input/output error")

    async with a_member(tmp_path, startFrom={"position": "Latest"}, messageModel=model) as member:
        if model == "Clustering":
            member.memory.groups.committed_offsets[GROUP][FIRST] = 1
        else:
            OffsetFiles(Path(member.identity.state_folder), GROUP).store_offset(FIRST, 1)
        await member.send(*texts(0, 3), queue=0)
        with monkeypatch.context() as patched:
            patched.setattr(MemoryConsumer, "committed_offset", silent)
            patched.setattr(OffsetFiles, "load", unreadable)
            member.publish([FIRST])
            await member.wait_until(lambda report: report.active_queues == {FIRST} and requests > 0)
            assert member.sidecar.member.leases[FIRST].state in {"Starting", "Stuck"}
        await member.wait_until_done("1", "2")


# Orderly.


async def test_orderly_failed_message_is_retried_in_place_and_then_a_dead_letter(
    tmp_path: Path,
) -> None:
    retry = {"retry": {"maxAttempts": 3}}
    async with a_member(tmp_path, ordering="Orderly", delivery=retry) as member:
        member.app.answer = lambda event: _is_status(500 if event.body == "1" else 204)
        await member.assign([FIRST])
        assert (GROUP, FIRST) in member.memory.groups.locks
        await member.send(*texts(0, 5), queue=0)
        await member.wait_until_done("0", "2", "3", "4")
        expected = [("0", 1), ("1", 1), ("1", 2), ("1", 3), ("2", 1), ("3", 1), ("4", 1)]
        assert [(event.body, event.attempt) for event in member.app.events] == expected
        assert member.app.max_in_flight == 1
        assert [message.body for message in await member.memory.messages_of(DEAD)] == [b"1"]
        await member.assign([])
        assert (member.memory.groups.locks, member.offset(0)) == ({}, 5)


async def test_orderly_queues_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with a_member(tmp_path, ordering="Orderly") as member:
        member.app.answer = latch = Latch()
        await member.assign(QUEUES)
        for queue in range(4):
            await member.send(f"{queue}a", f"{queue}b", queue=queue)
        await member.wait_until(lambda report: report.inflight == 4)
        assert {event.body for event in member.app.events} == {"0a", "1a", "2a", "3a"}
        latch.opened.set()
        await member.wait_until_done(*(f"{queue}{letter}" for queue in range(4) for letter in "ab"))
        for queue in range(4):
            assert [event.body[1] for event in member.app.events if event.queue == queue] == ["a", "b"]


async def test_orderly_queue_locked_by_another_consumer_waits_and_is_reported(tmp_path: Path) -> None:
    async with a_member(tmp_path, ordering="Orderly") as member:
        member.memory.groups.locks[GROUP, FIRST] = "another-client", member.memory.clock() + 60
        await member.send("1", queue=0)
        await member.assign([FIRST])
        report = await member.wait_until(lambda report: "QueueStartFailed" in report.troubles)
        assert "such as orders/memory/0: another consumer has its lock" in report.troubles["QueueStartFailed"]
        assert [queue.locked for queue in report.queues] == [False]
        del member.memory.groups.locks[GROUP, FIRST]
        await member.wait_until_done("1")
        await member.wait_until(lambda report: report.troubles == {})


# Requests from brokers.


async def test_broker_query_returns_offsets_and_times_of_the_members_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path, ordering="Orderly") as member:
        began = time.time()
        await member.assign([FIRST, SECOND])
        await member.send("1", "2", queue=0)
        await member.wait_until_done("1", "2")
        await member.wait_until(lambda report: report.queues[0].buffered == 0)
        working = (await joined(member)).get_queues()
        assert working.keys() == {FIRST, SECOND}
        status = working[FIRST]
        assert (status.min_buffered_offset, status.buffered_messages, status.locked) == (2, 0, True)
        for at in (status.pulled_at, status.delivered_at, status.locked_at):
            assert began - 1 < at < time.time() + 1
        assert working[SECOND].delivered_at == 0


async def test_offset_reset_is_applied_at_once(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        await member.send("0", "1", "2", queue=0)
        await member.wait_until_done("0", "1", "2")
        (await joined(member)).on_offsets_reset({FIRST: 1, FOURTH: 0})
        await member.wait_until_done("0", "1", "1", "2", "2")
        await soon(lambda: as_awaitable(member.offset(0) == 3))


# Flow control.


async def test_push_to_a_slow_app_stops_reading_at_the_buffer_limit(tmp_path: Path) -> None:
    settings = {"buffer": {"messagesPerQueue": 40}, "push": {"concurrency": 2}}
    async with a_member(tmp_path, delivery=settings) as member:
        member.app.answer = latch = Latch()
        await member.send(*texts(0, 300), queue=0)
        await member.send(*texts(300, 310), queue=1)
        await member.assign([FIRST])
        await member.wait_until(lambda report: report.queues[0].buffered >= 40)
        for _ in range(20):
            [queue] = (await member.report()).queues
            assert (queue.buffered, queue.pulled) == (64, 64), "two pulls: the last may exceed the limit"
        latch.opened.set()
        await member.wait_until_done(*texts(0, 300))


async def test_topic_buffer_limit_is_divided_among_the_members_queues(tmp_path: Path) -> None:
    async with a_member(tmp_path, delivery={"buffer": {"messagesPerTopic": 100}}) as member:
        await member.assign([FIRST])
        limits = [member.sidecar.readers[FIRST].limits.max_messages]
        await member.assign(QUEUES)
        limits.append(member.sidecar.readers[FIRST].limits.max_messages)
        member.settings["delivery"] = {"buffer": {"messagesPerTopic": 20}}
        await member.assign([FIRST, SECOND])
        limits.append(member.sidecar.readers[FIRST].limits.max_messages)
        assert limits == [100, 25, 10]


async def test_retry_at_an_unreachable_broker_delivers_the_message_again_locally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "SEND_BACK_RETRY_SECONDS", 0.02)

    async def refuse(*_: object, **__: object) -> None:
        raise UnreachableError("It does not answer")

    async with a_member(tmp_path) as member:
        member.app.answer = lambda _: _is_status(500 if len(member.app.events) < 3 else 204)
        await member.assign([FIRST])
        with monkeypatch.context() as patched:
            patched.setattr(MemoryConsumer, "send_back", refuse)
            await member.send("1", queue=0)
            await member.wait_until_done("1")
        assert [event.attempt for event in member.app.events] == [1, 1, 1]
        assert await member.memory.messages_of(RETRIES) == []
