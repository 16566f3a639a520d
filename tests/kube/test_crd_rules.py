"""The rules of the CRDs and of `rota.spec`: both reject the same objects, and fill in the same defaults."""

import copy
from typing import Any

import pytest

from ground.api import Api, ApiError, Object
from rota.spec import InvalidSpecError, parse_group, parse_policy

pytestmark = pytest.mark.usefixtures("crds")

GROUPS = "/apis/rota.dev/v1alpha1/namespaces/{}/consumergroups"
POLICIES = "/apis/rota.dev/v1alpha1/namespaces/{}/rebalancepolicies"
MINIMAL_SPEC: Object = {"broker": {"rocketmq": {"nameServers": ["ns:9876"]}}, "subscriptions": [{"topic": "orders"}]}


def a_group(name: str = "shop", **changed: Any) -> Object:
    """Return a group; fields that are None are omitted."""
    spec = {key: value for key, value in (MINIMAL_SPEC | changed).items() if value is not None}
    return {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": name}, "spec": spec}


def a_policy(**spec: Any) -> Object:
    return {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "p"}, "spec": spec}


def nested(path: str, value: Any) -> Any:
    """Return a spec with one field at a path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def by_config(*ids: str) -> Object:
    """Return a spec that assigns these ids of one broker's queues, one argument a member."""
    members = [
        {"index": at, "queues": [{"topic": "t", "broker": "b", "ids": ids_of_member}]}
        for at, ids_of_member in enumerate(ids)
    ]
    return {"strategy": "ByConfig", **nested("options.byConfig.members", members)}


def nearby(*rooms: str) -> Object:
    brokers = [{"broker": "b", "room": room} for room in rooms]
    return {
        "strategy": "MachineRoomNearby",
        **nested("options.machineRoomNearby", {"roomLabel": "z", "brokers": brokers}),
    }


async def api_error(api: Api, body: Object) -> str:
    """Return the API server's message about an object, empty if it would accept it."""
    path = {"ConsumerGroup": GROUPS, "RebalancePolicy": POLICIES}[body["kind"]].format("default")
    try:
        await api.create(path, body, dryRun="All", fieldValidation="Strict")
    except ApiError as rejected:
        if rejected.status not in {400, 422}:
            raise
        return str(rejected)
    return ""


def parser_error(body: Object) -> str:
    """Return the parser's message about an object, empty if it accepts it."""
    try:
        (parse_group if body["kind"] == "ConsumerGroup" else parse_policy)(body)
    except InvalidSpecError as mistake:
        return str(mistake)
    return ""


GROUP_TIMES = ["delivery.push.timeout", "delivery.pull.visibilityTimeout"]
POLICY_TIMES = ["handover.drainTimeout", "handover.lostAfter"]
POLICY_TIMES += ["triggers.debounce", "triggers.resync", "triggers.unreadyGrace", "budget.per"]
INVALID_TIMES = ["1 week", "30", "-1s", "0s", "0.0ms", "1h30m", "1234567s", "s", ".5s", "1s\n", 30]
EMPTY: Object = {"rocketmq": {"nameServers": []}}
ENCRYPTED_BY_NAME = {"broker": {"rocketmq": {"nameServers": ["ns:9876"], "tls": {"caSecret": {"name": "ca"}}}}}
ORDERLY_PULL = {"ordering": "Orderly", "delivery": {"mode": "Pull"}}
OWN = "spec.subscriptions names a topic that is the group's own: members read its retries anyway"
NEED = "is missing: strategy {} requires it"

