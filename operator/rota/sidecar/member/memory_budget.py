"""Memory budget of a member: one limit for the messages of all its queues, applied before a pull keeps a message.

**A message within its queue's share never waits for messages of other queues**, not even if an app hangs on those. The
budget consists of equal shares, one for each queue, and a common part with the size of one largest message. A message
is within the share if its queue, with it, holds no more than the share. If a pull refuses a message, the queue waits in
a line (first come, first served) until the memory for that message is reserved, and then pulls again.

- The budget charges each queue with its share, or with the memory that it holds if that is more. A message beyond its
  queue's share takes the common part only if all charges together stay within the budget: this keeps the shares free.
- Only a queue that holds nothing may take a message beyond its share. If the common part has no room for it, the queue
  waits for the common part. So large messages that an app never finishes delay other large messages, and nothing else.
- A message that is too large for the common part waits until enough of the budget is free; messages behind it wait too,
  so that it is not overtaken forever. A member that holds nothing takes one message of any size.
- After the member got more queues, shares are smaller, and queues may still hold more than their new shares. Until they
  have finished those messages, messages within shares may have to wait in the line, too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import NamedTuple, Protocol, Self

from rota.brokers.message import MAX_PROPERTIES_BYTES, MEBIBYTE, MESSAGE_OVERHEAD_BYTES
from rota.model import Queue
from rota.sidecar.member.window import QueueLimits, QueueWindow
from rota.spec import Buffer


class QueueMemory(Protocol):
    """A queue as the budget sees it."""

    window: QueueWindow
    limits: QueueLimits


class RefusedMessage(NamedTuple):
    """A message for which a pull had no memory."""

    offset: int
    memory_bytes: int


class _Part(Enum):
    """The part of the budget that a message may take."""

    SHARE = auto()
    COMMON = auto()  # for a message beyond its queue's share
    ANY = auto()  # for a message that is too large even for the common part


@dataclass(slots=True, eq=False)
class MemoryReservation:
    """A queue's place in the line, and the memory that is reserved for it once it is granted."""

    queue: QueueMemory
    memory_bytes: int
    on_granted: Callable[[], None]
    granted: bool = False


