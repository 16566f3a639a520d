"""Times of one queue's pulls: they show a pull that hangs, and a queue whose broker answers none."""

UNREAD_SECONDS = 60.0  # a queue without an answered pull for this long is reported
IDLE_SECONDS = 120.0  # a pull that neither returns nor fails for this long is sent again


class PullTimes:
    """Times of a queue's pulls. `awake_since` is the end of the process's last stall: time before it does not count."""

    def __init__(self) -> None:
        self._sent_at: float | None = None  # when the open pull was sent; None: no pull is open
        self._unanswered_since: float | None = None  # when the first pull was sent that has had no answer

    def on_sent(self, now: float) -> None:
        """Note that a pull is sent."""
        self._sent_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now

    def on_unanswered(self) -> None:
        """Note that the open pull has ended without an answer of the broker, or was cancelled to be sent again."""
        self._sent_at = None

    def reset(self) -> None:
        """Note that the broker has answered, or that no pull is sent for now, as the queue is full or stopped."""
        self._sent_at = None
        self._unanswered_since = None

    def hanging_seconds(self, now: float, awake_since: float) -> float | None:
        """Return for how long the open pull has hung, if that is IDLE_SECONDS or more."""
        if self._sent_at is None:
            return None
        seconds = now - max(self._sent_at, awake_since)
        return seconds if seconds >= IDLE_SECONDS else None

    def is_unread(self, now: float, awake_since: float) -> bool:
        """Whether the broker has answered no pull for UNREAD_SECONDS, although the reader keeps pulling."""
        since = self._unanswered_since
        return since is not None and now - max(since, awake_since) > UNREAD_SECONDS