# Names that would direct a request for a Secret to another object, if put into its path unescaped.
PATHS_AS_NAMES = ["../../victim/secrets/rmq-admin", "..", "%2e%2e", "a%2fb", "a//b", "a?b", "a#b", "a\n", "A", "a..b"]
# The invalid fields, the API server's message, and the parser's message if it differs.
BAD_GROUPS: list[tuple[Object, str, str]] = [
    ({"broker": None}, "spec.broker: Required value", "spec: object missing required field broker"),
    ({"broker": {}}, "spec.broker.rocketmq: Required value", "spec.broker: object missing required field rocketmq"),
    ({"broker": EMPTY}, "spec.broker.rocketmq.nameServers: Invalid value", "expected array of length >= 1"),
    ({"subscriptions": None}, "spec.subscriptions: Required value", "spec: object missing required field subscr"),
    ({"subscriptions": []}, "spec.subscriptions: Invalid value", "spec.subscriptions: expected array of length >= 1"),
    ({"subscriptions": [{"topic": "a b"}]}, "subscriptions[0].topic in body should match", "expected str matching"),
    ({"subscriptions": [{"topic": "a\n"}]}, "subscriptions[0].topic in body should match", "expected str matching"),
    ({"subscriptions": [{"topic": "a" * 128}]}, "spec.subscriptions[0].topic: Too long", "length <= 127"),
    ({"subscriptions": [{"topic": "a"}] * 2}, "spec.subscriptions[1]: Duplicate value", "names a topic twice"),
    ({"subscriptions": [{"topic": "a", "expression": ""}]}, "spec.subscriptions[0].expression", "length >= 1"),
    ({"subscriptions": [{"topic": "a", "expression": " || "}]}, "an expression without a tag; write * for all", ""),
    ({"subscriptions": [{"topic": "a", "type": "Tags"}]}, 'Unsupported value: "Tags"', "invalid enum value 'Tags'"),
    ({"subscriptions": [{"topic": "%RETRY%shop"}]}, OWN, "%RETRY%shop is the group's own: members read its retries"),
    ({"subscriptions": [{"topic": "%DLQ%shop"}]}, OWN, "%DLQ%shop is the group's own"),
    ({"group": "g", "subscriptions": [{"topic": "%RETRY%g"}]}, OWN, "%RETRY%g is the group's own"),
    ({"group": ""}, "spec.group: Invalid value", "spec.group: expected str of length >= 1"),
    ({"group": "shop eu"}, "spec.group in body should match", "spec.group: expected str matching regex"),
    ({"colour": 1}, 'unknown field "spec.colour"', "spec: object contains unknown field colour"),
    ({"messageModel": "All"}, 'spec.messageModel: Unsupported value: "All"', "spec.messageModel: invalid enum value"),
    ({"ordering": "Strict"}, 'spec.ordering: Unsupported value: "Strict"', "spec.ordering: invalid enum value"),
    (ENCRYPTED_BY_NAME, "spec.broker.rocketmq.tls names a Secret although enabled is false; set it to true", ""),
    *(
        (nested("delivery.traces.endpoint", url), "endpoint is not the URL of a receiver; write", "")
        for url in ("http://me:x@collector", "http://a:b", "http://[", "collector:4318", "http://a/?b", "http://a\\b")
    ),
    (ORDERLY_PULL, "spec.delivery.mode Pull works with ordering Concurrent only; use Push or change spec.ordering", ""),
    (
        {"ordering": "Orderly", **nested("delivery.push.timeout", "30001ms")},
        "spec.delivery.push.timeout may be at most 30s in an Orderly group, whose queue locks live 60s",
        "",
    ),
    (nested("startFrom.position", "Newest"), "spec.startFrom.position: Unsupported", "position: invalid enum value"),
    (nested("startFrom.timestamp", "2026-01-01T00:00:00Z"), "startFrom.timestamp requires position Timestamp", ""),
    (
        {"startFrom": {"position": "Timestamp", "timestamp": "yesterday"}},
        "spec.startFrom.timestamp: Invalid value",
        "spec.startFrom.timestamp: invalid RFC3339",
    ),
    (
        {"startFrom": {"position": "Timestamp", "timestamp": "2026-01-01T00:00:00"}},
        "spec.startFrom.timestamp: Invalid value",
        "spec.startFrom.timestamp has no time zone",
    ),
    (
        nested("delivery.mode", "Poll"),
        "spec.delivery.mode: Unsupported value",
        "spec.delivery.mode: invalid enum value",
    ),
    (nested("delivery.push.port", 0), "greater than or equal to 1", "expected int >= 1"),
    (nested("delivery.push.port", 65536), "less than or equal to 65535", "expected int <= 65535"),
    (nested("delivery.push.path", "orders"), "path in body should match", "path: expected str matching regex '^/'"),
    (nested("delivery.push.concurrency", 0), "greater than or equal to 1", "expected int >= 1"),
    (nested("delivery.push.concurrency", 2**31), "concurrency: Invalid value", "expected int <= 2147483647"),
    (nested("delivery.push.maxBatch", 2**31), "maxBatch: Invalid value", "expected int <= 2147483647"),
    (nested("delivery.push.maxBatch", 0), "greater than or equal to 1", "expected int >= 1"),
    (nested("delivery.retry.maxAttempts", 0), "spec.delivery.retry.maxAttempts must be at least 1, or -1 for ever", ""),
    (nested("delivery.retry.maxAttempts", 2**31), "maxAttempts: Invalid value", "expected int <= 2147483647"),
    (nested("delivery.retry.maxAttempts", -2), "greater than or equal to -1", "expected int >= -1"),
    *(
        (nested(f"delivery.buffer.{field}", value), f"spec.delivery.buffer.{field}: Invalid value", "expected int")
        for field in (
            *("messagesPerQueue", "mebibytesPerQueue", "mebibytesPerMessage"),
            *("messagesPerTopic", "mebibytesPerTopic"),
        )
        for value in (0, 2**31)
    ),
    ({"replicas": 3}, "spec.replicas requires spec.template; without a template Rota neither runs", ""),
    ({"replicas": -1, "template": {}}, "greater than or equal to 0", "expected int >= 0"),
    ({"replicas": 2**31, "template": {}}, "spec.replicas: Invalid value", "expected int <= 2147483647"),
    ({"replicas": "three", "template": {}}, "spec.replicas: Invalid value", "spec.replicas: expected int"),
    ({"template": "web", "replicas": 1}, "spec.template: Invalid value", "spec.template: expected object"),
    (nested("rollout.maxSurge", 0), "maxUnavailable are both 0, so no pod could be replaced; allow one of them", ""),
    ({"rollout": {"maxSurge": "0%", "maxUnavailable": "0%"}}, "maxUnavailable are both 0, so no pod could be", ""),
    (nested("rollout.maxSurge", "half"), "maxSurge in body should match", "maxSurge: expected str matching regex"),
    (nested("rollout.maxSurge", -1), "greater than or equal to 0", "spec.rollout.maxSurge: expected int >= 0"),
    (nested("rollout.maxSurge", 2**31), "spec.rollout.maxSurge: Invalid value", "expected int <= 2147483647"),
    (nested("rollout.maxUnavailable", -1), "greater than or equal to 0", "maxUnavailable: expected int >= 0"),
    (nested("rollout.maxUnavailable", 2**31), "maxUnavailable: Invalid value", "expected int <= 2147483647"),
    (nested("rollout.maxUnavailable", "101%"), "maxUnavailable in body should match", "expected str matching regex"),
    (nested("sidecar.resources", "small"), "spec.sidecar.resources: Invalid value", "resources: expected object"),
    (nested("policyRef.name", ""), "spec.policyRef.name: Invalid value", "name: expected str of length >= 1"),
    *(
        (nested("policyRef.name", name), "policyRef.name in body should match", "name is not the name of a Kubernetes")
        for name in PATHS_AS_NAMES
    ),
    ({"policyRef": {}}, "spec.policyRef.name: Required value", "spec.policyRef: object missing required field name"),
]

