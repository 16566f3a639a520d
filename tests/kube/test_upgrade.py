"""A newer CRD with existing objects: changes that the release check accepts are harmless, those it reports are not."""

import copy
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ground.api import Api, ApiError, Object
from ground.poll import soon
from release.compat import incompatible

PRESENT: Object = yaml.safe_load((Path(__file__).parents[2] / "crds" / "rota.dev_consumergroups.yaml").read_text())
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SPEC: Object = {
    "broker": {"rocketmq": {"nameServers": ["ns:9876"]}},
    "subscriptions": [{"topic": "orders"}],
    "ordering": "Orderly",
    "rollout": {"maxSurge": 2},
}
STATUS: Object = {"observedGeneration": 1, "members": 3, "queues": 16, "lag": 7, "strategy": "Sticky"}


class Kind:
    """Our CRD in an API group of its own, so that it affects no other objects."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self.group = api, f"r{secrets.token_hex(4)}.rota.dev"
        self.definition_path = f"{DEFINITIONS}/consumergroups.{self.group}"
        self.objects = f"/apis/{self.group}/v1alpha1/namespaces/{namespace}/consumergroups"
        self.path = f"{self.objects}/orders"
        self.numbers = 0

    async def define(self, body: Object) -> None:
        """Create or replace the CRD, and wait until the API server uses it."""
        self.numbers += 1
        mark = f"mark{self.numbers}"
        body = copy.deepcopy(body)
        body["metadata"]["name"], body["spec"]["group"] = f"consumergroups.{self.group}", self.group
        fields(body, "spec")[mark] = {"type": "string"}
        await self.api.patch(self.definition_path, body, "apply")

        async def is_used() -> bool:
            try:
                await self.api.get(self.objects)
                await self.api.create(self.objects, self.body("probe", **{mark: "x"}), **DRY)
            except ApiError as error:
                return error.status not in {404, 429, 503} and mark not in str(error)
            return True

        await soon(is_used)

    def body(self, name: str, **more: Any) -> Object:
        """Return an object of the kind."""
        header = {"apiVersion": f"{self.group}/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": name}}
        return {**header, "spec": {**SPEC, **more}}

    async def create_object(self) -> Object:
        """Create an object with a status, and return it."""
        await self.api.create(self.objects, self.body("orders"))
        return await self.api.patch(f"{self.path}/status", {"status": STATUS})

    async def error_of(self, part: str, change: Object) -> str:
        """Return the API server's message about a change, empty if it accepts it."""
        try:
            await self.api.patch(self.path + part, change)
        except ApiError as error:
            return str(error)
        return ""


DRY = {"dryRun": "All", "fieldValidation": "Strict"}


def fields(body: Object, path: str) -> Object:
    """Return the fields below a field of the first version's schema."""
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        schema = schema["properties"][name]
    properties: Object = schema["properties"]
    return properties


@pytest.fixture
async def kind(api: Api, namespace: str) -> AsyncIterator[Kind]:
    definition = Kind(api, namespace)
    yield definition
    await api.delete(definition.definition_path)


MORE_CHANGES = pytest.mark.slow("more changes of the CRDs, validated by the API server")


def without(path: str) -> Object:
    """Return our CRD without this field, as before it was added."""
    older = copy.deepcopy(PRESENT)
    parent, _, name = path.rpartition(".")
    del fields(older, parent)[name]
    return older


def at(body: Object, path: str) -> Any:
    """Return the value at a path of an object, None if it is empty."""
    for name in path.split("."):
        body = body.get(name, {})
    return body or None


@pytest.mark.parametrize(
    "path",
    [
        "spec.startFrom",
        *(pytest.param(field, marks=MORE_CHANGES) for field in ("spec.rollout", "spec.delivery.buffer")),
        "status.lag",
    ],
)
async def test_upgrade_that_adds_a_crd_field_keeps_existing_objects(kind: Kind, path: str) -> None:
    assert incompatible(without(path), PRESENT) == []
    await kind.define(without(path))
    original = await kind.create_object()
    assert at(original, path) is None
    await kind.define(PRESENT)
    upgraded = await kind.api.get(kind.path)
    for part in ("spec", "status"):
        parent, _, name = path.rpartition(".")
        if parent.startswith(part):  # the new default is the only change
            at(upgraded, parent).pop(name, None)
        assert upgraded[part] == original[part]
    assert (upgraded["metadata"]["uid"], upgraded["metadata"]["generation"]) == (original["metadata"]["uid"], 1)
    assert await kind.error_of("/status", {"status": {"lag": 8}}) == ""
    assert await kind.error_of("", {"spec": {"paused": True}}) == ""
    assert (await kind.api.get(kind.path))["status"] == {**STATUS, "lag": 8}


def require_owner(spec: Object) -> None:
    spec["properties"]["owner"] = {"type": "string"}
    spec["required"].append("owner")


