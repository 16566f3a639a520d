"""Window of one queue: fetched and unfinished messages, delivered in order, finished in any order, committed in order.

**No unfinished message is skipped.** The committed offset is the lowest unfinished offset or, if every message is
finished, the next offset to fetch; this may be higher than the last message's, as filters and compaction leave messages
out. Only `reset` lowers it. While it is unknown which offset the broker has (`committed_offset` is None), the window's
offset is committed even if no message was finished: without a stored offset, the next member would look the start up
again and, with `Latest`, might skip messages.

**A stopped window discards the messages that it has not handed out**; a resumed one fetches them again. The answer to a
pull for an offset other than `next_offset` is ignored, as it would leave a hole. But a `RESET` is not: it reports that
the group's offset was set at the broker, and the broker sends it only once.

**A reset ends no delivery.** Open deliveries go on at the app: until they end, an Orderly queue starts no other, and
the window is not idle. But such a delivery finishes no message of the window, and the answer to a commit from before
the reset is ignored. Therefore a window is kept, not replaced, when the queue's start is looked up again: it still
counts the open deliveries.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple, Self

from rota.brokers.message import MEBIBYTE, MESSAGE_OVERHEAD_BYTES, Message
from rota.brokers.port import OffsetCorrection, PullResult
from rota.spec import Buffer

IMMEDIATELY = float("-inf")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits for the fetched and unfinished messages of a queue; the last pull may bring more messages than that."""

    max_messages: int = 1000
    max_bytes: int = 100 * MEBIBYTE  # of memory; an empty window takes a larger message all the same
    # From the first unfinished offset to the last: a crash may repeat these. Orderly queues have no limit.
    max_offset_span: int = 2000
    max_body_bytes: int = 4 * MEBIBYTE  # bytes of a compressed body; a larger one stays compressed

    @classmethod
    def for_queue(cls, buffer: Buffer, queue_count: int, max_share_bytes: float = inf) -> Self:
        """Return the limits of one of a topic's `queue_count` queues; `max_share_bytes` is its part of the memory.

        Limits per topic take precedence over limits per queue, as in RocketMQ's client.
        """
        max_messages = buffer.messages_per_queue
        if buffer.messages_per_topic:
            max_messages = max(1, buffer.messages_per_topic // queue_count)
        mebibytes = buffer.mebibytes_per_queue
        if buffer.mebibytes_per_topic:
            mebibytes = max(1, buffer.mebibytes_per_topic // queue_count)
        max_bytes = int(min(mebibytes * MEBIBYTE, max_share_bytes))
        return cls(max_messages, max_bytes, max_body_bytes=buffer.mebibytes_per_message * MEBIBYTE)


class Commit(NamedTuple):
    """An offset to commit; the caller passes it to `mark_committed` once the broker has answered."""

    offset: int
    reset_count: int  # of the window at that time: if the window has been reset since, the answer is ignored


@dataclass(slots=True, eq=False)
class OpenDelivery:
    """Messages that were handed out together; open until each of them is finished or returned."""

    started_at: float
    reset_count: int  # of the window at that time: if the window has been reset since, no message is finished
    unsettled: dict[int, Message]  # by offset; messages that are finished or returned are removed, to free their memory

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that are neither finished nor returned."""
        return tuple(self.unsettled.values())


class _ReturnedMessage(NamedTuple):
    """An unfinished message that waits for its next delivery; in the heap, the first two fields give the order."""

    deliver_after: float
    offset: int
    message: Message


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class QueueWindow:
    """The messages of one queue between fetching and committing; other modules may read the public fields.

    A new window has no start offset: the first `reset` sets it, and later resets keep it.
    """

    next_offset: int  # the next offset to fetch; without a meaning before the first reset
    orderly: bool = False
    committed_offset: int | None = None  # the offset that the broker is known to have; None: unknown
    start_offset: int | None = field(default=None, init=False)  # where this member began to read the queue
    max_sent_offset: int | None = field(default=None, init=False)  # the highest offset that was sent to the app
    stopped: bool = field(default=False, init=False)
    unfinished_bytes: int = field(default=0, init=False)  # of unfinished messages, without MESSAGE_OVERHEAD_BYTES each
    in_flight: int = field(default=0, init=False)  # messages of open deliveries, also of those from before a reset
    open_deliveries: dict[OpenDelivery, None] = field(default_factory=dict, init=False)
    extra_attempts: dict[int, int] = field(default_factory=dict, init=False)  # by offset, beyond the broker's count
    _reset_count: int = field(default=0, init=False)
    _orphaned_bytes: int = field(default=0, init=False)  # memory of open deliveries from before a reset
    _undelivered: deque[Message] = field(default_factory=deque, init=False)  # not handed out yet
    _returned: list[_ReturnedMessage] = field(default_factory=list, init=False)  # a heap
    _deliver_after: float = field(default=IMMEDIATELY, init=False)  # an Orderly queue starts no delivery before this
    _handed_out: deque[int] = field(default_factory=deque, init=False)  # offsets from the first unfinished one on
    _finished: set[int] = field(default_factory=set, init=False)  # the finished offsets in `_handed_out`

    def reset(self, start: int, committed: int | None = None) -> None:
        """Discard everything except open deliveries, and continue at `start`."""
        if self.start_offset is None:
            self.start_offset = start
        self.next_offset = start
        self.committed_offset = committed
        self.unfinished_bytes = 0
        self._deliver_after = IMMEDIATELY
        for delivery in filter(self._is_current, self.open_deliveries):
            self._orphaned_bytes += sum(message.memory_bytes for message in delivery.messages)
        self._reset_count += 1
        for collection in (self._undelivered, self._returned, self._handed_out, self._finished, self.extra_attempts):
            collection.clear()

    def rewind(self, start: int) -> None:
        """Continue at an offset that a user or the broker set; `would_repeat` ignores messages sent before."""
        self.reset(start)
        self.max_sent_offset = None

    def _is_current(self, started: OpenDelivery | Commit) -> bool:
        """Whether a delivery or commit was started since the last reset; an earlier one finishes or commits nothing."""
        return started.reset_count == self._reset_count

    @property
    def has_start_offset(self) -> bool:
        """Whether the start offset is known."""
        return self.start_offset is not None

    def stop(self) -> None:
        """Stop handing out messages, and discard messages that were not handed out."""
        self.stopped = True
        if self._undelivered:
            self.next_offset = self._undelivered[0].offset
            self.unfinished_bytes -= sum(message.variable_bytes for message in self._undelivered)
            self._undelivered.clear()

    def resume(self) -> None:
        """Continue after `stop`."""
        self.stopped = False

    def add_pull(self, requested_offset: int, pulled: PullResult) -> None:
        """Add the messages of a pull for `requested_offset`; an answer for another offset is ignored."""
        if pulled.correction is OffsetCorrection.RESET:
            self.rewind(pulled.next_offset)
        elif requested_offset != self.next_offset or self.stopped:
            return
        elif pulled.correction and pulled.next_offset >= self.next_offset:
            # The broker deleted the queue's oldest messages: skip to the first that it has; fetched messages stay.
            self.next_offset = pulled.next_offset
        elif pulled.correction:
            # The broker lost the end of the queue: fetch unfinished messages again, or from the new end if it is lower.
            self.rewind(min(pulled.next_offset, self.committable_offset))
        else:
            for message in pulled.messages:
                if message.offset >= self.next_offset:
                    self._undelivered.append(message)
                    self.unfinished_bytes += message.variable_bytes
                    self.next_offset = message.offset + 1
            self.next_offset = max(self.next_offset, pulled.next_offset)

    def start_delivery(self, max_messages: int, now: float) -> OpenDelivery | None:
        """Start a delivery, if one may start; returned messages go first, each alone: one might fail a batch."""
        if self.stopped or now < self._deliver_after or (self.orderly and self.open_deliveries):
            return None
        if self._returned and self._returned[0].deliver_after <= now:
            messages = [heappop(self._returned).message]
        else:
            messages = [self._undelivered.popleft() for _ in range(min(max_messages, len(self._undelivered)))]
            self._handed_out.extend([message.offset for message in messages])
        if not messages:
            return None
        delivery = OpenDelivery(now, self._reset_count, {message.offset: message for message in messages})
        self.open_deliveries[delivery] = None
        self.in_flight += len(messages)
        return delivery

    def mark_sent(self, delivery: OpenDelivery) -> None:
        """Record that a delivery is being sent to the app; not called for a delivery that finds no listening app."""
        if self._is_current(delivery) and delivery.unsettled:
            last = max(delivery.unsettled)
            self.max_sent_offset = last if self.max_sent_offset is None else max(self.max_sent_offset, last)

    def count_fitting(self, max_messages: int, max_bytes: int) -> int:
        """Return how many of the next messages fit into `max_bytes` encoded bytes; at least 1."""
        number = 0
        remaining_bytes = max_bytes
        for message in islice(self._undelivered, max_messages):
            remaining_bytes -= message.encoded_bytes
            if remaining_bytes < 0:
                break
            number += 1
        return max(1, number)

    def has_extra_attempt(self, offset: int) -> bool:
        """Whether an unfinished message has attempts that the broker does not count; no message has after a reset."""
        return offset in self.extra_attempts

    def attempt_number(self, message: Message) -> int:
        """Return the number of a message's attempt, from 1: the sum of the broker's count and the window's."""
        return 1 + message.reconsume_times + self.extra_attempts.get(message.offset, 0)

    def count_attempt(self, delivery: OpenDelivery, message: Message) -> None:
        """Count an attempt that the broker does not count; ignored for a delivery from before a reset."""
        if self._is_current(delivery):
            self.extra_attempts[message.offset] = self.extra_attempts.get(message.offset, 0) + 1

    def finish_message(self, delivery: OpenDelivery, message: Message) -> None:
        """Finish a message: the app consumed it, or the broker has it for a retry or as a dead letter."""
        if self._close_message(delivery, message):
            self.unfinished_bytes -= message.variable_bytes
            self.extra_attempts.pop(message.offset, None)
            self._finished.add(message.offset)
            while self._handed_out and self._handed_out[0] in self._finished:
                self._finished.remove(self._handed_out.popleft())

    def return_message(self, delivery: OpenDelivery, message: Message, deliver_after: float = IMMEDIATELY) -> None:
        """Return an unfinished message, for delivery after `deliver_after`; an Orderly queue waits as a whole.

        Of the messages that do not wait, the lowest offset goes first, however often each one was returned: it keeps
        all higher offsets from being committed, and the queue's next owner would deliver those messages again.
        """
        if self._close_message(delivery, message):
            if self.orderly:
                self._deliver_after = max(self._deliver_after, deliver_after)
                deliver_after = IMMEDIATELY
            heappush(self._returned, _ReturnedMessage(deliver_after, message.offset, message))

    def _close_message(self, delivery: OpenDelivery, message: Message) -> bool:
        """Mark a message as no longer in flight; return whether the window still counts it as unfinished.

        It does not if the message was closed before, or if its delivery is from before a reset.
        """
        if message.offset not in delivery.unsettled:
            return False
        del delivery.unsettled[message.offset]
        self.in_flight -= 1
        if not delivery.unsettled:
            del self.open_deliveries[delivery]
        is_current = self._is_current(delivery)
        if not is_current:
            self._orphaned_bytes -= message.memory_bytes
        return is_current

    def next_commit(self) -> Commit | None:
        """Return the offset to commit; None if the broker has it. Only one may be open: commits can overtake."""
        offset = self.committable_offset
        return None if offset == self.committed_offset else Commit(offset, self._reset_count)

    def mark_committed(self, commit: Commit) -> None:
        """Record that the broker has a committed offset, unless it is known to have a higher one."""
        known_offset = -1 if self.committed_offset is None else self.committed_offset
        if self._is_current(commit) and commit.offset > known_offset:
            self.committed_offset = commit.offset

    def committed_with(self, carried: Commit | None) -> int | None:
        """Return the committed offset, or that of an unanswered commit if it is higher; None: the former is unknown."""
        if carried is None or self.committed_offset is None or not self._is_current(carried):
            return self.committed_offset
        return max(self.committed_offset, carried.offset)

    def skip_if_passed(self, commit: Commit, group_offset: int) -> bool:
        """Continue at the group's offset and return True if it is above the commit: others have consumed the queue."""
        if not self._is_current(commit) or group_offset <= commit.offset:
            return False
        self.reset(group_offset, group_offset)
        return True

    def is_full(self, limits: QueueLimits) -> bool:
        """Whether no more may be fetched now."""
        unfinished_count = self.unfinished_count
        unfinished_bytes = self.unfinished_bytes + MESSAGE_OVERHEAD_BYTES * unfinished_count
        if unfinished_count >= limits.max_messages or unfinished_bytes >= limits.max_bytes:
            return True
        last_offset = self.last_offset
        if self.orderly or last_offset is None:
            return False
        return last_offset - self.committable_offset > limits.max_offset_span

    @property
    def memory_bytes(self) -> int:
        """The memory of unfinished messages, and of open deliveries from before a reset."""
        return self.unfinished_bytes + MESSAGE_OVERHEAD_BYTES * self.unfinished_count + self._orphaned_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no delivery is open."""
        return not self.open_deliveries

    @property
    def committable_offset(self) -> int:
        """The first unfinished offset; every lower offset is finished."""
        if self._handed_out:
            return self._handed_out[0]
        return self._undelivered[0].offset if self._undelivered else self.next_offset

    @property
    def uncommitted_count(self) -> int:
        """The number of finished offsets that are not known to be committed; 0 if the broker's offset is unknown."""
        return 0 if self.committed_offset is None else max(0, self.committable_offset - self.committed_offset)

    @property
    def would_repeat(self) -> bool:
        """Whether a reader that starts at the committed offset, or an unknown one, may repeat messages sent before."""
        if self.max_sent_offset is None:
            return False
        return self.committed_offset is None or self.max_sent_offset >= self.committed_offset

    @property
    def unfinished_count(self) -> int:
        """The number of unfinished messages."""
        return len(self._undelivered) + len(self._handed_out) - len(self._finished)

    @property
    def last_offset(self) -> int | None:
        """The offset of the last fetched message; None if no message is unfinished."""
        if self._undelivered:
            return self._undelivered[-1].offset
        return self._handed_out[-1] if self._handed_out else None
