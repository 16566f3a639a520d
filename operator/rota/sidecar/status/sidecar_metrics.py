"""What a sidecar counts."""

import time
from collections.abc import Collection, Sequence

from rota.brokers.message import Message
from rota.metrics import Counter, Gauge, Histogram, render


class Measures:
    """The metrics of one sidecar."""

    def __init__(self) -> None:
        """Start from nothing."""
        self.messages = Counter("rota_sidecar_messages_total", "Messages by what came of them.", ("topic", "outcome"))
        self.delivery = Histogram("rota_sidecar_delivery_duration_seconds", "From handing over to the app's answer.")
        self.end_to_end = Histogram("rota_sidecar_end_to_end_seconds", "From sending by the producer to done.")
        self.redelivered = Counter("rota_sidecar_redelivered_total", "Messages that had been handed over before.")
        self.commits = Counter("rota_sidecar_commits_total", "Offsets that were committed.", ("outcome",))
        self.uncommitted = Counter(
            "rota_sidecar_uncommitted_total",
            "Offsets finished but not committed when their queue was released: at most so many messages come again.",
        )
        self.pulls = Counter("rota_sidecar_pulls_total", "Pulls by what came of them.", ("outcome",))
        self.paused = Counter(
            "rota_sidecar_paused_seconds_total", "Time for which the app was away or answered 404 to what is pushed."
        )
        self._inflight = self._buffered = self._generation = 0  # as they are while all of it is rendered
        self._gauges = (
            Gauge("rota_sidecar_inflight", "Messages that are at the app.", look=lambda: {(): self._inflight}),
            Gauge(
                "rota_sidecar_buffered",
                "Messages that were fetched and are not finished.",
                look=lambda: {(): self._buffered},
            ),
            Gauge("rota_sidecar_generation", "The generation that is obeyed.", look=lambda: {(): self._generation}),
        )

    @property
    def metrics(self) -> tuple[Counter | Gauge | Histogram, ...]:
        """Return every metric there is."""
        counted = (self.messages, self.delivery, self.end_to_end, self.redelivered, self.commits, self.pulls)
        return (*counted, self.uncommitted, self.paused, *self._gauges)

    def answered(self, seconds: float) -> None:
        """Note how long a delivery was at the app."""
        self.delivery.observe(seconds)

    def ended(self, messages: Sequence[Message], outcome: str, topics: Collection[str]) -> None:
        """Count messages of one topic by what came of them."""
        if messages:
            self.messages.add(topic_label(messages[0], topics), outcome, by=len(messages))
        if outcome == "done":
            now = time.time()
            for message in messages:
                self.end_to_end.observe(max(0.0, now - message.born / 1000))

    def text(self, *, inflight: int, buffered: int, generation: int) -> str:
        """Render all of it, with what is so at this moment."""
        self._inflight, self._buffered, self._generation = inflight, buffered, generation
        return render(self.metrics)


def topic_label(message: Message, topics: Collection[str]) -> str:
    """Return the topic that a message counts for, when the group subscribes to `topics`.

    The topic of a message in a retry queue is a property that its producer may have written: unless the group
    subscribes to that topic, the queue's own one counts, so that there are only so many labels.
    """
    topic = message.topic
    return topic if topic in topics else message.queue.topic