BAD_POLICIES: list[tuple[Object, str, str]] = [
    ({"strategy": "Stick"}, 'spec.strategy: Unsupported value: "Stick"', "spec.strategy: invalid enum value 'Stick'"),
    ({"colour": 1}, 'unknown field "spec.colour"', "spec: object contains unknown field colour"),
    *(
        ({"strategy": name}, f"spec.options.{name[0].lower()}{name[1:]} {NEED.format(name)}", "")
        for name in ("ByConfig", "ByMachineRoom", "MachineRoomNearby", "Custom")
    ),
    *(
        ({"options": {block: value}}, f"spec.options.{block} does not belong to strategy Averagely; remove it", "")
        for block, value in {
            **by_config("0")["options"],
            "byMachineRoom": {"rooms": ["east"]},
            **nearby("east")["options"],
            "consistentHash": {},
            "balanced": {},
            "custom": {"name": "own"},
        }.items()
    ),
    (
        {"strategy": "ByConfig", **nested("options.byConfig.members", [{"index": 0, "queues": []}] * 2)},
        "spec.options.byConfig.members[1]: Duplicate value",
        "spec.options.byConfig.members names an index twice",
    ),
    (
        {"strategy": "ByConfig", **nested("options.byConfig.members", [{"index": 0, "queues": [{"topic": "t"}]}])},
        "spec.options.byConfig.members[0].queues[0].broker: Required value",
        "spec.options.byConfig.members[0].queues[0]: object missing required field broker",
    ),
    (by_config("a-b"), "queues[0].ids in body should match", "queues[0].ids: expected str matching regex"),
    (by_config("0-1000000"), "queues[0].ids in body should match", "ids '0-1000000' is not valid"),
    (
        {"strategy": "ByMachineRoom", **nested("options.byMachineRoom.rooms", [])},
        "spec.options.byMachineRoom.rooms: Invalid value",
        "spec.options.byMachineRoom.rooms: expected array of length >= 1",
    ),
    (nearby("east", "west"), "machineRoomNearby.brokers[1]: Duplicate value", "broker b is in room east already"),
    (nearby(), "spec.options.machineRoomNearby.brokers: Invalid value", "expected array of length >= 1"),
    (
        {"strategy": "Balanced", **nested("options.balanced.brokers", [{"broker": "b", "room": r} for r in "ew"])},
        "spec.options.balanced.brokers[1]: Duplicate value",
        "broker b is in room e already",
    ),
    (
        {"strategy": "ConsistentHash", **nested("options.consistentHash.virtualNodes", 1001)},
        "less than or equal to 1000",
        "virtualNodes: expected int <= 1000",
    ),
    (nested("handover.mode", "Quick"), "spec.handover.mode: Unsupported value", "spec.handover.mode: invalid enum"),
    (nested("handover.drainTimeout", "99ms"), "spec.handover.drainTimeout must be at least 100ms", ""),
    (nested("handover.lostAfter", "0.9s"), "spec.handover.lostAfter must be at least 1s", ""),
    (nested("triggers.debounce", "9.9ms"), "spec.triggers.debounce must be at least 10ms", ""),
    (nested("triggers.resync", "999ms"), "spec.triggers.resync must be at least 1s", ""),
    (nested("triggers.unreadyGrace", "99ms"), "spec.triggers.unreadyGrace must be at least 100ms", ""),
    ({"budget": {"maxMoves": 1, "per": "999ms"}}, "spec.budget.per must be at least 1s", ""),
    ({"budget": {"maxMoves": -1}}, "greater than or equal to 0", "spec.budget.maxMoves: expected int >= 0"),
    ({"budget": {"maxMoves": 10**6 + 1}}, "less than or equal to 1000000", "maxMoves: expected int <= 1000000"),
    ({"budget": {}}, "spec.budget.maxMoves: Required value", "spec.budget: object missing required field maxMoves"),
]


