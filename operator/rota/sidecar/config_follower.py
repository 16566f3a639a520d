"""Follower of the mounted ConfigMap: watches and reads it, retries failed reads, and reports invalid settings."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from rota.model import Reason
from rota.sidecar.member.member import Member
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.mounted_config import MountedConfig, MountedFiles
from rota.sidecar.storage.state_store import StateStore
from rota.spec.resolved import GroupSettings, decode_settings

RETRY_SECONDS = 2.0  # after a failed read or disk check, or while a Secret or the incarnation is missing


class ConfigFollower:
    """Reads assignment and settings, and calls back whenever they may have changed."""

    def __init__(
        self, pod: PodIdentity, state_store: StateStore, problems: Problems, on_changed: Callable[[], None]
    ) -> None:
        self._mounted_config = MountedConfig(Path(pod.config_folder))
        self._state_store = state_store
        self._problems = problems
        self._on_changed = on_changed
        self._retry_timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Call back at the start and after each change."""
        async with aclosing(self._mounted_config.changes()) as changes:
            async for _ in changes:
                self._on_changed()

    def close(self) -> None:
        """Cancel the pending retry."""
        self._cancel_retry()

    def _cancel_retry(self) -> None:
        if self._retry_timer:
            self._retry_timer.cancel()

    def read(self) -> MountedFiles | None:
        """Return the files of one generation; None if they cannot be read now: then a retry is scheduled."""
        files = self._mounted_config.read()
        if files is None:  # no inotify event follows when the files become readable
            self.schedule_retry()
        return files

    def parse_settings(self, files: MountedFiles) -> GroupSettings | None:
        """Return the settings in the files; None if they are missing, or invalid and thus reported as a problem."""
        try:
            settings = None if files.settings is None else decode_settings(files.settings)
        except ValueError as error:
            self._problems.set_problem(Reason.UNSUPPORTED_SETTINGS, str(error))
            return None
        self._problems.set_problem(Reason.UNSUPPORTED_SETTINGS, "")
        return settings

    def can_store_state(self) -> bool:
        """Whether a new generation can be stored; if not, the problem is reported and a retry is scheduled."""
        try:
            self._state_store.check_space()
        except OSError as error:
            self.schedule_retry(
                Reason.STATE_WRITE_FAILED,
                f"New assignments are ignored, because the member's state cannot be written: {error}",
            )
            return False
        return True

    def start_incarnation(self, member: Member) -> None:
        """Store the number of this process in the pod once, and give it to the member; report a failed write."""
        if not member.incarnation:
            try:
                member.set_incarnation(self._state_store.store_incarnation(), time.time())
            except OSError as error:
                message = f"The member receives no queues, because its process number cannot be written: {error}"
                self._problems.set_problem(Reason.STATE_WRITE_FAILED, message)
                return
        # A write has just succeeded: the one above or, later, the test file of `can_store_state`.
        self._problems.set_problem(Reason.STATE_WRITE_FAILED, "")

    def schedule_retry(self, reason: Reason | None = None, message: str = "") -> None:
        """Call back after RETRY_SECONDS; report `reason`, if given, as a problem."""
        if reason:
            self._problems.set_problem(reason, message)
        self._cancel_retry()
        self._retry_timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._on_changed)
