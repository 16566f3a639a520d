"""Requests to the page by users of a cluster; a stand-in for the API server knows their rights."""

import asyncio
from collections.abc import AsyncIterator
from types import MappingProxyType
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from rota.kube.http import broadcaster, schema, site
from rota.kube.http.access.access import MayRead, PageAccess
from rota.kube.http.access.reviews import ReviewError
from rota.kube.http.access.rights import READ_ALL_GROUPS, READ_METRICS, Right, User, right_to_read_groups

LEADS = schema.OperatorInfo("rota-0", "0.1.0", leads=True)
GROUPS = [("billing", "invoices"), ("shop", "orders")]
IMPERSONATE_BOB = Right("impersonate", "users", name="bob")
RIGHTS = MappingProxyType(
    {
        "admin": {READ_ALL_GROUPS, READ_METRICS, IMPERSONATE_BOB},
        "alice": {right_to_read_groups("shop")},
        "bob": {right_to_read_groups("billing")},
    }
)
PATHS = ["/", "/web/page.js", "/metrics", "/v1/groups", "/v1/groups/shop/orders", "/v1/groups/shop/orders/why"]


class KnownUsers:
    """Users with their names as tokens."""

    def __init__(self) -> None:
        self.is_down = False
        self.reviewed_rights: list[Right] = []

    async def user_of(self, token: str) -> User | None:
        if self.is_down:
            raise ReviewError("The API server does not answer")
        return User(token) if token in RIGHTS else None

    async def allows(self, user: User, right: Right) -> bool:
        self.reviewed_rights.append(right)
        if self.is_down:
            raise ReviewError("The API server does not answer")
        return right in RIGHTS[user.name]


class TwoGroups:
    """A read model of two groups."""

    async def list_groups(self, may_read: MayRead | None = None) -> schema.GroupList:
        names = [key for key in GROUPS if may_read is None or await may_read(key[0])]
        return schema.GroupList(LEADS, [summary(*key) for key in names])

    def has_group(self, namespace: str, name: str) -> bool:
        return (namespace, name) in GROUPS

    def describe_group(self, *_: str) -> schema.GroupDetail | None:
        return None

    async def explain(self, namespace: str, name: str, _: str | None) -> schema.OwnerReasons | None:
        return schema.OwnerReasons("Sticky", 1, [], None) if self.has_group(namespace, name) else None


def summary(namespace: str, name: str) -> Any:
    return {"namespace": namespace, "name": name}


@pytest.fixture
def users() -> KnownUsers:
    return KnownUsers()


@pytest.fixture
def hub() -> broadcaster.Broadcaster:
    return broadcaster.Broadcaster()


