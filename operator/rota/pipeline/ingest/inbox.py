"""Which of the journal's hours a lake takes, and when: Spark reads a file once, and the journal's grow for an hour.

So a stream never looks at the journal itself, but at an inbox in the lake. A file whose hour is over is linked into it,
whole, and is replaced there by an empty one when its lines are in the lake: that is how it is known that it was taken.
A link takes no room, and keeps a file that the journal removes meanwhile. Killed at any moment, the inbox tells what to
do: what is not empty goes through the stream, which knows by its checkpoint whether it had it.

A name in it is `EVENT.SIZE.HOUR-<identity>.jsonl`. A file that grew after it was taken (clocks jump) has another size,
and is taken again: what was known of it is told apart line by line. EVENT is the hour itself, unless that is so old
that its copies are forgotten; then it is the newest one taken, and the stream puts the lines aside.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from rota.pipeline.common.paths import ANY_DAY, FILE

HOUR = timedelta(hours=1)
LAST = datetime.max.replace(tzinfo=UTC) - HOUR  # of clocks that jumped; to Python there is no later end
CHUNK = 512 * 2**20  # bytes of lines in one batch, at most, unless one file has more


class Hour(NamedTuple):
    """A file of the journal."""

    hour: str  # 2026-11-21T08
    name: str  # 2026-11-21T08-<identity>.jsonl
    path: Path
    size: int

    @property
    def key(self) -> str:
        """What it is known by when it was taken."""
        return f"{self.size}.{self.name}"


class Inbox:
    """The folder that the stream reads."""

    def __init__(self, folder: Path, journal: Path, lateness: timedelta) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._journal, self._lateness = folder, journal, lateness

    def finish(self) -> None:
        """Note that whatever is there was taken."""
        for path in self._waiting():
            empty = self._folder / f".{path.name}"  # hidden from Spark
            empty.touch()
            empty.replace(path)  # never truncate: it is the journal's own file by another name

    def waits(self) -> bool:
        """Say whether something is there that was perhaps not taken."""
        return any(True for _ in self._waiting())

    def _waiting(self) -> Iterator[Path]:
        return (path for path in self._folder.glob("[!.]*") if path.stat().st_size)

    def fill(self, now: datetime, settle: timedelta | None) -> bool:
        """Take in the oldest hours that are over, as many as make a batch; say whether there were any.

        An hour is over when its file has not grown for `settle` after its end; without it, everything is.
        """
        names = [path.name.partition(".") for path in self._folder.glob("[!.]*")]
        taken, newest, room = {key for _, _, key in names}, max((event for event, _, _ in names), default=""), CHUNK
        for it in sorted(_over(self._journal, now, settle)):
            if it.key not in taken and it.size:
                room -= it.size
                if room < 0 and room + it.size < CHUNK:
                    break
                self._take(it, it.hour if self._is_known(it.hour, newest) else newest)
        return self.waits()

    def _is_known(self, hour: str, newest: str) -> bool:
        """Say whether the stream still remembers an hour's lines."""
        return not newest or _began(hour) > _began(newest) - self._lateness

    def _take(self, it: Hour, event: str) -> None:
        into, part = self._folder / f"{event}.{it.key}", self._folder / ".part"
        part.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # the journal has made room
            try:
                os.link(it.path, part)
            except FileNotFoundError:
                raise
            except OSError:  # another disk, or not ours to link
                shutil.copyfile(it.path, part)
            part.replace(into)


def _over(journal: Path, now: datetime, settle: timedelta | None) -> Iterator[Hour]:
    for path in journal.glob(f"{ANY_DAY}/*.jsonl"):
        found = FILE.fullmatch(f"{path.parent.name}/{path.name}")
        if found:
            with suppress(FileNotFoundError, ValueError):  # the journal has made room; no such day
                told, hour = path.stat(), f"{found[1]}T{found[3]}"
                changed = max(datetime.fromtimestamp(told.st_mtime, UTC), min(_began(hour), LAST) + HOUR)
                if settle is None or changed <= now - settle:
                    yield Hour(hour, f"{found[1]}T{found[2]}", path, told.st_size)


def _began(hour: str) -> datetime:
    return datetime.strptime(hour, "%Y-%m-%dT%H").replace(tzinfo=UTC)
