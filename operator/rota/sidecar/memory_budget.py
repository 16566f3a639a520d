"""The member's memory budget: one limit for the messages of all its queues, applied before a pull keeps a message.

Three rules decide whether a message is kept:

- It fits into the member's budget, beside what the windows of all queues hold, what other pulls have admitted, and what
  queues that wait were promised. A member that holds nothing takes one message of any size.
- It fits into the queue's own limit. A queue that holds nothing takes one message that does not.
- A queue whose message was refused waits in a line. Memory that becomes free is reserved for the first in the line, so
  a large message is not overtaken for ever by small ones.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Protocol, Self

from rota.brokers import MEBIBYTE, MESSAGE_OVERHEAD_BYTES
from rota.model import Queue
from rota.sidecar.window import Limits, Window
from rota.spec import Buffer

SMALLEST_SHARE_BYTES = 64 * 1024  # of one queue, however many a member has


class QueueMemory(Protocol):
    """A queue as the budget sees it."""

    window: Window
    limits: Limits


class Reservation:
    """A queue's place in the line, and the memory that is reserved for it once it is granted."""

    def __init__(self, memory_bytes: int, on_granted: Callable[[], None]) -> None:
        self.memory_bytes = memory_bytes
        self.granted = False
        self.on_granted = on_granted


class MemoryBudget:
    """Limits the memory of the messages that all queues of a member have fetched and not finished."""

    def __init__(self, limit_bytes: float, windows: Callable[[], Iterable[Window]]) -> None:
        self.limit_bytes = limit_bytes
        self._windows = windows
        self._pending_bytes = 0  # admitted by pulls whose messages are in no window yet, or granted to the line
        self._line: dict[Reservation, None] = {}

    @property
    def used_bytes(self) -> int:
        """The memory of all windows, open pulls and granted reservations."""
        return self._pending_bytes + sum(window.memory_bytes for window in self._windows())

    @property
    def free_bytes(self) -> float:
        """The memory that is neither used nor promised to the line."""
        return self.limit_bytes - self.used_bytes - sum(it.memory_bytes for it in self._line)

    def divide(self, buffer: Buffer, queues: Mapping[Queue, QueueMemory]) -> None:
        """Set each queue's limits: a topic's are divided among its queues, the budget among all queues."""
        topics = Counter(queue.topic for queue in queues)
        share_bytes = self.share_bytes(len(queues), buffer.mebibytes_per_message * MEBIBYTE)
        for queue, memory in queues.items():
            memory.limits = Limits.of(buffer, topics[queue.topic], share_bytes)

    def share_bytes(self, queues: int, largest_body_bytes: int) -> float:
        """Return each queue's part of the budget, less what one largest message takes: that is for any queue."""
        kept_bytes = min(largest_body_bytes + MESSAGE_OVERHEAD_BYTES, self.limit_bytes / 2)
        return max(SMALLEST_SHARE_BYTES, (self.limit_bytes - kept_bytes) / max(1, queues))

    def reserve(self, memory_bytes: int, on_granted: Callable[[], None]) -> Reservation:
        """Put a queue at the end of the line; `on_granted` is called if its memory is not free at once."""
        reservation = Reservation(memory_bytes, on_granted)
        self._line[reservation] = None
        self.grant()
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        """Leave the line, or give the granted memory back."""
        self._line.pop(reservation, None)
        if reservation.granted:
            reservation.granted = False
            self.release(reservation.memory_bytes)
        else:
            self.grant()

    def add_pending(self, memory_bytes: int) -> None:
        """Count memory that was admitted and is in no window yet."""
        self._pending_bytes += memory_bytes

    def release(self, memory_bytes: int) -> None:
        """Count that memory no more: a window has the messages, or they were dropped."""
        self._pending_bytes -= memory_bytes
        self.grant()

    def grant(self) -> None:
        """Grant reservations, first come first served, as far as memory is free; call this whenever some became so."""
        if not self._line:
            return
        used = self.used_bytes
        for reservation in [*self._line]:
            if used and used + reservation.memory_bytes > self.limit_bytes:
                return
            used += reservation.memory_bytes
            self._pending_bytes += reservation.memory_bytes
            reservation.granted = True
            del self._line[reservation]
            reservation.on_granted()


class PullAdmission:
    """Decides which messages one pull keeps; open from before the pull until the queue's window has its messages.

    Whatever it admits after that, for a pull that was given up, is not counted: those messages are dropped.
    """

    def __init__(self, budget: MemoryBudget, queue: QueueMemory, reservation: Reservation | None = None) -> None:
        self.refused_bytes = 0  # the memory of the first message that was not admitted
        self._budget = budget
        self._queue = queue
        self._reservation = reservation
        self._admitted_bytes = 0
        self._free_bytes: float | None = None  # of the budget, when the pull's first message came
        self._open = True

    @property
    def largest_body_bytes(self) -> int:
        """The size up to which a packed body is unpacked, as the settings in force say."""
        return self._queue.limits.body

    def admit(self, memory_bytes: int) -> bool:
        """Whether a message that takes so much memory is kept; counted until the admission is closed."""
        if not self._open:
            return True
        if not (self._fits_queue(memory_bytes) and self._fits_member(memory_bytes)):
            self.refused_bytes = memory_bytes
            return False
        self._admitted_bytes += memory_bytes
        self._budget.add_pending(memory_bytes)
        return True

    def _fits_queue(self, memory_bytes: int) -> bool:
        window = self._queue.window
        if not (self._admitted_bytes or window.buffered):
            return True
        return window.memory_bytes + self._admitted_bytes + memory_bytes <= self._queue.limits.bytes

    def _fits_member(self, memory_bytes: int) -> bool:
        if self._free_bytes is None:
            reserved_bytes = self._take_reserved()
            self._free_bytes = max(0, self._budget.free_bytes) + reserved_bytes
            if not self._budget.used_bytes:
                self._free_bytes = max(self._free_bytes, memory_bytes)
        if memory_bytes > self._free_bytes:
            return False
        self._free_bytes -= memory_bytes
        return True

    def _take_reserved(self) -> int:
        """Return the memory that was reserved for this pull, which is pending no more."""
        reservation = self._reservation
        if reservation is None or not reservation.granted:
            return 0
        reservation.granted = False
        self._budget.add_pending(-reservation.memory_bytes)
        return reservation.memory_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close: the window has the messages, or they are dropped."""
        self._open = False
        if self._reservation:
            self._budget.cancel(self._reservation)
        self._budget.release(self._admitted_bytes)
