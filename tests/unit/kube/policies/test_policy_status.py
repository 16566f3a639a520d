"""The status of a RebalancePolicy."""

from typing import Any

import pytest

from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.policies.policy_status import MAX_NAMES, is_published, policy_status

NOW = 1_795_248_000.0
AT = "2026-11-21T08:00:00Z"


def a_policy(spec: Any, status: Any = None) -> CustomResource:
    metadata = Metadata(name="steady", namespace="shop", uid="a", resource_version="5", generation=3)
    return CustomResource(metadata, spec, status or {})


def accepted_condition(status: dict[str, Any]) -> dict[str, Any]:
    condition, stalled = status["conditions"]
    assert (condition["type"], stalled["type"]) == ("Accepted", "Stalled")
    assert {condition["status"], stalled["status"]} == {"True", "False"}
    assert isinstance(condition, dict)
    return condition


def test_policy_status_reports_that_a_policy_is_accepted_and_which_groups_use_it() -> None:
    status = policy_status(a_policy({"strategy": "Sticky"}), ["orders", "bills"], NOW)
    assert status == {
        "observedGeneration": 3,
        "groups": 2,
        "usedBy": ["bills", "orders"],
        "conditions": [
            {
                "type": "Accepted",
                "status": "True",
                "reason": "Accepted",
                "message": "The policy can be used",
                "observedGeneration": 3,
                "lastTransitionTime": AT,
            },
            {
                "type": "Stalled",
                "status": "False",
                "reason": "Accepted",
                "message": "The policy can be used",
                "observedGeneration": 3,
                "lastTransitionTime": AT,
            },
        ],
    }


@pytest.mark.parametrize("spec", ["x", {"strategy": "Rolling"}, {"strategy": "Sticky", "budget": {"maxMoves": -1}}])
def test_policy_status_reports_why_a_policy_is_not_accepted(spec: Any) -> None:
    condition = accepted_condition(policy_status(a_policy(spec), (), NOW))
    assert (condition["status"], condition["reason"]) == ("False", "InvalidPolicy")
    assert condition["message"].startswith("spec")


def test_policy_status_names_some_of_many_groups() -> None:
    status = policy_status(a_policy({}), [f"g-{number:04}" for number in reversed(range(1000))], NOW)
    assert status["groups"] == 1000
    assert status["usedBy"] == [f"g-{number:04}" for number in range(MAX_NAMES)]


def test_policy_status_keeps_the_time_of_the_last_transition_until_the_next() -> None:
    first = policy_status(a_policy({}), (), NOW)
    unchanged = policy_status(a_policy({}, first), ["orders"], NOW + 60)
    assert accepted_condition(unchanged)["lastTransitionTime"] == AT
    rejected = policy_status(a_policy({"strategy": "Rolling"}, unchanged), (), NOW + 60)
    assert accepted_condition(rejected)["lastTransitionTime"] == "2026-11-21T08:01:00Z"


@pytest.mark.parametrize(
    "status", [{"conditions": 1}, {"conditions": ["x", {}]}, {"conditions": [{"type": "Accepted", "status": "True"}]}]
)
def test_policy_status_replaces_one_that_a_user_edited(status: Any) -> None:
    assert accepted_condition(policy_status(a_policy({}, status), (), NOW))["lastTransitionTime"] == AT


def test_policy_status_with_conditions_of_other_controllers_is_written_only_if_it_changed() -> None:
    status = policy_status(a_policy({}), (), NOW)
    foreign = {"type": "Audited", "status": "True"}
    accepted, stalled = status["conditions"]
    policy = a_policy({}, {**status, "conditions": [accepted, foreign, stalled]})
    later = NOW + 60
    assert is_published(policy, policy_status(policy, (), later))
    assert not is_published(policy, policy_status(policy, ["orders"], later))
    assert not is_published(a_policy({}, {"conditions": [foreign]}), status)
    assert not is_published(a_policy({}), status)
