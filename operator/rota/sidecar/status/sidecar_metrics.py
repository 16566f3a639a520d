"""Prometheus metrics of a sidecar."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache

from rota.brokers.message import Message
from rota.metrics import Labels, Metric, Metrics, MetricsFormat
from rota.sidecar.status.delivery_spans import trace_parent
from rota.tls import Validity


class SidecarMetrics:
    """Metrics of one sidecar."""

    def __init__(self, client_validity: Callable[[], Validity | None] = lambda: None) -> None:
        """`client_validity` returns the validity of the client certificate; None without one."""
        self._client_validity = client_validity
        self._metrics = metrics = Metrics()
        self._messages = metrics.counter("rota_sidecar_messages_total", "Messages by outcome.", ("topic", "outcome"))
        self._delivery_seconds = metrics.histogram(
            "rota_sidecar_delivery_duration_seconds", "Seconds from the delivery to the app's answer."
        )
        self._end_to_end_seconds = metrics.histogram(
            "rota_sidecar_end_to_end_seconds", "Seconds from the producer's send to the acknowledgement."
        )
        self.redelivered = metrics.counter("rota_sidecar_redelivered_total", "Messages that had been delivered before.")
        self.commits = metrics.counter("rota_sidecar_commits_total", "Commits of offsets, by outcome.", ("outcome",))
        self.pulls = metrics.counter("rota_sidecar_pulls_total", "Pulls by outcome.", ("outcome",))
        self.uncommitted = metrics.counter(
            "rota_sidecar_uncommitted_total",
            "Messages that were finished but not committed when their queue was released; "
            "at most this many are delivered again.",
        )
        self.paused = metrics.counter(
            "rota_sidecar_paused_seconds_total",
            "Seconds for which the app was unreachable or answered pushed messages with 404.",
        )
        self._message_counter_of = cache(self._messages.labels)  # cached: a look-up takes longer than counting
        self._inflight = self._buffered = self._generation = 0  # values of gauges, set by `render`
        metrics.add_computed(Metric("rota_sidecar_inflight", "Messages at the app now."), lambda: {(): self._inflight})
        metrics.add_computed(
            Metric("rota_sidecar_buffered", "Messages that were fetched and are not finished yet."),
            lambda: {(): self._buffered},
        )
        metrics.add_computed(
            Metric("rota_sidecar_generation", "The generation that the member obeys."), lambda: {(): self._generation}
        )
        metrics.add_computed(
            Metric(
                "rota_sidecar_client_certificate_expiration_timestamp_seconds",
                "When the certificate expires that the sidecar presents to brokers (tls.clientSecret).",
            ),
            lambda: self._certificate_time(lambda validity: validity.not_after),
        )
        metrics.add_computed(
            Metric(
                "rota_sidecar_client_certificate_not_before_timestamp_seconds",
                "Since when the certificate is valid that the sidecar presents to brokers (tls.clientSecret).",
            ),
            lambda: self._certificate_time(lambda validity: validity.not_before),
        )

    def _certificate_time(self, time_of: Callable[[Validity], float]) -> Mapping[Labels, float]:
        """Return the value of a gauge without labels; no value if there is no certificate."""
        validity = self._client_validity()
        return {(): time_of(validity)} if validity else {}

    @property
    def metrics(self) -> list[Metric]:
        """All metrics of the sidecar."""
        return self._metrics.declared

    def observe_delivery(self, seconds: float, messages: Iterable[Message] = ()) -> None:
        """Record how long a delivery was at the app; the first traced message is the exemplar."""
        trace_ids = filter(None, map(trace_id_of, messages))
        trace_id = next(trace_ids, None)
        self._delivery_seconds.observe(seconds, {"trace_id": trace_id} if trace_id else None)

    def count_messages(self, messages: Sequence[Message], outcome: str, topics: Collection[str]) -> None:
        """Count messages of one topic by outcome; for finished messages, also record the time since they were sent."""
        if messages:
            topic = topic_label(messages[0], topics)
            self._message_counter_of(topic, outcome).inc(len(messages))
        if outcome == "done":
            now = time.time()
            for message in messages:
                self._end_to_end_seconds.observe(max(0.0, now - message.born_ms / 1000))

    def render(self, style: MetricsFormat, *, inflight: int, buffered: int, generation: int) -> bytes:
        """Render all metrics, with the present values of the gauges."""
        self._inflight = inflight
        self._buffered = buffered
        self._generation = generation
        return self._metrics.render(style)


def trace_id_of(message: Message) -> str:
    """Return the id of a message's trace, from its property `traceparent`; empty if it has none."""
    parent = trace_parent(message)
    return parent.trace_id if parent else ""


def topic_label(message: Message, topics: Collection[str]) -> str:
    """Return the topic by which a message is counted, for a group that subscribes to `topics`.

    The topic of a message in a retry queue is a property that its producer may have written. If the group does not
    subscribe to that topic, the message counts for the queue's own topic, so that the number of labels is bounded.
    """
    topic = message.topic
    return topic if topic in topics else message.queue.topic
