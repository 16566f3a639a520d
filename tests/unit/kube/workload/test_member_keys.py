"""The operator's keys as its Secret defines them, and the Secrets of groups."""

import base64
from typing import Any, cast

import pytest

from rota.kube.client.api import Api, ApiError
from rota.kube.client.objects import CustomResource, Metadata, Pod, key_secret_name
from rota.kube.state.group import Group
from rota.kube.state.pod_state import PodState
from rota.kube.workload.deployments import Deployments
from rota.kube.workload.member_keys import PREVIOUS_KEY_VALID_SECONDS, MemberKeys, OperatorKeys, read_or_generate_keys
from rota.model import Reason
from rota.signing import KEY_BYTES, derive_group_key, fingerprint

KEY, PREVIOUS = (bytes([number]) * KEY_BYTES for number in range(2))
NOW = 1_790_000_000
OPERATOR_SECRET = "/api/v1/namespaces/rota-system/secrets/rota-operator-key"
GROUP_SECRET = "/api/v1/namespaces/shop/secrets/orders-rota-key"


def encoded(**values: bytes) -> dict[str, str]:
    return {name: base64.b64encode(value).decode() for name, value in values.items()}


@pytest.mark.parametrize(
    "data", [{}, {"current": ""}, {"current": "no base64"}, encoded(current=b"short"), {"current": "ÿ"}]
)
def test_signature_key_that_was_removed_is_replaced_and_valid_for_ten_minutes_more(data: dict[str, str]) -> None:
    keys = read_or_generate_keys(data, OperatorKeys(KEY), NOW)
    assert (len(keys.current), keys.previous, keys.changed_at) == (KEY_BYTES, KEY, NOW)
    assert keys.current != KEY
    stored = encoded(current=keys.current, previous=keys.previous, changed=b"2026-09-21T14:13:20+00:00")
    assert read_or_generate_keys(stored, keys, NOW + 599) == keys
    assert read_or_generate_keys(stored, None, NOW + 600) == keys._replace(previous=b"")
    assert PREVIOUS_KEY_VALID_SECONDS == 600


def test_signature_key_is_created_if_missing() -> None:
    first, second = (read_or_generate_keys({}, None, NOW) for _ in range(2))
    assert first.current != second.current
    assert first.previous == b""


def test_signature_keys_of_a_group_are_derived_from_the_current_key_first() -> None:
    assert OperatorKeys(KEY, PREVIOUS).group_keys("1") == (derive_group_key(KEY, "1"), derive_group_key(PREVIOUS, "1"))
    assert OperatorKeys(KEY).group_keys("1") == (derive_group_key(KEY, "1"),)