TLS = {"enabled": True, "caSecret": {"name": "ca"}, "clientSecret": {"name": "client"}}
ROCKETMQ = {"nameServers": ["ns:9876"], "credentialsSecret": {"name": "s"}, "tls": TLS}
NEARBY = nearby("east")["options"]["machineRoomNearby"]
WHOLE: Object = {
    "broker": {"rocketmq": ROCKETMQ},
    "byConfig": by_config("0")["options"]["byConfig"],
    "byMachineRoom": {"rooms": ["east"]},
    "machineRoomNearby": {**NEARBY, "inner": "Sticky"},
    "consistentHash": {"virtualNodes": 1},
    "balanced": {"roomLabel": "zone", "brokers": NEARBY["brokers"]},
    "custom": {"name": "own"},
}


def with_block(block: str, value: Any) -> Object:
    """Return a group or a policy with this block."""
    if block == "broker":
        return a_group(broker=value)
    return a_policy(strategy=block[0].upper() + block[1:], options={block: value})


# The path in a block, and its invalid values; None: the field is missing.
INVALID_FIELDS: dict[str, list[Any]] = {
    "broker.rocketmq.nameServers": [None, [""]],
    "broker.rocketmq.credentialsSecret.name": [None, "", 254 * "a", *PATHS_AS_NAMES],
    "broker.rocketmq.tls.caSecret.name": [None, "", 254 * "a", *PATHS_AS_NAMES],
    "broker.rocketmq.tls.clientSecret.name": [None, "", 254 * "a", *PATHS_AS_NAMES],
    "broker.rocketmq.tls.enabled": ["yes"],
    "byConfig.members": [None, []],
    "byConfig.members.0.index": [None, -1],
    "byConfig.members.0.queues": [None],
    "byConfig.members.0.queues.0.topic": [None, "", "a b"],
    "byConfig.members.0.queues.0.broker": [None, ""],
    "byConfig.members.0.queues.0.ids": [None, "", "1-"],
    "byMachineRoom.rooms": [None, [""]],
    "machineRoomNearby.roomLabel": [None, ""],
    "machineRoomNearby.brokers": [None],
    "machineRoomNearby.brokers.0.broker": [None, ""],
    "machineRoomNearby.brokers.0.room": [None, ""],
    "machineRoomNearby.inner": ["Balanced"],
    "consistentHash.virtualNodes": [0],
    "balanced.roomLabel": [""],
    "balanced.brokers.0.broker": [None, ""],
    "balanced.brokers.0.room": [None, ""],
    "custom.name": [None, ""],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, bad in INVALID_FIELDS.items() for value in bad])
