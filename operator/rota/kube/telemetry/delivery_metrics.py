"""Metrics of a group's deliveries, by topic; queues and messages are no labels, because they are too many."""

from collections.abc import Callable, Iterator

from rota.deliveries import DeliveryOutcome
from rota.delivery_totals import DeliveryTotals, GroupDeliveries
from rota.metrics import Labels

Samples = Iterator[tuple[Labels, float | None]]
DeliveryLook = Callable[[GroupDeliveries, float], Samples]


def _attempts(deliveries: GroupDeliveries, _: float) -> Samples:
    for topic, totals in _topics(deliveries):
        yield (topic, DeliveryOutcome.DONE.value), totals.done
        yield from (((topic, str(outcome)), number) for outcome, number in [*totals.failures.items()])


def _total(field: str) -> DeliveryLook:
    def read(deliveries: GroupDeliveries, _: float) -> Samples:
        yield from (((topic,), getattr(totals, field)) for topic, totals in _topics(deliveries))

    return read


def _topics(deliveries: GroupDeliveries) -> list[tuple[str, DeliveryTotals]]:
    """Return a copy: a thread renders the scrape while the event loop reads members' deliveries."""
    return [*deliveries.by_topic.items()]


def _failed_ratio(deliveries: GroupDeliveries, now: float) -> Samples:
    attempts = deliveries.recent(now)
    yield (), attempts.failed_share if attempts.number else None


def _delayed(deliveries: GroupDeliveries, _: float) -> Samples:
    yield (), deliveries.delayed


DELIVERY_METRICS: tuple[tuple[str, str, Labels, DeliveryLook], ...] = (
    (
        "rota_deliveries_total",
        "Attempts to deliver a message, by outcome: done, a status or its class, timeout, refused and others.",
        ("topic", "outcome"),
        _attempts,
    ),
    (
        "rota_delivery_first_attempts_total",
        "Messages whose first attempt ended.",
        ("topic",),
        _total("first_attempts"),
    ),
    (
        "rota_delivery_in_flight_seconds_total",
        "Seconds that messages spent at the app, summed over messages; its rate is the mean number of messages there.",
        ("topic",),
        _total("in_flight_seconds"),
    ),
    (
        "rota_delivery_active_seconds_total",
        "Seconds for which members measured queues, summed over queues.",
        ("topic",),
        _total("active_seconds"),
    ),
    (
        "rota_delivery_backlog_seconds_total",
        "The part of rota_delivery_active_seconds_total in which fetched messages waited for the app.",
        ("topic",),
        _total("backlog_seconds"),
    ),
    (
        "rota_delivery_failed_ratio",
        "The share of attempts that failed in the last 5 minutes; absent if there were none.",
        (),
        _failed_ratio,
    ),
    (
        "rota_delayed_messages",
        "Messages that failed and that brokers delay until their next attempt, as members estimate it.",
        (),
        _delayed,
    ),
)
