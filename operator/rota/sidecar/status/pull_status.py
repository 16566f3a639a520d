"""Times the pulls of one queue, to notice a pull that hangs, and a queue whose pulls the broker does not answer."""

from rota.reports import QueueState

UNREAD_SECONDS = 60.0  # a queue without an answered pull for this long is reported
HANGING_PULL_SECONDS = 120.0  # a pull that neither returns nor fails for this long is sent again


class PullStatus:
    """Status of a queue's pulls; all times are seconds of the clock `ReaderHost.now`.

    Parameters `awake_since`: when the process last resumed after it had stood still; time before that is not counted.
    """

    def __init__(self) -> None:
        self.answered_at = 0.0  # time of the last answer with a result; 0: none yet
        # Why no messages come, set by QueuePuller: "full" (no room for more), "paused" (consumption is disabled at the
        # broker) or "failing"; empty: they do. Reports show it for queues that the member consumes.
        self.obstacle: QueueState = ""
        self._sent_at: float | None = None  # when the open pull was sent; None: no pull is open
        # When the first of the pulls without an answer was sent; None: the last pull was answered, or none was sent.
        self._unanswered_since: float | None = None

    def on_sent(self, now: float) -> None:
        """Note that a pull is sent; an obstacle other than a full queue lasts until a pull is answered."""
        self._sent_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now
        if self.obstacle == "full":
            self.obstacle = ""

    def on_unanswered(self) -> None:
        """Note that the open pull has ended without an answer of the broker, or was cancelled to be sent again."""
        self._sent_at = None

    def on_answered(self, now: float) -> None:
        """Note that the broker has answered with a result."""
        self.answered_at = now
        self.reset()

    def reset(self, obstacle: QueueState = "") -> None:
        """Note that no pull is open or unanswered: the broker answered or rejected it, or none is sent for now."""
        self.obstacle = obstacle
        self._sent_at = None
        self._unanswered_since = None

    def hanging_seconds(self, now: float, awake_since: float) -> float | None:
        """Return for how long the open pull has hung, if that is HANGING_PULL_SECONDS or more; None otherwise."""
        if self._sent_at is None:
            return None
        seconds = now - max(self._sent_at, awake_since)
        return seconds if seconds >= HANGING_PULL_SECONDS else None

    def is_unread(self, now: float, awake_since: float) -> bool:
        """Whether the broker has answered no pull for UNREAD_SECONDS, although the reader keeps pulling."""
        since = self._unanswered_since
        return since is not None and now - max(since, awake_since) > UNREAD_SECONDS
