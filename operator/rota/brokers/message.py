"""Message of a queue, with estimates of its size in memory and in responses.

The sidecar's memory budget limits pulls by these estimates, and its pull API limits the responses to the app.

A message is *ordinary* if it has at most ORDINARY_PROPERTIES properties of at most ORDINARY_TEXT_BYTES together.
"""

from collections.abc import Mapping
from itertools import chain

import msgspec

from rota.model import RETRY_TOPIC_PREFIX, Queue

MEBIBYTE = 1 << 20
MESSAGE_OVERHEAD_BYTES = 1536  # memory of an ordinary message without its body, as measured
ORDINARY_PROPERTIES = 8
ORDINARY_TEXT_BYTES = 512  # bytes of the names and values of properties
PROPERTY_BYTES = 176  # memory of each further property without its text; up to 161 bytes were measured
# Upper limit of `Message.properties_bytes`. A message has at most 64 KiB of properties of its own, and in a batch as
# much again from the batch. They take most memory if each property is as short as possible.
MAX_PROPERTIES_BYTES = 6 * MEBIBYTE
MAX_CHARACTER_BYTES = 4  # CPython stores each character of a text in 4 bytes if one of them is outside the BMP
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
    properties_bytes: int = 0  # memory of its properties beyond those of an ordinary message: `extra_properties_bytes`

    @property
    def variable_bytes(self) -> int:
        """The memory of the message without MESSAGE_OVERHEAD_BYTES, which the sidecar counts by number of messages."""
        return len(self.body) + self.properties_bytes

    @property
    def memory_bytes(self) -> int:
        """The memory that the message takes while a member holds it."""
        return self.variable_bytes + MESSAGE_OVERHEAD_BYTES

    @property
    def encoded_bytes(self) -> int:
        """An estimate of the bytes that the message adds to a request or response.

        The properties of an ordinary message are not counted. Those of any other are, all of them: encoded twice, with
        each character escaped.
        """
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


def extra_properties_bytes(count: int, size_bytes: int) -> int:
    """Return the memory of properties beyond those of an ordinary message, which MESSAGE_OVERHEAD_BYTES includes.

    `count` is the number of the properties, `size_bytes` the memory of their names and values (`text_bytes`).
    """
    extra_count = max(0, count - ORDINARY_PROPERTIES)
    extra_text_bytes = max(0, size_bytes - ORDINARY_TEXT_BYTES)
    return extra_count * PROPERTY_BYTES + extra_text_bytes
