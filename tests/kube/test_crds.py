"""The CRDs on a real API server: accepted, explained, shown in columns, scaled; and the examples."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import a_document, a_pod, a_report, a_snapshot, obeying
from ground.api import Api, ApiError, Object
from ground.cluster import Cluster
from rota.model import Queue
from rota.planner import plan
from rota.spec import parse_group, parse_policy

pytestmark = pytest.mark.usefixtures("crds")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
MANIFESTS = [body for path in sorted(EXAMPLES.glob("*.yaml")) for body in yaml.safe_load_all(path.read_text())]
KINDS = {"ConsumerGroup": ("consumergroups", parse_group), "RebalancePolicy": ("rebalancepolicies", parse_policy)}
COLUMNS = ["NAME", "READY", "MEMBERS", "QUEUES", "LAG", "STRATEGY", "LAST-REBALANCE", "AGE"]
SPEC: Object = {"broker": {"rocketmq": {"nameServers": ["ns:9876"]}}, "subscriptions": [{"topic": "orders"}]}
NEARBY: Object = {"roomLabel": "zone", "brokers": [{"broker": "b", "room": "east"}]}
FLEET = {**SPEC, "replicas": 3, "template": {"spec": {"containers": [{"name": "app", "image": "app"}]}}}


def collection(namespace: str, kind: str = "ConsumerGroup") -> str:
    return f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/{KINDS[kind][0]}"


async def a_group(api: Api, namespace: str, spec: Object) -> str:
    """Create a group, and return its path."""
    body = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": "orders"}, "spec": spec}
    await api.create(collection(namespace), body)
    return f"{collection(namespace)}/orders"


def fields(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Yield every field of a schema, with its path."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")
        yield from fields(field.get("items", {}), f"{path}.{name}[]")


def every_field() -> Iterator[Any]:
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        body = yaml.safe_load(path.read_text())
        for name, field in fields(body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]):
            yield pytest.param(field, id=body["spec"]["names"]["singular"] + name)


def test_crd_manifests_are_accepted_without_a_warning(control_plane: Cluster) -> None:
    options = ("--server-side", "--force-conflicts", "--warnings-as-errors", "--dry-run=server")
    assert control_plane.kubectl("apply", *options, "-f", f"{ROOT}/crds/")


@pytest.mark.parametrize("kind", KINDS)
def test_crd_is_established_and_structural(crds: dict[str, Object], kind: str) -> None:
    conditions = {condition["type"]: condition["status"] for condition in crds[kind]["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}  # otherwise NonStructuralSchema, too
    assert crds[kind]["status"]["storedVersions"] == ["v1alpha1"]


@pytest.mark.parametrize("field", [*every_field()])
def test_crd_fields_have_a_description_in_sentences_that_names_the_default(field: Object) -> None:
    description = field.get("description", "")
    assert description[:1].isupper()
    assert description.endswith(".")
    assert "  " not in description
    default = field.get("default")
    if isinstance(default, str | int) and not isinstance(default, bool):
        assert description.endswith(f"Default {default}.")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("cg", "A ConsumerGroup is a fleet of consumers of a message broker."),
        ("cg.spec.delivery.push", "Time limit of the app's response."),
        ("cg.spec.subscriptions.type", "SQL92 requires brokers with enablePropertyFilter."),
        ("cg.status.conditions", "Ready: every queue has an owner that can consume it."),
        ("rp.spec.options.byConfig.members", "The member's index among the sorted names of all members, from 0."),
        ("rp.spec.handover", "Cooperative grants a queue after its owner has released it."),
    ],
)
def test_crd_descriptions_are_shown_by_kubectl_explain(control_plane: Cluster, path: str, sentence: str) -> None:
    assert sentence in " ".join(control_plane.kubectl("explain", path).split())


async def test_crd_fills_in_the_defaults_of_a_group(api: Api, namespace: str) -> None:
    spec = (await api.get(await a_group(api, namespace, SPEC)))["spec"]
    assert spec == {
        "broker": {"rocketmq": {"nameServers": ["ns:9876"], "tls": {"enabled": False}}},
        "subscriptions": [{"topic": "orders", "expression": "*", "type": "Tag"}],
        "messageModel": "Clustering",
        "ordering": "Concurrent",
        "startFrom": {"position": "Latest"},
        "delivery": {
            "mode": "Push",
            "push": {"port": 8080, "path": "/", "timeout": "30s", "concurrency": 16, "maxBatch": 1},
            "pull": {"visibilityTimeout": "30s"},
            "retry": {},
            "buffer": {"messagesPerQueue": 1000, "mebibytesPerQueue": 100, "mebibytesPerMessage": 4},
        },
        "rollout": {"maxSurge": 1, "maxUnavailable": 0},
        "sidecar": {"autoUpgrade": False},
        "paused": False,
    }


@pytest.mark.parametrize(
    ("policy_spec", "defaults"),
    [
        ({}, {"strategy": "Averagely", "options": {}}),
        ({"budget": {"maxMoves": 10}}, {"budget": {"maxMoves": 10, "per": "1m"}}),
        (
            {"strategy": "ConsistentHash", "options": {"consistentHash": {}}},
            {"options": {"consistentHash": {"virtualNodes": 10}}},
        ),
        (
            {"strategy": "MachineRoomNearby", "options": {"machineRoomNearby": NEARBY}},
            {"options": {"machineRoomNearby": {**NEARBY, "inner": "Averagely"}}},
        ),
    ],
)
async def test_crd_fills_in_the_defaults_of_a_policy(
    api: Api, namespace: str, policy_spec: Object, defaults: Object
) -> None:
    body = {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "RebalancePolicy",
        "metadata": {"name": "calm"},
        "spec": policy_spec,
    }
    spec = (await api.create(collection(namespace, "RebalancePolicy"), body))["spec"]
    assert spec == {
        "strategy": "Averagely",
        "options": {},
        "handover": {"mode": "Cooperative", "drainTimeout": "30s", "lostAfter": "10s"},
        "triggers": {"debounce": "500ms", "resync": "20s", "unreadyGrace": "10s"},
        "paused": False,
        **policy_spec,
        **defaults,
    }


async def test_status_of_a_new_group_has_observed_generation_minus_1(api: Api, namespace: str) -> None:
    path = await a_group(api, namespace, SPEC)
    assert (await api.get(path))["status"] == {"observedGeneration": -1}


async def test_status_written_by_the_planner_is_stored_whole(api: Api, namespace: str) -> None:
    path = await a_group(api, namespace, SPEC)
    queues = [Queue("orders", "a", number) for number in range(6)]
    document = a_document(members={"m1": queues[:3], "m2": queues[3:]})
    pods = (*obeying(document), a_pod("m3", a_report("m3", 0)), a_pod("m4", ended=True, ready=False))
    status = dict(plan(a_snapshot(document=document, pods=pods, lag=7, observed_generation=3), 1_763_712_000.0).status)
    status["lastRebalance"] = {**status["lastRebalance"], "seconds": 1.5}
    status["strategy"] = "Sticky"
    written = await api.patch(f"{path}/status", {"status": status}, fieldValidation="Strict")
    assert written["status"] == status
    assert written["spec"]["paused"] is False


async def test_crd_columns_show_the_state_of_a_group(api: Api, control_plane: Cluster, namespace: str) -> None:
    path = await a_group(api, namespace, SPEC)
    at = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True", "reason": "Settled", "message": "All well", "lastTransitionTime": at}
    last = {"reason": "MemberJoined", "at": at, "moved": 2}
    status = {
        "conditions": [ready],
        "members": 3,
        "queues": 16,
        "lag": 120,
        "strategy": "Sticky",
        "lastRebalance": last,
    }
    await api.patch(f"{path}/status", {"status": status})
    head, row = control_plane.kubectl("get", "cg", "-n", namespace).splitlines()
    assert head.split() == COLUMNS
    assert row.split()[:6] == ["orders", "True", "3", "16", "120", "Sticky"]
    assert row.split()[6] not in {"<none>", "<invalid>", "<unknown>"}
    assert "All well" in control_plane.kubectl("get", "cg", "-n", namespace, "-o", "wide")


async def test_crd_columns_show_the_fields_of_a_policy(api: Api, control_plane: Cluster, namespace: str) -> None:
    spec = {"strategy": "Sticky", "budget": {"maxMoves": 10}}
    body = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "calm"}, "spec": spec}
    await api.create(collection(namespace, "RebalancePolicy"), body)
    head, row = control_plane.kubectl("get", "rp", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "STRATEGY", "HANDOVER", "MAX-MOVES", "PAUSED", "ACCEPTED", "GROUPS", "AGE"]
    assert row.split()[:5] == ["calm", "Sticky", "Cooperative", "10", "false"]


@pytest.mark.parametrize("name", ["cg", "consumergroup", "rota"])
async def test_crd_short_names_find_a_group(api: Api, control_plane: Cluster, namespace: str, name: str) -> None:
    await a_group(api, namespace, SPEC)
    assert control_plane.kubectl("get", name, "-n", namespace, "-o", "name") == "consumergroup.rota.dev/orders\n"


async def test_crd_scale_subresource_scales_a_group_with_a_template(
    api: Api, control_plane: Cluster, namespace: str
) -> None:
    path = await a_group(api, namespace, FLEET)
    await api.patch(f"{path}/status", {"status": {"replicas": 3, "selector": "rota.dev/group=orders"}})
    scale = await api.get(f"{path}/scale")
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 3, "selector": "rota.dev/group=orders"}
    await api.patch(f"{path}/scale", {"spec": {"replicas": 4}})
    assert (await api.get(path))["spec"]["replicas"] == 4
    control_plane.kubectl("scale", "cg/orders", "--replicas=5", "-n", namespace)
    assert (await api.get(path))["spec"]["replicas"] == 5


async def test_crd_scale_subresource_rejects_a_group_without_a_template(api: Api, namespace: str) -> None:
    path = await a_group(api, namespace, SPEC)
    with pytest.raises(ApiError, match=r"spec\.replicas"):
        await api.patch(f"{path}/scale", {"spec": {"replicas": 4}})
    assert "replicas" not in (await api.get(path))["spec"]


async def test_crd_requires_replicas_and_template_together(api: Api, namespace: str) -> None:
    path = await a_group(api, namespace, FLEET)
    for removed, sentence in (("replicas", "spec.replicas is missing"), ("template", "spec.replicas requires")):
        with pytest.raises(ApiError, match=sentence):
            await api.patch(path, {"spec": {removed: None}})
    bare = await api.patch(path, {"spec": {"replicas": None, "template": None}})
    assert bare["spec"].keys() & FLEET.keys() == SPEC.keys()


@pytest.mark.parametrize(
    "body", [pytest.param(body, id=body["metadata"]["name"]) for body in MANIFESTS if body["kind"] in KINDS]
)
async def test_example_is_applied_and_parses_the_same_as_its_file(api: Api, namespace: str, body: Object) -> None:
    path = f"{collection(namespace, body['kind'])}/{body['metadata']['name']}"
    applied = await api.patch(path, body, "apply", fieldValidation="Strict")
    parse: Any = KINDS[body["kind"]][1]
    assert parse(applied) == parse(body)


def test_example_manifests_are_accepted_all_at_once(control_plane: Cluster, namespace: str) -> None:
    options = ("--warnings-as-errors", "--dry-run=server", "-n", namespace, "-o", "name")
    applied = control_plane.kubectl("apply", *options, "-f", str(EXAMPLES)).split()
    assert len(set(applied)) == len(MANIFESTS)  # no object is in two files