def forbid_orderly(spec: Object) -> None:
    spec["x-kubernetes-validations"].append({"rule": "self.ordering != 'Orderly'", "message": "no longer"})


def remove_an_ordering(spec: Object) -> None:
    spec["properties"]["ordering"]["enum"] = ["Concurrent"]


def lower_max_surge(spec: Object) -> None:
    spec["properties"]["rollout"]["properties"]["maxSurge"]["maximum"] = 1


@pytest.mark.parametrize(
    ("change", "finding", "new", "frozen"),
    [
        (require_owner, "spec.owner: must be there now, and has no default", "spec.owner: Required value", True),
        (
            remove_an_ordering,
            "spec.ordering: does not take Orderly any more",
            "spec.ordering: Unsupported value",
            False,
        ),
        pytest.param(
            lower_max_surge,
            "spec.rollout.maxSurge: maximum is 1 now, was 2147483647",
            "spec.rollout.maxSurge: Invalid value: 2",
            False,
            marks=MORE_CHANGES,
        ),
        pytest.param(
            forbid_orderly,
            "spec: has a rule that was not there: self.ordering != 'Orderly'",
            "no longer",
            True,
            marks=MORE_CHANGES,
        ),
    ],
)
async def test_upgrade_to_a_stricter_crd_is_reported_and_rejects_former_manifests(
    kind: Kind, change: Callable[[Object], None], finding: str, new: str, *, frozen: bool
) -> None:
    later = copy.deepcopy(PRESENT)
    change(later["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    assert incompatible(PRESENT, later) == [f"ConsumerGroup/v1alpha1 {finding}"]
    await kind.define(PRESENT)
    original = await kind.create_object()
    await kind.define(later)
    assert (await kind.api.get(kind.path))["spec"] == original["spec"]
    # Before Kubernetes 1.30, which does not validate unchanged fields, this was rejected, too.
    assert await kind.error_of("/status", {"status": {"lag": 8}}) == ""
    message = await kind.error_of("", {"spec": {"paused": True}})
    assert message.startswith("ConsumerGroup") if frozen else message == ""
    with pytest.raises(ApiError, match=new):
        await kind.api.create(kind.objects, kind.body("other"))


async def test_upgrade_that_removes_a_crd_field_is_reported_and_loses_its_value(kind: Kind) -> None:
    findings = ["ConsumerGroup/v1alpha1 spec.rollout: was removed; what is said there is dropped or refused"]
    assert incompatible(PRESENT, without("spec.rollout")) == findings
    await kind.define(PRESENT)
    assert at(await kind.create_object(), "spec.rollout.maxSurge") == 2
    await kind.define(without("spec.rollout"))
    assert await kind.error_of("/status", {"status": {"lag": 8}}) == ""
    assert at(await kind.api.get(kind.path), "spec.rollout") is None
    await kind.define(PRESENT)
    assert at(await kind.api.get(kind.path), "spec.rollout.maxSurge") == 1  # the default: the value 2 is lost


@pytest.mark.parametrize(
    ("key", "value", "finding", "error"),
    [
        ("scope", "Cluster", "ConsumerGroup scope: changed from Namespaced to Cluster", "spec.scope: Invalid value"),
        pytest.param(
            "names",
            {**PRESENT["spec"]["names"], "kind": "Fleet"},
            "ConsumerGroup names.kind: changed from ConsumerGroup to Fleet",
            "spec.names.kind: Invalid value",
            marks=MORE_CHANGES,
        ),
        pytest.param(
            "versions",
            [{**PRESENT["spec"]["versions"][0], "name": "v1"}],
            "ConsumerGroup/v1alpha1 version: was removed; objects may be stored in it, and manifests name it",
            "v1alpha1 was previously a storage version",
            marks=MORE_CHANGES,
        ),
    ],
)
async def test_upgrade_that_the_api_server_rejects_is_reported_before(
    kind: Kind, key: str, value: Any, finding: str, error: str
) -> None:
    later = copy.deepcopy(PRESENT)
    later["spec"][key] = value
    assert finding in incompatible(PRESENT, later)
    await kind.define(PRESENT)
    with pytest.raises(ApiError, match=error):
        await kind.define(later)


async def test_upgrade_to_another_stored_version_is_reported_and_irreversible(kind: Kind) -> None:
    later = copy.deepcopy(PRESENT)
    (first,) = later["spec"]["versions"]
    later["spec"]["versions"] = [{**first, "storage": False}, {**copy.deepcopy(first), "name": "v1"}]
    assert incompatible(PRESENT, later) == ["ConsumerGroup the stored version: changed from v1alpha1 to v1"]
    await kind.define(PRESENT)
    original = await kind.create_object()
    await kind.define(later)
    assert (await kind.api.get(kind.path))["spec"] == original["spec"]
    with pytest.raises(ApiError, match="v1 was previously a storage version"):
        await kind.define(PRESENT)
