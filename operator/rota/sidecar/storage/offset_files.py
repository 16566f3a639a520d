"""The offsets of a Broadcasting group on the member's own disk: a file for each topic."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from rota.documents import Whole
from rota.model import Queue
from rota.ranges import unnested
from rota.sidecar.storage.limited_files import write_file

_log = logging.getLogger(__name__)


class _Places(msgspec.Struct):
    group: str
    topic: str
    offsets: dict[str, dict[str, Whole]]  # by broker and id
    begun: Annotated[float, msgspec.Meta(ge=0, le=2**40)] | None = None  # seconds since 1970


class Offsets:
    """How far this member is with the queues of a Broadcasting group, and since when, a file for each topic.

    The folder is this member's alone. It waits for the disk, so call it in a thread, one call at a time.
    """

    def __init__(self, folder: Path, group: str) -> None:
        """Read nothing yet; groups and topics have names as the spec allows them, without slashes and dots."""
        self._root = folder
        self._folder = folder / group
        self._group = group
        self._kept: dict[str, dict[Queue, int]] = {}
        self._begun: dict[str, float] = {}

    def load(self, topic: str) -> dict[Queue, int]:
        """Return what was kept of a topic; a torn file is set aside and told, an unreadable one an OSError.

        For who cannot read does not know that there is no offset.
        """
        self._kept[topic] = self._read(topic)
        return dict(self._kept[topic])

    def begun(self, topic: str) -> float:
        """Return when a loaded topic was first loaded, in seconds since 1970; kept with the first offset."""
        return self._begun[topic]

    def keep(self, offsets: Mapping[Queue, int]) -> None:
        """Put offsets on the disk, forward or back; queues that are not named stay.

        What can be written is, also where another topic's file cannot; then an OSError is raised.
        """
        failed: list[OSError] = []
        for topic in sorted({queue.topic for queue in offsets}):
            try:
                self._keep(topic, {queue: offset for queue, offset in offsets.items() if queue.topic == topic})
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _keep(self, topic: str, offsets: Mapping[Queue, int]) -> None:
        before = self._kept[topic] if topic in self._kept else self.load(topic)
        after = {**before, **offsets}
        if after == before:
            return
        nested: dict[str, dict[str, int]] = {}
        for queue, offset in sorted(after.items()):
            nested.setdefault(queue.broker, {})[str(queue.id)] = offset
        write_file(self._root, self._path(topic), _Places(self._group, topic, nested, self._begun[topic]))
        self._kept[topic] = after

    def _path(self, topic: str) -> Path:
        return self._folder / f"{topic}.json"

    def _read(self, topic: str) -> dict[Queue, int]:
        path = self._path(topic)
        self._begun[topic] = time.time()
        try:
            return self._understood(topic, path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            aside = path.with_name(f"{path.name}.torn")
            path.replace(aside)
            _log.error("The offsets of %s cannot be read, and are set aside as %s: %s", topic, aside, error)
            return {}

    def _understood(self, topic: str, text: bytes) -> dict[Queue, int]:
        places = msgspec.json.decode(text, type=_Places)
        if (places.group, places.topic) != (self._group, topic):
            raise ValueError(f"they are those of {places.topic} in group {places.group}")
        offsets = dict(unnested({topic: places.offsets}))
        self._begun[topic] = places.begun or self._begun[topic]
        return offsets
