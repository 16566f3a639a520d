"""Failures of operators, brokers and stored assignments while a fleet is under load, on a real node."""

import pytest

from e2e import events
from e2e.consumers import Consumers

pytestmark = pytest.mark.node

DOWN_SECONDS = 90


@pytest.mark.slow("on a node, the leader's pod is deleted during a handover")
def test_failover_completes_a_handover_when_the_leaders_pod_is_deleted(consumers: Consumers) -> None:
    events.delete_leader(consumers)


@pytest.mark.slow("on a node, both operators are deleted by force during a handover")
def test_failover_completes_a_handover_when_both_operators_are_force_deleted(consumers: Consumers) -> None:
    events.force_delete_operators(consumers)


@pytest.mark.slow("on a node, members consume for 90 s without an operator")
def test_restart_of_all_operators_after_90_seconds_keeps_the_assignment(consumers: Consumers) -> None:
    events.stop_operators(consumers, DOWN_SECONDS)


@pytest.mark.slow("on a node, the assignment is edited and deleted")
def test_config_map_of_the_stored_assignment_is_restored_after_edit_and_deletion(consumers: Consumers) -> None:
    events.edit_config_map(consumers)
    events.delete_config_map(consumers)


@pytest.mark.slow("on a node, a broker crashes")
def test_broker_failure_and_restart_loses_no_message(consumers: Consumers) -> None:
    events.kill_broker_process(consumers)


@pytest.mark.slow("on a node, the chart is upgraded during a handover")
def test_upgrade_of_the_chart_completes_a_handover_in_progress(consumers: Consumers) -> None:
    events.upgrade_chart(consumers)
