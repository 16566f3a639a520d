"""A message, and how much memory it takes."""

from collections.abc import Mapping

import msgspec

from rota.model import RETRY, Queue

MEBIBYTE = 1 << 20
MESSAGE_OVERHEAD_BYTES = 1536  # memory that a message takes besides its body: measured, with ordinary properties
ORDINARY_PROPERTIES = 8  # they are in the overhead
ORDINARY_TEXT_BYTES = 512  # the same: of their names and values
PROPERTY_BYTES = 176  # memory of each further property besides its text: up to 161 were measured
LARGEST_PROPERTIES_BYTES = 6 * MEBIBYTE  # memory of those of a batch and of a message in it, 64 KiB of each
WIDEST_CHARACTER_BYTES = 4  # one character outside the BMP widens all others of its text
LONGEST_ESCAPE = 6  # bytes of JSON or of a header for one character, such as \u0003
TIMES_ENCODED = 2  # a tag, keys or a topic have a field of their own besides


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message as it lies in a queue."""

    queue: Queue  # where it lies; for one that is tried again the group's retry topic
    offset: int
    body: bytes
    properties: Mapping[str, str]
    attempt: int = 0  # how often it was tried before
    born: int = 0  # milliseconds since 1970, by its producer
    stored: int = 0  # the same, by the broker
    place: int = 0  # where the broker keeps it: how it is named when it is given back
    damage: str = ""  # why its body is not what was sent, if that is so
    properties_bytes: int = 0  # memory of its properties beyond ordinary ones: see `properties_bytes_of`

    @property
    def variable_bytes(self) -> int:
        """The memory that the message takes beyond the overhead of every message."""
        return len(self.body) + self.properties_bytes

    @property
    def memory_bytes(self) -> int:
        """The memory that the message takes while a member holds it."""
        return self.variable_bytes + MESSAGE_OVERHEAD_BYTES

    @property
    def encoded_bytes(self) -> int:
        """What the message adds to a request or an answer, at most: its body, and properties beyond ordinary ones."""
        if not self.properties_bytes:
            return len(self.body)
        characters = sum(len(name) + len(value) for name, value in self.properties.items())
        return len(self.body) + LONGEST_ESCAPE * TIMES_ENCODED * characters

    @property
    def topic(self) -> str:
        """The topic that it was sent to."""
        return (self.queue.topic.startswith(RETRY) and self.properties.get("RETRY_TOPIC")) or self.queue.topic

    @property
    def tag(self) -> str:
        """Its tag."""
        return self.properties.get("TAGS", "")

    @property
    def keys(self) -> str:
        """Its keys, separated by blanks."""
        return self.properties.get("KEYS", "")

    @property
    def id(self) -> str:
        """What is unique about it, however often it is tried."""
        return self.properties.get("UNIQ_KEY") or f"{self.queue}@{self.offset}"


def text_bytes(text: str) -> int:
    """Return the memory of a text's characters, at most."""
    return len(text) if text.isascii() else WIDEST_CHARACTER_BYTES * len(text)


def properties_bytes_of(number: int, text_bytes: int) -> int:
    """Return the memory of so many properties with so much text, beyond what is in MESSAGE_OVERHEAD_BYTES."""
    further = max(0, number - ORDINARY_PROPERTIES)
    return further * PROPERTY_BYTES + max(0, text_bytes - ORDINARY_TEXT_BYTES)