async def test_crd_and_parser_reject_a_missing_or_empty_field_in_a_block(api: Api, path: str, value: object) -> None:
    block, *inner, last = path.split(".")
    whole = copy.deepcopy(WHOLE)
    assert await api_error(api, with_block(block, whole[block])) == ""
    at: Any = whole[block]
    for key in inner:
        at = at[int(key) if key.isdigit() else key]
    at.pop(last) if value is None else at.update({last: value})
    assert last in await api_error(api, with_block(block, whole[block]))
    assert last in parser_error(with_block(block, whole[block]))


@pytest.mark.parametrize(("changed", "sentence", "parser_sentence"), BAD_GROUPS)
async def test_crd_and_parser_reject_an_invalid_group(
    api: Api, changed: Object, sentence: str, parser_sentence: str
) -> None:
    body = a_group(**changed)
    assert sentence in await api_error(api, body)
    assert (parser_sentence or sentence) in parser_error(body)


@pytest.mark.parametrize(("spec", "sentence", "parser_sentence"), BAD_POLICIES)
async def test_crd_and_parser_reject_an_invalid_policy(
    api: Api, spec: Object, sentence: str, parser_sentence: str
) -> None:
    body = a_policy(**spec)
    assert sentence in await api_error(api, body)
    assert (parser_sentence or sentence) in parser_error(body)


@pytest.mark.parametrize("duration", INVALID_TIMES, ids=repr)
@pytest.mark.parametrize("path", GROUP_TIMES + POLICY_TIMES)
async def test_crd_and_parser_reject_an_invalid_duration(api: Api, path: str, duration: object) -> None:
    spec = nested(path, duration)
    if "budget" in spec:
        spec["budget"]["maxMoves"] = 1
    body = a_group(**spec) if path in GROUP_TIMES else a_policy(**spec)
    message = await api_error(api, body)
    assert f"spec.{path}" in message
    assert "conversion" not in message  # an error of CEL, not of the user
    assert f"spec.{path}: expected a duration such as 500ms, 30s or 1m" in parser_error(body)


# Only the API server rejects these: names of objects, fields that `/scale` needs, and duplicate keys of a list.
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (a_group("a" * 64), "metadata.name may have at most 63 characters, because it becomes a label's value"),
        (a_group("shop.eu"), "metadata.name has a dot, which no group at a broker may have; set spec.group"),
        (a_group(template={}), "spec.replicas is missing; set it to the number of pods of spec.template"),
        (a_policy(**nearby("east", "east")), "spec.options.machineRoomNearby.brokers[1]: Duplicate value"),
    ],
)
async def test_crd_rejects_some_objects_that_the_parser_accepts(api: Api, body: Object, sentence: str) -> None:
    assert sentence in await api_error(api, body)
    assert parser_error(body) == ""


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (("3-1",), "members[0].queues[0].ids '3-1' is not valid"),
        (("1,0-2",), "members[0].queues[0].ids names queue t/b/1"),
        (("0-3", "5,2-8"), "members[1].queues[0].ids names queue t/b/2"),
    ],
)
async def test_crd_leaves_invalid_queue_ranges_to_the_parser(api: Api, ids: tuple[str, ...], sentence: str) -> None:
    body = a_policy(**by_config(*ids))
    assert await api_error(api, body) == ""
    assert sentence in parser_error(body)


