"""The metrics of deliveries, as Prometheus scrapes them."""

import asyncio

from rota.deliveries import DeliveriesPage, QueueCounts
from rota.delivery_totals import GroupDeliveries, MemberDeliveries
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.rebalances import RebalanceTracker

LABELS = 'namespace="shop",group="orders"'


class OneGroup:
    """A read model of one group with these deliveries."""

    def __init__(self, deliveries: GroupDeliveries) -> None:
        self.group = Group("shop", "orders")
        self.group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop")), None)
        self.group.deliveries = deliveries

    def facts_of(self, _: tuple[str, str]) -> GroupFacts:
        return GroupFacts(self.group, RebalanceTracker(), BrokerState(), GroupLag({}))

    def keys(self) -> list[tuple[str, str]]:
        return [("shop", "orders")]


async def scrape(deliveries: GroupDeliveries) -> list[str]:
    text = (await OperatorMetrics(lambda: True).render(OneGroup(deliveries))).decode()
    return [line for line in text.splitlines() if line.startswith(("rota_deliver", "rota_delayed"))]


async def test_metrics_of_deliveries_are_summed_over_queues_and_members() -> None:
    deliveries = GroupDeliveries()
    for uid, failures in (("m1", {"5xx": 3}), ("m2", {"5xx": 1, "refused": 9})):
        counts = [QueueCounts("orders", "a", number, 4, 2, failures, 8.0, 6.0, 2.0) for number in range(2)]
        page = DeliveriesPage(f"of {uid}", 1.0, counts, delayed=5)
        now = asyncio.get_running_loop().time()
        deliveries.record(uid, "r1", MemberDeliveries.from_page(page), {"orders"}, now)
    assert sorted(await scrape(deliveries)) == sorted(
        [
            f'rota_deliveries_total{{{LABELS},topic="orders",outcome="done"}} 8',
            f'rota_deliveries_total{{{LABELS},topic="orders",outcome="5xx"}} 8',
            f'rota_deliveries_total{{{LABELS},topic="orders",outcome="refused"}} 18',
            f'rota_delivery_first_attempts_total{{{LABELS},topic="orders"}} 16',
            f'rota_delivery_in_flight_seconds_total{{{LABELS},topic="orders"}} 24',
            f'rota_delivery_active_seconds_total{{{LABELS},topic="orders"}} 32',
            f'rota_delivery_backlog_seconds_total{{{LABELS},topic="orders"}} 8',
            f"rota_delivery_failed_ratio{{{LABELS}}} 0.5",
            f"rota_delayed_messages{{{LABELS}}} 10",
        ]
    )


async def test_metrics_of_deliveries_are_absent_until_a_member_was_read() -> None:
    assert await scrape(GroupDeliveries()) == []