class Server:
    """Secrets of an API server."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.error: ApiError | None = None

    async def get(self, path: str, kind: Any) -> Any:
        if path not in self.secrets:
            raise ApiError(404, "NotFound", "no such Secret")
        return kind(Metadata("rota-operator-key", resource_version="1"), dict(self.secrets[path]["data"]))

    async def create(self, path: str, body: dict[str, Any], _: Any) -> None:
        self._write("create", f"{path}/{body['metadata']['name']}", body)

    async def replace(self, path: str, body: dict[str, Any], _: Any) -> None:
        if path not in self.secrets:
            raise ApiError(404, "NotFound", "no such Secret")
        self._write("replace", path, body)

    async def merge_patch(self, path: str, body: dict[str, Any], _: Any) -> None:
        self._write("merge", path, body)

    def _write(self, verb: str, path: str, body: dict[str, Any]) -> None:
        if self.error:
            raise self.error
        self.writes.append(f"{verb} {path}")
        self.secrets[path] = body


def a_group() -> Group:
    group = Group("shop", "orders")
    group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop")), None)
    return group


def member_keys(server: Server) -> MemberKeys:
    return MemberKeys(cast("Api", server), "rota-system", "rota-operator-key")


def test_signature_key_that_was_removed_before_a_restart_is_valid_for_ten_minutes_more() -> None:
    keys = read_or_generate_keys(encoded(last=KEY), None, NOW)
    assert (keys.previous, keys.changed_at) == (KEY, NOW)


@pytest.mark.parametrize("changed", [b"", b"\xff", b"soon", b"0001-01-01T00:00:00+14:00", b"9999-12-31T23:59:59-12:00"])
def test_signature_keys_are_valid_with_any_time_of_change(changed: bytes) -> None:
    keys = read_or_generate_keys(encoded(current=KEY, previous=PREVIOUS, changed=changed), None, NOW)
    assert keys.current == KEY
    assert keys.changed_at >= 0


async def test_signature_key_is_created_once_and_read_by_the_next_operator() -> None:
    server = Server()
    first, second = member_keys(server), member_keys(server)
    assert first.keys_of("1") == ()
    await first.load()
    await second.load()
    assert server.writes == [f"create {OPERATOR_SECRET}"]
    assert len(first.keys_of("1")) == 1
    assert first.keys_of("1") == second.keys_of("1")


async def test_signature_key_of_a_group_is_written_to_its_secret_when_its_key_changes() -> None:
    server, group = Server(), a_group()
    server.secrets[OPERATOR_SECRET] = {"data": encoded(current=KEY, changed=b"2026-09-21T14:13:20+00:00")}
    keys = member_keys(server)
    assert await keys.distribute(group) == 0, "no key is known yet"
    await keys.load()
    assert [await keys.distribute(group) for _ in range(2)] == [1, 0]
    secret = server.secrets[GROUP_SECRET]
    assert secret["data"] == encoded(current=derive_group_key(KEY, "1"))
    assert secret["type"] == "Opaque"
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "1"
    group.set_spec(CustomResource(Metadata("orders", uid="2", namespace="shop")), None)
    assert await keys.distribute(group) == 1, "another group of the same name"
    assert server.writes == [f"create {GROUP_SECRET}", f"replace {GROUP_SECRET}"]


async def test_signature_key_that_cannot_be_written_is_a_condition_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.kube.workload.member_keys.REWRITE_SECONDS", 0.0)
    server, group = Server(), a_group()
    server.secrets[OPERATOR_SECRET] = {"data": encoded(current=KEY)}
    keys = member_keys(server)
    await keys.load()
    server.error = ApiError(403, "Forbidden", "denied by a quota")
    assert await keys.distribute(group) == 1
    (problem,) = group.key_problems
    assert problem.reason is Reason.WRITE_REJECTED
    assert problem.message == "The API server rejected the Secret orders-rota-key: denied by a quota"
    server.error = None
    assert await keys.distribute(group) == 1, "the write is retried"
    assert group.key_problems == ()


async def test_signature_key_is_written_again_if_members_do_not_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.kube.workload.member_keys.REWRITE_SECONDS", 0.0)
    server, group = Server(), a_group()
    server.secrets[OPERATOR_SECRET] = {"data": encoded(current=KEY)}
    keys = member_keys(server)
    await keys.load()
    await keys.distribute(group)
    pod_state = PodState(Pod(Metadata("orders-a", uid="2", namespace="shop")), 0.0, 0.0, 0.0)
    pod_state.record_report(None, 1.0, 1.0, Reason.MEMBER_NOT_AUTHENTICATED)
    group.pods["orders-a"] = pod_state
    assert await keys.distribute(group) == 2
    annotations = {"rota.dev/key": fingerprint(derive_group_key(KEY, "1"))}
    pod = "/api/v1/namespaces/shop/pods/orders-a"
    assert server.secrets[pod] == {"metadata": {"uid": "2", "annotations": annotations}}, (
        "the annotation makes the kubelet refresh the mounted Secret"
    )
    pod_state.pod = Pod(Metadata("orders-a", uid="2", namespace="shop", annotations=annotations))
    assert await keys.distribute(group) == 1, "the pod is annotated once for each key"
    pod_state.record_report(None, 2.0, 2.0, Reason.REPORT_TOO_LARGE)
    assert await keys.distribute(group) == 0


async def test_signature_key_is_written_at_once_only_for_members_that_are_not_authenticated() -> None:
    server, group = Server(), a_group()
    server.secrets[OPERATOR_SECRET] = {"data": encoded(current=KEY)}
    keys = member_keys(server)
    await keys.load()
    deployments = Deployments(cast("Api", server), keys=keys)
    pod_state = group.pods["orders-a"] = PodState(Pod(Metadata("orders-a", uid="2", namespace="shop")), 0.0, 0.0, 0.0)
    await deployments.ensure_key(group)
    assert server.writes == [], "a new leader writes no Secret before the assignment that members wait for"
    pod_state.record_report(None, 1.0, 1.0, Reason.MEMBER_NOT_AUTHENTICATED)
    await deployments.ensure_key(group)
    await deployments.ensure_key(group)
    assert server.writes == [f"create {GROUP_SECRET}"]


@pytest.mark.parametrize("group", ["rota", "prod", "operator", "rota-operator"])
def test_signature_key_of_a_group_never_has_the_name_of_the_operators(group: str) -> None:
    """Otherwise a group in the operator's namespace could replace the operator's key by a key that members know."""
    for lease in ("rota", "prod-rota", "rota-operator", group):
        assert key_secret_name(group) != f"{lease}-operator-key"
