"""Changes and failures of the pods of a fleet under load, on a real node."""

import pytest

from e2e import events
from e2e.consumers import Consumers

pytestmark = pytest.mark.node


@pytest.mark.parametrize("max_members", [4, pytest.param(10, marks=pytest.mark.slow("a fleet of ten on a node"))])
def test_scale_up_rolling_update_and_scale_down_lose_and_duplicate_no_message(
    consumers: Consumers, max_members: int
) -> None:
    events.scale_members(consumers, max_members)
    events.roll_pods(consumers)
    events.scale_members(consumers, 3)


@pytest.mark.slow("on a node, an Orderly group is scaled and rolled, and loses a pod")
def test_orderly_group_keeps_queue_order_over_scaling_rolling_update_and_deletion(consumers: Consumers) -> None:
    consumers.reset(orderly=True)
    events.scale_members(consumers, 5)
    events.roll_pods(consumers)
    events.delete_pod(consumers, consumers.pods()[0])
    events.scale_members(consumers, 2)


@pytest.mark.slow("on a node, a pod is deleted")
def test_member_pod_deletion_loses_and_duplicates_no_message(consumers: Consumers) -> None:
    events.delete_pod(consumers, consumers.pods()[0])


@pytest.mark.slow("on a node, a pod is deleted by force")
def test_member_pod_force_deletion_duplicates_in_flight_messages_at_most(consumers: Consumers) -> None:
    events.force_delete_pod(consumers, consumers.pods()[0])


@pytest.mark.slow("on a node, a sidecar is OOM-killed")
def test_sidecar_killed_for_its_memory_is_recovered(consumers: Consumers) -> None:
    events.exhaust_sidecar_memory(consumers, consumers.pods()[0])


@pytest.mark.slow("on a node, an app is in a crash loop")
def test_crash_loop_of_an_app_is_recovered(consumers: Consumers) -> None:
    events.crash_app(consumers, consumers.pods()[0])


@pytest.mark.own_node
@pytest.mark.slow("on a node, the network between a pod and the broker fails")
def test_connection_loss_between_a_pod_and_the_broker_moves_its_queues_until_reconnect(consumers: Consumers) -> None:
    events.cut_off_from_broker(consumers, consumers.pods()[0])


@pytest.mark.own_node
@pytest.mark.slow("on a node, the network between a pod and the operators fails")
def test_handover_waits_for_a_ready_pod_that_the_operators_cannot_reach(consumers: Consumers) -> None:
    events.cut_off_from_operators(consumers)
