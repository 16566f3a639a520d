"""What one queue has fetched and not finished: handed out in order, finished in any order, committed from below.

**Nothing unfinished is passed.** What is committed is the lowest unfinished offset or, with none, where is asked next,
past what filters and compaction left out. It goes back only by `reset`. A start that the broker does not have is
committed first: `Latest`, looked up by the next member, would be later, and what came between would be lost.

**Stopped, it forgets what it did not hand out**, and asks there again when resumed. An answer that comes late, for a
place that is not the next any more, would leave a hole, and is passed over, unless the broker says, once, `RESET`.

**A reset ends no delivery.** What is open goes on at the app: beside it an Orderly queue begins nothing, and the window
is not `empty`. But its end finishes nothing, and the answer to a commit that was under way counts for nothing. Hence
one window serves for as long as a member has the queue, however often its start is found anew.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple, Self

from rota.brokers.message import MEBIBYTE, MESSAGE_OVERHEAD_BYTES, Message
from rota.brokers.port import Moved, Pulled
from rota.spec import Buffer

AT_ONCE = float("-inf")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a queue may be fetched and not finished; the last pull may bring more messages than that."""

    messages: int = 1000
    bytes: int = 100 * MEBIBYTE  # of memory; a window without messages takes a larger one all the same
    span: int = 2000  # from the first unfinished offset to the last, which a crash may repeat; Orderly has none
    body: int = 4 * MEBIBYTE  # bytes of a packed body; a larger one stays packed

    @classmethod
    def of(cls, buffer: Buffer, queues: int, most: float = inf) -> Self:
        """Return those of one among so many queues of a topic; as in the reference, a topic's replace a queue's.

        `most` is what there is of the process's memory for one queue, in bytes.
        """
        messages = buffer.messages_per_topic and max(1, buffer.messages_per_topic // queues)
        mebibytes = buffer.mebibytes_per_topic and max(1, buffer.mebibytes_per_topic // queues)
        room = (mebibytes or buffer.mebibytes_per_queue) * MEBIBYTE
        body = buffer.mebibytes_per_message * MEBIBYTE
        return cls(messages or buffer.messages_per_queue, int(min(room, most)), body=body)


class Commit(NamedTuple):
    """What shall be committed; it is brought back once the broker has answered."""

    offset: int
    resets: int  # how many there were before it


@dataclass(slots=True, eq=False)
class Delivery:
    """Messages that were handed out together; open until each of them is done or back."""

    since: float
    resets: int  # how many there were before it
    left: dict[int, Message]  # by offset, those that are neither done nor back; the others' memory is free

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that are neither done nor back."""
        return tuple(self.left.values())


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Window:
    """One queue's messages between fetching and committing; what has no underscore is there to be read."""

    next: int  # where to ask next; at first the start
    orderly: bool = False
    committed: int | None = None  # what the broker is known to have
    start: int | None = field(default=None, init=False)  # the offset at which this member began to read the queue
    given: int | None = field(default=None, init=False)  # the highest offset that the app was given
    stopped: bool = field(default=False, init=False)
    bytes: int = field(default=0, init=False)  # of what is not finished, beyond each message's overhead
    in_flight: int = field(default=0, init=False)  # messages of open deliveries, those from before a reset too
    open: dict[Delivery, None] = field(default_factory=dict, init=False)
    tried: dict[int, int] = field(default_factory=dict, init=False)  # offsets, and attempts nobody else counts
    _resets: int = field(default=0, init=False)
    _orphaned_bytes: int = field(default=0, init=False)  # memory of open deliveries from before a reset
    _waiting: deque[Message] = field(default_factory=deque, init=False)  # not handed out yet
    _again: list[tuple[float, int, Message]] = field(default_factory=list, init=False)  # came back; a heap
    _not_before: float = field(default=AT_ONCE, init=False)  # of an Orderly queue
    _taken: deque[int] = field(default_factory=deque, init=False)  # handed out, from the first unfinished offset on
    _done: set[int] = field(default_factory=set, init=False)  # those of them that are finished

    def reset(self, start: int, committed: int | None = None) -> None:
        """Forget everything but what is open, and begin there."""
        self.start = self.start if self.placed else start
        self.next, self.committed, self.bytes, self._not_before = start, committed, 0, AT_ONCE
        for delivery in self.open:
            if delivery.resets == self._resets:
                self._orphaned_bytes += sum(message.memory_bytes for message in delivery.left.values())
        self._resets += 1
        for forgotten in (self._waiting, self._again, self._taken, self._done, self.tried):
            forgotten.clear()

    def rewind(self, start: int) -> None:
        """Begin at an offset that somebody set: what is delivered again from there on, no rebalance repeats."""
        self.reset(start)
        self.given = None

    @property
    def placed(self) -> bool:
        """Whether it is known where it begins."""
        return self._resets > 0

    def stop(self) -> None:
        """Hand out nothing more, and forget what was not handed out."""
        self.stopped = True
        if self._waiting:
            self.next = self._waiting[0].offset
            self.bytes -= sum(message.variable_bytes for message in self._waiting)
            self._waiting.clear()

    def resume(self) -> None:
        """Go on where it was stopped."""
        self.stopped = False

    def put(self, asked: int, pulled: Pulled) -> None:
        """Take what came of asking there."""
        if pulled.moved is Moved.RESET:
            self.rewind(pulled.next)
        elif asked != self.next or self.stopped:
            return
        elif pulled.moved and pulled.next >= self.next:
            self.next = pulled.next  # what was fetched before is kept: the broker has it no more
        elif pulled.moved:
            self.rewind(min(pulled.next, self.committable))  # it lost its end; what is not finished is fetched anew
        else:
            for message in pulled.messages:
                if message.offset >= self.next:
                    self._waiting.append(message)
                    self.bytes += message.variable_bytes
                    self.next = message.offset + 1
            self.next = max(self.next, pulled.next)

    def take(self, most: int, now: float) -> Delivery | None:
        """Begin a delivery, if one may begin; what came back goes first, each alone: of several one may be to blame."""
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
        """Note that a delivery is being sent to the app. One that finds no app listening never is."""
        if delivery.resets == self._resets and delivery.left:
            last = max(delivery.left)
            self.given = last if self.given is None else max(self.given, last)

    def fit(self, most: int, size: int) -> int:
        """Return how many of the next messages have that size together, encoded; one at least."""
        number = 0
        for message in islice(self._waiting, most):
            size -= message.encoded_bytes
            if size < 0:
                break
            number += 1
        return max(1, number)

    def attempt(self, message: Message) -> int:
        """Return the number of a message's attempt, from 1: the broker counts some, and the window others."""
        return 1 + message.attempt + self.tried.get(message.offset, 0)

    def tries(self, delivery: Delivery, message: Message) -> None:
        """Count an attempt of which the broker does not hear; a reset has forgotten what was handed out before it."""
        if delivery.resets == self._resets:
            self.tried[message.offset] = self.tried.get(message.offset, 0) + 1

    def done(self, delivery: Delivery, message: Message) -> None:
        """Finish a message: it was worked, or the broker has it for later or among the dead letters."""
        if self._ends(delivery, message):
            self.bytes -= message.variable_bytes
            self.tried.pop(message.offset, None)
            self._done.add(message.offset)
            while self._taken and self._taken[0] in self._done:
                self._done.remove(self._taken.popleft())

    def back(self, delivery: Delivery, message: Message, until: float = AT_ONCE) -> None:
        """Take a message back, unfinished, to hand it out again from then on; an Orderly queue waits as a whole.

        Of those that do not wait the lowest goes first, however often each came back: what is done behind one that is
        not cannot be committed, and would come again at the queue's next owner.
        """
        if self._ends(delivery, message):
            if self.orderly:
                self._not_before, until = max(self._not_before, until), AT_ONCE
            heappush(self._again, (until, message.offset, message))

    def _ends(self, delivery: Delivery, message: Message) -> bool:
        """Note that a message is no longer in flight; say whether that is news, and of what is fetched now."""
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
        """Return what the broker does not have yet; one is answered before the next, lest they overtake each other."""
        return Commit(self.committable, self._resets) if self.committable != self.committed else None

    def answered(self, commit: Commit) -> None:
        """Note that the broker has it, unless it is known to have more."""
        if commit.resets == self._resets and commit.offset > (-1 if self.committed is None else self.committed):
            self.committed = commit.offset

    def passed(self, commit: Commit, there: int) -> bool:
        """Go on where the group is, if that is further than what was to be committed: others have worked the queue."""
        if commit.resets != self._resets or there <= commit.offset:
            return False
        self.reset(there, there)
        return True

    def full(self, limits: Limits) -> str | None:
        """Say why no more is to be fetched now, if so."""
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
        """The memory of what is not finished, and of open deliveries from before a reset."""
        return self.bytes + MESSAGE_OVERHEAD_BYTES * self.buffered + self._orphaned_bytes

    @property
    def empty(self) -> bool:
        """Whether no delivery is open."""
        return not self.open

    @property
    def committable(self) -> int:
        """The first offset that is not finished; everything below it is."""
        return self._taken[0] if self._taken else self._waiting[0].offset if self._waiting else self.next

    @property
    def uncommitted(self) -> int:
        """How many offsets are finished and not known to be committed; 0 if the broker's offset is not known."""
        return 0 if self.committed is None else max(0, self.committable - self.committed)

    @property
    def would_repeat(self) -> bool:
        """Whether the app was given messages that come again if another reader begins at the committed offset."""
        return self.given is not None and (self.committed is None or self.given >= self.committed)

    @property
    def buffered(self) -> int:
        """How many messages are not finished."""
        return len(self._waiting) + len(self._taken) - len(self._done)

    @property
    def last(self) -> int | None:
        """The last offset that was fetched, while anything is not finished."""
        return self._waiting[-1].offset if self._waiting else self._taken[-1] if self._taken else None
