"""Messages at the app in Pull delivery: each end is counted once, also if the queue is aborted or the app is slow."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from builders import a_spec
from rota.brokers.message import Message
from rota.brokers.port import PullResult
from rota.model import Queue
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery.pull_messages import HandoutTracker
from rota.sidecar.delivery.scheduler import Batch
from rota.sidecar.delivery.settlement import DeliveryHost, Settlement
from rota.sidecar.member.window import QueueWindow
from rota.sidecar.status.delivery_counts import DeliveryCounts
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import SidecarMetrics
from rota.spec.resolved import GroupSettings, decode_settings, encode_settings

Q = Queue("orders", "broker-a", 3)


@dataclass
class AReader:
    """A queue's reader, whose broker takes messages back once `may_take_back` is set."""

    queue: Queue
    window: QueueWindow
    may_take_back: asyncio.Event = field(default_factory=asyncio.Event)
    sent_back: list[int] = field(default_factory=list)
    delivered_at: float = 0.0

    @property
    def session(self) -> "AReader":
        return self

    @property
    def consumer(self) -> "AReader":
        return self

    async def send_back(self, message: Message, **_: Any) -> None:
        await self.may_take_back.wait()
        self.sent_back.append(message.offset)

    def on_change(self) -> None:
        pass


@dataclass
class AHost:
    """The part of a member that the tracker needs."""

    reader: AReader
    problems: Problems = field(default_factory=Problems)
    settings: GroupSettings = field(
        default_factory=lambda: decode_settings(encode_settings("shop", a_spec(), 30.0, None))
    )
    delivery_counts: DeliveryCounts = field(default_factory=lambda: DeliveryCounts(0.0))
    metrics: SidecarMetrics = field(default_factory=lambda: SidecarMetrics(lambda: None))
    ended: list[tuple[str, list[int]]] = field(default_factory=list)
    tasks: list[asyncio.Task[object]] = field(default_factory=list)
    clock: float = 100.0

    def now(self) -> float:
        return self.clock

    def reader_of(self, _: Queue) -> AReader:
        return self.reader

    def may_send(self, _: Queue, __: float) -> bool:
        return True

    def start_task(self, work: Coroutine[None, None, object]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def on_delivery_ended(self, messages: Sequence[Message], outcome: str, _: float) -> None:
        self.ended.append((outcome, [message.offset for message in messages]))


def a_host(offsets: int) -> AHost:
    window = QueueWindow(next_offset=0)
    window.reset(0, 0)
    window.add_pull(0, PullResult(tuple(Message(Q, offset, b"", {}) for offset in range(offsets)), offsets, 0, offsets))
    return AHost(AReader(Q, window))


def a_tracker(host: AHost) -> HandoutTracker:
    delivery_host = cast(DeliveryHost, host)
    tracker = HandoutTracker(delivery_host, Settlement(delivery_host), lambda _: None)
    tracker.set_visibility_timeout(30.0)
    return tracker


def take_batch(host: AHost, max_messages: int) -> Batch:
    delivery = host.reader.window.start_delivery(max_messages, host.clock)
    assert delivery
    return Batch(Q, host.reader.window, delivery)


def ids_of(response: bytes) -> list[str]:
    return [message["id"] for message in msgspec.json.decode(response)["messages"]]


async def test_pull_counts_a_rejected_message_once_if_its_queue_is_aborted_before_the_broker_has_it() -> None:
    host = a_host(2)
    tracker = a_tracker(host)
    rejected_id, _ = ids_of(tracker.hand_out([take_batch(host, 2)]))
    rejected, unknown = tracker.claim([rejected_id])
    tracker.nack(rejected)
    tracker.abort(cast(QueueReader, host.reader))
    assert (unknown, host.ended) == ([], [("later", [0]), ("cut", [1])])
    assert host.reader.window.is_idle
    await asyncio.gather(*host.tasks)
    assert host.reader.sent_back == [], "the next owner of the queue has the message"
    tracker.close()


async def test_pull_counts_a_message_that_was_not_sent_back_before_an_abort_again_at_its_next_delivery() -> None:
    host = a_host(1)
    tracker = a_tracker(host)
    rejected, _ = tracker.claim(ids_of(tracker.hand_out([take_batch(host, 1)])))
    tracker.nack(rejected)
    tracker.abort(cast(QueueReader, host.reader))
    tracker.hand_out([take_batch(host, 1)])
    tracker.abort(cast(QueueReader, host.reader))
    assert host.ended == [("later", [0]), ("cut", [0])]
    await asyncio.gather(*host.tasks)
    tracker.close()


async def test_pull_message_that_expires_while_its_response_is_written_is_only_sent_back() -> None:
    host = a_host(2)
    tracker = a_tracker(host)
    batch = take_batch(host, 1)
    tracker.hand_out([batch])
    host.clock += 31.0
    not_expired = take_batch(host, 1)
    tracker.hand_out([not_expired])
    tracker.set_visibility_timeout(30.5)  # this looks for expired messages
    await asyncio.sleep(0)
    tracker.take_back([batch, not_expired])
    assert host.reader.window.in_flight == 1
    host.reader.may_take_back.set()
    await asyncio.gather(*host.tasks)
    assert host.reader.sent_back == [0]
    again = take_batch(host, 2)
    assert [message.offset for message in again.delivery.messages] == [1]
    assert host.ended == [("expired", [0])]
    tracker.close()
