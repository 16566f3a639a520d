"""Logins to a real API server by token, exec plugin and certificate, also through a proxy; and logins that fail."""

import asyncio
import base64
import json
import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ground import api as ground
from ground.cluster import Cluster
from ground.controlplane import ControlPlane
from ground.poll import PATIENCE_SECONDS
from kube.operators import an_operator
from logins import PROGRAMS, a_proxy, an_api, with_user
from rota.kube.client.api import Api, ApiError
from rota.kube.client.login import session

REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
REVIEW = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
TOKEN_REQUEST = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}


async def user_of(client: Api) -> str:
    """Return the user as which the API server authenticates a client."""
    review = msgspec.json.decode(bytes(await client.create(REVIEWS, REVIEW, msgspec.Raw)))
    return str(review["status"]["userInfo"]["username"])


@pytest.fixture
async def token(api: ground.Api, namespace: str) -> str:
    """Return the token of a service account."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await api.create(accounts, {"metadata": {"name": "rota"}})
    return str((await api.create(f"{accounts}/rota/token", TOKEN_REQUEST))["status"]["token"])


async def test_login_uses_a_newer_token_of_a_file_without_a_restart(
    token: str, namespace: str, control_plane: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RETRY_SECONDS", -1.0)
    (tmp_path / "token").write_text("outdated")
    config = with_user(tmp_path / "config", control_plane.kubeconfig, {"tokenFile": "token"})
    async with an_api(config) as client:
        with pytest.raises(ApiError) as rejected:
            await user_of(client)
        assert rejected.value.status == 401
        (tmp_path / "token").write_text(token)
        assert await user_of(client) == f"system:serviceaccount:{namespace}:rota"


async def test_login_by_exec_plugin_uses_the_token_that_it_prints(
    token: str, namespace: str, control_plane: Cluster, tmp_path: Path
) -> None:
    response = json.dumps({"apiVersion": PROGRAMS, "kind": "ExecCredential", "status": {"token": token}})
    program = {"apiVersion": PROGRAMS, "command": sys.executable, "args": ["-c", f"print({response!r})"]}
    config = with_user(tmp_path / "config", control_plane.kubeconfig, {"exec": program})
    async with an_api(config) as client:
        assert await user_of(client) == f"system:serviceaccount:{namespace}:rota"


async def test_login_by_exec_plugin_uses_the_certificate_that_it_prints(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    user = yaml.safe_load(control_plane.user("by-program", "jane").read_text())["users"][0]["user"]
    texts = {name: base64.b64decode(user[f"client-{name}-data"]).decode() for name in ("certificate", "key")}
    status = {"clientCertificateData": texts["certificate"], "clientKeyData": texts["key"]}
    response = json.dumps({"apiVersion": PROGRAMS, "kind": "ExecCredential", "status": status})
    (tmp_path / "response").write_text(response)
    program = {"apiVersion": PROGRAMS, "command": "cat", "args": [str(tmp_path / "response")]}
    async with an_api(with_user(tmp_path / "config", control_plane.kubeconfig, {"exec": program})) as client:
        assert await user_of(client) == "jane"


async def test_login_impersonates_another_user(control_plane: Cluster) -> None:
    async with an_api(control_plane.kubeconfig, impersonate="jane") as client:
        assert await user_of(client) == "jane"


async def test_login_takes_the_named_context(control_plane: ControlPlane, tmp_path: Path) -> None:
    content = yaml.safe_load(control_plane.kubeconfig.read_text())
    janes_config = yaml.safe_load(control_plane.user("other", "jane").read_text())
    content["users"].append({"name": "jane", "user": janes_config["users"][0]["user"]})
    cluster = content["clusters"][0]["name"]
    content["contexts"].append({"name": "of-jane", "context": {"cluster": cluster, "user": "jane"}})
    (tmp_path / "config").write_text(json.dumps(content))
    async with an_api(tmp_path / "config", context="of-jane") as client:
        assert await user_of(client) == "jane"


async def test_login_goes_through_the_proxy_of_the_kubeconfig(control_plane: ControlPlane, tmp_path: Path) -> None:
    user = yaml.safe_load(control_plane.kubeconfig.read_text())["users"][0]["user"]
    async with a_proxy() as (url, requests):
        config = with_user(tmp_path / "config", control_plane.kubeconfig, user, **{"proxy-url": url})
        async with an_api(config) as client:
            assert await user_of(client) == "admin"
    assert len(requests) == 1


Configure = Callable[..., Path]
FailedStart = Callable[..., Awaitable[str]]


@pytest.fixture
def failed_start(addresses: Callable[[], str], tmp_path: Path) -> FailedStart:
    """Return a function that starts an operator, expects exit code 2, and returns the operator's output."""

    async def start(config: Path, *options: str) -> str:
        log = tmp_path / "operator.log"
        async with an_operator(config, "default", addresses(), log, *options) as process:
            assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 2
        return log.read_text()

    return start


@pytest.fixture
def configured(control_plane: Cluster, tmp_path: Path) -> Configure:
    """Return a function that writes a kubeconfig of the cluster with another user."""
    return partial(with_user, tmp_path / "config", control_plane.kubeconfig)


NO_SUCH_PROGRAM = {"exec": {"apiVersion": PROGRAMS, "command": "rota-no-such-program"}}


@pytest.mark.parametrize(
    ("user", "options", "sentence"),
    [
        (NO_SUCH_PROGRAM, (), "The exec plugin rota-no-such-program of the kubeconfig was not found; install it"),
        ({"token": "outdated"}, (), r"The API server https://\S+ rejects the credentials; log in again"),
        ({}, ("--context", "none"), "The kubeconfig has no context 'none'; kubectl config view shows its entries"),
        ({}, ("--kubeconfig", "/none"), "The kubeconfig /none does not exist; .*"),
    ],
)
async def test_login_of_an_operator_that_fails_exits_with_one_sentence(
    user: dict[str, Any], options: tuple[str, ...], sentence: str, configured: Configure, failed_start: FailedStart
) -> None:
    assert re.fullmatch(f"rota: {sentence}\n", await failed_start(configured(user), *options))


async def test_login_of_an_operator_to_a_server_of_another_authority_exits_with_one_sentence(
    control_plane: ControlPlane, configured: Configure, failed_start: FailedStart
) -> None:
    user = yaml.safe_load(control_plane.kubeconfig.read_text())["users"][0]["user"]
    extra = {"certificate-authority-data": user["client-certificate-data"]}
    sentence = r"The API server https://\S+ cannot be reached: .* its certificate is not trusted \(.*\)"
    assert re.fullmatch(f"rota: {sentence}\n", await failed_start(configured(user, **extra)))