@pytest.fixture
async def client(
    users: KnownUsers, hub: broadcaster.Broadcaster
) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    app = web.Application(middlewares=[PageAccess(users).check])

    async def respond_ok(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app.add_routes(
        [web.get("/healthz", respond_ok), web.get("/metrics", respond_ok), *site.page_routes(TwoGroups(), hub)]
    )
    async with TestClient(TestServer(app)) as client:
        yield client
        await hub.close()


def bearer(token: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **headers}


async def error_of(response: ClientResponse) -> str:
    assert response.content_type == "application/json"
    return str((await response.json())["error"])


async def test_page_is_for_known_users_only(client: TestClient[web.Request, web.Application]) -> None:
    for path in [*PATHS, "/v1/events", "/v1/nothing", "/elsewhere"]:
        for headers in (
            {},
            bearer("mallory"),
            bearer(""),
            {"Authorization": "Basic YWxpY2U6"},
            bearer("\xff"),
            bearer("x" * 9_000),
        ):
            response = await client.get(path, headers=headers)
            assert response.status in {400, 401}, path  # a header of 9,000 characters is too large for the server
            if response.status == 401:
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert "send a bearer token or a client certificate" in await error_of(response)
    assert (await client.get("/healthz")).status == 200


async def test_page_lists_the_groups_of_namespaces_that_the_user_may_read(
    client: TestClient[web.Request, web.Application],
) -> None:
    async def listed(token: str) -> list[str]:
        response = await client.get("/v1/groups", headers=bearer(token))
        return [group["name"] for group in (await response.json())["groups"]]

    assert await listed("admin") == ["invoices", "orders"]
    assert await listed("alice") == ["orders"]
    assert await listed("bob") == ["invoices"]


@pytest.mark.parametrize(
    "path", ["/v1/groups/billing/invoices", "/v1/groups/billing/absent", "/v1/events?group=billing/x"]
)
async def test_page_rejects_groups_of_other_namespaces_whether_they_exist_or_not(
    client: TestClient[web.Request, web.Application], path: str
) -> None:
    response = await client.get(path, headers=bearer("alice"))
    assert response.status == 403
    right = "get consumergroups.rota.dev in namespace billing"
    assert await error_of(response) == f"You may not {right}; ask for that right"
    explanation = await client.get("/v1/groups/billing/invoices/why", headers=bearer("alice"))
    assert explanation.status == 403
    assert (await client.get("/v1/groups/billing/invoices/why", headers=bearer("bob"))).status == 200


async def test_metrics_need_the_right_to_their_path(client: TestClient[web.Request, web.Application]) -> None:
    assert (await client.get("/metrics", headers=bearer("admin"))).status == 200
    response = await client.get("/metrics", headers=bearer("alice"))
    assert response.status == 403
    assert await error_of(response) == "User alice may not get /metrics; ask for that right"


async def test_page_events_name_groups_that_the_user_may_read(
    client: TestClient[web.Request, web.Application], hub: broadcaster.Broadcaster
) -> None:
    async with asyncio.timeout(20), client.get("/v1/events", headers=bearer("alice")) as stream:
        assert await stream.content.readline() == b": here\n"
        hub.publish(("billing", "invoices"))
        await asyncio.sleep(0.3)
        hub.publish(("billing", "invoices"), ("shop", "orders"))
        line = b""
        while b"data:" not in line:
            line = await stream.content.readline()
    assert line == b'data: {"groups":["shop/orders"]}\n'


async def test_page_reviews_no_rights_in_namespaces_that_cannot_exist(
    client: TestClient[web.Request, web.Application], users: KnownUsers
) -> None:
    """Otherwise the cache of reviews would keep each such name, of any length that a client chooses."""
    previous_count = len(users.reviewed_rights)
    for name in ("x" * 7_000, "%F0%9F%98%80", "Shop"):
        assert (await client.get(f"/v1/groups/{name}/orders", headers=bearer("alice"))).status == 403
        assert (await client.get(f"/v1/events?group={name}/orders", headers=bearer("alice"))).status == 403
    assert len(users.reviewed_rights) == previous_count


async def test_page_events_end_when_rights_cannot_be_checked_any_more(
    client: TestClient[web.Request, web.Application], users: KnownUsers, hub: broadcaster.Broadcaster
) -> None:
    async with asyncio.timeout(20), client.get("/v1/events", headers=bearer("alice")) as stream:
        assert await stream.content.readline() == b": here\n"
        users.is_down = True
        hub.publish(("shop", "orders"))
        assert b"HTTP/1.1" not in await stream.content.read(), "no other response is within this one"


async def test_page_shows_an_impersonated_user_the_groups_that_this_user_may_read(
    client: TestClient[web.Request, web.Application],
) -> None:
    response = await client.get("/v1/groups", headers=bearer("admin", **{"Impersonate-User": "bob"}))
    assert [group["name"] for group in (await response.json())["groups"]] == ["invoices"]
    rejected = await client.get("/v1/groups", headers=bearer("alice", **{"Impersonate-User": "bob"}))
    assert rejected.status == 403
    assert await error_of(rejected) == "User alice may not impersonate users/bob; ask for that right"
    for name in ("\xff", "x" * 300):
        assert (await client.get("/v1/groups", headers=bearer("admin", **{"Impersonate-User": name}))).status == 400
    for name in ("Impersonate-Group", "Impersonate-Uid", "impersonate-extra-scopes"):
        assert (await client.get("/v1/groups", headers=bearer("admin", **{name: "ops"}))).status == 400


async def test_page_reports_that_no_user_can_log_in_while_the_api_server_is_down(
    client: TestClient[web.Request, web.Application], users: KnownUsers
) -> None:
    users.is_down = True
    response = await client.get("/v1/groups", headers=bearer("admin"))
    assert response.status == 503
    assert response.headers["Retry-After"] == "5"
    assert await error_of(response) == "The API server does not answer"
