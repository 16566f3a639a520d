"""A sidecar's metrics: their labels are bounded, and no producer chooses them."""

import pytest

from rota.brokers.message import Message
from rota.metrics import MetricsFormat
from rota.model import Queue
from rota.sidecar.status.sidecar_metrics import SidecarMetrics
from rota.tls import Validity

ORDERS = Queue("orders", "broker-a", 3)
RETRIES = Queue("%RETRY%shop", "broker-a", 0)


@pytest.mark.parametrize(
    ("queue", "properties", "topic"),
    [
        (ORDERS, {}, "orders"),
        (RETRIES, {"RETRY_TOPIC": "orders"}, "orders"),
        (RETRIES, {"RETRY_TOPIC": "x" * 30_000}, "%RETRY%shop"),
        (RETRIES, {}, "%RETRY%shop"),
    ],
)
def test_metrics_count_messages_by_a_topic_of_the_group_or_else_of_the_queue(
    queue: Queue, properties: dict[str, str], topic: str
) -> None:
    metrics = SidecarMetrics()
    metrics.count_messages([Message(queue, 7, b"", properties)], "done", {"orders"})
    text = metrics.render(MetricsFormat.TEXT, inflight=0, buffered=0, generation=0).decode()
    counted = [line for line in text.splitlines() if "messages_total{" in line]
    assert counted == [f'rota_sidecar_messages_total{{outcome="done",topic="{topic}"}} 1.0']


@pytest.mark.parametrize(
    ("validity", "samples"),
    [(None, []), (Validity(1_700_000_000.0, 1_800_000_000.0), ["expiration 1800000000", "not_before 1700000000"])],
)
def test_metrics_have_the_times_of_the_client_certificate_if_there_is_one(
    validity: Validity | None, samples: list[str]
) -> None:
    text = SidecarMetrics(lambda: validity).render(MetricsFormat.TEXT, inflight=0, buffered=0, generation=0).decode()
    lines = [line for line in text.splitlines() if line.startswith("rota_sidecar_client_certificate")]
    prefix, suffix = "rota_sidecar_client_certificate_", "_timestamp_seconds"
    assert [line.removeprefix(prefix).replace(suffix, "") for line in lines] == samples
