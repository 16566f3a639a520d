"""What a member says of itself, from what its parts know."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Protocol

from msgspec import Struct

from rota.model import Queue
from rota.ranges import to_ranges
from rota.reports import MOST_UNCOMMITTED, FullReport, QueueState, Report, Uncommitted, Worked
from rota.sidecar.member.member import Member
from rota.sidecar.member.queue_lifecycle import State
from rota.sidecar.member.window import Window
from rota.sidecar.status.problems import Health

QUEUES_IN_A_PAGE = 400  # less than 256 KiB, however long the names of topics and brokers are

_BY_TABLE: dict[State, QueueState] = {
    State.WANTED: "starting",
    State.LOCKING: "starting",
    State.STARTING: "starting",
    State.STUCK: "stuck",
    State.DRAINING: "draining",
}


class Reading(Protocol):
    """The reader of a queue, as reports need it."""

    window: Window
    pulled_at: float
    obstacle: QueueState


class QueuesPage(Struct, frozen=True):
    """How far the member is with some of its queues; `next` is where the next page begins, if there is one."""

    queues: list[Worked]
    next: int | None = None
    incarnation: str = ""  # of the sidecar's process


class ReleasedQueues:
    """The queues that were released lately and whose last messages at the app are not committed."""

    def __init__(self) -> None:
        self._entries: dict[Queue, Uncommitted] = {}  # the latest last

    def add(self, queue: Queue, window: Window) -> None:
        """Note that a queue is released; the oldest entry goes if there are too many."""
        self._entries.pop(queue, None)
        if entry := _uncommitted(queue, window):
            self._entries[queue] = entry
        if len(self._entries) > MOST_UNCOMMITTED:
            del self._entries[next(iter(self._entries))]

    def without(self, queues: Mapping[Queue, object]) -> Iterable[Uncommitted]:
        """Return the entries of all queues but these, the latest first."""
        return [entry for queue, entry in reversed(self._entries.items()) if queue not in queues]


def full_report(
    told: Report, health: Health, member: Member, readings: Mapping[Queue, Reading], released: ReleasedQueues
) -> FullReport:
    """Return the report without its revision; `told` is what may be told of the member."""
    fields = {name: getattr(told, name) for name in Report.__struct_fields__}
    states = Counter(_state(queue, reading, member) for queue, reading in readings.items())
    del states[""]
    entries = [*_given_up(member, readings), *released.without(readings)]
    fields |= {"troubles": health.troubles, "states": dict(states), "uncommitted": entries[:MOST_UNCOMMITTED]}
    inflight = sum(reading.window.in_flight for reading in readings.values())
    return FullReport(**fields, inflight=inflight, stuck=to_ranges(member.stuck))


def _state(queue: Queue, reading: Reading, member: Member) -> QueueState:
    life = member.lives.get(queue)
    return _BY_TABLE.get(life.state, reading.obstacle) if life else ""


def _given_up(member: Member, readings: Mapping[Queue, Reading]) -> list[Uncommitted]:
    """Return what is not committed of queues that are being released, or have just been."""
    entries: list[Uncommitted] = []
    for queue, reading in readings.items():
        life = member.lives.get(queue)
        if (life is None or life.state is State.DRAINING) and (entry := _uncommitted(queue, reading.window)):
            entries.append(entry)
    return entries


def _uncommitted(queue: Queue, window: Window) -> Uncommitted | None:
    if window.given is None or not window.would_repeat:
        return None
    return Uncommitted(*queue, window.given, window.start)


def queues_page(start: int, member: Member, readings: Mapping[Queue, Reading], now: float) -> QueuesPage:
    """Return how far it is with its queues, from that one on in the order in which it got them."""
    stop = start + QUEUES_IN_A_PAGE
    page = islice(readings.items(), start, stop)
    return QueuesPage([_worked(*it, member, now) for it in page], stop if stop < len(readings) else None)


def _worked(queue: Queue, reading: Reading, member: Member, now: float) -> Worked:
    window, life = reading.window, member.lives.get(queue)
    committed, locked = window.committed if window.placed else None, bool(life and life.locked is not None)
    age = round(now - reading.pulled_at, 3) if reading.pulled_at else None
    return Worked(
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
