"""Window of one queue: fetched and unfinished messages, delivered in order, finished in any order, committed in order.

**No unfinished message is skipped.** The committed offset is the lowest unfinished offset or, if every message is
finished, the next offset to fetch, which lies behind messages that filters and compaction left out. It goes back only
by `reset`. A start offset that the broker does not have is committed first: the next member would look up a later
`Latest`, and messages in between would be lost.

**A stopped window discards messages that it did not hand out**, and fetches from there again when it is resumed. A late
answer for an offset that is no longer the next one would leave a hole; it is ignored, unless the broker says, once,
`RESET`.

**A reset ends no delivery.** Open deliveries go on at the app: until they end, an Orderly queue starts no other, and
the window is not `empty`. But their end finishes no message of the window, and the answer to a commit that was under
way is ignored. So one window serves for as long as a member has the queue, however often its start is looked up again.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple, Self

from rota.brokers.message import MEBIBYTE, MESSAGE_OVERHEAD_BYTES, Message
from rota.brokers.port import PullRedirect, PullResult
from rota.spec import Buffer

AT_ONCE = float("-inf")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the fetched and unfinished messages of a queue; the last pull may bring more messages than that."""

    messages: int = 1000
    bytes: int = 100 * MEBIBYTE  # of memory; an empty window takes a larger message all the same
    span: int = 2000  # from the first unfinished offset to the last: a crash may repeat these; not for Orderly
    body: int = 4 * MEBIBYTE  # bytes of a compressed body; a larger one stays compressed

    @classmethod
    def of(cls, buffer: Buffer, queues: int, most: float = inf) -> Self:
        """Return the limits of one of `queues` queues of a topic; as in the reference, the topic's take precedence.

        `most` is the share of the process's memory for one queue, in bytes.
        """
        messages = buffer.messages_per_topic and max(1, buffer.messages_per_topic // queues)
        mebibytes = buffer.mebibytes_per_topic and max(1, buffer.mebibytes_per_topic // queues)
        room = (mebibytes or buffer.mebibytes_per_queue) * MEBIBYTE
        body = buffer.mebibytes_per_message * MEBIBYTE
        return cls(messages or buffer.messages_per_queue, int(min(room, most)), body=body)


class Commit(NamedTuple):
    """An offset to commit; the caller passes it to `answered` once the broker has answered."""

    offset: int
    resets: int  # number of resets before it


@dataclass(slots=True, eq=False)
class Delivery:
    """Messages that were handed out together; open until each of them is finished or returned."""

    since: float
    resets: int  # number of resets before it
    left: dict[int, Message]  # by offset, neither finished nor returned; the memory of the others is free

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that are neither finished nor returned."""
        return tuple(self.left.values())


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Window:
    """The messages of one queue between fetching and committing; other modules may read the public fields."""

    next: int  # the next offset to fetch; at first the start offset
    orderly: bool = False
    committed: int | None = None  # the offset that the broker is known to have
    start: int | None = field(default=None, init=False)  # the offset at which this member began to read the queue
    given: int | None = field(default=None, init=False)  # the highest offset that was sent to the app
    stopped: bool = field(default=False, init=False)
    bytes: int = field(default=0, init=False)  # of unfinished messages, without each message's overhead
    in_flight: int = field(default=0, init=False)  # messages of open deliveries, also of those from before a reset
    open: dict[Delivery, None] = field(default_factory=dict, init=False)
    tried: dict[int, int] = field(default_factory=dict, init=False)  # by offset: attempts beyond the broker's count
    _resets: int = field(default=0, init=False)
    _orphaned_bytes: int = field(default=0, init=False)  # memory of open deliveries from before a reset
    _waiting: deque[Message] = field(default_factory=deque, init=False)  # not handed out yet
    _again: list[tuple[float, int, Message]] = field(default_factory=list, init=False)  # returned messages; a heap
    _not_before: float = field(default=AT_ONCE, init=False)  # for an Orderly queue
    _taken: deque[int] = field(default_factory=deque, init=False)  # handed out, from the first unfinished offset on
    _done: set[int] = field(default_factory=set, init=False)  # the finished ones among them

    def reset(self, start: int, committed: int | None = None) -> None:
        """Discard everything except open deliveries, and continue at `start`."""
        self.start = self.start if self.placed else start
        self.next, self.committed, self.bytes, self._not_before = start, committed, 0, AT_ONCE
        for delivery in self.open:
            if delivery.resets == self._resets:
                self._orphaned_bytes += sum(message.memory_bytes for message in delivery.left.values())
        self._resets += 1
        for collection in (self._waiting, self._again, self._taken, self._done, self.tried):
            collection.clear()

    def rewind(self, start: int) -> None:
        """Continue at an offset that a user or the broker set; what this repeats is not counted against rebalances."""
        self.reset(start)
        self.given = None

    @property
    def placed(self) -> bool:
        """Whether the start offset is known."""
        return self._resets > 0

    def stop(self) -> None:
        """Stop handing out messages, and discard messages that were not handed out."""
        self.stopped = True
        if self._waiting:
            self.next = self._waiting[0].offset
            self.bytes -= sum(message.variable_bytes for message in self._waiting)
            self._waiting.clear()

    def resume(self) -> None:
        """Continue after `stop`."""
        self.stopped = False

    def put(self, requested_offset: int, pulled: PullResult) -> None:
        """Add the messages of a pull for `requested_offset`; an answer for another offset is ignored."""
        if pulled.moved is PullRedirect.RESET:
            self.rewind(pulled.next)
        elif requested_offset != self.next or self.stopped:
            return
        elif pulled.moved and pulled.next >= self.next:
            self.next = pulled.next  # keep fetched messages: the broker no longer has them
        elif pulled.moved:
            self.rewind(min(pulled.next, self.committable))  # the broker lost the end: fetch unfinished messages again
        else:
            for message in pulled.messages:
                if message.offset >= self.next:
                    self._waiting.append(message)
                    self.bytes += message.variable_bytes
                    self.next = message.offset + 1
            self.next = max(self.next, pulled.next)

    def take(self, most: int, now: float) -> Delivery | None:
        """Start a delivery, if one may start; returned messages go first, each alone, as one may fail a batch."""
        if self.stopped or now < self._not_before or (self.orderly and self.open):
            return None
        messages: list[Message] = []
        if self._again and self._again[0][0] <= now:
            messages = [heappop(self._again)[2]]
        else:
            messages = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._taken.extend([message.offset for message in messages])
        if not messages:
            return None
        delivery = Delivery(now, self._resets, {message.offset: message for message in messages})
        self.open[delivery] = None
        self.in_flight += len(messages)
        return delivery

    def note_given(self, delivery: Delivery) -> None:
        """Record that a delivery is being sent to the app; not called for a delivery that finds no listening app."""
        if delivery.resets == self._resets and delivery.left:
            last = max(delivery.left)
            self.given = last if self.given is None else max(self.given, last)

    def fit(self, most: int, size: int) -> int:
        """Return how many of the next messages fit into `size` encoded bytes; at least 1."""
        number = 0
        for message in islice(self._waiting, most):
            size -= message.encoded_bytes
            if size < 0:
                break
            number += 1
        return max(1, number)

    def attempt(self, message: Message) -> int:
        """Return the number of a message's attempt, from 1: the sum of the broker's count and the window's."""
        return 1 + message.attempt + self.tried.get(message.offset, 0)

    def tries(self, delivery: Delivery, message: Message) -> None:
        """Count an attempt that the broker does not count; ignored for a delivery from before a reset."""
        if delivery.resets == self._resets:
            self.tried[message.offset] = self.tried.get(message.offset, 0) + 1

    def done(self, delivery: Delivery, message: Message) -> None:
        """Finish a message: the app consumed it, or the broker has it for a retry or as a dead letter."""
        if self._ends(delivery, message):
            self.bytes -= message.variable_bytes
            self.tried.pop(message.offset, None)
            self._done.add(message.offset)
            while self._taken and self._taken[0] in self._done:
                self._done.remove(self._taken.popleft())

    def back(self, delivery: Delivery, message: Message, until: float = AT_ONCE) -> None:
        """Return a message, unfinished, to be handed out again from `until` on; an Orderly queue waits as a whole.

        Of the messages that do not wait, the lowest offset goes first, however often each one was returned: messages
        finished behind an unfinished one cannot be committed, and would come again at the queue's next owner.
        """
        if self._ends(delivery, message):
            if self.orderly:
                self._not_before, until = max(self._not_before, until), AT_ONCE
            heappush(self._again, (until, message.offset, message))

    def _ends(self, delivery: Delivery, message: Message) -> bool:
        """Mark a message as no longer in flight; return whether it was, in a delivery since the last reset."""
        if message.offset not in delivery.left:
            return False
        del delivery.left[message.offset]
        self.in_flight -= 1
        if not delivery.left:
            del self.open[delivery]
        if delivery.resets == self._resets:
            return True
        self._orphaned_bytes -= message.memory_bytes
        return False

    def to_commit(self) -> Commit | None:
        """Return the offset to commit, or None; wait for each answer, so that no commit overtakes another."""
        return Commit(self.committable, self._resets) if self.committable != self.committed else None

    def answered(self, commit: Commit) -> None:
        """Record that the broker has a committed offset, unless it is known to have a higher one."""
        if commit.resets == self._resets and commit.offset > (-1 if self.committed is None else self.committed):
            self.committed = commit.offset

    def passed(self, commit: Commit, group_offset: int) -> bool:
        """Continue at the group's offset and return True if it is above the commit: others have consumed the queue."""
        if commit.resets != self._resets or group_offset <= commit.offset:
            return False
        self.reset(group_offset, group_offset)
        return True

    def full(self, limits: Limits) -> str | None:
        """Return why no more may be fetched now; None if fetching may continue."""
        if self.buffered >= limits.messages:
            return f"{self.buffered} messages are not finished; the limit is {limits.messages}"
        unfinished = self.bytes + MESSAGE_OVERHEAD_BYTES * self.buffered
        if unfinished >= limits.bytes:
            return f"{unfinished / MEBIBYTE:.1f} MiB are not finished; the limit is {limits.bytes / MEBIBYTE:.1f} MiB"
        span = 0 if self.orderly or self.last is None else self.last - self.committable
        if span > limits.span:
            return f"{self.committable} is not finished and {span} offsets behind the last; the limit is {limits.span}"
        return None

    @property
    def memory_bytes(self) -> int:
        """The memory of unfinished messages, and of open deliveries from before a reset."""
        return self.bytes + MESSAGE_OVERHEAD_BYTES * self.buffered + self._orphaned_bytes

    @property
    def empty(self) -> bool:
        """Whether no delivery is open."""
        return not self.open

    @property
    def committable(self) -> int:
        """The first unfinished offset; every lower offset is finished."""
        return self._taken[0] if self._taken else self._waiting[0].offset if self._waiting else self.next

    @property
    def uncommitted(self) -> int:
        """The number of finished offsets that are not known to be committed; 0 if the broker's offset is unknown."""
        return 0 if self.committed is None else max(0, self.committable - self.committed)

    @property
    def would_repeat(self) -> bool:
        """Whether the app would get messages again if another reader starts at the committed offset."""
        return self.given is not None and (self.committed is None or self.given >= self.committed)

    @property
    def buffered(self) -> int:
        """The number of unfinished messages."""
        return len(self._waiting) + len(self._taken) - len(self._done)

    @property
    def last(self) -> int | None:
        """The last fetched offset; None if no message is unfinished."""
        return self._waiting[-1].offset if self._waiting else self._taken[-1] if self._taken else None
