"""Messages at the app in Pull delivery: as the app receives them, and while they wait for its answer."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import msgspec

from rota.brokers.message import Message
from rota.sidecar.delivery.scheduler import Batch


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


class MessageIds(msgspec.Struct):
    """The hand-outs that the app acknowledges or rejects."""

    ids: list[str]


class OpenMessage(NamedTuple):
    """A message at the app, and since when."""

    batch: Batch
    message: Message
    handed_out_at: float

    @property
    def is_open(self) -> bool:
        """Whether the app still has it: an aborted queue takes its messages back."""
        return self.message.offset in self.batch.delivery.unsettled
