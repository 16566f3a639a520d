"""Unexpected errors, injected into one queue's requests or into a task: nothing else stops, and it is reported."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ground.poll import soon
from rota import aio
from rota.brokers.errors import ConsumptionDisabledError, NotFoundError
from rota.brokers.memory import BROKER, MemoryConsumer
from rota.brokers.port import PullResult
from rota.model import Queue
from rota.sidecar import agent, member_host
from rota.sidecar.consume import lease_requests, queue_reader, start_offset
from rota.sidecar.member import queue_lifecycle
from rota.sidecar.member.queue_lifecycle import LeaseState
from rota.sidecar.status import pull_status
from sidecar.in_memory import TOPIC, Latch, MemoryMember, a_member

FIRST, SECOND = (Queue(TOPIC, BROKER, number) for number in range(2))


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MONITOR_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.1)
    monkeypatch.setattr(aio, "MIN_RESTART_PAUSE_SECONDS", 0.05)


class Faulty(MemoryConsumer):
    """A consumer with requests for the first queue that raise the errors of its class, until these are cleared."""

    pull_error: Exception | None = None
    commit_error: Exception | None = None
    lock_error: Exception | None = None

    async def pull(self, queue: Queue, offset: int, **more: Any) -> PullResult:
        if queue == FIRST and self.pull_error:
            raise self.pull_error
        if queue == FIRST and more.get("commit_offset") is not None and self.commit_error:
            more["commit_offset"] = None
        return await super().pull(queue, offset, **more)

    async def commit(self, queue: Queue, offset: int) -> None:
        if queue == FIRST and self.commit_error:
            raise self.commit_error
        await super().commit(queue, offset)

    async def lock(self, queues: Any) -> Any:
        if FIRST in queues and self.lock_error:
            raise self.lock_error
        return await super().lock(queues)


def faulty(**errors: Exception) -> type[Faulty]:
    return type("Injected", (Faulty,), errors)


async def stored(member: MemoryMember, queue: int, offset: int) -> None:
    async def is_stored() -> bool:
        return member.offset(queue) == offset

    await soon(is_stored)


async def counted(member: MemoryMember, name: str) -> float:
    lines = (await member.request("/metrics"))[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"rota_sidecar_{name}"))


async def test_unexpected_error_in_a_pull_is_reported_and_the_reader_restarts_where_it_was(tmp_path: Path) -> None:
    consumer = faulty(pull_error=KeyError("queueOffset"))
    async with a_member(tmp_path) as member:
        member.connect = consumer
        await member.send("1", queue=0)
        await member.send("2", queue=1)
        await member.assign([FIRST, SECOND])
        await member.wait_until_done("2")
        report = await member.wait_until(lambda report: "QueueStartFailed" in report.troubles)
        assert "orders/memory/0: its reader failed" in report.troubles["QueueStartFailed"]
        assert report.held == {TOPIC: {BROKER: "0-1"}}
        number = member.sidecar.member.leases[FIRST].number
        consumer.pull_error = None
        await member.wait_until_done("1", "2")
        await member.wait_until(lambda report: report.troubles == {})
        assert member.sidecar.member.leases[FIRST].number == number


async def test_unexpected_error_in_a_pull_keeps_the_messages_at_the_app(tmp_path: Path) -> None:
    latch = Latch()
    consumer = faulty()
    async with a_member(tmp_path) as member:
        member.connect = consumer
        member.app.answer = latch
        await member.send("1", queue=0)
        await member.assign([FIRST])
        await member.wait_until(lambda report: report.inflight == 1)
        consumer.pull_error = RuntimeError("injected")
        member.sidecar.readers[FIRST]._restart_pull()
        await member.wait_until(lambda report: "QueueStartFailed" in report.troubles)
        consumer.pull_error = None
        latch.opened.set()
        await member.send("2", queue=0)
        await member.wait_until_done("1", "2")
        assert [event.attempt for event in member.app.events] == [1, 1]
        await stored(member, 0, 2)


@pytest.mark.parametrize(
    "error", [RuntimeError("injected"), OSError("injected")], ids=lambda error: type(error).__name__
)
async def test_unexpected_error_in_a_commit_stops_no_other_queue(tmp_path: Path, error: Exception) -> None:
    consumer = faulty()
    async with a_member(tmp_path) as member:
        member.connect = consumer
        await member.assign([FIRST, SECOND])
        await stored(member, 0, 0)
        consumer.commit_error = error
        await member.send("1", queue=0)
        await member.send("2", queue=1)
        await member.wait_until_done("1", "2")
        await stored(member, 1, 1)
        assert await counted(member, 'commits_total{outcome="failed"}') > 0
        assert (await member.report()).state == "serving"
        consumer.commit_error = None
        await stored(member, 0, 1)


async def test_offset_commit_that_is_never_answered_delays_no_other_queue(tmp_path: Path) -> None:
    requested, answers = asyncio.Event(), asyncio.Event()

    class Silent(MemoryConsumer):
        async def commit(self, queue: Queue, offset: int) -> None:
            if queue == FIRST and offset:
                requested.set()
                await answers.wait()
            await super().commit(queue, offset)

        async def pull(self, queue: Queue, offset: int, **more: Any) -> PullResult:
            return await super().pull(queue, offset, **more | {"commit_offset": None})

    async with a_member(tmp_path) as member:
        member.connect = Silent
        await member.assign([FIRST, SECOND])
        await member.send("0", queue=0)
        await requested.wait()
        for number in (1, 2, 3):
            await member.send(str(number), queue=1)
            await stored(member, 1, number)
        answers.set()


@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
async def test_queue_release_ends_though_its_last_commit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, hangs: bool
) -> None:
    consumer = faulty()

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    async with a_member(tmp_path) as member:
        member.connect = consumer
        member.drain_timeout = 0.3
        await member.assign([FIRST])
        await stored(member, 0, 0)
        if hangs:
            monkeypatch.setattr(start_offset, "COMMIT_SECONDS", 0.2)
            monkeypatch.setattr(consumer, "commit", hang)
        consumer.commit_error = RuntimeError("injected")
        await member.send("1", queue=0)
        await member.wait_until_done("1")
        member.publish([])
        await member.wait_until(lambda report: not report.active_queues)
        assert await counted(member, "uncommitted_total") == 1


async def test_queue_release_ends_though_a_delivery_does_not_end_when_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_requests, "ABORT_TIMEOUT_SECONDS", 0.1)
    latch = Latch()
    async with a_member(tmp_path) as member:
        member.app.answer = latch
        member.drain_timeout = 0.1
        await member.send("1", queue=0)
        await member.assign([FIRST])
        await member.wait_until(lambda report: report.inflight == 1)
        monkeypatch.setattr(member.sidecar.host, "abort_deliveries", lambda _: None)
        member.publish([])
        await member.wait_until(lambda report: not report.active_queues)
        latch.opened.set()


async def test_queue_release_waits_for_all_deliveries_that_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch()
    async with a_member(tmp_path) as member:
        member.app.answer = latch
        member.drain_timeout = 0.1
        await member.send("1", "2", queue=0)
        await member.assign([FIRST])
        await member.wait_until(lambda report: report.inflight == 2)
        reading = member.sidecar.readers[FIRST]
        monkeypatch.setattr(member.sidecar.host, "abort_deliveries", lambda _: None)
        member.publish([])
        await member.wait_until(lambda _: reading._requests.is_drain_overdue)
        reading.on_change()  # as the end of the first delivery does
        await asyncio.sleep(0)
        latch.opened.set()
        await member.wait_until(lambda report: not report.active_queues)
        assert reading.window.is_idle
        assert member.offset(0) == 2


async def test_unexpected_error_in_a_lock_request_is_reported_and_the_request_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = faulty(lock_error=RuntimeError("injected"))
    monkeypatch.setattr(queue_lifecycle, "MAX_BACKOFF_SECONDS", 1.0)
    async with a_member(tmp_path, ordering="Orderly") as member:
        member.connect = consumer
        await member.send("1", queue=0)
        member.publish([FIRST])
        await member.wait_until(lambda report: "QueueStartFailed" in report.troubles)
        consumer.lock_error = None
        await member.wait_until_done("1")


async def test_unexpected_error_in_a_start_offset_is_reported_and_the_search_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> int:
        raise KeyError("injected")

    async with a_member(tmp_path) as member:
        monkeypatch.setattr(lease_requests, "find_start_offset", broken)
        await member.send("1", queue=0)
        member.publish([FIRST])
        await member.wait_until(lambda report: "QueueStartFailed" in report.troubles)
        monkeypatch.setattr(lease_requests, "find_start_offset", start_offset.find_start_offset)
        await member.wait_until_done("1")


@pytest.mark.parametrize(
    ("owner", "method", "name"),
    [(member_host.MemberHost, "look_for_stall", "beat"), (queue_reader.QueueReader, "start_commit", "commits")],
    ids=["beat", "commits"],
)
async def test_supervision_reports_and_restarts_a_failed_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, name: str
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(aio, "RECOVERED_AFTER_SECONDS", 0.2)
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        with monkeypatch.context() as injected:
            injected.setattr(owner, method, broken)
            report = await member.wait_until(lambda report: "InternalError" in report.troubles)
            assert f"The task {name} failed" in report.troubles["InternalError"]
        await member.wait_until(lambda report: report.troubles == {})
        await member.send("1", queue=0)
        await member.wait_until_done("1")
        await stored(member, 0, 1)


async def test_idle_pull_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = list[int]()

    class Lost(MemoryConsumer):
        async def pull(self, queue: Queue, offset: int, **more: Any) -> PullResult:
            pulls.append(offset)
            if len(pulls) == 1:
                await asyncio.Event().wait()
            return await super().pull(queue, offset, **more)

    monkeypatch.setattr(pull_status, "HANGING_PULL_SECONDS", 0.5)
    async with a_member(tmp_path) as member:
        member.connect = Lost
        await member.send("1", queue=0)
        await member.assign([FIRST])
        assert member.sidecar.member.leases[FIRST].state is LeaseState.RUNNING
        await member.wait_until_done("1")
        assert await counted(member, 'pulls_total{outcome="idle"}') == 1


async def test_report_counts_the_queues_that_are_not_read_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch()
    consumer = faulty()
    async with a_member(tmp_path, delivery={"buffer": {"messagesPerQueue": 1}}) as member:
        member.connect = consumer
        member.app.answer = latch
        await member.assign([FIRST, SECOND])
        await member.wait_until(
            lambda report: not report.states and all(queue.pull_age is not None for queue in report.queues)
        )
        revision = (await member.report()).revision
        await member.send("1", queue=1)
        consumer.pull_error = NotFoundError("no such queue")
        member.sidecar.readers[FIRST]._restart_pull()
        report = await member.wait_until(lambda report: report.states == {"failing": 1, "full": 1})
        assert [queue.state for queue in report.queues] == ["failing", "full"]
        assert report.revision == revision
        consumer.pull_error = ConsumptionDisabledError("consumption is disabled")
        monkeypatch.setattr(pull_status, "UNREAD_SECONDS", 0.0)
        await member.wait_until(
            lambda report: report.states == {"paused": 1, "full": 1} and "QueuesNotRead" not in report.troubles
        )
        member.publish([FIRST])
        await member.wait_until(lambda report: report.states == {"paused": 1, "draining": 1})
        consumer.pull_error = None
        latch.opened.set()
        await member.wait_until(lambda report: not report.states)


async def test_report_names_a_queue_of_which_no_pull_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = faulty(pull_error=ValueError("no such queue"))
    monkeypatch.setattr(pull_status, "UNREAD_SECONDS", 0.2)
    async with a_member(tmp_path) as member:
        member.connect = consumer
        await member.assign([FIRST])
        report = await member.wait_until(lambda report: "QueuesNotRead" in report.troubles)
        assert "such as orders/memory/0" in report.troubles["QueuesNotRead"]
        monkeypatch.setattr(pull_status, "UNREAD_SECONDS", 60.0)
        consumer.pull_error = None
        await member.wait_until(lambda report: report.troubles == {})


async def test_idle_pull_is_not_restarted_for_time_in_which_the_sidecar_was_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        reading = member.sidecar.readers[FIRST]
        await member.send("1", queue=0)
        await member.wait_until_done("1")
        monkeypatch.setattr(pull_status, "HANGING_PULL_SECONDS", 0.0)
        reading.restart_idle_pull(member.sidecar.host.now() + 1)
        assert await counted(member, 'pulls_total{outcome="idle"}') == 0
        reading.restart_idle_pull(0.0)
        assert await counted(member, 'pulls_total{outcome="idle"}') == 1
