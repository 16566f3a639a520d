"""The page of an operator for users of the cluster: a real API server authenticates and authorizes them."""

import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from ground.api import Access, Api, Object
from ground.cluster import Cluster
from ground.poll import soon
from kube.operators import an_operator
from kube.world import a_group
from logins import unverified

pytestmark = pytest.mark.usefixtures("crds", "node")

RBAC = "/apis/rbac.authorization.k8s.io/v1"
TOKEN_REQUEST: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}


class Page(NamedTuple):
    """The page of an operator for one group in each of two namespaces."""

    url: str
    mine: str  # the namespace in which the account may read groups
    other: str
    token: str  # the token of the account
    session: aiohttp.ClientSession

    async def get(self, path: str, token: str = "", **headers: str) -> tuple[int, Any]:
        """Return the status, and the body if it is JSON."""
        login = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.session.get(self.url + path, headers={**login, **headers}) as response:
            body = await response.json() if response.content_type == "application/json" else await response.text()
            return response.status, body


def names(body: Any) -> list[str]:
    return [group["namespace"] for group in body["groups"]]


@pytest.fixture
async def other_namespace(api: Api, namespace: str) -> AsyncIterator[str]:
    name = f"{namespace}-other"
    await api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    await api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
async def token(api: Api, namespace: str) -> str:
    """Return the token of an account with the right to get the groups of one namespace."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await api.create(accounts, {"metadata": {"name": "viewer"}})
    token = (await api.create(f"{accounts}/viewer/token", TOKEN_REQUEST))["status"]["token"]
    rule = {"apiGroups": ["rota.dev"], "resources": ["consumergroups"], "verbs": ["get"]}
    await api.create(f"{RBAC}/namespaces/{namespace}/roles", {"metadata": {"name": "viewer"}, "rules": [rule]})
    await api.create(
        f"{RBAC}/namespaces/{namespace}/rolebindings",
        {
            "metadata": {"name": "viewer"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "viewer"},
            "subjects": [{"kind": "ServiceAccount", "name": "viewer", "namespace": namespace}],
        },
    )
    return str(token)


@pytest.fixture
async def page(  # noqa: PLR0917
    api: Api, control_plane: Cluster, token: str, other_namespace: str, addresses: Callable[[], str], tmp_path: Path
) -> AsyncIterator[Page]:
    """Run an operator for two namespaces with a group in each."""
    namespace = other_namespace.removesuffix("-other")
    address = addresses()
    for group_namespace in (namespace, other_namespace):
        await api.create(f"/apis/rota.dev/v1alpha1/namespaces/{group_namespace}/consumergroups", a_group())
    options = ("--page-auth", "Kubernetes", "--namespace", other_namespace)
    log = tmp_path / "operator.log"
    async with (
        an_operator(control_plane.kubeconfig, namespace, address, log, *options),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=unverified())) as session,
    ):
        page = Page(f"https://{address}:8080", namespace, other_namespace, token, session)

        async def is_serving() -> bool:
            try:
                return (await page.get("/readyz"))[0] == 200
            except aiohttp.ClientError:
                return False

        await soon(is_serving)
        yield page


async def test_page_shows_an_account_the_groups_of_its_namespace_only(page: Page) -> None:
    status, body = await page.get("/v1/groups", page.token)
    assert (status, names(body)) == (200, [page.mine])
    assert (await page.get(f"/v1/groups/{page.mine}/orders", page.token))[0] == 200
    status, body = await page.get(f"/v1/groups/{page.other}/orders", page.token)
    missing_right = f"get consumergroups.rota.dev in namespace {page.other}"
    assert (status, body) == (403, {"error": f"You may not {missing_right}; ask for that right"})
    assert (await page.get("/metrics", page.token))[0] == 403


@pytest.mark.parametrize("token", ["", "nonsense"])
async def test_page_rejects_clients_that_the_api_server_does_not_authenticate(page: Page, token: str) -> None:
    for path in ("/", "/v1/groups", f"/v1/groups/{page.mine}/orders", "/v1/events", "/metrics"):
        assert (await page.get(path, token))[0] == 401, path
    assert (await page.get("/healthz"))[0] == 200


async def test_page_shows_everything_to_the_administrators_client_certificate(
    page: Page, control_plane: Cluster
) -> None:
    trust = Access.read(control_plane.kubeconfig).trust
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
        by_certificate = page._replace(session=session)
        status, body = await by_certificate.get("/v1/groups")
        assert (status, names(body)) == (200, sorted([page.mine, page.other]))
        status, body = await by_certificate.get("/metrics")
        assert status == 200
        assert "rota_leader" in body
        account = f"system:serviceaccount:{page.mine}:viewer"
        status, body = await by_certificate.get("/v1/groups", **{"Impersonate-User": account})
        assert (status, names(body)) == (200, [page.mine])


async def test_page_follows_rights_that_are_granted_and_revoked(page: Page, api: Api) -> None:
    async def listed() -> list[str]:
        return names((await page.get("/v1/groups", page.token))[1])

    assert await listed() == [page.mine]
    await api.delete(f"{RBAC}/namespaces/{page.mine}/rolebindings/viewer")

    async def sees_nothing() -> bool:
        return not await listed()

    await soon(sees_nothing, 120)


async def test_metrics_are_read_by_an_account_with_the_right_to_their_path(page: Page, api: Api) -> None:
    name = f"{page.mine}-metrics-reader"
    await api.create(
        f"{RBAC}/clusterroles",
        {"metadata": {"name": name}, "rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]},
    )
    await api.create(
        f"{RBAC}/clusterrolebindings",
        {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": "viewer", "namespace": page.mine}],
        },
    )

    async def reads() -> bool:
        return (await page.get("/metrics", page.token))[0] == 200

    await soon(reads)


async def test_page_of_a_standby_shows_the_response_of_the_leader(
    page: Page, control_plane: Cluster, addresses: Callable[[], str], tmp_path: Path
) -> None:
    """Only the leader polls brokers, so the response has the leader's name."""
    address = addresses()
    namespace = page.mine

    async def leads() -> bool:
        status, body = await page.get("/v1/groups", page.token)
        return status == 200 and body["operator"]["leads"]

    await soon(leads)
    leader = (await page.get("/v1/groups", page.token))[1]["operator"]["identity"]
    options = ("--page-auth", "Kubernetes", "--namespace", page.other)
    async with an_operator(control_plane.kubeconfig, namespace, address, tmp_path / "standby.log", *options):
        standby = page._replace(url=f"https://{address}:8080")

        async def shows_the_leaders_response() -> bool:
            try:
                status, body = await standby.get("/v1/groups", page.token)
            except aiohttp.ClientError:
                return False
            return status == 200 and body["operator"] == {**body["operator"], "identity": leader, "leads": True}

        await soon(shows_the_leaders_response)
        _, body = await standby.get("/v1/groups", page.token)
        assert names(body) == [page.mine], "the leader knows the user, too"
        assert (await standby.get(f"/v1/groups/{page.other}/orders", page.token))[0] == 403
        assert (await standby.get("/healthz"))[1] == "standby\n"
