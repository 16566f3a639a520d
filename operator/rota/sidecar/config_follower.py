"""The mounted ConfigMap, watched and read; what cannot be read is reported as a problem and retried."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from rota.model import Reason
from rota.sidecar.member.member import Member
from rota.sidecar.status.problems import Health
from rota.sidecar.storage.environment import Who
from rota.sidecar.storage.mounted_config import Files, Volume
from rota.sidecar.storage.state_store import Notes
from rota.spec.resolved import Settings, read_settings

RETRY_SECONDS = 2.0  # after a read, or a check of the disk, that failed


class ConfigFollower:
    """Reads assignment and settings, and calls back whenever they may have changed."""

    def __init__(self, who: Who, notes: Notes, health: Health, changed: Callable[[], None]) -> None:
        """Read nothing yet."""
        self._volume, self._notes, self._health, self._changed = Volume(Path(who.documents)), notes, health, changed
        self._retry: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Call back at the start and after each change."""
        async with aclosing(self._volume.changes()) as changes:
            async for _ in changes:
                self._changed()

    def close(self) -> None:
        """Cancel the pending retry."""
        if self._retry:
            self._retry.cancel()

    def read(self) -> Files:
        """Return the files of one generation; without contents, and with a retry, if they cannot be read now."""
        files = self._volume.read()
        if files is None:  # no event tells when that is over
            self.retry()
        return files or Files()

    def settings(self, files: Files) -> Settings | None:
        """Return the settings in the files, None without valid ones."""
        try:
            settings = None if files.settings is None else read_settings(files.settings)
        except ValueError as error:
            self._health.trouble(Reason.SETTINGS_NOT_READ, str(error))
            return None
        self._health.trouble(Reason.SETTINGS_NOT_READ, "")
        return settings

    def check_disk(self) -> bool:
        """Check that the generation of a new assignment could be stored; report it as a problem and retry if not."""
        try:
            self._notes.need_room()
        except OSError as error:
            self.retry(Reason.STATE_NOT_WRITTEN, f"No other document is obeyed, for that cannot be noted: {error}")
            return False
        return True

    def count_start(self, member: Member) -> None:
        """Give the member the number of its process, once that is on the disk; without one, report it as a problem."""
        if not member.incarnation:
            try:
                member.count(self._notes.start(), time.time())
            except OSError as error:
                message = f"The member gets no queues, for the start of its process cannot be noted: {error}"
                self._health.trouble(Reason.STATE_NOT_WRITTEN, message)
                return
        self._health.trouble(Reason.STATE_NOT_WRITTEN, "")

    def retry(self, reason: Reason | None = None, message: str = "") -> None:
        """Call back again soon; report the reason as a problem if there is one."""
        if reason:
            self._health.trouble(reason, message)
        self.close()
        self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._changed)
