"""Carries out what the member has decided (`Effects`): state to store, then commands that start and stop queues.

State is stored first; only then do the commands run, and only then does a report show the result. While the disk fails,
these effects and all later ones wait, and the published report does not change: a restart would forget decisions that
are not on the disk.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable

from rota.model import Reason
from rota.reports import Report
from rota.sidecar.member.member import Effects
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.state_store import StateStore

RETRY_SECONDS = 1.0  # seconds before a failed write is retried

_log = logging.getLogger(__name__)


class EffectRunner:
    """Queue of effects that wait for the disk, and the report that may be published meanwhile."""

    def __init__(
        self,
        state_store: StateStore,
        problems: Problems,
        get_report: Callable[[], Report],
        run_command: Callable[[Command], None],
        on_done: Callable[[], None],
    ) -> None:
        """`run_command` starts a command; `on_done` is called when no effects wait any more."""
        self._state_store = state_store
        self._problems = problems
        self._get_report = get_report
        self._run_command = run_command
        self._on_done = on_done
        self._pending: deque[Effects] = deque()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._skips_failed_writes = False  # the pod ends: commands run even if their state cannot be stored
        # Whether commands were run although their state could not be stored: then the report is not renewed any more.
        self._has_run_unstored = False
        # Whether this class has set the problem STATE_WRITE_FAILED: ConfigFollower may set it, too, and clears its own.
        self._has_reported_problem = False
        self._published_report = get_report()

    @property
    def published_report(self) -> Report:
        """The report to publish: the current one or, while effects wait for the disk, the one from before them."""
        self.snapshot_report()
        return self._published_report

    def snapshot_report(self) -> None:
        """Keep the present report, to publish it until the effects of the next decision are stored.

        Call this before each decision that must be stored. While effects wait for the disk, it changes nothing.
        """
        if not (self._pending or self._has_run_unstored):
            self._published_report = self._get_report()

    @property
    def is_waiting(self) -> bool:
        """Whether effects wait for the disk."""
        return bool(self._pending)

    def submit_effects(self, effects: Effects) -> None:
        """Execute effects after all earlier ones."""
        self._pending.append(effects)
        if self._retry_timer is None:
            self._run_pending()

    def skip_failed_writes(self) -> None:
        """From now on run commands even if their state cannot be stored: the pod ends. Reports do not show them."""
        self._skips_failed_writes = True

    def _run_pending(self) -> None:
        self._retry_timer = None
        while self._pending:
            effects = self._pending[0]
            try:
                self._store_state(effects)
            except OSError as error:
                self._has_reported_problem = True
                consequence = self._describe_consequence(effects)
                message = f"The member's state cannot be written{consequence}: {error}"
                self._problems.set_problem(Reason.STATE_WRITE_FAILED, message)
                if not self._skips_failed_writes:
                    self._retry_timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._run_pending)
                    return
                self._has_run_unstored = True
            self._pending.popleft()
            _log_effects(effects)
            for command in effects.commands:
                self._run_command(command)
        self._on_done()

    def _describe_consequence(self, effects: Effects) -> str:
        """Return what a failed write means for the effects, as the continuation of a sentence."""
        if self._skips_failed_writes:
            return "; its process ends, so it releases its queues all the same"
        if effects.store_generation is None:
            return ", so the final drain is postponed"
        return f", so generation {effects.store_generation} is not applied yet"

    def _store_state(self, effects: Effects) -> None:
        if effects.store_generation is not None or effects.store_final:
            self._state_store.store_state(obeyed_generation=effects.store_generation, final=effects.store_final)
            if self._has_reported_problem:
                self._has_reported_problem = False
                self._problems.set_problem(Reason.STATE_WRITE_FAILED, "")


def _log_effects(effects: Effects) -> None:
    """Log a newly obeyed generation, and the start of the final drain."""
    actions = Counter(command.action for command in effects.commands)
    stopping = actions[LeaseAction.STOP]
    if effects.store_generation is not None:
        starting = actions[LeaseAction.LOCK] + actions[LeaseAction.FIND_START]  # Orderly queues start with LOCK
        text = "A new assignment is in force: %d queues start, %d queues are released"
        _log.info(text, starting, stopping, extra={"generation": effects.store_generation})
    elif effects.store_final:
        _log.info("The final drain starts: %d queues are released", stopping)
