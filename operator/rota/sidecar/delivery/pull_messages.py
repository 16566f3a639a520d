"""Tracks messages that the app has pulled: each is open until the app answers or visibilityTimeout is over.

Each time that a message is given to the app (a *hand-out*), it gets a new ID, unique among all sidecars. So an ack or
nack that comes too late, or reaches another process, names an unknown ID and changes nothing.

No task or timer is created for a single message. Open messages are kept in the order in which they were handed out, so
overdue messages come first.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import NamedTuple, Self

import msgspec

from rota.brokers.message import Message
from rota.deliveries import AppResponse, DeliveryOutcome
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery.scheduler import Batch
from rota.sidecar.delivery.settlement import DeliveryHost, Settlement, partition
from rota.sidecar.member.window import OpenDelivery
from rota.sidecar.status.sidecar_metrics import topic_label

MAX_CONCURRENT_SEND_BACKS = 32  # messages that end together are sent back to their brokers in groups of this size
MIN_SWEEP_SECONDS = 0.05  # seconds between two sweeps for overdue messages
STALL_SECONDS = 0.5  # a sweep that runs later than this shows that the process stood still

# Outcomes of attempts that are retried, by label. The labels of metrics and spans are these, done, dead, and cut (a
# message of a queue that this member loses). Users' dashboards name them, so they stay.
_DELIVERY_OUTCOMES = {"later": DeliveryOutcome.NACK, "expired": DeliveryOutcome.TIMEOUT}


class AppMessage(msgspec.Struct, omit_defaults=True):
    """A message as the app receives it."""

    id: str
    topic: str
    broker: str
    queue: int
    offset: int
    attempt: int
    tag: str
    keys: str
    properties: Mapping[str, str]
    body: bytes = msgspec.field(name="bodyBase64")
    damage: str = ""  # why the body differs from the producer's, if it does

    @classmethod
    def from_message(cls, handout_id: str, msg: Message, attempt: int) -> Self:
        """Return a message with the ID of this hand-out."""
        properties = dict(msg.properties)  # a message of a batch has a view, which cannot be encoded
        position = (msg.topic, msg.queue.broker, msg.queue.id, msg.offset)
        return cls(handout_id, *position, attempt, msg.tag, msg.keys, properties, msg.body, msg.body_error)


class OpenMessage(NamedTuple):
    """A message at the app, and since when."""

    batch: Batch
    message: Message
    handed_out_at: float

    @classmethod
    def all_of(cls, batch: Batch) -> list[Self]:
        """Return all open messages of a delivery; the delivery's start counts as the time of their hand-out."""
        return [cls(batch, message, batch.delivery.started_at) for message in batch.delivery.messages]

    @property
    def is_open(self) -> bool:
        """Whether the message is neither finished nor returned to its window, as messages of an aborted queue are."""
        return self.message.offset in self.batch.delivery.unsettled

    @property
    def key(self) -> tuple[OpenDelivery, int]:
        """The message's delivery and offset, which no other open message has."""
        return self.batch.delivery, self.message.offset


_CountedTogether = list[OpenMessage]  # of one delivery and topic; the messages of a delivery are handed out together


def _split_for_counting(entries: Iterable[OpenMessage]) -> list[_CountedTogether]:
    """Split messages by delivery, because times are counted for each, and by topic, which metrics have as a label."""
    parts: dict[tuple[OpenDelivery, str], _CountedTogether] = {}
    for entry in entries:
        parts.setdefault((entry.batch.delivery, entry.message.topic), []).append(entry)
    return [*parts.values()]


