"""A member's report of its queues, put together from the state of their readers."""

from dataclasses import dataclass, field

import msgspec
import pytest

from builders import a_document
from rota.brokers.message import Message
from rota.brokers.port import PullResult
from rota.documents import encode_assignment
from rota.model import Queue
from rota.queue_offsets import decode_progress
from rota.redelivery import DeliveryTracker, ReaderProcess, RedeliveryRules
from rota.reports import MAX_UNCOMMITTED_ENTRIES, FullReport, Uncommitted
from rota.sidecar.member.member import Member
from rota.sidecar.member.queue_lifecycle import LeaseEvent
from rota.sidecar.member.window import Commit, QueueWindow
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.pull_status import PullStatus
from rota.sidecar.status.self_report import ReleasedQueues, full_report, queues_page

Q, R = Queue("orders", "a", 0), Queue("orders", "a", 1)


@dataclass
class AReader:
    """The state of a queue's reader."""

    window: QueueWindow
    pull_status: PullStatus = field(default_factory=PullStatus)
    carried: Commit | None = None

    @property
    def reported_offset(self) -> int | None:
        return self.window.committed_with(self.carried)


def a_window(queue: Queue, start: int = 5, last_sent: int | None = None) -> QueueWindow:
    """Return a window that started at an offset; the app was sent all messages up to another."""
    window = QueueWindow(next_offset=0)
    window.reset(start, start)
    if last_sent is not None:
        window.add_pull(
            start,
            PullResult(
                tuple(Message(queue, offset, b"", {}) for offset in range(start, last_sent + 1)), last_sent + 1, 0, 99
            ),
        )
        delivery = window.start_delivery(99, 0.0)
        assert delivery
        window.mark_sent(delivery)
    return window


def a_member(generation: int = 1, *queues: Queue) -> Member:
    member = Member("m1", "uid-m1")
    obey(member, generation, *queues)
    return member


def obey(member: Member, generation: int, *queues: Queue) -> None:
    (text,) = encode_assignment(a_document(generation, members={"m1": queues})).values()
    step = member.apply_assignment(text, 0.0)
    assert step.rejection is None
    for command in step.commands:
        member.on_event(LeaseEvent.START_FOUND, command.queue, command.lease_number, 0.0)


def report_of(member: Member, readers: dict[Queue, AReader], released: ReleasedQueues | None = None) -> FullReport:
    return full_report(member.report(), Problems(), member, readers, released or ReleasedQueues())


def test_report_page_has_the_start_offset_and_the_last_one_that_the_app_was_sent() -> None:
    readers = {Q: AReader(a_window(Q, 5, 7)), R: AReader(QueueWindow(next_offset=0, committed_offset=0))}
    first, second = queues_page(0, a_member(1, Q, R), readers, 0.0).queues
    assert (first.start, first.given, first.committed) == (5, 7, 5)
    assert (second.start, second.given, second.committed) == (None, None, None)


def test_report_page_has_the_offset_that_an_unanswered_pull_carries_but_a_queue_that_drains_is_uncommitted() -> None:
    member = a_member(1, Q)
    window = a_window(Q, 5, 7)
    [delivery] = window.open_deliveries
    for message in delivery.messages:
        window.finish_message(delivery, message)
    readers = {Q: AReader(window, carried=window.next_commit()), R: AReader(QueueWindow(next_offset=0))}
    page = queues_page(0, member, readers, 0.0)
    assert [queue.committed for queue in page.queues] == [8, None]
    progress = decode_progress(msgspec.json.encode(page))
    assert progress
    tracker = DeliveryTracker()
    rules = RedeliveryRules(forced_queues=(), has_ended=lambda _: False)
    tracker.record_page(ReaderProcess("m1", "uid-m1", "1"), progress.queues, rules, 0.0, max_queues=9)
    assert tracker.uncommitted_messages == 0
    obey(member, 2)
    assert report_of(member, readers).uncommitted == [Uncommitted(*Q, 7, 5)]


def test_report_names_uncommitted_offsets_only_of_queues_that_are_given_up() -> None:
    member = a_member(1, Q, R)
    readers = {Q: AReader(a_window(Q, 5, 7)), R: AReader(a_window(R, 0, 3))}
    assert report_of(member, readers).uncommitted == []
    obey(member, 2, R)
    assert report_of(member, readers).uncommitted == [Uncommitted(*Q, 7, 5)]
    readers[Q].window.committed_offset = 8
    assert report_of(member, readers).uncommitted == []


def test_report_names_uncommitted_offsets_of_released_queues_until_they_are_read_again() -> None:
    member = a_member()
    released = ReleasedQueues()
    released.add(Q, a_window(Q, 5, 7))
    released.add(R, a_window(R))
    assert report_of(member, {}, released).uncommitted == [Uncommitted(*Q, 7, 5)]
    obey(member, 2, Q)
    readers = {Q: AReader(a_window(Q, 5))}
    assert report_of(member, readers, released).uncommitted == []
    released.add(Q, readers[Q].window)
    assert report_of(member, {}, released).uncommitted == []


@pytest.mark.parametrize("count", [MAX_UNCOMMITTED_ENTRIES - 1, MAX_UNCOMMITTED_ENTRIES, MAX_UNCOMMITTED_ENTRIES + 5])
def test_report_names_the_queues_that_were_released_last_if_there_are_too_many(count: int) -> None:
    released = ReleasedQueues()
    for number in range(count):
        released.add(Q._replace(id=number), a_window(Q, 5, 7))
    named = [entry.id for entry in report_of(a_member(), {}, released).uncommitted]
    assert named == [*range(count)][::-1][:MAX_UNCOMMITTED_ENTRIES]
