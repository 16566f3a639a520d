"""Builds a member's full report from the state of its components."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Protocol

from msgspec import Struct

from rota.model import Queue
from rota.ranges import to_ranges
from rota.reports import MOST_UNCOMMITTED, FullReport, QueueState, QueueStatus, Report, Uncommitted
from rota.sidecar.member.member import Member
from rota.sidecar.member.queue_lifecycle import LeaseState
from rota.sidecar.member.window import Window
from rota.sidecar.status.problems import Problems

QUEUES_IN_A_PAGE = 400  # less than 256 KiB, for names of any length

_BY_TABLE: dict[LeaseState, QueueState] = {
    LeaseState.WANTED: "starting",
    LeaseState.LOCKING: "starting",
    LeaseState.STARTING: "starting",
    LeaseState.STUCK: "stuck",
    LeaseState.DRAINING: "draining",
}


class ReportedReader(Protocol):
    """The properties of a queue's reader that reports need."""

    window: Window
    pulled_at: float
    obstacle: QueueState


class QueuesPage(Struct, frozen=True):
    """Progress of some of the member's queues; `next` is the index of the next page, if any."""

    queues: list[QueueStatus]
    next: int | None = None
    incarnation: str = ""  # of the sidecar's process


class ReleasedQueues:
    """Recently released queues with delivered messages that are not committed."""

    def __init__(self) -> None:
        self._entries: dict[Queue, Uncommitted] = {}  # the latest last

    def add(self, queue: Queue, window: Window) -> None:
        """Add a released queue; the oldest entry is removed if there are too many."""
        self._entries.pop(queue, None)
        if entry := _uncommitted(queue, window):
            self._entries[queue] = entry
        if len(self._entries) > MOST_UNCOMMITTED:
            del self._entries[next(iter(self._entries))]

    def without(self, queues: Mapping[Queue, object]) -> Iterable[Uncommitted]:
        """Return the entries of all queues except these, the latest first."""
        return [entry for queue, entry in reversed(self._entries.items()) if queue not in queues]


def full_report(
    member_report: Report,
    health: Problems,
    member: Member,
    readings: Mapping[Queue, ReportedReader],
    released: ReleasedQueues,
) -> FullReport:
    """Return the report without its revision; `member_report` covers only state that is on the disk."""
    fields = {name: getattr(member_report, name) for name in Report.__struct_fields__}
    states = Counter(_state(queue, reading, member) for queue, reading in readings.items())
    del states[""]
    entries = [*_given_up(member, readings), *released.without(readings)]
    fields |= {"troubles": health.troubles, "states": dict(states), "uncommitted": entries[:MOST_UNCOMMITTED]}
    inflight = sum(reading.window.in_flight for reading in readings.values())
    return FullReport(**fields, inflight=inflight, stuck=to_ranges(member.stuck))


def _state(queue: Queue, reading: ReportedReader, member: Member) -> QueueState:
    life = member.lives.get(queue)
    return _BY_TABLE.get(life.state, reading.obstacle) if life else ""


def _given_up(member: Member, readings: Mapping[Queue, ReportedReader]) -> list[Uncommitted]:
    """Return uncommitted offsets of queues that are being released, or have just been released."""
    entries: list[Uncommitted] = []
    for queue, reading in readings.items():
        life = member.lives.get(queue)
        if (life is None or life.state is LeaseState.DRAINING) and (entry := _uncommitted(queue, reading.window)):
            entries.append(entry)
    return entries


def _uncommitted(queue: Queue, window: Window) -> Uncommitted | None:
    if window.given is None or not window.would_repeat:
        return None
    return Uncommitted(*queue, window.given, window.start)


def queues_page(start: int, member: Member, readings: Mapping[Queue, ReportedReader], now: float) -> QueuesPage:
    """Return the progress of the member's queues, from index `start` on, in the order of their assignment."""
    stop = start + QUEUES_IN_A_PAGE
    page = islice(readings.items(), start, stop)
    return QueuesPage([_queue_status(*item, member, now) for item in page], stop if stop < len(readings) else None)


def _queue_status(queue: Queue, reading: ReportedReader, member: Member, now: float) -> QueueStatus:
    window, life = reading.window, member.lives.get(queue)
    committed, locked = window.committed if window.placed else None, bool(life and life.locked is not None)
    age = round(now - reading.pulled_at, 3) if reading.pulled_at else None
    return QueueStatus(
        *queue,
        committed,
        window.next,
        window.buffered,
        locked,
        state=_state(queue, reading, member),
        pull_age=age,
        start=window.start,
        given=window.given,
    )
