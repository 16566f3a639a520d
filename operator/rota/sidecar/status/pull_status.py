"""Status of one queue's pulls: it shows a pull that hangs, and a queue whose broker answers none."""

from rota.reports import QueueState

UNREAD_SECONDS = 60.0  # a queue without an answered pull for this long is reported
IDLE_SECONDS = 120.0  # a pull that neither returns nor fails for this long is sent again


class PullStatus:
    """Status of a queue's pulls. `awake_since` is the end of the process's last stall: time before that is ignored."""

    def __init__(self) -> None:
        self.answered_at = 0.0  # the last answer with a result, in seconds of the host's clock; 0: none yet
        self.obstacle: QueueState = ""  # why the queue is not pulled, while its state is Running
        self._sent_at: float | None = None  # when the open pull was sent; None: no pull is open
        self._unanswered_since: float | None = None  # when the first pull was sent that has had no answer

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
        """Note that no pull is open, and that none lacks an answer: the broker answered, or no pull is sent for now."""
        self.obstacle = obstacle
        self._sent_at = None
        self._unanswered_since = None

    def hanging_seconds(self, now: float, awake_since: float) -> float | None:
        """Return for how long the open pull has hung, if that is IDLE_SECONDS or more; None otherwise."""
        if self._sent_at is None:
            return None
        seconds = now - max(self._sent_at, awake_since)
        return seconds if seconds >= IDLE_SECONDS else None

    def is_unread(self, now: float, awake_since: float) -> bool:
        """Whether the broker has answered no pull for UNREAD_SECONDS, although the reader keeps pulling."""
        since = self._unanswered_since
        return since is not None and now - max(since, awake_since) > UNREAD_SECONDS