class MemoryBudget:
    """Limits the memory of the messages that all queues of a member have fetched and not finished."""

    def __init__(self, limit_bytes: float, queues: Callable[[], Iterable[QueueMemory]]) -> None:
        self.limit_bytes = limit_bytes
        self._queues = queues
        self._share_bytes = inf  # of each queue, once `set_limits` has divided the budget
        # Memory that is in no window yet: admitted by open pulls, also of queues that were released meanwhile, or
        # granted to the line.
        self._pending: Counter[QueueMemory] = Counter()
        self._waiting: dict[MemoryReservation, None] = {}  # the line

    @property
    def used_bytes(self) -> int:
        """The memory of all windows, open pulls and granted reservations."""
        return self._pending.total() + sum(queue.window.memory_bytes for queue in self._queues())

    @property
    def free_bytes(self) -> float:
        """The memory for messages within shares that is neither used nor promised to the line."""
        return self.limit_bytes - self.used_bytes - self._promised_bytes()

    def set_limits(self, buffer: Buffer, queues: Mapping[Queue, QueueMemory]) -> None:
        """Set each queue's limits: a topic's limits are divided among its queues, the budget among all queues."""
        topics = Counter(queue.topic for queue in queues)
        self._share_bytes = self.compute_share(len(queues), buffer.mebibytes_per_message * MEBIBYTE)
        for queue, memory in queues.items():
            memory.limits = QueueLimits.for_queue(buffer, topics[queue.topic], self._share_bytes)

    def compute_share(self, queue_count: int, max_body_bytes: int) -> float:
        """Return the share of each queue: an equal part of what the common part leaves."""
        largest_bytes = max_body_bytes + MAX_PROPERTIES_BYTES + MESSAGE_OVERHEAD_BYTES
        common_bytes = min(largest_bytes, self.limit_bytes / 2)  # a small container's shares need the other half
        return (self.limit_bytes - common_bytes) / max(1, queue_count)

    def is_within_share(self, queue: QueueMemory, memory_bytes: int) -> bool:
        """Whether a queue holds no more than its share with a message of that memory."""
        return self._held_bytes(queue) + memory_bytes <= self._guaranteed_bytes(queue)

    def may_exceed_share(self, queue: QueueMemory, memory_bytes: int) -> bool:
        """Whether a queue may take a message beyond its share now, without a place in the line.

        The caller has checked that the queue holds nothing (`PullAdmission._fits_queue`).
        """
        if not self.used_bytes:
            return True
        if any(not self.is_within_share(waiting.queue, waiting.memory_bytes) for waiting in self._waiting):
            return False  # a message beyond its share waits in the line already: first come, first served
        if self._is_too_large(queue, memory_bytes):
            return memory_bytes <= self.free_bytes
        return self._fits_common_part(queue, memory_bytes)

    def _held_bytes(self, queue: QueueMemory) -> int:
        return queue.window.memory_bytes + self._pending[queue]

    def _guaranteed_bytes(self, queue: QueueMemory) -> float:
        return min(queue.limits.max_bytes, self._share_bytes)

    def _fits_common_part(self, queue: QueueMemory, memory_bytes: int) -> bool:
        """Whether a message beyond its queue's share fits beside the memory that is charged to all other queues."""
        peers = (self._pending.keys() | self._queues()) - {queue}  # also released queues that have pending memory
        claimed_bytes = sum(max(self._held_bytes(peer), self._guaranteed_bytes(peer)) for peer in peers)
        return claimed_bytes + self._held_bytes(queue) + memory_bytes <= self.limit_bytes

    def _is_too_large(self, queue: QueueMemory, memory_bytes: int) -> bool:
        """Whether the common part has no room for a message, even if no other queue exceeds its share.

        Pending memory of released queues does not count: it is free soon, so waiting for the common part is enough.
        """
        peers = set(self._queues()) - {queue}
        return sum(map(self._guaranteed_bytes, peers)) + memory_bytes > self.limit_bytes

    def _candidates(self) -> Iterator[tuple[MemoryReservation, _Part]]:
        """Yield each waiting message within its queue's share, and the first one beyond its queue's share.

        If the caller grants that one before it continues, the next message beyond its queue's share is yielded, too.
        """
        is_awaited_beyond_share = False
        for waiting in list(self._waiting):
            if self.is_within_share(waiting.queue, waiting.memory_bytes):
                yield waiting, _Part.SHARE
            elif not is_awaited_beyond_share:
                yield waiting, _Part.ANY if self._is_too_large(waiting.queue, waiting.memory_bytes) else _Part.COMMON
                is_awaited_beyond_share = waiting in self._waiting  # False if the caller has granted it

    def _promised_bytes(self) -> int:
        """Return the memory that new pulls must not take, because messages in the line come first.

        A message that waits for the common part is not counted: `may_exceed_share` refuses all others meanwhile.
        """
        return sum(waiting.memory_bytes for waiting, part in self._candidates() if part is not _Part.COMMON)

    def reserve(self, queue: QueueMemory, memory_bytes: int, on_granted: Callable[[], None]) -> MemoryReservation:
        """Put a queue at the end of the line; `on_granted` is called once it gets its memory, which may be at once."""
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
        used_bytes = self.used_bytes
        for waiting, part in self._candidates():
            if part is _Part.COMMON:
                fits = self._fits_common_part(waiting.queue, waiting.memory_bytes)
            else:
                fits = used_bytes + waiting.memory_bytes <= self.limit_bytes
            if fits or not used_bytes:
                used_bytes += waiting.memory_bytes
                self._grant(waiting)
            elif part is not _Part.COMMON:  # only a message that waits for the common part may be overtaken
                return

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
        # Free memory of the budget, computed once: it takes a walk over all queues, and all messages of a pull are
        # admitted in one turn of the event loop, so that nothing else takes or frees memory meanwhile.
        self._free_bytes: float | None = None
        self._open = True

    @property
    def max_body_bytes(self) -> int:
        """The size up to which a compressed body is decompressed, from the settings in force."""
        return self._queue.limits.max_body_bytes

    def admit(self, memory_bytes: int) -> bool:
        """Return whether a message that takes this much memory is kept; counted until the admission is closed."""
        if not self._open:
            return True
        if not self._fits_queue(memory_bytes) or not self._take_memory(memory_bytes):
            self.refused_bytes = memory_bytes
            return False
        self._admitted_bytes += memory_bytes
        self._budget.add_pending(self._queue, memory_bytes)
        return True

    def _fits_queue(self, memory_bytes: int) -> bool:
        window = self._queue.window
        if not self._admitted_bytes and not window.unfinished_count:
            return True  # a queue that holds nothing takes a message of any size
        return window.memory_bytes + self._admitted_bytes + memory_bytes <= self._queue.limits.max_bytes

    def _take_memory(self, memory_bytes: int) -> bool:
        """Whether the reservation or the budget has memory for a message; if so, later messages cannot have it.

        The reservation is for the pull's first message, so it ends here even if that message needs more. Free bytes
        are cached for messages within the share, which most are; the others ask the budget each time.
        """
        budget = self._budget
        queue = self._queue
        reserved_bytes = self._release_reservation()
        if memory_bytes <= reserved_bytes:
            return True
        if not budget.is_within_share(queue, memory_bytes):
            return budget.may_exceed_share(queue, memory_bytes)
        if self._free_bytes is None:
            self._free_bytes = budget.free_bytes
        if memory_bytes > self._free_bytes:
            return False
        self._free_bytes -= memory_bytes
        return True

    def _release_reservation(self) -> int:
        """Stop counting the memory that was reserved for the pull's first message, and return it; 0 from then on."""
        reservation = self._reservation
        if reservation is None or not reservation.granted:
            return 0
        reservation.granted = False
        self._budget.add_pending(self._queue, -reservation.memory_bytes)  # `remove_pending` would serve the line now
        return reservation.memory_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close: the window has the messages, or they are dropped."""
        self._open = False
        if self._reservation:
            self._budget.cancel(self._reservation)  # gives its memory back, unless the first message has released it
        self._budget.remove_pending(self._queue, self._admitted_bytes)
