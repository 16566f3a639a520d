"""Availability of the app for pushed messages: it is away while no process listens, or while its path answers 404.

Any other outcome of a delivery shows that it is back. While it is away, the caller (`push`) tries one delivery at a
time, after each pause (`is_try_due`).
"""

import asyncio
from collections.abc import Callable

from rota.deliveries import DeliveryOutcome
from rota.model import Reason
from rota.sidecar.delivery.settlement import DeliveryHost

# The pause before the next try is the time for which the app has been away, divided by this: an app that restarts in a
# second is found within 0.1 s, one that stays away is tried rarely.
_PAUSE_DIVISOR = 8
# The shortest and the longest pause, in seconds.
_PAUSES_SECONDS = {
    DeliveryOutcome.REFUSED: (0.05, 1.0),
    DeliveryOutcome.NOT_FOUND: (1.0, 10.0),  # a user must correct the path, and each try is a request to the app
}


class AppAvailability:
    """Tracks whether the app is away, and reports why."""

    def __init__(self, host: DeliveryHost, on_try_due: Callable[[], None]) -> None:
        """`on_try_due` is called after each pause."""
        self.is_away = False
        self._host = host
        self._on_try_due = on_try_due
        self._last_outcome_at = 0.0
        self._away_since = 0.0
        self._is_problem_reported = False
        self._retry_at = 0.0  # no delivery is tried before this while the app is away

    def is_try_due(self, now: float) -> bool:
        """Whether the pause is over."""
        return now >= self._retry_at

    def clear_problems(self) -> None:
        """Clear the problems: nothing is pushed any more."""
        self._report_problem(DeliveryOutcome.DONE)  # an outcome without a problem

    def track(self, outcome: DeliveryOutcome) -> None:
        """Track the outcome of a delivery, and schedule the next try if the app is away."""
        now = self._host.now()
        self._report_problem(outcome)
        if self.is_away:  # the app was away from the last outcome until now
            self._host.metrics.paused.inc(now - self._last_outcome_at)
        self._last_outcome_at = now
        pauses = _PAUSES_SECONDS.get(outcome)
        if pauses is None:
            self.is_away = False
            return
        if not self.is_away:
            self.is_away = True
            self._away_since = now
            self._retry_at = 0.0
        if now >= self._retry_at:  # of deliveries that fail together, only the first starts a pause
            shortest, longest = pauses
            pause_seconds = min(max(shortest, (now - self._away_since) / _PAUSE_DIVISOR), longest)
            self._retry_at = now + pause_seconds
            asyncio.get_running_loop().call_later(pause_seconds, self._on_try_due)

    def _report_problem(self, outcome: DeliveryOutcome) -> None:
        """Report the problem that an outcome shows, and clear the others."""
        is_away = outcome in _PAUSES_SECONDS
        if not is_away and not self._is_problem_reported:
            return  # most deliveries end here: two problems would be cleared that are not reported
        self._is_problem_reported = is_away
        push = self._host.settings.delivery.push
        not_found = not_listening = ""
        if outcome is DeliveryOutcome.NOT_FOUND:
            not_found = f"The app answers 404 to POST {push.path}; correct spec.delivery.push.path"
        elif outcome is DeliveryOutcome.REFUSED:
            not_listening = f"No process listens on port {push.port}; start the app, or correct spec.delivery.push.port"
        self._host.problems.set_problem(Reason.APP_PATH_NOT_FOUND, not_found)
        self._host.problems.set_problem(Reason.APP_NOT_LISTENING, not_listening)
