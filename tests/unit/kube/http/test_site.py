"""The API of the page: event streams, the list of all groups, limits and errors."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rota.aio import ITEMS_PER_TURN
from rota.kube import operator, options
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.http import broadcaster, schema, site
from rota.kube.http.access.access import MayRead
from rota.kube.http.read_model import ReadModel
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.telemetry.operator_metrics import OperatorMetrics

LEADS = schema.OperatorInfo("rota-0", "0.1.0", leads=True)
UNUSED: Any = None  # collaborators that these tests do not use


def test_api_event_stream_beyond_the_limit_ends_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcaster, "MAX_STREAMS", 2)
    hub = broadcaster.Broadcaster()
    with ExitStack() as streams:
        first, second, third = [streams.enter_context(hub.subscribe()) for _ in range(3)]
        assert (first.is_ended, second.is_ended, third.is_ended) == (True, False, False)
        streams.enter_context(hub.subscribe())
        assert second.is_ended
    with hub.subscribe() as only, hub.subscribe():
        assert not only.is_ended, "closed streams do not count"


def add_group(controller: Controller, body: CustomResource) -> None:
    EventHandlers(controller).groups.on_upsert(body)


async def test_api_list_of_many_groups_yields_to_other_tasks() -> None:
    controller = Controller(UNUSED, UNUSED, BrokerRegistry(UNUSED), UNUSED)
    names = [f"g{number}" for number in range(10 * ITEMS_PER_TURN)]
    for name in names:
        add_group(controller, CustomResource(Metadata(name, uid=name, namespace="shop", generation=1), {}))
    clock = asyncio.get_running_loop().time
    read_model = ReadModel(controller, BrokerRegistry(UNUSED), OperatorMetrics(), "rota-0", "0", clock, asyncio.Lock())
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other_task = asyncio.create_task(count_turns())
    response = await read_model.list_groups()
    other_task.cancel()
    assert [group.name for group in response.groups] == sorted(names)
    assert turns >= 9


class SlowReadModel:
    """A read model that delays each response until a test releases it."""

    def __init__(self) -> None:
        self.lists = 0
        self.started = asyncio.Event()
        self.released = asyncio.Semaphore(0)

    async def list_groups(self, _: MayRead | None = None) -> schema.GroupList:
        self.lists += 1
        operator = schema.OperatorInfo(f"list {self.lists}", "0.1.0", leads=True)
        self.started.set()
        await self.released.acquire()
        return schema.GroupList(operator, [])

    def has_group(self, namespace: str, name: str) -> bool:
        return (namespace, name) == ("shop", "orders")

    def describe_group(self, namespace: str, name: str) -> schema.GroupDetail | None:
        raise NotImplementedError

    async def explain(self, namespace: str, name: str, queue: str | None) -> schema.OwnerReasons | None:
        assert (namespace, name, queue) == ("shop", "orders", None)
        self.started.set()
        await self.released.acquire()
        return schema.OwnerReasons("Sticky", 1, [], None)


async def test_api_concurrent_requests_share_the_next_list_of_groups() -> None:
    slow_model = SlowReadModel()
    arrived = asyncio.Semaphore(0)

    @web.middleware
    async def count_requests(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Any:
        arrived.release()
        return await handler(request)

    app = web.Application(middlewares=[count_requests])
    app.add_routes(site.page_routes(slow_model, broadcaster.Broadcaster()))
    async with TestClient(TestServer(app)) as client:

        async def request_list() -> Any:
            async with client.get("/v1/groups") as response:
                return (await response.json())["operator"]["identity"]

        first = asyncio.create_task(request_list())
        await slow_model.started.wait()
        later_requests = [asyncio.create_task(request_list()) for _ in range(5)]
        for _ in range(6):
            await arrived.acquire()
        slow_model.released.release()
        slow_model.released.release()
        assert await first == "list 1"
        assert await asyncio.gather(*later_requests) == ["list 2"] * 5, (
            "their list includes changes since the first request"
        )
        slow_model.released.release()
        assert await request_list() == "list 3", "later requests get a new list"


async def test_api_details_beyond_the_limit_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MAX_CONCURRENT_REQUESTS", 1)
    slow_model = SlowReadModel()
    app = web.Application()
    app.add_routes(site.page_routes(slow_model, broadcaster.Broadcaster()))
    async with TestClient(TestServer(app)) as client:
        first = asyncio.create_task(client.get("/v1/groups/shop/orders/why"))
        await slow_model.started.wait()
        async with client.get("/v1/groups/shop/orders") as response:
            assert response.status == 503
        slow_model.released.release()
        assert (await first).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "sentence"),
    [
        ("POST", "/v1/groups", 405, "Method POST is not allowed; use GET"),
        ("DELETE", "/v1/groups/shop/orders", 405, "Method DELETE is not allowed; use GET"),
        ("HEAD", "/v1/events", 405, ""),
        ("HEAD", "/v1/what", 404, ""),
        ("GET", "/v1/what", 404, "No such path: /v1/what; see docs/page.md"),
        ("GET", "/v1", 404, "No such path: /v1; see docs/page.md"),
        ("GET", "/v1/events?group=a/b/c", 400, "group must be NAMESPACE/NAME, not 'a/b/c'"),
        ("GET", "/v1/events?group=", 400, "group must be NAMESPACE/NAME, not ''"),
        (
            "GET",
            "/v1/events?group=shop/none",
            404,
            "Group shop/none does not exist, or this operator does not watch its namespace",
        ),
    ],
)
async def test_api_error_is_json_with_a_sentence(method: str, path: str, status: int, sentence: str) -> None:
    app = web.Application()
    app.add_routes(site.page_routes(SlowReadModel(), broadcaster.Broadcaster()))
    async with TestClient(TestServer(app)) as client, client.request(method, path) as response:
        assert (response.status, response.content_type) == (status, "application/json")
        allowed = "GET" if path == "/v1/events" else "GET, HEAD"
        assert response.headers.get("allow") == (allowed if status == 405 else None)
        assert method == "HEAD" or await response.json() == {"error": sentence}


@pytest.mark.parametrize("path", ["/v1/groups", "/v1/groups/shop/orders/why"])
async def test_api_head_is_answered_like_get_without_a_body(path: str) -> None:
    slow_model = SlowReadModel()
    slow_model.released.release()
    app = web.Application()
    app.add_routes(site.page_routes(slow_model, broadcaster.Broadcaster()))
    async with TestClient(TestServer(app), headers={"Accept-Encoding": "identity"}) as client:
        async with client.head(path) as head:
            assert (head.status, head.content_type, await head.read()) == (200, "application/json", b"")
        slow_model.released.release()
        async with client.get(path) as response:
            assert (
                str(len(await response.read())) == response.headers["content-length"] == head.headers["content-length"]
            )


async def test_api_explain_rejects_an_empty_queue() -> None:
    controller = Controller(UNUSED, UNUSED, BrokerRegistry(UNUSED), UNUSED)
    add_group(controller, CustomResource(Metadata("orders", uid="1", namespace="shop", generation=1), {}))
    clock = asyncio.get_running_loop().time
    read_model = ReadModel(controller, BrokerRegistry(UNUSED), OperatorMetrics(), "rota-0", "0", clock, asyncio.Lock())
    assert (read_model.has_group("shop", "orders"), read_model.has_group("shop", "other")) == (True, False)
    with pytest.raises(ValueError, match="Invalid queue ''"):
        await read_model.explain("shop", "orders", "")


@pytest.fixture
def gc_thresholds() -> Iterator[tuple[int, int, int]]:
    thresholds = gc.get_threshold()
    yield thresholds
    gc.set_threshold(*thresholds)


def test_memory_garbage_collector_of_the_operator_runs_less_often(
    monkeypatch: pytest.MonkeyPatch, gc_thresholds: tuple[int, int, int]
) -> None:
    async def operate(_: options.Options) -> int:
        return 7

    monkeypatch.setattr(operator, "operate", operate)
    assert operator.run_process(options.Options()) == 7
    assert gc.get_threshold() > gc_thresholds