GOOD = [
    a_group(),
    a_group("a" * 63),
    a_group("shop.eu", group="shop-eu"),
    a_group(group="%BI|Reports_1"),
    a_group(subscriptions=[{"topic": "%RETRY%other"}, {"topic": "b", "expression": "created || paid"}]),
    a_group(subscriptions=[{"topic": "a", "expression": "||", "type": "SQL92"}]),
    a_group(subscriptions=[{"topic": f"t{number}"} for number in range(128)]),
    a_group(messageModel="Broadcasting", ordering="Orderly", startFrom={"position": "Earliest"}),
    a_group(startFrom={"position": "Timestamp"}),
    a_group(startFrom={"position": "Timestamp", "timestamp": "2026-11-21T08:00:00.5+01:00"}),
    a_group(ordering="Orderly", delivery={"push": {"timeout": "0.5m"}, "retry": {"maxAttempts": -1}}),
    a_group(delivery={"mode": "Pull", "pull": {"visibilityTimeout": "999999.999999h"}, "push": {"timeout": "5m"}}),
    a_group(delivery={"buffer": {"messagesPerTopic": None, "mebibytesPerTopic": None}}),
    a_group(replicas=0, template={"spec": {"containers": [{"name": "app", "anything": {"goes": 1}}]}}),
    a_group(
        rollout={"maxSurge": "25%", "maxUnavailable": "100%"}, sidecar={"resources": {"limits": {"memory": "1Gi"}}}
    ),
    a_group(policyRef={"name": "steady"}, paused=True),
    a_policy(),
    {key: value for key, value in a_policy().items() if key != "spec"},
    a_policy(**by_config("0-3,7", "999999")),
    a_policy(strategy="ByMachineRoom", options={"byMachineRoom": {"rooms": ["east", "west"]}}),
    a_policy(**nearby("east")),
    a_policy(strategy="ConsistentHash"),
    a_policy(strategy="ConsistentHash", options={"consistentHash": {}}),
    a_policy(strategy="Balanced", options={"balanced": {}}),
    a_policy(strategy="Custom", options={"custom": {"name": "own", "options": {"any": ["thing"]}}}),
    a_policy(strategy="Custom", options={"custom": {"name": "own"}}),
    a_policy(handover={"drainTimeout": "100ms", "lostAfter": "1000ms"}, budget={"maxMoves": 0, "per": "0.25h"}),
    a_policy(triggers={"debounce": "10ms", "resync": "1s", "unreadyGrace": "0.1s"}, paused=True),
]


@pytest.mark.parametrize("body", GOOD)
async def test_crd_and_parser_accept_and_default_valid_objects_alike(api: Api, body: Object) -> None:
    path = {"ConsumerGroup": GROUPS, "RebalancePolicy": POLICIES}[body["kind"]].format("default")
    defaulted = await api.create(path, body, dryRun="All", fieldValidation="Strict")
    parse = parse_group if body["kind"] == "ConsumerGroup" else parse_policy
    assert defaulted["spec"] != body.get("spec")
    assert parse(defaulted) == parse(body)


@pytest.mark.parametrize(("original", "new_name"), [("a", "b"), (None, "shop"), ("a", None)])
async def test_crd_makes_spec_group_immutable(
    api: Api, namespace: str, original: str | None, new_name: str | None
) -> None:
    collection = GROUPS.format(namespace)
    await api.create(collection, a_group(group=original))
    with pytest.raises(ApiError, match=r"spec\.group cannot be set, changed or removed once the group is there"):
        await api.patch(f"{collection}/shop", {"spec": {"group": new_name}})
    changed = await api.patch(f"{collection}/shop", {"spec": {"group": original, "paused": True}})
    assert (changed["spec"].get("group"), changed["spec"]["paused"]) == (original, True)
