"""Message of a queue, with an estimate of the memory that it takes."""

from collections.abc import Mapping
from itertools import chain

import msgspec

from rota.model import RETRY_TOPIC_PREFIX, Queue

MEBIBYTE = 1 << 20
MESSAGE_OVERHEAD_BYTES = 1536  # memory of a message without its body: measured with ordinary properties
ORDINARY_PROPERTIES = 8  # number of properties that the overhead includes
ORDINARY_TEXT_BYTES = 512  # bytes of property names and values that the overhead includes
PROPERTY_BYTES = 176  # memory of each further property without its text; up to 161 bytes were measured
# Upper limit: memory of the properties of a batch and of one of its messages, if each are 64 KiB of the shortest ones.
MAX_PROPERTIES_BYTES = 6 * MEBIBYTE
MAX_CHARACTER_BYTES = 4  # one character outside the BMP widens every character of its text to 4 bytes
MAX_ESCAPE_BYTES = 6  # bytes of one escaped character in JSON or in a header, such as \u0003
ENCODINGS_PER_PROPERTY = 2  # tag, keys and topic are encoded as properties, and again in fields of their own


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message as it is stored in a queue."""

    queue: Queue  # a redelivered message is stored in the group's retry topic
    offset: int
    body: bytes
    properties: Mapping[str, str]
    reconsume_times: int = 0  # number of earlier delivery attempts
    born_ms: int = 0  # milliseconds since 1970, set by the producer
    stored_ms: int = 0  # milliseconds since 1970, set by the broker
    commit_log_offset: int = 0  # position in the broker's store; identifies the message when it is sent back
    body_error: str = ""  # why the body is not the producer's original; empty if it is
    properties_bytes: int = 0  # memory of its properties beyond ordinary ones: see `properties_bytes_of`

    @property
    def variable_bytes(self) -> int:
        """The memory of the message beyond MESSAGE_OVERHEAD_BYTES: its body, and properties beyond ordinary ones."""
        return len(self.body) + self.properties_bytes

    @property
    def memory_bytes(self) -> int:
        """The memory that the message takes while a member holds it."""
        return self.variable_bytes + MESSAGE_OVERHEAD_BYTES

    @property
    def encoded_bytes(self) -> int:
        """The most bytes that the message adds to a request or response: body, and properties beyond ordinary ones."""
        if not self.properties_bytes:
            return len(self.body)
        characters = sum(map(len, chain(self.properties, self.properties.values())))
        return len(self.body) + MAX_ESCAPE_BYTES * ENCODINGS_PER_PROPERTY * characters

    @property
    def topic(self) -> str:
        """The topic that the producer sent it to; for a redelivered message not the retry topic."""
        stored_topic = self.queue.topic
        if stored_topic.startswith(RETRY_TOPIC_PREFIX):
            return self.properties.get("RETRY_TOPIC") or stored_topic
        return stored_topic

    @property
    def tag(self) -> str:
        """The tag that the producer set; empty if none."""
        return self.properties.get("TAGS", "")

    @property
    def keys(self) -> str:
        """The keys that the producer set, separated by blanks; empty if none."""
        return self.properties.get("KEYS", "")

    @property
    def id(self) -> str:
        """The producer's unique id, the same in every delivery attempt; without one, queue and offset."""
        return self.properties.get("UNIQ_KEY") or f"{self.queue}@{self.offset}"


def text_bytes(text: str) -> int:
    """Return an upper bound of the memory of a text's characters."""
    return len(text) if text.isascii() else MAX_CHARACTER_BYTES * len(text)


def properties_bytes_of(number: int, size: int) -> int:
    """Return the memory of properties beyond the ordinary ones that MESSAGE_OVERHEAD_BYTES includes.

    `number` is that of the properties, `size` the bytes of their names and values (`text_bytes`).
    """
    further = max(0, number - ORDINARY_PROPERTIES)
    return further * PROPERTY_BYTES + max(0, size - ORDINARY_TEXT_BYTES)
