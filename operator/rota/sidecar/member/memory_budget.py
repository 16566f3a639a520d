"""Memory budget of a member: one limit for the messages of all its queues, applied before a pull keeps a message.

Each queue has a share of the budget, and a common part of the size of one largest message is reserved.

- A queue counts with its share, or with the memory that it holds if that is more; all queues together count no more
  than the budget. So a message within its queue's share never waits for messages of other queues.
- A queue that holds nothing takes one message beyond its share, if the common part has room for that. If not, the queue
  waits in a line, which is served first come, first served. So large messages that an app never finishes delay other
  large messages, and nothing else.
- A message that is too large for the common part waits until enough of the budget is free; messages behind it wait too,
  so that it is not overtaken forever. A member that holds nothing takes one message of any size.
- While shares have just become smaller, because the member has more queues, queues may hold more than the budget leaves
  to the other queues. Messages within shares then wait in the same line.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import TracebackType
from typing import Protocol, Self

from rota.brokers.message import MAX_PROPERTIES_BYTES, MEBIBYTE, MESSAGE_OVERHEAD_BYTES
from rota.model import Queue
from rota.sidecar.member.window import QueueLimits, QueueWindow
from rota.spec import Buffer


class QueueMemory(Protocol):
    """A queue as the budget sees it."""

    window: QueueWindow
    limits: QueueLimits


class MemoryReservation:
    """A queue's place in the line, and the memory that is reserved for it once it is granted."""

    def __init__(self, queue: QueueMemory, memory_bytes: int, on_granted: Callable[[], None]) -> None:
        self.queue = queue
        self.memory_bytes = memory_bytes
        self.granted = False
        self.on_granted = on_granted


class MemoryBudget:
    """Limits the memory of the messages that all queues of a member have fetched and not finished."""

    def __init__(self, limit_bytes: float, queues: Callable[[], Iterable[QueueMemory]]) -> None:
        self.limit_bytes = limit_bytes
        self._queues = queues
        self._share_bytes = inf  # of each queue, once the budget is divided
        # Admitted by pulls whose messages are in no window yet, or granted to the line.
        self._pending: Counter[QueueMemory] = Counter()
        self._waiting: dict[MemoryReservation, None] = {}

    @property
    def used_bytes(self) -> int:
        """The memory of all windows, open pulls and granted reservations."""
        return self._pending.total() + sum(queue.window.memory_bytes for queue in self._queues())

    @property
    def free_bytes(self) -> float:
        """The memory for messages within shares that is neither used nor promised to the line."""
        return self.limit_bytes - self.used_bytes - self._promised_bytes()

    def set_limits(self, buffer: Buffer, queues: Mapping[Queue, QueueMemory]) -> None:
        """Set each queue's limits: a topic's are divided among its queues, the budget among all queues."""
        topics = Counter(queue.topic for queue in queues)
        self._share_bytes = self.share_bytes(len(queues), buffer.mebibytes_per_message * MEBIBYTE)
        for queue, memory in queues.items():
            memory.limits = QueueLimits.for_queue(buffer, topics[queue.topic], self._share_bytes)

    def share_bytes(self, queues: int, max_body_bytes: int) -> float:
        """Return each queue's part of the budget, without the common part for one largest message of any queue."""
        largest_bytes = max_body_bytes + MAX_PROPERTIES_BYTES + MESSAGE_OVERHEAD_BYTES
        common_bytes = min(largest_bytes, self.limit_bytes / 2)
        return (self.limit_bytes - common_bytes) / max(1, queues)

    def is_within_share(self, queue: QueueMemory, memory_bytes: int) -> bool:
        """Whether a queue holds no more than its share with a message of that memory."""
        return self._held_bytes(queue) + memory_bytes <= self._guaranteed_bytes(queue)

    def may_exceed_share(self, queue: QueueMemory, memory_bytes: int) -> bool:
        """Whether a queue may take a message beyond its share now, without a place in the line."""
        if not self.used_bytes:
            return True
        if any(not self.is_within_share(waiting.queue, waiting.memory_bytes) for waiting in self._waiting):
            return False
        if self._is_too_large(queue, memory_bytes):
            return memory_bytes <= self.free_bytes
        return self._fits_common_part(queue, memory_bytes)

    def _held_bytes(self, queue: QueueMemory) -> int:
        return queue.window.memory_bytes + self._pending[queue]

    def _guaranteed_bytes(self, queue: QueueMemory) -> float:
        return min(queue.limits.max_bytes, self._share_bytes)

    def _fits_common_part(self, queue: QueueMemory, memory_bytes: int) -> bool:
        """Whether the budget covers a message beyond its queue's share, and all shares of the other queues."""
        peers = {*self._queues(), *self._pending} - {queue}
        claimed_bytes = sum(max(self._held_bytes(peer), self._guaranteed_bytes(peer)) for peer in peers)
        return claimed_bytes + self._held_bytes(queue) + memory_bytes <= self.limit_bytes

    def _is_too_large(self, queue: QueueMemory, memory_bytes: int) -> bool:
        """Whether the common part has no room for a message, even if no other queue exceeds its share."""
        peers = {*self._queues()} - {queue}
        return sum(map(self._guaranteed_bytes, peers)) + memory_bytes > self.limit_bytes

    def _promised_bytes(self) -> int:
        """Return the memory for which messages within shares must wait: see `grant_waiting`."""
        promised_bytes = 0
        has_common_part_taker = False
        for waiting in self._waiting:
            is_within_share = self.is_within_share(waiting.queue, waiting.memory_bytes)
            if is_within_share:
                promised_bytes += waiting.memory_bytes
            elif not has_common_part_taker:
                has_common_part_taker = True
                if self._is_too_large(waiting.queue, waiting.memory_bytes):
                    promised_bytes += waiting.memory_bytes
        return promised_bytes

    def reserve(self, queue: QueueMemory, memory_bytes: int, on_granted: Callable[[], None]) -> MemoryReservation:
        """Put a queue at the end of the line; `on_granted` is called if its memory is not free at once."""
        reservation = MemoryReservation(queue, memory_bytes, on_granted)
        self._waiting[reservation] = None
        self.grant_waiting()
        return reservation

    def cancel(self, reservation: MemoryReservation) -> None:
        """Leave the line, or give the granted memory back."""
        self._waiting.pop(reservation, None)
        if reservation.granted:
            reservation.granted = False
            self.remove_pending(reservation.queue, reservation.memory_bytes)
        else:
            self.grant_waiting()

    def add_pending(self, queue: QueueMemory, memory_bytes: int) -> None:
        """Count memory that was admitted and is in no window yet."""
        self._pending[queue] += memory_bytes
        if not self._pending[queue]:
            del self._pending[queue]

    def remove_pending(self, queue: QueueMemory, memory_bytes: int) -> None:
        """Stop counting memory as pending: a window has the messages, or they were dropped."""
        self.add_pending(queue, -memory_bytes)
        self.grant_waiting()

    def grant_waiting(self) -> None:
        """Grant reservations as far as memory is free; call this whenever memory becomes free.

        Among messages beyond their queue's share, the first in the line gets the common part, and the others wait for
        it. Messages within shares do not wait for it, unless that first message is too large for the common part.
        """
        if not self._waiting:
            return
        used = self.used_bytes
        is_common_part_awaited = False
        for waiting in [*self._waiting]:
            queue = waiting.queue
            memory_bytes = waiting.memory_bytes
            is_within_share = self.is_within_share(queue, memory_bytes)
            if is_common_part_awaited and not is_within_share:
                continue
            takes_any_part = is_within_share or self._is_too_large(queue, memory_bytes)
            if takes_any_part:
                fits = used + memory_bytes <= self.limit_bytes
            else:
                fits = self._fits_common_part(queue, memory_bytes)
            if fits or not used:
                used += memory_bytes
                self._grant(waiting)
            elif takes_any_part:
                return
            else:
                is_common_part_awaited = True

    def _grant(self, reservation: MemoryReservation) -> None:
        self.add_pending(reservation.queue, reservation.memory_bytes)
        reservation.granted = True
        del self._waiting[reservation]
        reservation.on_granted()