class HandoutTracker:
    """Tracks the messages at the app by the ID of their hand-out, and settles them."""

    def __init__(self, host: DeliveryHost, settlement: Settlement, offer: Callable[[QueueReader], None]) -> None:
        """`offer` is called for queues whose messages were settled or returned."""
        self.visibility_timeout = 0.0  # how long a message may be open, in seconds; 0: no settings were applied yet
        self._host = host
        self._settlement = settlement
        self._offer = offer
        self._open_messages: dict[str, OpenMessage] = {}  # at the app: by ID, in the order of `handed_out_at`
        # Keys of rejected and expired messages: already counted as ended, but not yet sent back to the broker.
        self._being_sent_back: set[tuple[OpenDelivery, int]] = set()
        process_id = secrets.token_hex(6)
        self._handout_ids = (f"{process_id}-{number}" for number in count(1))
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        """Stop the sweeps for overdue messages."""
        self._closed = True
        if self._sweep_timer:
            self._sweep_timer.cancel()

    def set_visibility_timeout(self, seconds: float) -> None:
        """Apply a timeout, also to open messages."""
        if seconds != self.visibility_timeout:
            self.visibility_timeout = seconds
            self._sweep()

    def hand_out(self, batches: Iterable[Batch]) -> bytes:
        """Return the response's body for the app; its messages are open from now on."""
        now = self._host.now()
        handed_out: list[AppMessage] = []
        redelivered = 0
        for batch in batches:
            for message in batch.delivery.messages:
                handout_id = next(self._handout_ids)
                attempt = batch.window.attempt_number(message)
                self._open_messages[handout_id] = OpenMessage(batch, message, now)
                handed_out.append(AppMessage.from_message(handout_id, message, attempt))
                redelivered += attempt > 1
        if handed_out:
            self._schedule_sweep(now + self.visibility_timeout)
        if redelivered:
            self._host.metrics.redelivered.inc(redelivered)
        return msgspec.json.encode({"messages": handed_out})

    def claim(self, handout_ids: Iterable[str]) -> tuple[list[OpenMessage], list[str]]:
        """Forget hand-outs; return their open messages, which the caller settles, and the IDs with no open message."""
        entries: list[OpenMessage] = []
        unknown: list[str] = []
        for handout_id in handout_ids:
            entry = self._open_messages.pop(handout_id, None)
            if entry and entry.is_open:
                entries.append(entry)
            else:
                unknown.append(handout_id)
        return entries, unknown

    def ack(self, entries: Sequence[OpenMessage]) -> None:
        """Finish messages."""
        parts = _split_for_counting(entries)
        self._count_outcomes(parts, DeliveryOutcome.DONE)
        for entry in entries:
            self._settlement.ack(entry.batch, entry.message)
        self._on_ended(parts, "done")

    def nack(self, entries: Sequence[OpenMessage]) -> None:
        """Retry messages that the app rejects."""
        self._retry(entries, "later")

    def _retry(self, entries: Iterable[OpenMessage], outcome: str) -> None:
        """Send messages back for another attempt, in a task: the app does not wait for the broker.

        Messages whose queue was reassigned during a stall are not sent back: the queue's next owner has them.
        """
        to_send_back, reassigned = partition(entries, self._may_send)
        self._cut(reassigned)
        self._count_outcomes(_split_for_counting(to_send_back), _DELIVERY_OUTCOMES[outcome])
        exhausted, retried = partition(to_send_back, self._is_last_attempt)
        self._on_ended(_split_for_counting(retried), outcome)
        self._on_ended(_split_for_counting(exhausted), "dead")
        if to_send_back:
            self._being_sent_back.update(entry.key for entry in to_send_back)
            self._host.start_task(self._send_back(to_send_back))

    def _may_send(self, entry: OpenMessage) -> bool:
        return self._host.may_send(entry.batch.queue, entry.handed_out_at)

    def _is_last_attempt(self, entry: OpenMessage) -> bool:
        return self._settlement.is_last_attempt(entry.batch, entry.message)

    async def _send_back(self, entries: Sequence[OpenMessage]) -> None:
        try:
            for first in range(0, len(entries), MAX_CONCURRENT_SEND_BACKS):
                chunk = entries[first : first + MAX_CONCURRENT_SEND_BACKS]
                group = [entry for entry in chunk if entry.is_open]  # their queue may have been aborted meanwhile
                await asyncio.gather(*(self._settlement.retry(entry.batch, entry.message) for entry in group))
                self._wake_readers(group)
        finally:
            self._being_sent_back.difference_update(entry.key for entry in entries)

    def abort(self, reader: QueueReader) -> None:
        """Return a queue's open messages to its window now, also those that wait to be sent back to the broker."""
        entries: list[OpenMessage] = []
        for delivery in reader.window.open_deliveries:
            entries += OpenMessage.all_of(Batch(reader.queue, reader.window, delivery))
        being_sent_back, at_app = partition(entries, self._is_being_sent_back)
        self._return_to_windows(being_sent_back)  # already counted as ended
        self._cut(at_app)

    def take_back(self, batches: Iterable[Batch]) -> None:
        """Return the messages of deliveries that did not reach the app to their windows.

        Messages that expired during the response are left out, since they are being sent back to their brokers.
        """
        entries: list[OpenMessage] = []
        for batch in batches:
            entries += [entry for entry in OpenMessage.all_of(batch) if not self._is_being_sent_back(entry)]
        self._return_to_windows(entries)
        self._wake_readers(entries)

    def _is_being_sent_back(self, entry: OpenMessage) -> bool:
        return entry.key in self._being_sent_back

    def _cut(self, entries: Sequence[OpenMessage]) -> None:
        """Return messages whose queue this member loses, or has lost, to their windows; no attempt is counted."""
        self._return_to_windows(entries)
        self._on_ended(_split_for_counting(entries), "cut")

    def _return_to_windows(self, entries: Iterable[OpenMessage]) -> None:
        for entry in entries:
            self._settlement.return_messages(entry.batch, [entry.message])
        # Drop these entries now, not only when the app names their IDs: their bodies would stay in memory until then.
        self._open_messages = {name: entry for name, entry in self._open_messages.items() if entry.is_open}

    def _count_outcomes(self, parts: Sequence[_CountedTogether], outcome: DeliveryOutcome) -> None:
        """Count each message's outcome; call this before the message is settled, which changes its attempt number."""
        now = self._host.now()
        counts = self._host.delivery_counts
        topics = self._host.settings.topics
        for part in parts:
            first = part[0]
            attempts = [(entry.message, entry.batch.window.attempt_number(entry.message)) for entry in part]
            counts.count(first.batch.queue, attempts, AppResponse(outcome), now)
            counts.count_time(topic_label(first.message, topics), now - first.handed_out_at, len(part))

    def _on_ended(self, parts: Sequence[_CountedTogether], outcome: str) -> None:
        """Count ended messages, and wake their readers."""
        now = self._host.now()
        for part in parts:
            messages = [entry.message for entry in part]
            seconds = now - part[0].handed_out_at
            self._host.metrics.observe_delivery(seconds, messages)
            self._host.on_delivery_ended(messages, outcome, seconds)
        self._wake_readers(chain.from_iterable(parts))

    def _wake_readers(self, entries: Iterable[OpenMessage]) -> None:
        """Wake the readers that wait for room or for the end of a drain, and offer returned messages again."""
        now = self._host.now()
        for queue in dict.fromkeys([entry.batch.queue for entry in entries]):
            if reader := self._host.reader_of(queue):
                reader.delivered_at = now
                reader.on_change()
                self._offer(reader)

    # Sweeps for overdue messages.

    def _schedule_sweep(self, when: float) -> None:
        if self._sweep_timer is None and not self._closed:
            now = self._host.now()
            self._call_sweep(now, max(now + MIN_SWEEP_SECONDS, when))

    def _call_sweep(self, now: float, due: float) -> None:
        self._sweep_timer = asyncio.get_running_loop().call_later(due - now, self._on_sweep_due, due)

    def _on_sweep_due(self, due: float) -> None:
        """Sweep; after a stall of the process, first read the acks that arrived meanwhile."""
        now = self._host.now()
        if now - due < STALL_SECONDS:
            self._sweep()
        else:
            self._call_sweep(now, now + MIN_SWEEP_SECONDS)

    def _sweep(self) -> None:
        """Send overdue messages back, and schedule the sweep for the next one."""
        if self._sweep_timer:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        handed_out_until = self._host.now() - self.visibility_timeout
        overdue_ids: list[str] = []
        for handout_id, entry in self._open_messages.items():
            if entry.handed_out_at > handed_out_until:
                break
            overdue_ids.append(handout_id)
        overdue, _ = self.claim(overdue_ids)
        self._retry(overdue, "expired")
        oldest = next(iter(self._open_messages.values()), None)
        if oldest:
            self._schedule_sweep(oldest.handed_out_at + self.visibility_timeout)
