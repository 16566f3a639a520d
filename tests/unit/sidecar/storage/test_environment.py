"""The settings that a sidecar reads from the environment variables of its pod."""

from math import inf
from pathlib import Path

import pytest

from rota.container import memory_limit_bytes
from rota.sidecar.storage.environment import PodIdentity

REQUIRED = {"POD_NAME": "orders-1", "POD_NAMESPACE": "shop", "POD_UID": "0a1b2c3d-4e5f"}


def test_sidecar_environment_needs_pod_name_namespace_and_uid_and_has_defaults() -> None:
    assert PodIdentity.from_environment(REQUIRED) == PodIdentity(
        name="orders-1",
        namespace="shop",
        uid="0a1b2c3d-4e5f",
        address="127.0.0.1",
        node_address="",
        app_host="127.0.0.1",
        config_folder="/etc/rota",
        state_folder="/var/lib/rota",
        credentials_folder="",
        ca_folder="",
    )


def test_sidecar_environment_overrides_the_defaults() -> None:
    variables = {
        "POD_IP": "10.0.0.7",
        "HOST_IP": "10.0.0.1",
        "ROTA_LOCAL": "::1",
        "ROTA_DOCUMENTS": "/documents",
        "ROTA_STATE": "/state",
        "ROTA_CREDENTIALS": "/credentials",
        "ROTA_CA": "/ca",
        "ROTA_CLIENT": "/client",
        "ROTA_KEY": "/key",
        "ROTA_RUN": "/run",
        "HOME": "/",
    }
    identity = PodIdentity.from_environment(REQUIRED | variables)
    folders = ("/documents", "/state", "/credentials", "/ca", "/client", "/key", "/run")
    assert identity[3:] == ("10.0.0.7", "10.0.0.1", "::1", *folders)


FOLDERS = ["ROTA_DOCUMENTS", "ROTA_STATE", "ROTA_CREDENTIALS", "ROTA_CA", "ROTA_CLIENT", "ROTA_KEY", "ROTA_RUN"]


@pytest.mark.parametrize("name", ["POD_IP", "HOST_IP", "ROTA_LOCAL", *FOLDERS])
def test_sidecar_environment_treats_an_empty_variable_as_unset(name: str) -> None:
    assert PodIdentity.from_environment(REQUIRED | {name: ""}) == PodIdentity.from_environment(REQUIRED)


@pytest.mark.parametrize(
    ("name", "field"),
    [("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace"), ("POD_UID", "metadata.uid")],
)
@pytest.mark.parametrize("empty", [False, True])
def test_sidecar_environment_without_a_required_variable_is_rejected_with_a_sentence(
    name: str,
    field: str,
    empty: bool,  # noqa: FBT001 - a case
) -> None:
    variables = {key: value for key, value in REQUIRED.items() if key != name} | ({name: ""} if empty else {})
    with pytest.raises(
        ValueError,
        match=rf"^The environment variable {name} is not set; set it from the pod's field {field} \(downward API\)$",
    ):
        PodIdentity.from_environment(variables)


@pytest.mark.parametrize(
    ("pod", "node", "is_shared"),
    [("10.0.0.7", "10.0.0.1", False), ("10.0.0.1", "10.0.0.1", True), ("10.0.0.7", "", False), ("", "", False)],
)
def test_sidecar_environment_shows_whether_the_pod_shares_the_nodes_network(
    pod: str, node: str, *, is_shared: bool
) -> None:
    assert PodIdentity.from_environment(REQUIRED | {"POD_IP": pod, "HOST_IP": node}).shares_node_network is is_shared


def test_sidecar_client_id_consists_of_address_pod_name_and_uid_prefix() -> None:
    assert PodIdentity.from_environment(REQUIRED | {"POD_IP": "10.0.0.7"}).client_id == "10.0.0.7@orders-1#0a1b2c3d"


@pytest.mark.parametrize(
    ("name", "text", "limit_bytes"),
    [
        ("memory.max", "268435456\n", 268435456.0),
        ("memory.max", "max\n", inf),
        ("memory/memory.limit_in_bytes", "268435456\n", 268435456.0),
        ("cpu.max", "1\n", inf),
    ],
)
def test_memory_limit_is_read_from_the_containers_cgroup(
    tmp_path: Path, name: str, text: str, limit_bytes: float
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert memory_limit_bytes(tmp_path) == limit_bytes