class PullAdmission:
    """Decides which messages one pull keeps; open from before the pull until the queue's window has its messages.

    If the pull was given up, messages that are admitted after closing are not counted: they are dropped.
    """

    def __init__(self, budget: MemoryBudget, queue: QueueMemory, reservation: MemoryReservation | None = None) -> None:
        self.refused_bytes = 0  # memory of the first message that was not admitted
        self._budget = budget
        self._queue = queue
        self._reservation = reservation
        self._admitted_bytes = 0
        self._reserved_bytes: int | None = None  # for the pull's first message
        self._free_bytes: float | None = None  # of the budget, when the first message within the queue's share arrived
        self._open = True

    @property
    def max_body_bytes(self) -> int:
        """The size up to which a compressed body is decompressed, from the settings in force."""
        return self._queue.limits.max_body_bytes

    def admit(self, memory_bytes: int) -> bool:
        """Return whether a message that takes this much memory is kept; counted until the admission is closed."""
        if not self._open:
            return True
        if not (self._fits_queue(memory_bytes) and self._fits_member(memory_bytes)):
            self.refused_bytes = memory_bytes
            return False
        self._admitted_bytes += memory_bytes
        self._budget.add_pending(self._queue, memory_bytes)
        return True

    def _fits_queue(self, memory_bytes: int) -> bool:
        window = self._queue.window
        if not (self._admitted_bytes or window.unfinished_count):
            return True
        return window.memory_bytes + self._admitted_bytes + memory_bytes <= self._queue.limits.max_bytes

    def _fits_member(self, memory_bytes: int) -> bool:
        budget = self._budget
        queue = self._queue
        if self._reserved_bytes is None:
            self._reserved_bytes = self._take_reserved()
            if memory_bytes <= self._reserved_bytes:
                return True
        if not budget.is_within_share(queue, memory_bytes):
            return budget.may_exceed_share(queue, memory_bytes)
        if self._free_bytes is None:
            self._free_bytes = budget.free_bytes
        if memory_bytes > self._free_bytes:
            return False
        self._free_bytes -= memory_bytes
        return True

    def _take_reserved(self) -> int:
        """Return the memory that was reserved for this pull, and stop counting it as pending."""
        reservation = self._reservation
        if reservation is None or not reservation.granted:
            return 0
        reservation.granted = False
        self._budget.add_pending(self._queue, -reservation.memory_bytes)
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
        self._budget.remove_pending(self._queue, self._admitted_bytes)
