"""Tests parsing of custom resources: the defaults, and the sentence for every mistake."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rota.spec import InvalidSpecError, PolicySpec, parse_group, parse_policy
from rota.spec.rules import policy_mistakes

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MINIMAL_SPEC: dict[str, Any] = {
    "broker": {"rocketmq": {"nameServers": ["ns:9876"]}},
    "subscriptions": [{"topic": "orders"}],
}


def a_group(**changed: Any) -> dict[str, Any]:
    return {"spec": MINIMAL_SPEC | changed}


def by_config(*ranges: str) -> dict[str, Any]:
    """Return a policy that assigns each of these ranges of queue ids to one more member."""
    members = [
        {"index": index, "queues": [{"topic": "t", "broker": "b", "ids": id_ranges}]}
        for index, id_ranges in enumerate(ranges)
    ]
    return {"strategy": "ByConfig", "options": {"byConfig": {"members": members}}}


def test_spec_of_a_group_has_defaults() -> None:
    spec = parse_group(a_group())
    assert (spec.message_model, spec.ordering, spec.delivery.mode) == ("Clustering", "Concurrent", "Push")
    assert (spec.delivery.push.timeout, spec.delivery.buffer.messages_per_queue) == (30.0, 1000)
    assert spec.subscriptions[0].expression == "*"
    assert spec.max_attempts == 16


def test_spec_of_an_orderly_group_retries_forever_by_default() -> None:
    assert parse_group(a_group(ordering="Orderly")).max_attempts == -1
    assert parse_group(a_group(ordering="Orderly", delivery={"retry": {"maxAttempts": 3}})).max_attempts == 3


def test_spec_of_a_policy_has_defaults() -> None:
    spec = parse_policy({})
    assert spec == PolicySpec()
    assert (spec.strategy, spec.handover.mode, spec.triggers.resync) == ("Averagely", "Cooperative", 20.0)


def test_spec_of_every_documented_example_is_valid() -> None:
    kinds = {"ConsumerGroup": parse_group, "RebalancePolicy": parse_policy}
    documents = [body for path in EXAMPLES.glob("*.yaml") for body in yaml.safe_load_all(path.read_text())]
    assert [kinds[body["kind"]](body) for body in documents if body["kind"] in kinds]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"replicas": "three", "template": {}}, "spec.replicas: expected int"),
        ({"replicas": 3}, "spec.replicas requires spec.template"),
        ({"group": "a b"}, "spec.group: expected str matching regex"),
        ({"group": 256 * "g"}, "spec.group: expected str of length <= 255"),
        ({"replicas": 2**31, "template": {}}, "spec.replicas: expected int <= 2147483647"),
        ({"rollout": {"maxSurge": -1}}, "spec.rollout.maxSurge: expected int >= 0"),
        ({"rollout": {"maxSurge": "101%"}}, "spec.rollout.maxSurge: expected str matching regex"),
        ({"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, "spec.rollout.maxSurge and maxUnavailable are both 0"),
        ({"messageModel": "\ud800"}, r"spec contains text that is not valid Unicode: '\\ud800'"),
        ({"subscriptions": []}, "spec.subscriptions: expected array of length >= 1"),
        ({"subscriptions": [{"topic": "a b"}]}, r"spec.subscriptions\[0\].topic: expected str matching regex"),
        ({"subscriptions": [{"topic": "a"}, {"topic": "a"}]}, "spec.subscriptions names a topic twice"),
        ({"subscriptions": [{"topic": "a", "expression": " || "}]}, "spec.subscriptions has an expression without a"),
        (
            {"policyRef": {"name": "../steady"}},
            "spec.policyRef.name is not the name of a Kubernetes object; write lower-case letters, digits, - and .",
        ),
        ({"colour": 1}, "spec: object contains unknown field colour"),
        ({"delivery": {"push": {"timeout": 30}}}, "spec.delivery.push.timeout: expected a duration such as 500ms"),
        ({"delivery": {"push": {"timeout": "1 week"}}}, "spec.delivery.push.timeout: expected a duration"),
        (
            {"delivery": {"mode": "Pull"}, "ordering": "Orderly"},
            "spec.delivery.mode Pull works with ordering Concurrent",
        ),
        (
            {"delivery": {"push": {"timeout": "31s"}}, "ordering": "Orderly"},
            "spec.delivery.push.timeout may be at most",
        ),
        ({"startFrom": {"timestamp": "2026-01-01T00:00:00Z"}}, "spec.startFrom.timestamp requires position Timestamp"),
        (
            {"startFrom": {"position": "Timestamp", "timestamp": "yesterday"}},
            "spec.startFrom.timestamp: invalid RFC3339",
        ),
        (
            {"startFrom": {"position": "Timestamp", "timestamp": "2026-01-01T00:00:00"}},
            "spec.startFrom.timestamp has no",
        ),
        ({"delivery": {"retry": {"maxAttempts": 0}}}, "spec.delivery.retry.maxAttempts must be at least 1"),
        ({"delivery": {"push": {"timeout": "0s"}}}, "spec.delivery.push.timeout: expected a duration"),
        ({"subscriptions": [{"topic": "a\n"}]}, r"spec.subscriptions\[0\].topic: expected str matching regex"),
        ({"broker": {"rocketmq": {"nameServers": []}}}, "spec.broker.rocketmq.nameServers: expected array"),
        ({"group": "g", "subscriptions": [{"topic": "%RETRY%g"}]}, r"spec.subscriptions\[0\].topic %RETRY%g is"),
        ({"group": "g", "subscriptions": [{"topic": "%DLQ%g"}]}, r"spec.subscriptions\[0\].topic %DLQ%g is"),
        ({"delivery": {"push": {"timeout": "9" * 400 + "s"}}}, "spec.delivery.push.timeout: expected a duration"),
    ],
)
def test_spec_of_a_group_with_a_mistake_is_rejected_with_a_sentence_naming_the_field(
    changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSpecError, match=f"^{sentence}"):
        parse_group(a_group(**changed))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"strategy": "Stick"}, "spec.strategy: invalid enum value 'Stick'"),
        ({"strategy": "Custom"}, "spec.options.custom is missing: strategy Custom requires it"),
        (
            {"strategy": "Sticky", "options": {"balanced": {}}},
            "spec.options.balanced does not belong to strategy Sticky",
        ),
        (
            {"strategy": "ByConfig", "options": {"byConfig": {"members": [{"index": 0, "queues": []}] * 2}}},
            "spec.options.byConfig.members names an index twice",
        ),
        ({"budget": {"maxMoves": 10**30}}, "spec.budget.maxMoves: "),
        ({"triggers": {"resync": 1000 * "9"}}, "spec.triggers.resync: expected a duration .{0,400}$"),
        ({"budget": {"maxMoves": -1}}, "spec.budget.maxMoves: expected int >= 0"),
        ({"handover": {"mode": "Quick"}}, "spec.handover.mode: invalid enum value 'Quick'"),
        (
            {"strategy": "ByConfig", "options": {"byConfig": {"members": [{"index": 0, "queues": [{"topic": "t"}]}]}}},
            r"spec.options.byConfig.members\[0\].queues\[0\]: object missing required field broker",
        ),
        (
            {"strategy": "ConsistentHash", "options": {"consistentHash": {"virtualNodes": 1001}}},
            "spec.options.consistentHash.virtualNodes: expected int <= 1000",
        ),
        ({"triggers": {"resync": "999ms"}}, "spec.triggers.resync must be at least 1s"),
        ({"triggers": {"debounce": "1ms"}}, "spec.triggers.debounce must be at least 10ms"),
        ({"triggers": {"unreadyGrace": "1ms"}}, "spec.triggers.unreadyGrace must be at least 100ms"),
        ({"handover": {"drainTimeout": "1ms"}}, "spec.handover.drainTimeout must be at least 100ms"),
        ({"handover": {"lostAfter": "0.5s"}}, "spec.handover.lostAfter must be at least 1s"),
        ({"budget": {"maxMoves": 1, "per": "1ms"}}, "spec.budget.per must be at least 1s"),
        (
            by_config("3-1"),
            r"spec.options.byConfig.members\[0\].queues\[0\].ids '3-1' is not valid: write ids as 0-3,7",
        ),
        (by_config("0-999999999"), r"spec.options.byConfig.members\[0\].queues\[0\].ids '0-999999999' is not valid"),
        (
            by_config("1,0-2"),
            r"spec.options.byConfig.members\[0\].queues\[0\].ids names queue t/b/1 twice; name it once",
        ),
        (
            by_config("0-3", "5,2-8"),
            r"spec.options.byConfig.members\[1\].queues\[0\].ids names queue t/b/2, which .*members\[0\].* too",
        ),
        (
            by_config("0-9", "12", "7-20"),
            r"spec.options.byConfig.members\[2\].queues\[0\].ids names queue t/b/7, which .*members\[0\].* too",
        ),
        (
            {
                "strategy": "MachineRoomNearby",
                "options": {
                    "machineRoomNearby": {
                        "roomLabel": "zone",
                        "brokers": [{"broker": "b", "room": "east"}, {"broker": "b", "room": "west"}],
                    }
                },
            },
            r"spec.options.machineRoomNearby.brokers\[1\]: broker b is in room east already; name it once",
        ),
    ],
)
def test_spec_of_a_policy_with_a_mistake_is_rejected_with_a_sentence_naming_the_field(
    spec: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSpecError, match=f"^{sentence}"):
        parse_policy({"spec": spec})


def test_spec_with_an_invalid_range_of_ids_has_one_mistake_although_the_range_also_overlaps() -> None:
    policy = msgspec.convert(by_config("0-9", "5-1"), PolicySpec)
    (mistake,) = policy_mistakes(policy)
    assert "members[1].queues[0].ids '5-1' is not valid" in mistake


def test_spec_group_name_at_the_broker_defaults_to_the_objects_name() -> None:
    body = a_group(subscriptions=[{"topic": "%RETRY%shop"}])
    assert parse_group(body).subscriptions[0].topic == "%RETRY%shop"  # another group's
    with pytest.raises(InvalidSpecError, match=r"%RETRY%shop is the group's own"):
        parse_group(body | {"metadata": {"name": "shop"}})


@pytest.mark.parametrize("spec", [[], 0, "", False, "Sticky"])
def test_spec_that_is_no_object_is_rejected(spec: object) -> None:
    with pytest.raises(InvalidSpecError, match=r"^spec: expected object"):
        parse_policy({"spec": spec})


def test_spec_with_endless_nesting_is_rejected_with_a_sentence() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidSpecError, match=r"^spec"):
        parse_policy({"spec": {"triggers": {"resync": deep}}})
