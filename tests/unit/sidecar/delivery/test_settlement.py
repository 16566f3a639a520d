"""How deliveries of a message end, and what a returned batch means for its messages."""

from dataclasses import dataclass, field
from itertools import count

from builders import a_spec
from rota.brokers.errors import BrokerError
from rota.brokers.message import Message
from rota.brokers.port import PullResult
from rota.model import Queue
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery.scheduler import Batch
from rota.sidecar.delivery.settlement import Settlement, _rejection_message
from rota.sidecar.member.window import QueueWindow
from rota.sidecar.status.delivery_counts import DeliveryCounts
from rota.sidecar.status.problems import Problems
from rota.spec.resolved import GroupSettings, decode_settings, encode_settings

Q = Queue("orders", "broker-a", 3)


@dataclass
class AMember:
    """The part of a member that Settlement needs; its clock advances at each reading."""

    problems: Problems
    settings: GroupSettings
    delivery_counts: DeliveryCounts = field(default_factory=lambda: DeliveryCounts(0.0))
    clock = count(1)

    def now(self) -> float:
        return float(next(self.clock))

    def reader_of(self, _: Queue) -> QueueReader | None:
        return None

    def offer(self, _: QueueReader) -> None:
        pass


def a_batch(window: QueueWindow) -> Batch:
    delivery = window.start_delivery(1, now=1e9)
    assert delivery
    return Batch(Q, window, delivery)


def test_push_repeats_undelivered_messages_from_the_lowest_offset() -> None:
    member = AMember(Problems(), decode_settings(encode_settings("shop", a_spec(), 30.0, None)))
    settlement = Settlement(member)
    window = QueueWindow(next_offset=0, orderly=False, committed_offset=0)
    window.add_pull(0, PullResult(tuple(Message(Q, offset, b"", {}) for offset in (0, 1, 2)), 3, 0, 3))
    for batch in [a_batch(window) for _ in range(3)]:
        settlement.return_messages(batch, batch.delivery.messages)
    for _ in range(3):
        batch = a_batch(window)
        assert [message.offset for message in batch.delivery.messages] == [0]
        settlement.return_messages(batch, batch.delivery.messages)


def test_retry_rejection_names_the_message_in_at_most_100_characters() -> None:
    message = Message(Q, 7, b"", {"UNIQ_KEY": "k\n" * 15_000})
    message_text = _rejection_message(message, BrokerError("it is full"))
    assert message_text.startswith(f"The broker rejects message {'k ' * 50}… (offset 7 of ")
