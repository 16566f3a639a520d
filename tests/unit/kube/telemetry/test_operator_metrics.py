"""The metrics of a group: its series start at 0 and are removed with the group."""

from rota.kube.telemetry.group_gauges import GroupFacts
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.redelivery import RedeliveryCause

ORDERS, BILLS = ("shop", "orders"), ("shop", "bills")


class Groups:
    """A read model that knows only the keys of groups."""

    def __init__(self, *keys: tuple[str, str]) -> None:
        self._keys = keys

    def facts_of(self, _: tuple[str, str]) -> GroupFacts | None:
        return None

    def keys(self) -> list[tuple[str, str]]:
        return [*self._keys]


async def test_metrics_series_of_a_group_start_at_0_and_are_removed_together() -> None:
    metrics = OperatorMetrics(lambda: True)
    for key in (ORDERS, BILLS):
        metrics.count_redelivered(key, RedeliveryCause.CRASH, 3)
    lines = (await metrics.render(Groups(ORDERS, BILLS))).decode().splitlines()
    assert 'rota_redelivered_messages_total{namespace="shop",group="orders",cause="crash"} 3' in lines
    assert 'rota_queues_moved_total{namespace="shop",group="orders"} 0' in lines
    assert 'rota_handover_duration_seconds_count{group="orders",namespace="shop"} 0.0' in lines
    remaining_series = (await metrics.render(Groups(BILLS))).decode()
    assert ("orders" in remaining_series, "bills" in remaining_series) == (False, True)
