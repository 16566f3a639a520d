"""Table of the metrics of a group's deliveries, with the readers of their samples; `group_gauges` exports them.

Their labels are at most topic and outcome: by queue or message, there would be too many series.
"""

from collections.abc import Callable, Iterator

from rota.deliveries import DeliveryOutcome
from rota.delivery_totals import DeliveryTotals, GroupDeliveries
from rota.metrics import Labels

MetricSamples = Iterator[tuple[Labels, float | None]]  # label values, and the value; None: no sample
DeliveryReader = Callable[[GroupDeliveries, float], MetricSamples]  # of a group's deliveries and the present time


def _attempts(deliveries: GroupDeliveries, _: float) -> MetricSamples:
    for topic, totals in _topics(deliveries):
        yield (topic, DeliveryOutcome.DONE.value), totals.done
        for outcome, number in [*totals.failures.items()]:  # a copy: the event loop changes it meanwhile
            yield (topic, str(outcome)), number


def _total_reader(field: str) -> DeliveryReader:
    """Return a reader of a field of `DeliveryTotals`."""

    def read(deliveries: GroupDeliveries, _: float) -> MetricSamples:
        for topic, totals in _topics(deliveries):
            yield (topic,), getattr(totals, field)

    return read


def _topics(deliveries: GroupDeliveries) -> list[tuple[str, DeliveryTotals]]:
    """Return a copy: a thread renders the scrape while the event loop reads members' deliveries."""
    return [*deliveries.totals_by_topic.items()]


def _failed_ratio(deliveries: GroupDeliveries, now: float) -> MetricSamples:
    attempts = deliveries.recent_attempts(now)
    yield (), attempts.failed_share if attempts.total else None


def _delayed_messages(deliveries: GroupDeliveries, _: float) -> MetricSamples:
    yield (), deliveries.delayed_messages


# Name, help text, reader of samples, names of labels.
DELIVERY_METRICS: tuple[tuple[str, str, DeliveryReader, Labels], ...] = (
    (
        "rota_deliveries_total",
        "Attempts to deliver a message, by outcome: done, a status or its class, timeout, refused and others.",
        _attempts,
        ("topic", "outcome"),
    ),
    (
        "rota_delivery_first_attempts_total",
        "Messages whose first attempt ended.",
        _total_reader("first_attempts"),
        ("topic",),
    ),
    (
        "rota_delivery_in_flight_seconds_total",
        "Seconds that messages spent at the app, summed over messages; its rate is the mean number of messages there.",
        _total_reader("in_flight_seconds"),
        ("topic",),
    ),
    (
        "rota_delivery_active_seconds_total",
        "Seconds for which members measured queues, summed over queues.",
        _total_reader("active_seconds"),  # the denominator of in_flight_seconds and backlog_seconds
        ("topic",),
    ),
    (
        "rota_delivery_backlog_seconds_total",
        "The part of rota_delivery_active_seconds_total in which fetched messages waited for the app.",
        _total_reader("backlog_seconds"),
        ("topic",),
    ),
    (
        "rota_delivery_failed_ratio",
        "The share of attempts that failed in the last 5 minutes; absent if there were none.",
        _failed_ratio,
        (),
    ),
    (
        "rota_delayed_messages",
        "Messages that failed and that brokers delay until their next attempt, as members estimate it.",
        _delayed_messages,
        (),
    ),
)
