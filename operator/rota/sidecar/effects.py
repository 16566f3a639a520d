"""Executor of the member's steps, in order.

The state that a step must remember is on the disk before its commands run and before a report shows the step. While
the disk fails, this step and all later ones wait, and the report stays as it was: a restart would forget the step.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable

from rota.model import Reason
from rota.reports import Report
from rota.sidecar.member.member import Step
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.state_store import StateStore

KEEP_AGAIN = 1.0  # seconds before a failed write is retried

_log = logging.getLogger(__name__)


class EffectRunner:
    """Queue of steps that wait for the disk, and the report that may be published meanwhile."""

    def __init__(
        self,
        notes: StateStore,
        health: Problems,
        report: Callable[[], Report],
        obey: Callable[[Command], None],
        done: Callable[[], None],
    ) -> None:
        """`obey` starts a command; `done` is called when no step waits any more."""
        self._notes, self._health, self._report, self._obey, self._done = notes, health, report, obey, done
        self._waiting: deque[Step] = deque()
        self._again: asyncio.TimerHandle | None = None
        self._ends = self._untold = self._has_failed = False
        self._told = report()

    @property
    def told(self) -> Report:
        """The report to publish: the current one or, while a step waits for the disk, the one from before that step."""
        if not (self._waiting or self._untold):
            self._told = self._report()
        return self._told

    def hold(self) -> None:
        """Fix the report to publish while the next step waits; call this before a decision that must be stored."""
        self._told = self.told

    @property
    def waiting(self) -> bool:
        """Whether a step waits for the disk."""
        return bool(self._waiting)

    def take(self, step: Step) -> None:
        """Execute a step after all earlier ones."""
        self._waiting.append(step)
        if self._again is None:
            self._go_on()

    def end(self) -> None:
        """Stop waiting for the disk: the member drains now, and a step that could not be stored is never reported."""
        self._ends = True

    def _go_on(self) -> None:
        self._again = None
        while self._waiting:
            step = self._waiting[0]
            try:
                self._keep(step)
            except OSError as error:
                self._has_failed = True
                text = "the final drain waits" if step.remember is None else f"generation {step.remember} is not obeyed"
                self._health.trouble(
                    Reason.STATE_NOT_WRITTEN, f"The member's state cannot be written, so {text}: {error}"
                )
                if not self._ends:
                    self._again = asyncio.get_running_loop().call_later(KEEP_AGAIN, self._go_on)
                    return
                self._untold = True
            self._waiting.popleft()
            _log_step(step)
            for command in step.commands:
                self._obey(command)
        self._done()

    def _keep(self, step: Step) -> None:
        if step.remember is not None or step.remember_final:
            self._notes.keep(obeyed=step.remember, final=step.remember_final)
            if self._has_failed:  # clear only this class's own report of the problem
                self._has_failed = False
                self._health.trouble(Reason.STATE_NOT_WRITTEN, "")


def _log_step(step: Step) -> None:
    """Log a newly obeyed generation, and the start of the final drain."""
    actions = Counter(command.act for command in step.commands)
    stopping = actions[LeaseAction.STOP]
    if step.remember is not None:
        starting = actions[LeaseAction.LOCK] + actions[LeaseAction.PLACE]
        text = "A new assignment is obeyed: %d queues start, %d queues are released"
        _log.info(text, starting, stopping, extra={"generation": step.remember})
    elif step.remember_final:
        _log.info("The final drain starts: %d queues are released", stopping)
