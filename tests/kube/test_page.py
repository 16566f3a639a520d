"""The operator's page in a real browser, drawn from values; and its answers to other programs."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, ClientTimeout, web
from aiohttp.typedefs import Handler
from msgspec.structs import replace

from ground.browser import Browser, a_browser, chromium
from ground.fixtures import skip_what_is_missing
from ground.instance import Instance
from ground.poll import soon
from rota.kube import shown, site
from rota.listening import listen

PICTURES = Path(__file__).parents[2] / "docs" / "images"
EVIL = '<img src=x onerror="document.title=1">'

LEADS = shown.Operator(identity="rota-0", version="0.1.0", leads=True)
JOINED = shown.Rebalance(
    reason="MemberJoined", message="m1 has joined", at="2026-11-21T08:00:00Z", generation=42, moved=4, seconds=1.25
)
FIRST = shown.Rebalance(
    reason="FirstAssignment",
    message="The group is new",
    at="2026-11-21T07:00:00Z",
    generation=41,
    moved=8,
    seconds=0.8,
    longest=0.5,
)


def a_queue(number: int, owner: str | None = "m0", topic: str = "orders", **given: Any) -> shown.Queue:
    state = "Owned" if owner else "Free"
    told: dict[str, Any] = {"kind": "Subscribed", "state": state, "lag": 0, "delay": 0.0, "verdict": "KeepingUp"}
    return shown.Queue(topic=topic, broker="broker-a", id=number, owner=owner, **{**told, **given})


def a_member(name: str, **given: Any) -> shown.Member:
    told: dict[str, Any] = {
        "origin": "Rota",
        "state": "Ready",
        "queues": 4,
        "generation": 42,
        "rate": 12.5,
        "address": "10.0.0.7",
    }
    return shown.Member(name=name, client_id=f"10.0.0.7@{name}", **{**told, **given})


def a_summary(name: str = "orders", **given: Any) -> shown.Summary:
    told: dict[str, Any] = {
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
    return shown.Summary(namespace="shop", name=name, **{**told, **given})


def owned(number: int) -> list[shown.Queue]:
    return [a_queue(it, f"m{it % 2}") for it in range(number)]


def a_detail(name: str = "orders", queues: Sequence[shown.Queue] = (), **given: Any) -> shown.Detail:
    queues = list(queues) or owned(8)
    summary = a_summary(name, queues=len(queues))
    told: dict[str, Any] = {
        "operator": LEADS,
        "conditions": [shown.Condition("Ready", "True", "Settled", "Every queue has its owner.", JOINED.at)],
        "members": [a_member("m0"), a_member("m1")],
        "topics": [shown.Topic("orders", "Subscribed", len(queues), lag=12, delay=1.5, estimate=True)],
        "rebalances": [JOINED, FIRST],
        "looked_at": "2026-11-21T08:00:03Z",
    }
    return shown.Detail(at_broker=name, queues=queues, **{"summary": summary, **told, **given})


@dataclass
class Fleets:
    """Groups that are what a test says they are."""

    details: dict[str, shown.Detail] = field(default_factory=dict)
    operator: shown.Operator = LEADS

    def put(self, detail: shown.Detail) -> None:
        self.details[detail.summary.name] = detail

    async def groups(self) -> shown.Groups:
        return shown.Groups(self.operator, [it.summary for it in self.details.values()])

    def knows(self, namespace: str, name: str) -> bool:
        return namespace == "shop" and name in self.details

    def group(self, namespace: str, name: str) -> shown.Detail | None:
        found = self.details.get(name) if namespace == "shop" else None
        return replace(found, operator=self.operator) if found else None

    async def why(self, namespace: str, name: str, queue: str | None) -> shown.Reasons | None:
        if not (detail := self.group(namespace, name)):
            return None
        found = [it for it in detail.queues if f"{it.topic}/{it.broker}/{it.id}" == queue or queue is None]
        if not found:
            raise ValueError(f"{queue} is no queue of shop/{name}; give TOPIC/BROKER/ID")
        why = [shown.Reason(it.topic, it.broker, it.id, it.owner, f"{it.owner} had it before.") for it in found]
        return shown.Reasons("Sticky", detail.summary.generation, why, JOINED)


class Served(Fleets):
    """Groups that are answered for over HTTP, at an address that stays the same."""

    def __init__(self, address: str, port: int) -> None:
        super().__init__()
        self.hub = site.Hub()
        self.url = f"http://{address}:{port}/"
        self.fails: list[Callable[[], Awaitable[object]]] = []  # what becomes of the next questions about a group
        self._address, self._port = address, port
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        @web.middleware
        async def perhaps(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.fails and request.path.startswith("/v1/groups/"):
                await self.fails.pop(0)()
            return await handler(request)

        self.hub = site.Hub()
        app = web.Application(middlewares=[perhaps])
        app.add_routes(site.routes(self, self.hub))
        app.on_shutdown.append(self.hub.close)
        self._runner = await listen(app, self._address, self._port)

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    def change(self, detail: shown.Detail) -> None:
        self.put(detail)
        self.hub.tell(("shop", detail.summary.name))


@pytest.fixture
async def served(instance: Instance) -> AsyncIterator[Served]:
    found = Served(instance.address(), instance.port("page", 8080))
    found.put(a_detail())
    await found.start()
    yield found
    await found.stop()


@pytest.fixture(scope="module")
async def chrome(instance: Instance) -> AsyncIterator[Browser]:
    with skip_what_is_missing():
        await asyncio.to_thread(chromium)
    async with a_browser(instance) as started:
        await started.size(1200, 800)
        yield started


@pytest.fixture
async def browser(chrome: Browser, served: Served) -> AsyncIterator[Browser]:
    """A tab in which nothing may go wrong, and nothing is asked of anybody but the operator."""
    await chrome.prefer("light")
    chrome.forget()
    yield chrome
    assert chrome.errors == []
    assert [url for url in chrome.requests if not url.startswith((served.url, "data:", "about:"))] == []
    await chrome.open("about:blank")


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


# The list.


async def test_groups_are_shown_with_how_they_fare(browser: Browser, served: Served) -> None:
    served.put(a_detail("parcels", summary=a_summary("parcels", ready=False, reason="NoMembers", unowned=8, idle=1)))
    await browser.open(served.url)
    await browser.wait_for(LIVE)
    lines = await browser.evaluate("[...document.querySelectorAll('#groups tr')].map(it => it.innerText)")
    assert len(lines) == 2
    assert all(word in lines[0] for word in ("shop/orders", "Ready Settled", "12", "1.5 s", "KeepingUp 7, Slow 1"))
    assert "MemberJoined, 2026-11-21 08:00:00" in lines[0]
    assert all(word in lines[1] for word in ("shop/parcels", "Not ready NoMembers", "8 unowned", "1 idle"))


async def test_the_filter_leaves_groups_whose_name_has_it_and_one_is_chosen_by_its_link(
    browser: Browser, served: Served
) -> None:
    served.put(a_detail("parcels"))
    await browser.open(served.url)
    await browser.wait_for(has("#list-count", "2 groups"))
    await browser.evaluate("document.querySelector('#list-filter').focus()")
    await browser.call("Input.insertText", text="PARC")
    await browser.wait_for(has("#list-count", "1 of 2 groups"))
    await browser.evaluate("document.querySelector('#groups a').click()")
    await browser.wait_for(has("#name", "shop/parcels"))
    await browser.wait_for(f"{LABELS}.length === 8")
    assert await browser.evaluate("document.activeElement.textContent") == "shop/parcels", "where a reader goes on"
    await browser.evaluate("document.querySelector('#home').click()")
    await browser.wait_for("document.activeElement.textContent === 'Groups'")


async def test_what_is_not_known_is_unknown_and_never_0(browser: Browser, served: Served) -> None:
    blind: dict[str, Any] = {"lag": None, "delay": None}
    summary = a_summary(retrying=None, dead=None, verdicts={}, last_rebalance=None, **blind)
    served.put(
        a_detail(
            summary=summary,
            members=[a_member("m0", queues=None, generation=None, rate=None)],
            topics=[shown.Topic("orders", "Subscribed", 1)],
            queues=[a_queue(0, verdict=None, **blind)],
            rebalances=[replace(FIRST, seconds=None, longest=None)],
            looked_at=None,
        )
    )
    await open_group(browser, served.url)
    facts = dict(
        await browser.evaluate("[...document.querySelectorAll('dl div')].map(it => it.innerText.split('\\n'))")
    )
    for name in ("Lag", "Delay", "Retrying", "Dead letters", "Verdicts", "Brokers last asked"):
        assert facts[name] == "unknown"
    assert await browser.evaluate(cell(0)) == "orders/broker-a/0: owned by m0, lag unknown, verdict unknown"
    for table, unknown in (("members", 3), ("topics", 2), ("queues", 5), ("rebalances", 2)):
        line = await browser.evaluate(f"document.querySelector('#{table} tr').innerText")
        assert line.count("unknown") == unknown, line
    await browser.evaluate("location.hash = ''")
    line = await browser.wait_for(text("#groups tr"))
    assert line.count("unknown") == 3


async def test_an_operator_that_stands_by_says_so(browser: Browser, served: Served) -> None:
    served.operator = replace(LEADS, leads=False)
    await open_group(browser, served.url)
    words = await browser.evaluate(text("#standby"))
    assert words.startswith("The operator rota-0 stands by: ")
    assert words.endswith("so lag is not known.")
    served.operator = LEADS
    served.hub.tell()
    await browser.wait_for("document.querySelector('#standby').hidden")


# One group.


MOVING = [
    *(a_queue(number) for number in range(3)),
    a_queue(3, state="Releasing", to="m1", lag=12, verdict="Slow"),
    a_queue(4, "m1", forced=True),
    a_queue(5, None, lag=4, verdict="Stopped"),
]


async def test_what_foreigners_work_is_told_from_what_is_free(browser: Browser, served: Served) -> None:
    served.put(a_detail(queues=[a_queue(0, None), a_queue(1, None, state="Foreign")]))
    await open_group(browser, served.url)
    assert await browser.evaluate(LABELS) == [
        "orders/broker-a/0: free, lag 0, KeepingUp",
        "orders/broker-a/1: a foreigner's, lag 0, KeepingUp",
    ]
    drawn = await browser.evaluate("[...document.querySelectorAll('.cell')].map(it => it.textContent)")
    assert drawn == ["", "-"], "whoever sees no colours reads the sign"
    told = await browser.evaluate("[...document.querySelectorAll('#queues tr')].map(it => it.innerText)")
    assert ["nobody" in line for line in told] == [True, False]
    assert "a foreigner" in told[1]


async def test_the_map_says_of_each_queue_who_works_it(browser: Browser, served: Served) -> None:
    served.put(a_detail(queues=[*MOVING, a_queue(0, "m1", "payments", estimate=True, lag=7)]))
    await open_group(browser, served.url)
    assert await browser.evaluate(LABELS) == [
        "orders/broker-a/0: owned by m0, lag 0, KeepingUp",
        "orders/broker-a/1: owned by m0, lag 0, KeepingUp",
        "orders/broker-a/2: owned by m0, lag 0, KeepingUp",
        "orders/broker-a/3: being released by m0, next m1, lag 12, Slow",
        "orders/broker-a/4: owned by m1, taken by force, lag 0, KeepingUp",
        "orders/broker-a/5: free, lag 4, Stopped",
        "payments/broker-a/0: owned by m1, lag at most 7, KeepingUp",
    ]
    drawn = await browser.evaluate("[...document.querySelectorAll('.cell')].map(it => it.textContent)")
    assert drawn == ["1", "1", "1", "1", "2!", "", "2"], "whoever sees no colours reads the owner's number"
    colours = await browser.evaluate(
        "[...document.querySelectorAll('.cell')].map(it => getComputedStyle(it).backgroundColor)"
    )
    assert colours[0] == colours[3] != colours[4] == colours[6]
    assert "gradient" in await browser.evaluate(
        "getComputedStyle(document.querySelector('.releasing')).backgroundImage"
    )


async def test_a_screen_reader_finds_landmarks_headings_and_queues(browser: Browser, served: Served) -> None:
    served.put(a_detail(queues=MOVING))
    await open_group(browser, served.url)
    wanted = (
        ("banner", ""),
        ("main", ""),
        ("contentinfo", ""),
        ("heading", "shop/orders"),
        ("heading", "Members"),
        ("heading", "Conditions"),
        ("heading", "Last rebalances"),
        ("listbox", "Who works which queue"),
        ("group", "orders on broker-a"),
        ("option", "orders/broker-a/3: being released by m0, next m1, lag 12, Slow"),
        ("rowheader", "orders/broker-a/3"),
        ("status", ""),
    )

    async def all_told() -> bool:
        return {*wanted} <= {*await browser.accessible()}

    with suppress(TimeoutError):  # what a reader is told follows what is drawn a moment later
        await soon(all_told)
    found = await browser.accessible()
    for it in wanted:
        assert it in found
    assert [name for role, name in found if role in {"button", "link", "searchbox", "combobox"} and not name] == []


async def test_arrow_keys_go_from_queue_to_queue_and_enter_asks_why(browser: Browser, served: Served) -> None:
    served.put(a_detail(queues=owned(100)))
    await open_group(browser, served.url)
    await browser.evaluate("document.querySelector('#filter').focus()")
    await browser.press("Tab")
    here = "document.activeElement.ariaLabel?.split(':')[0]"
    for key, number in (("ArrowRight", 1), ("End", 99), ("ArrowRight", 99), ("ArrowLeft", 98), ("Home", 0)):
        await browser.press(key)
        await browser.wait_for(f"{here} === 'orders/broker-a/{number}'")
    await browser.press("ArrowDown")
    below = int(await browser.evaluate(f"{here}.split('/')[2]"))
    assert below > 1
    assert await browser.evaluate(f"{text('#told')} === document.activeElement.ariaLabel")
    await browser.press("ArrowUp")
    await browser.wait_for(f"{here} === 'orders/broker-a/0'")
    await browser.press("Enter")
    await browser.wait_for(has("#why", "orders/broker-a/0: m0 had it before. (Sticky, generation 42)"))
    assert await browser.evaluate("document.activeElement.ariaSelected") == "true"
    assert await browser.evaluate("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1


async def test_a_handover_is_seen_as_it_happens(browser: Browser, served: Served) -> None:
    served.put(a_detail(queues=[a_queue(0), a_queue(1)]))
    await open_group(browser, served.url)
    await browser.evaluate("window.same = document.querySelector('.cell'); window.same.focus()")
    assert await browser.evaluate(cell(0)) == "orders/broker-a/0: owned by m0, lag 0, KeepingUp"
    releasing = a_queue(0, state="Releasing", to="m1")
    served.change(a_detail(summary=a_summary(moving=True), queues=[releasing, a_queue(1)]))
    await browser.wait_for(f"{cell(0)} === 'orders/broker-a/0: being released by m0, next m1, lag 0, KeepingUp'")
    assert "A handover is under way." in await browser.evaluate(text("#state"))
    assert "being released" in await browser.evaluate(text("#told"))
    served.change(a_detail(queues=[a_queue(0, "m1"), a_queue(1)]))
    await browser.wait_for(f"{cell(0)} === 'orders/broker-a/0: owned by m1, lag 0, KeepingUp'")
    assert await browser.evaluate("document.activeElement === window.same"), "no reload, and the focus stays"


async def test_a_group_that_goes_says_so_and_is_shown_again_when_it_is_made_anew(
    browser: Browser, served: Served
) -> None:
    await open_group(browser, served.url)
    gone = served.details.pop("orders")
    served.hub.tell(("shop", "orders"))
    await browser.wait_for(has("#error", "There is no group shop/orders"))
    assert await browser.evaluate("document.querySelector('#known').hidden")
    served.change(gone)
    await browser.wait_for("document.querySelector('#error').hidden && !document.querySelector('#known').hidden")
    assert all("404" in it for it in browser.errors), "which the browser writes down by itself"
    browser.forget()


async def test_names_are_text_whatever_is_in_them(browser: Browser, served: Served) -> None:
    bad = replace(JOINED, reason=EVIL, message=EVIL)
    served.put(
        a_detail(
            EVIL,
            summary=a_summary(EVIL, reason=EVIL, message=EVIL, strategy=EVIL, last_rebalance=bad),
            conditions=[shown.Condition(EVIL, EVIL, EVIL, EVIL, EVIL)],
            members=[a_member(EVIL, troubles=[EVIL], version=EVIL, state=EVIL)],
            topics=[shown.Topic(EVIL, "Subscribed", 1)],
            queues=[a_queue(0, EVIL, EVIL, verdict=EVIL, to=EVIL)],
            rebalances=[bad],
        )
    )
    await browser.open(served.url)
    await browser.wait_for(has("#groups", EVIL))
    await browser.evaluate("document.querySelectorAll('#groups a')[1].click()")
    await browser.wait_for(has("#name", EVIL))
    await browser.wait_for(f"{LABELS}.length === 1")
    await browser.evaluate("document.querySelector('.cell').click()")
    await browser.wait_for(has("#why", EVIL))
    assert await browser.evaluate("document.images.length") == 0
    assert await browser.evaluate("document.title") == f"shop/{EVIL} - Rota"


TURNS = "a\u202eb\x9bc\u2066d\u200be"
MARKED = "a\ufffdb\ufffdc\ufffdd\ufffde"


async def test_what_turns_a_line_around_or_is_not_seen_is_a_mark(browser: Browser, served: Served) -> None:
    served.put(
        a_detail(
            TURNS,
            summary=a_summary(TURNS, reason=TURNS, message=TURNS),
            members=[a_member(TURNS, troubles=[TURNS])],
            queues=[a_queue(0, TURNS, TURNS, verdict=TURNS)],
            topics=[shown.Topic(TURNS, "Subscribed", 1)],
        )
    )
    await browser.open(served.url)
    await browser.wait_for(has("#list-count", "2 groups"))
    await browser.evaluate("document.querySelectorAll('#groups a')[1].click()")
    await browser.wait_for(has("#name", MARKED))
    await browser.wait_for(f"{LABELS}.length === 1")
    await browser.evaluate("document.querySelector('.cell').click()")
    await browser.wait_for(has("#why", MARKED))
    seen = "document.title + document.body.innerText + document.querySelector('.cell').ariaLabel"
    assert [
        letter for letter in await browser.evaluate(seen) if not letter.isprintable() and letter not in "\n\t"
    ] == []
    await browser.evaluate("document.querySelector('#members button').click()")
    await browser.wait_for("document.querySelectorAll('.cell.aside').length === 0")


async def test_one_group_is_told_of_in_the_singular(browser: Browser, served: Served) -> None:
    await browser.open(served.url)
    await browser.wait_for("document.querySelector('#list-count')?.innerText === '1 group'")


MANY = [
    replace(a_queue(number, f"m{number % 300}", f"topic-{topic}"), broker=f"broker-{broker}")
    for topic in range(5)
    for broker in "abcdefgh"
    for number in range(250)
]


async def test_10000_queues_can_be_seen_and_reached(browser: Browser, served: Served) -> None:
    served.put(a_detail(queues=MANY, members=[a_member(f"m{number}") for number in range(300)]))
    await open_group(browser, served.url)
    assert len(set(await browser.evaluate(LABELS))) == 10_000
    await browser.evaluate("document.querySelector('.cell').focus()")
    await browser.press("End")
    await browser.wait_for("document.activeElement.ariaLabel?.startsWith('topic-4/broker-h/249: owned by m249')")
    await browser.press("ArrowUp")
    await browser.wait_for("document.activeElement.ariaLabel?.startsWith('topic-4/broker-h/')")
    await browser.evaluate("document.querySelector('#filter').value = 'topic-4/broker-h/249'")
    await browser.evaluate("document.querySelector('#filter').dispatchEvent(new Event('input'))")
    await browser.wait_for(has("#filter-count", "1 of 10,000 queues"))
    assert "topic-4/broker-h/249" in await browser.evaluate(text("#queues"))
    await browser.evaluate("document.querySelector('#filter').value = ''")
    await browser.evaluate("document.querySelector('#filter').dispatchEvent(new Event('input'))")
    await browser.evaluate("for (let page = 1; page < 100; page++) document.querySelector('#on').click()")
    assert (
        await browser.evaluate(
            "document.querySelector('#on').disabled && document.querySelectorAll('#queues tr').length"
        )
        == 100
    )
    assert "topic-4/broker-h/249" in await browser.evaluate(text("#queues tr:last-child"))
    served.change(a_detail(queues=[*MANY[:-1], replace(MANY[-1], owner="m0")], members=[a_member("m0")]))
    await browser.wait_for(f"{LABELS}.at(-1) === 'topic-4/broker-h/249: owned by m0, lag 0, KeepingUp'")
    print(await browser.evaluate(_PAINT))  # to be read with -s


_PAINT = """({
    firstPaint: performance.getEntriesByName("first-contentful-paint")[0]?.startTime,
    shown: performance.getEntriesByName("shown").map(it => it.startTime),
})"""

# Of every text that is seen: how much it contrasts with what is behind it, by WCAG 2.
CONTRASTS = """(() => {
    const parts = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(it => it / 255).map(
        it => it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4
    ).reduce((sum, it, number) => sum + it * [0.2126, 0.7152, 0.0722][number], 0);
    const behind = it => {
        const [r, g, b, alpha = 1] = parts(getComputedStyle(it).backgroundColor);
        return alpha ? [r, g, b] : behind(it.parentElement);
    };
    return [...document.querySelectorAll("body *")].filter(it =>
        it.checkVisibility() && !it.disabled
        && (it.matches("input") || [...it.childNodes].some(child => child.nodeType === 3 && child.data.trim()))
    ).map(it => {
        const [a, b] = [light(parts(getComputedStyle(it).color)), light(behind(it))];
        return [it.outerHTML.slice(0, 80), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    });
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_stand_out_in_light_and_in_dark(browser: Browser, served: Served, scheme: str) -> None:
    members = [a_member(f"m{number}", troubles=["BrokerUnreachable"]) for number in range(40)]
    queues = [*MOVING, *(a_queue(number, f"m{number}") for number in range(6, 40))]
    served.put(a_detail(members=members, queues=queues))
    served.put(a_detail("parcels", summary=a_summary("parcels", ready=False, reason="NoMembers")))
    served.operator = replace(LEADS, leads=False)
    await browser.prefer(scheme)
    await open_group(browser, served.url)
    told = await browser.evaluate(CONTRASTS)
    await browser.evaluate("location.hash = ''")
    await browser.wait_for(text("#groups tr"))
    told += await browser.evaluate(CONTRASTS)
    assert len(told) > 200
    assert [it for it in told if it[1] < 4.5] == []
    ground = await browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


async def test_a_connection_that_breaks_is_told_of_and_comes_back_by_itself(browser: Browser, served: Served) -> None:
    await open_group(browser, served.url)
    await served.stop()
    await browser.wait_for(has("#live", "Stale since 20"))
    assert await browser.evaluate(cell(0)) == "orders/broker-a/0: owned by m0, lag 0, KeepingUp", "what was last known"
    served.put(a_detail(queues=[a_queue(0, "m1")]))
    await served.start()
    await browser.wait_for(LIVE)
    assert await browser.evaluate(LABELS) == ["orders/broker-a/0: owned by m1, lag 0, KeepingUp"]
    assert all("ERR_" in it for it in browser.errors), "which the browser writes down by itself"
    browser.forget()


async def refused() -> None:
    raise web.HTTPServiceUnavailable


async def test_what_is_not_answered_is_asked_again_though_nothing_changes(browser: Browser, served: Served) -> None:
    served.fails = [refused, refused, refused]
    await open_group(browser, served.url)
    assert not served.fails
    assert len(await browser.evaluate(LABELS)) == 8
    assert all("503" in it for it in browser.errors), "which the browser writes down by itself"
    browser.forget()


async def test_why_a_queue_has_its_owner_is_asked_again_if_that_is_not_answered(
    browser: Browser, served: Served
) -> None:
    async def nothing() -> None:
        pass

    await open_group(browser, served.url)
    served.fails = [refused, nothing, refused]  # why; then the group, and why again
    await browser.evaluate("document.querySelector('.cell').click()")
    await browser.wait_for(has("#why", "m0 had it before."))
    assert not served.fails
    assert all("503" in it for it in browser.errors), "which the browser writes down by itself"
    browser.forget()


async def test_an_answer_that_never_comes_is_told_of_and_asked_for_again(browser: Browser, served: Served) -> None:
    never = asyncio.Event()
    await open_group(browser, served.url)
    served.fails = [never.wait]
    served.change(a_detail(queues=[a_queue(0, "m1")]))
    await browser.wait_for(has("#live", "the operator does not answer. Trying again."))
    await browser.wait_for(LIVE)
    assert await browser.evaluate(LABELS) == ["orders/broker-a/0: owned by m1, lag 0, KeepingUp"]
    never.set()


async def test_it_works_below_a_path_as_behind_the_proxy_of_an_api_server(
    browser: Browser, served: Served, instance: Instance
) -> None:
    before = "/api/v1/namespaces/rota/services/rota:http/proxy/"
    inside, app = web.Application(), web.Application()
    inside.add_routes(site.routes(served, served.hub))
    app.add_subapp(before, inside)
    runner = await listen(app, instance.address(), instance.port("proxy", 8081))
    port = instance.port("proxy", 8081)
    await open_group(browser, f"http://{instance.address()}:{port}{before}")
    assert len(await browser.evaluate(LABELS)) == 8
    assert [url for url in browser.requests if before not in url and not url.startswith(("about:", "data:"))] == []
    browser.requests.clear()
    await browser.open("about:blank")
    await runner.cleanup()


# What other programs are answered.


@asynccontextmanager
async def get(url: str, **given: Any) -> AsyncIterator[ClientResponse]:
    async with ClientSession(timeout=ClientTimeout(60)) as session, session.get(url, **given) as answer:
        yield answer


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("v1/groups/shop/nobody", 404, "There is no group shop/nobody, or it is not looked after"),
        ("v1/groups/shop/nobody/why", 404, "There is no group shop/nobody, or it is not looked after"),
        ("v1/groups/shop/orders/why?queue=x", 400, "x is no queue of shop/orders; give TOPIC/BROKER/ID"),
        ("v1/events?group=orders", 400, "group is NAMESPACE/NAME, not 'orders'"),
        ("v1/events?group=shop/orders/x", 400, "group is NAMESPACE/NAME, not 'shop/orders/x'"),
        ("v1/events?group=shop/nobody", 404, "There is no group shop/nobody, or it is not looked after"),
        ("v1/nothing", 404, "There is nothing at /v1/nothing; see docs/page.md"),
        ("v1/groups/shop", 404, "There is nothing at /v1/groups/shop; see docs/page.md"),
        ("v1", 404, "There is nothing at /v1; see docs/page.md"),
        ("web/..%2Fsite.py", 404, "There is no such file"),
    ],
)
async def test_what_cannot_be_answered_is_a_sentence(served: Served, path: str, status: int, words: str) -> None:
    async with get(served.url + path) as answer:
        assert (answer.status, await answer.json()) == (status, {"error": words})


@pytest.mark.parametrize(
    "path", ["", "web/page.js", "v1/groups", "v1/groups/shop/orders", "v1/events", "v1/groups/a/b"]
)
async def test_whatever_is_answered_may_load_nothing_from_elsewhere(served: Served, path: str) -> None:
    async with get(served.url + path) as answer:
        rules = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= {*rules}
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_is_known_already_is_not_sent_again(served: Served) -> None:
    async with get(f"{served.url}web/page.js") as answer:
        tag, kept = answer.headers["etag"], answer.headers["cache-control"]
        assert (answer.content_type, kept) == ("text/javascript", "no-cache")
    async with get(f"{served.url}web/page.js", headers={"if-none-match": tag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")


async def test_a_big_answer_is_packed(served: Served) -> None:
    served.put(a_detail(queues=MANY))
    async with get(f"{served.url}v1/groups/shop/orders", headers={"accept-encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert len((await answer.json())["queues"]) == 10_000


async def _next(answer: ClientResponse) -> dict[str, Any]:
    """Return the data of the next event."""
    while not (line := await answer.content.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    told: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return told


async def test_changes_are_told_together_and_to_those_who_ask_for_them(served: Served) -> None:
    served.put(a_detail("b"))
    async with get(f"{served.url}v1/events") as every, get(f"{served.url}v1/events?group=shop/b") as one:
        for _ in range(100):
            served.hub.tell(("shop", "a"))
            served.hub.tell(("shop", "b"), ("shop", "c"))
        assert await _next(every) == {"groups": ["shop/a", "shop/b", "shop/c"]}
        assert await _next(one) == {"groups": ["shop/b"]}
        served.hub.tell()
        served.hub.tell(("shop", "a"))
        assert await _next(every) == {"groups": ["shop/a"]}
        assert await _next(one) == {"groups": []}, "the operator itself has changed"


async def test_so_many_may_listen_and_who_goes_makes_room(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MOST_LISTENERS", 1)
    async with get(f"{served.url}v1/events") as one:
        assert one.status == 200
        async with get(f"{served.url}v1/events") as another:
            words = "1 listen for changes already; close a page, or ask again later"
            assert (another.status, await another.json()) == (503, {"error": words})

    async def let_in() -> bool:
        async with get(f"{served.url}v1/events") as again:
            return again.status == 200

    await soon(let_in)


async def test_who_listens_from_one_address_leaves_room_for_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "MOST_OF_ONE", 1)
    async with get(f"{served.url}v1/events") as one, get(f"{served.url}v1/events") as another:
        assert (one.status, another.status) == (200, 503)
        assert "1 listen for changes from 127." in (await another.json())["error"]


async def test_who_listens_is_let_go_at_the_end(served: Served) -> None:
    async with get(f"{served.url}v1/events") as answer:
        await answer.content.readline()
        await served.stop()
        assert await answer.content.read() == b"\n"


# The real thing, for a test that has an operator.


async def a_handover_is_seen(
    browser: Browser, page: str, queue: str, owners: tuple[str, str], hand_over: Callable[[], Awaitable[object]]
) -> None:
    """See a queue change hands on an open page (`http://…:8080/#shop/orders`), once its first owner is seen there."""
    first, second = owners
    label = label_of(queue)
    await browser.open(page)
    await browser.wait_for(f"{label}?.startsWith({json.dumps(f'{queue}: owned by {first},')})")
    # Every label that the cell ever has: who looks now and then would miss a quick one.
    await browser.evaluate(
        f"window.labels = []; new MutationObserver(() => labels.push({label})).observe("
        "document.querySelector('#map'), {subtree: true, attributeFilter: ['aria-label']})"
    )
    await hand_over()
    await browser.wait_for(f"{label}?.startsWith({json.dumps(f'{queue}: owned by {second},')})")
    released = f"{queue}: being released by {first}, next {second},"
    assert any(it.startswith(released) for it in await browser.evaluate("labels"))


async def test_pictures(browser: Browser, served: Served, tmp_path: Path) -> None:
    """Draw a group while queues are handed to a member that has just joined; with ROTA_PICTURES=1 for the docs."""
    where = PICTURES if "ROTA_PICTURES" in os.environ else tmp_path
    members = [
        a_member(f"orders-7d9f-{name}", language="Python", version="V5_3_0") for name in ("4kx2p", "9bd7w", "m2vzq")
    ]
    a, b, new = [it.name for it in members]
    members = [replace(members[0], queues=12), replace(members[1], queues=12), replace(members[2], queues=4, rate=3.0)]

    def one(number: int, topic: str, broker: str) -> shown.Queue:
        owner = a if broker == "broker-a" else b
        lag = (number * 37 + len(topic)) % 23
        it = replace(a_queue(number, owner, topic, lag=lag, delay=lag / 10), broker=broker)
        if number >= 6:
            return replace(it, owner=new) if topic == "orders" else replace(it, state="Releasing", to=new)
        return it

    queues = [one(n, t, b) for t in ("orders", "payments") for b in ("broker-a", "broker-b") for n in range(8)]
    queues[3] = replace(queues[3], lag=4180, delay=95.0, verdict="Slow")
    joined = replace(JOINED, message=f"{new} has joined", moved=8, seconds=None)
    words = f"4 queues are being handed to {new}."
    served.put(
        a_detail(
            summary=a_summary(
                queues=32,
                members=3,
                moving=True,
                ready=False,
                reason="HandoverInFlight",
                message=words,
                lag=sum(it.lag or 0 for it in queues),
                verdicts={"KeepingUp": 31, "Slow": 1},
                delay=95.0,
                last_rebalance=joined,
            ),
            members=members,
            queues=queues,
            rebalances=[joined, FIRST],
        )
    )
    await open_group(browser, served.url)
    await browser.evaluate("document.querySelectorAll('.releasing')[1].focus()")
    await browser.screenshot(where / "page.png")
    assert 10_000 < (where / "page.png").stat().st_size < 150_000
