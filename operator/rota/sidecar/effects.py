"""What the member decides, carried out in its order.

What must be remembered is on the disk before anything else of a step is done or told. While it cannot be put there,
the step waits, every later one behind it, and the report stays as it was: after a restart nobody would know of it.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from rota.model import Reason
from rota.reports import Report
from rota.sidecar.member.member import Step
from rota.sidecar.member.queue_lifecycle import Command
from rota.sidecar.status.problems import Health
from rota.sidecar.storage.state_store import Notes

KEEP_AGAIN = 1.0  # before the disk is tried again


class Steps:
    """Steps that wait for the disk, and what is told of those that do not any more."""

    def __init__(
        self,
        notes: Notes,
        health: Health,
        report: Callable[[], Report],
        obey: Callable[[Command], None],
        done: Callable[[], None],
    ) -> None:
        """Have commands obeyed, and say when nothing waits."""
        self._notes, self._health, self._report, self._obey, self._done = notes, health, report, obey, done
        self._waiting: deque[Step] = deque()
        self._again: asyncio.TimerHandle | None = None
        self._ends = self._untold = self._has_failed = False
        self._told = report()

    @property
    def told(self) -> Report:
        """What may be told: what is so, or, while a step waits for the disk, what was so before it was decided."""
        if not (self._waiting or self._untold):
            self._told = self._report()
        return self._told

    def hold(self) -> None:
        """Before anything is decided that must be remembered: this is what is told while that waits."""
        self._told = self.told

    @property
    def waiting(self) -> bool:
        """Whether the disk holds something up."""
        return bool(self._waiting)

    def take(self, step: Step) -> None:
        """Carry a step out once those before it were."""
        self._waiting.append(step)
        if self._again is None:
            self._go_on()

    def end(self) -> None:
        """Wait for no disk any more: everything is given up, and what could not be noted is told to nobody."""
        self._ends = True

    def _go_on(self) -> None:
        self._again = None
        while self._waiting:
            step = self._waiting[0]
            try:
                self._keep(step)
            except OSError as error:
                self._has_failed = True
                told = "the final drain waits" if step.remember is None else f"generation {step.remember} is not obeyed"
                self._health.trouble(
                    Reason.STATE_NOT_WRITTEN, f"The member's state cannot be written, so {told}: {error}"
                )
                if not self._ends:
                    self._again = asyncio.get_running_loop().call_later(KEEP_AGAIN, self._go_on)
                    return
                self._untold = True
            self._waiting.popleft()
            for command in step.commands:
                self._obey(command)
        self._done()

    def _keep(self, step: Step) -> None:
        if step.remember is not None or step.remember_final:
            self._notes.keep(obeyed=step.remember, final=step.remember_final)
            if self._has_failed:  # there may be another reason for that problem
                self._has_failed = False
                self._health.trouble(Reason.STATE_NOT_WRITTEN, "")
