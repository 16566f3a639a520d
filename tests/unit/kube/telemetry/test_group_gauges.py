"""The gauges of a group, as Prometheus scrapes them."""

import pytest

from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.rebalances import RebalanceTracker
from rota.tls import Validity

KEY = ("shop", "orders")


class OneGroup:
    """A read model of one group with this state of its brokers."""

    def __init__(self, broker: BrokerState) -> None:
        self.group = Group(*KEY)
        self.group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop")), None)
        self.broker = broker

    def facts_of(self, _: tuple[str, str]) -> GroupFacts:
        return GroupFacts(self.group, RebalanceTracker(), self.broker, GroupLag({}))

    def keys(self) -> list[tuple[str, str]]:
        return [KEY]


@pytest.mark.parametrize(
    ("validity", "times"),
    [
        (None, {}),
        (Validity(1_700_000_000.0, 1_800_000_000.0), {"expiration": "1800000000", "not_before": "1700000000"}),
    ],
)
async def test_metrics_have_the_times_of_the_groups_client_certificate_if_it_has_one(
    validity: Validity | None, times: dict[str, str]
) -> None:
    group = OneGroup(BrokerState(client_validity=validity))
    text = (await OperatorMetrics(lambda: True).render(group)).decode()
    lines = [line for line in text.splitlines() if line.startswith("rota_group_client_certificate")]
    labels = '{namespace="shop",group="orders"}'
    name = "rota_group_client_certificate_{}_timestamp_seconds{} {}"
    assert lines == [name.format(field, labels, time) for field, time in times.items()]
