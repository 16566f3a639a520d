"""Offset files of a Broadcasting group on the member's own disk, one for each topic."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from rota.documents import NonNegativeInt
from rota.model import Queue
from rota.ranges import iterate_entries
from rota.sidecar.storage.limited_files import write_file

_log = logging.getLogger(__name__)


class _StoredOffsets(msgspec.Struct):
    group: str
    topic: str
    offsets: dict[str, dict[str, NonNegativeInt]]  # by broker and queue id
    begun: Annotated[float, msgspec.Meta(ge=0, le=2**40)] | None = None  # seconds since 1970


class OffsetFiles:
    """Stores this member's offsets of a Broadcasting group, and each topic's first load time, in one file per topic.

    Only this member uses the folder. Disk access blocks, so call the methods in a thread, one call at a time.
    """

    def __init__(self, folder: Path, group: str) -> None:
        """Reads nothing yet; names of groups and topics contain no slashes or dots, as the spec requires."""
        self._root = folder
        self._folder = folder / group
        self._group = group
        self._stored: dict[str, dict[Queue, int]] = {}
        self._consuming_since: dict[str, float] = {}

    def load(self, topic: str) -> dict[Queue, int]:
        """Return the stored offsets of a topic; rename and log a torn file, raise OSError for an unreadable one.

        An unreadable file must not look like a missing one: that would mean that the topic has no offsets.
        """
        self._stored[topic] = self._read(topic)
        return dict(self._stored[topic])

    def consuming_since(self, topic: str) -> float:
        """Return when a loaded topic was first loaded, in seconds since 1970; stored with the first offset."""
        return self._consuming_since[topic]

    def store_offsets(self, offsets: Mapping[Queue, int]) -> None:
        """Write offsets to the disk, also lower ones; other queues keep theirs.

        If the file of one topic cannot be written, the other topics are still written, and then an OSError is raised.
        """
        failed: list[OSError] = []
        for topic in sorted({queue.topic for queue in offsets}):
            try:
                self._store_topic(topic, {queue: offset for queue, offset in offsets.items() if queue.topic == topic})
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _store_topic(self, topic: str, offsets: Mapping[Queue, int]) -> None:
        stored = self._stored[topic] if topic in self._stored else self.load(topic)
        updated = {**stored, **offsets}
        if updated == stored:
            return
        nested: dict[str, dict[str, int]] = {}
        for queue, offset in sorted(updated.items()):
            nested.setdefault(queue.broker, {})[str(queue.id)] = offset
        write_file(
            self._root, self._path(topic), _StoredOffsets(self._group, topic, nested, self._consuming_since[topic])
        )
        self._stored[topic] = updated

    def _path(self, topic: str) -> Path:
        return self._folder / f"{topic}.json"

    def _read(self, topic: str) -> dict[Queue, int]:
        path = self._path(topic)
        self._consuming_since[topic] = time.time()
        try:
            return self._decode_offsets(topic, path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            aside = path.with_name(f"{path.name}.torn")
            path.replace(aside)
            _log.error("The stored offsets of %s cannot be read; the file was renamed to %s: %s", topic, aside, error)
            return {}

    def _decode_offsets(self, topic: str, text: bytes) -> dict[Queue, int]:
        stored = msgspec.json.decode(text, type=_StoredOffsets)
        if (stored.group, stored.topic) != (self._group, topic):
            raise ValueError(f"they belong to topic {stored.topic} of group {stored.group}")
        offsets = dict(iterate_entries({topic: stored.offsets}))
        self._consuming_since[topic] = stored.begun or self._consuming_since[topic]
        return offsets
