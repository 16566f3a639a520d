"""What befalls the pods of a fleet under load, by hand or by accident, on a real node."""

import pytest

from e2e import events
from e2e.consumers import Consumers

pytestmark = pytest.mark.node


def test_ten_pods_come_are_replaced_and_go_and_nothing_is_lost_or_comes_twice(consumers: Consumers) -> None:
    events.scaled(consumers, 10)
    events.rolled(consumers)
    events.scaled(consumers, 3)


def test_an_orderly_group_is_scaled_and_replaced_and_each_queue_stays_in_order(consumers: Consumers) -> None:
    consumers.up(orderly=True)
    events.scaled(consumers, 5)
    events.rolled(consumers)
    events.pod_deleted(consumers, consumers.pods()[0])
    events.scaled(consumers, 2)


@pytest.mark.slow("on a node, a pod is deleted")
def test_a_pod_is_deleted(consumers: Consumers) -> None:
    events.pod_deleted(consumers, consumers.pods()[0])


@pytest.mark.slow("on a node, a pod is deleted by force")
def test_a_pod_is_deleted_by_force(consumers: Consumers) -> None:
    events.pod_deleted_by_force(consumers, consumers.pods()[0])


@pytest.mark.slow("on a node, a sidecar is killed for its memory")
def test_a_sidecar_takes_more_memory_than_it_has(consumers: Consumers) -> None:
    events.sidecar_out_of_memory(consumers, consumers.pods()[0])


@pytest.mark.slow("on a node, an app is in a crash loop")
def test_an_app_crashes_again_and_again(consumers: Consumers) -> None:
    events.app_crashing(consumers, consumers.pods()[0])


@pytest.mark.slow("on a node, the network between a pod and the broker fails")
def test_a_pod_is_cut_off_from_the_broker(consumers: Consumers) -> None:
    events.cut_off_from_broker(consumers, consumers.pods()[0])


@pytest.mark.slow("on a node, the network between a pod and the operators fails")
def test_a_pod_is_cut_off_from_the_operators(consumers: Consumers) -> None:
    events.cut_off_from_operators(consumers)
