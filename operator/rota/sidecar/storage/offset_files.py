"""Offset files of a Broadcasting group on the member's own disk, one for each topic."""

import logging
import time
from pathlib import Path
from typing import Annotated

import msgspec

from rota.documents import NonNegativeInt
from rota.model import Queue
from rota.ranges import iterate_entries
from rota.sidecar.storage.limited_files import replace_within_quota

_log = logging.getLogger(__name__)


class _StoredOffsets(msgspec.Struct):
    group: str
    topic: str
    offsets: dict[str, dict[str, NonNegativeInt]]  # by broker and queue id
    # Seconds since 1970. Its name in the file is `begun`, as in the assignment.
    consuming_since: Annotated[float, msgspec.Meta(ge=0, le=2**40)] | None = msgspec.field(name="begun", default=None)


class OffsetFiles:
    """Stores this member's offsets of a Broadcasting group, and since when it consumes each topic.

    Only this member uses the folder. Disk access blocks, so call the methods in a thread, one call at a time.
    """

    def __init__(self, folder: Path, group: str) -> None:
        """Read nothing yet. A group and a topic may name files: the spec allows neither slashes nor dots in them."""
        self._root = folder
        self._folder = folder / group
        self._group = group
        self._stored: dict[str, dict[Queue, int]] = {}  # by topic
        self._consuming_since: dict[str, float] = {}  # by topic
        # Topics whose last write failed, but may have replaced the file all the same: the next write is not skipped.
        self._uncertain_topics: set[str] = set()

    def load(self, topic: str) -> dict[Queue, int]:
        """Read a topic's file and return its offsets; without a file, the topic is consumed from now on.

        A file that cannot be decoded is renamed and logged, and counts as missing. An unreadable file raises OSError:
        as a missing one it would mean that the topic has no offsets.
        """
        offsets, consuming_since = self._read(topic)
        self._stored[topic] = offsets
        self._consuming_since[topic] = consuming_since or time.time()
        return dict(offsets)

    def consuming_since(self, topic: str) -> float:
        """Return since when a loaded topic is consumed, in seconds since 1970; stored with the first offset."""
        return self._consuming_since[topic]

    def store_offset(self, queue: Queue, offset: int) -> None:
        """Write a queue's offset to the disk, also a lower one; other queues of the topic keep theirs."""
        topic = queue.topic
        if topic not in self._stored:
            self.load(topic)
        stored = self._stored[topic]
        updated = {**stored, queue: offset}
        if updated == stored and topic not in self._uncertain_topics:
            return
        nested: dict[str, dict[str, int]] = {}
        for stored_queue, stored_offset in sorted(updated.items()):
            nested.setdefault(stored_queue.broker, {})[str(stored_queue.id)] = stored_offset
        content = _StoredOffsets(self._group, topic, nested, self._consuming_since[topic])
        self._uncertain_topics.add(topic)
        replace_within_quota(self._root, self._path(topic), content)
        self._uncertain_topics.remove(topic)
        self._stored[topic] = updated

    def _path(self, topic: str) -> Path:
        return self._folder / f"{topic}.json"

    def _read(self, topic: str) -> tuple[dict[Queue, int], float | None]:
        """Return a topic's offsets, and since when it is consumed; None without a usable file."""
        path = self._path(topic)
        try:
            return self._decode(topic, path.read_bytes())
        except FileNotFoundError:
            return {}, None
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            aside = path.with_name(f"{path.name}.torn")
            path.replace(aside)
            _log.error("The stored offsets of %s cannot be read; the file was renamed to %s: %s", topic, aside, error)
            return {}, None

    def _decode(self, topic: str, encoded: bytes) -> tuple[dict[Queue, int], float | None]:
        stored = msgspec.json.decode(encoded, type=_StoredOffsets)
        if (stored.group, stored.topic) != (self._group, topic):
            raise ValueError(f"they belong to topic {stored.topic} of group {stored.group}")
        return dict(iterate_entries({topic: stored.offsets})), stored.consuming_since
