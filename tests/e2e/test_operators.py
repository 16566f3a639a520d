"""What befalls operators, brokers and records while a fleet is under load, on a real node."""

import json
import time

import pytest

from chart.charts import CHART
from e2e.consumers import IN_FLIGHT, NAME, Consumers
from e2e.release import SECONDS, WAIT, Installed
from ground.poll import eventually

pytestmark = pytest.mark.node

DOWN = 90  # seconds
RECORD = f"configmap/{NAME}-rota"


def test_the_leaders_pod_is_deleted_in_the_middle_of_a_handover(installed: Installed, consumers: Consumers) -> None:
    leader = eventually(installed.leader, SECONDS)
    (other,) = installed.pods() - {leader}
    with consumers.under_load("the leader's pod deleted in the middle of a handover"):
        with consumers.moving():
            installed.home("delete", leader)
            eventually(lambda: installed.leader() == other, SECONDS)
        consumers.works(4)
    installed.whole()


def test_both_operators_are_deleted_by_force_in_the_middle_of_a_handover(
    installed: Installed, consumers: Consumers
) -> None:
    before = installed.pods()
    with consumers.under_load("both operators deleted by force in the middle of a handover"):
        with consumers.moving():
            installed.home("delete", *before, "--grace-period=0", "--force")
            eventually(lambda: installed.leader() not in before, SECONDS)
        consumers.works(4)
    installed.whole()


def test_there_is_no_operator_for_a_while(installed: Installed, consumers: Consumers) -> None:
    before = consumers.document()
    with consumers.under_load(f"no operator for {DOWN} s"):
        installed.home("scale", "deploy/rota", "--replicas=0")
        eventually(lambda: not installed.pods(), SECONDS)
        time.sleep(DOWN)  # this is what happens
        installed.home("scale", "deploy/rota", "--replicas=2")
        installed.whole()
        consumers.works(3)
    assert consumers.document() == before


def test_a_groups_record_is_edited_and_deleted(installed: Installed, consumers: Consumers) -> None:
    record = json.loads(installed.shop("get", RECORD, "-o", "json"))["data"]["assignment.json"]
    one, other, *_ = consumers.pods()
    swapped = record.replace(one, "?").replace(other, one).replace("?", other)
    before = consumers.document().generation
    with consumers.under_load("the record edited"):
        edit = {"data": {"assignment.json": swapped}}
        installed.shop("patch", RECORD, "--type=merge", "-p", json.dumps(edit))
        after = eventually(lambda: (now := consumers.document().generation) > before and now, SECONDS)
        consumers.works(3)
    with consumers.under_load("the record deleted"):
        installed.shop("delete", RECORD)
        eventually(lambda: consumers.document().generation > after, SECONDS)
        consumers.works(3)


def test_a_broker_crashes_and_comes_back(consumers: Consumers) -> None:
    with consumers.under_load("the broker killed and started again", twice=3 * IN_FLIGHT):
        consumers.kill_broker()
        consumers.broker.start_broker(0)
        consumers.goes_on()
        consumers.works(3)


def test_the_chart_is_upgraded_in_the_middle_of_a_handover(installed: Installed, consumers: Consumers) -> None:
    before = installed.pods()
    changed = {**installed.values, "podAnnotations": {"upgraded": "now"}}
    with consumers.under_load("the chart upgraded in the middle of a handover"):
        with consumers.moving():
            installed.release("upgrade", str(CHART), *WAIT, values=changed)
            eventually(lambda: installed.leader() in installed.pods() - before, SECONDS)
        consumers.works(4)
    assert before.isdisjoint(installed.pods())


def test_nothing_that_happened_was_beyond_the_operators_rights(installed: Installed, consumers: Consumers) -> None:
    installed.shop("patch", "cg", NAME, "--type=merge", "-p", json.dumps({"spec": {"policyRef": {"name": "none"}}}))
    eventually(lambda: "MissingPolicy" in installed.conditions(NAME), SECONDS)
    consumers.up()
    assert "is forbidden: User" not in installed.log()
