"""What befalls operators, brokers and records while a fleet is under load, on a real node."""

import json

import pytest

from e2e import events
from e2e.consumers import NAME, Consumers
from e2e.release import SECONDS, Installed
from ground.poll import eventually

pytestmark = pytest.mark.node

DOWN = 90  # seconds


def test_the_leaders_pod_is_deleted_in_the_middle_of_a_handover(consumers: Consumers) -> None:
    events.leader_deleted(consumers)


@pytest.mark.slow("on a node, both operators are deleted by force during a handover")
def test_both_operators_are_deleted_by_force_in_the_middle_of_a_handover(consumers: Consumers) -> None:
    events.operators_deleted_by_force(consumers)


@pytest.mark.slow("on a node, consuming goes on for 90 s without an operator")
def test_there_is_no_operator_for_a_while(consumers: Consumers) -> None:
    events.no_operator(consumers, DOWN)


@pytest.mark.slow("on a node, the assignment is edited and deleted")
def test_a_groups_record_is_edited_and_deleted(consumers: Consumers) -> None:
    events.record_edited(consumers)
    events.record_deleted(consumers)


@pytest.mark.slow("on a node, a broker crashes")
def test_a_broker_crashes_and_comes_back(consumers: Consumers) -> None:
    events.broker_killed(consumers)


@pytest.mark.slow("on a node, the chart is upgraded during a handover")
def test_the_chart_is_upgraded_in_the_middle_of_a_handover(consumers: Consumers) -> None:
    events.chart_upgraded(consumers)


def test_nothing_that_happened_was_beyond_the_operators_rights(installed: Installed, consumers: Consumers) -> None:
    installed.shop("patch", "cg", NAME, "--type=merge", "-p", json.dumps({"spec": {"policyRef": {"name": "none"}}}))
    eventually(lambda: "MissingPolicy" in installed.conditions(NAME), SECONDS)
    consumers.up()
    assert "is forbidden: User" not in installed.log()
