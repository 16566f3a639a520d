"""The operator's page served from values, and selectors of its elements."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec.structs import replace

from ground.browser import Browser
from rota.http_server import listen
from rota.kube.http import broadcaster, schema, site
from rota.kube.http.access.access import MayRead
from rota.kube.state import rebalance

PICTURES = Path(__file__).parents[2] / "docs" / "images"


LEADS = schema.OperatorInfo(identity="rota-0", version="0.1.0", leads=True)


JOINED = rebalance.Rebalance(
    reason="MemberJoined", message="m1 has joined", at="2026-11-21T08:00:00Z", generation=42, moved=4, seconds=1.25
)


FIRST = rebalance.Rebalance(
    reason="FirstAssignment",
    message="The group is new",
    at="2026-11-21T07:00:00Z",
    generation=41,
    moved=8,
    seconds=0.8,
    longest=0.5,
)


def a_queue(number: int, owner: str | None = "m0", topic: str = "orders", **overrides: Any) -> schema.QueueDetail:
    state = "Owned" if owner else "Free"
    defaults: dict[str, Any] = {"kind": "Subscribed", "state": state, "lag": 0, "delay": 0.0, "verdict": "KeepingUp"}
    return schema.QueueDetail(topic=topic, broker="broker-a", id=number, owner=owner, **{**defaults, **overrides})


def a_member(name: str, **overrides: Any) -> schema.MemberInfo:
    defaults: dict[str, Any] = {
        "origin": "Rota",
        "state": "Ready",
        "queues": 4,
        "generation": 42,
        "rate": 12.5,
        "address": "10.0.0.7",
    }
    return schema.MemberInfo(name=name, client_id=f"10.0.0.7@{name}", **{**defaults, **overrides})


def a_summary(name: str = "orders", **overrides: Any) -> schema.GroupSummary:
    defaults: dict[str, Any] = {
        "ready": True,
        "reason": "Settled",
        "message": "Every queue has its owner.",
        "moving": False,
        "members": 2,
        "queues": 8,
        "idle": 0,
        "unowned": 0,
        "generation": 42,
        "strategy": "Sticky",
        "lag": 12,
        "retrying": 0,
        "dead": 3,
        "delay": 1.5,
        "verdicts": {"KeepingUp": 7, "Slow": 1},
        "last_rebalance": JOINED,
    }
    return schema.GroupSummary(namespace="shop", name=name, **{**defaults, **overrides})


def owned(number: int) -> list[schema.QueueDetail]:
    return [a_queue(queue_id, f"m{queue_id % 2}") for queue_id in range(number)]


def a_detail(name: str = "orders", queues: Sequence[schema.QueueDetail] = (), **overrides: Any) -> schema.GroupDetail:
    queues = list(queues) or owned(8)
    summary = a_summary(name, queues=len(queues))
    defaults: dict[str, Any] = {
        "operator": LEADS,
        "conditions": [schema.ConditionInfo("Ready", "True", "Settled", "Every queue has its owner.", JOINED.at)],
        "members": [a_member("m0"), a_member("m1")],
        "topics": [schema.TopicInfo("orders", "Subscribed", len(queues), lag=12, delay=1.5, estimate=True)],
        "rebalances": [JOINED, FIRST],
        "looked_at": "2026-11-21T08:00:03Z",
    }
    return schema.GroupDetail(at_broker=name, queues=queues, **{"summary": summary, **defaults, **overrides})


@dataclass
class StaticGroups:
    """The groups that a test has put."""

    details: dict[str, schema.GroupDetail] = field(default_factory=dict)
    operator: schema.OperatorInfo = LEADS

    def put(self, detail: schema.GroupDetail) -> None:
        self.details[detail.summary.name] = detail

    async def list_groups(self, _: MayRead | None = None) -> schema.GroupList:
        return schema.GroupList(self.operator, [detail.summary for detail in self.details.values()])

    def has_group(self, namespace: str, name: str) -> bool:
        return namespace == "shop" and name in self.details

    def describe_group(self, namespace: str, name: str) -> schema.GroupDetail | None:
        detail = self.details.get(name) if namespace == "shop" else None
        return replace(detail, operator=self.operator) if detail else None

    async def explain(self, namespace: str, name: str, queue: str | None) -> schema.OwnerReasons | None:
        if not (detail := self.describe_group(namespace, name)):
            return None
        queues = [
            entry for entry in detail.queues if f"{entry.topic}/{entry.broker}/{entry.id}" == queue or queue is None
        ]
        if not queues:
            raise ValueError(f"{queue} is no queue of shop/{name}; give TOPIC/BROKER/ID")
        explanations = [
            schema.QueueExplanation(entry.topic, entry.broker, entry.id, entry.owner, f"{entry.owner} had it before.")
            for entry in queues
        ]
        return schema.OwnerReasons("Sticky", detail.summary.generation, explanations, JOINED)


class ServedGroups(StaticGroups):
    """Groups that are served over HTTP, at an address that stays the same."""

    def __init__(self, address: str, port: int) -> None:
        super().__init__()
        self.hub = broadcaster.Broadcaster()
        self.url = f"http://{address}:{port}/"
        # Run before the next requests about a group, one each; may raise.
        self.failures: list[Callable[[], Awaitable[object]]] = []
        self._address, self._port = address, port
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        @web.middleware
        async def inject_failure(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.failures and request.path.startswith("/v1/groups/"):
                await self.failures.pop(0)()
            return await handler(request)

        self.hub = broadcaster.Broadcaster()
        app = web.Application(middlewares=[inject_failure])
        app.add_routes(site.page_routes(self, self.hub))
        app.on_shutdown.append(self.hub.close)
        self._runner = await listen(app, self._address, self._port)

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    def change(self, detail: schema.GroupDetail) -> None:
        self.put(detail)
        self.hub.publish(("shop", detail.summary.name))


LABELS = "[...document.querySelectorAll('.cell')].map(it => it.ariaLabel)"


LIVE = "document.querySelector('#live').textContent === 'Live'"


def text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})?.innerText"


def has(selector: str, words: str) -> str:
    return f"{text(selector)}?.includes({json.dumps(words)})"


def cell(number: int, topic: str = "orders") -> str:
    return label_of(f"{topic}/broker-a/{number}")


def label_of(queue: str) -> str:
    selector = f'.cell[aria-label^="{queue}:"]'
    return f"document.querySelector({json.dumps(selector)})?.ariaLabel"


async def open_group(browser: Browser, url: str, name: str = "orders") -> None:
    await browser.open(f"{url}#shop/{name}")
    await browser.wait_for(LIVE)


# 10,000 queues of 300 members.
MANY = [
    replace(a_queue(number, f"m{number % 300}", f"topic-{topic}"), broker=f"broker-{broker}")
    for topic in range(5)
    for broker in "abcdefgh"
    for number in range(250)
]


async def assert_handover_shown(
    browser: Browser, page: str, queue: str, owners: tuple[str, str], hand_over: Callable[[], Awaitable[object]]
) -> None:
    """Assert that an open page (`http://…:8080/#shop/orders`) shows the queue's first owner, then the handover."""
    first, second = owners
    label = label_of(queue)
    await browser.open(page)
    await browser.wait_for(f"{label}?.startsWith({json.dumps(f'{queue}: owned by {first},')})")
    # Record every label of the cell: polling would miss a quick handover.
    await browser.evaluate(
        f"window.labels = []; new MutationObserver(() => labels.push({label})).observe("
        "document.querySelector('#map'), {subtree: true, attributeFilter: ['aria-label']})"
    )
    await hand_over()
    await browser.wait_for(f"{label}?.startsWith({json.dumps(f'{queue}: owned by {second},')})")
    released = f"{queue}: being released by {first}, next {second},"
    assert any(seen_label.startswith(released) for seen_label in await browser.evaluate("labels"))
