"""The operator's page in a real browser, drawn from values; and its API for other programs."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, ClientTimeout, web
from msgspec.structs import replace

from ground.browser import CONTRASTS, Browser, a_browser, chromium
from ground.fixtures import skip_what_is_missing
from ground.instance import Instance
from ground.poll import soon
from kube.live_page import (
    FIRST,
    JOINED,
    LABELS,
    LEADS,
    LIVE,
    MANY,
    PICTURES,
    ServedGroups,
    a_detail,
    a_member,
    a_queue,
    a_summary,
    cell,
    has,
    open_group,
    owned,
    text,
)
from rota.http_server import listen
from rota.kube.http import broadcaster, schema, site

EVIL = '<img src=x onerror="document.title=1">'


@pytest.fixture
async def served(instance: Instance) -> AsyncIterator[ServedGroups]:
    served = ServedGroups(instance.address(), instance.port("page", 8080))
    served.put(a_detail())
    await served.start()
    yield served
    await served.stop()


@pytest.fixture(scope="module")
async def chrome(instance: Instance) -> AsyncIterator[Browser]:
    with skip_what_is_missing():
        await asyncio.to_thread(chromium)
    async with a_browser(instance) as browser:
        await browser.size(1200, 800)
        yield browser


@pytest.fixture
async def browser(chrome: Browser, served: ServedGroups) -> AsyncIterator[Browser]:
    """A tab without errors, and without requests to any server but the operator."""
    await chrome.prefer("light")
    chrome.forget()
    yield chrome
    assert chrome.errors == []
    assert [url for url in chrome.requests if not url.startswith((served.url, "data:", "about:"))] == []
    await chrome.open("about:blank")


# The list of groups.


async def test_page_lists_groups_with_their_state(browser: Browser, served: ServedGroups) -> None:
    served.put(a_detail("parcels", summary=a_summary("parcels", ready=False, reason="NoMembers", unowned=8, idle=1)))
    await browser.open(served.url)
    await browser.wait_for(LIVE)
    lines = await browser.evaluate("[...document.querySelectorAll('#groups tr')].map(it => it.innerText)")
    assert len(lines) == 2
    assert all(word in lines[0] for word in ("shop/orders", "Ready Settled", "12", "1.5 s", "KeepingUp 7, Slow 1"))
    assert "MemberJoined, 2026-11-21 08:00:00" in lines[0]
    assert all(word in lines[1] for word in ("shop/parcels", "Not ready NoMembers", "8 unowned", "1 idle"))


async def test_page_filter_narrows_groups_by_name_and_a_link_opens_one(browser: Browser, served: ServedGroups) -> None:
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


async def test_page_shows_unknown_values_as_unknown_and_never_as_0(browser: Browser, served: ServedGroups) -> None:
    blind: dict[str, Any] = {"lag": None, "delay": None}
    summary = a_summary(retrying=None, dead=None, verdicts={}, last_rebalance=None, **blind)
    served.put(
        a_detail(
            summary=summary,
            members=[a_member("m0", queues=None, generation=None, rate=None)],
            topics=[schema.TopicInfo("orders", "Subscribed", 1)],
            queues=[a_queue(0, verdict=None, **blind)],
            rebalances=[replace(FIRST, seconds=None, longest=None)],
            looked_at=None,
        )
    )
    await open_group(browser, served.url)
    facts = dict(
        await browser.evaluate("[...document.querySelectorAll('dl div')].map(it => it.innerText.split('\\n'))")
    )
    for name in ("Lag", "Delay", "Retrying", "Dead letters", "Lag states", "Brokers last polled"):
        assert facts[name] == "unknown"
    assert await browser.evaluate(cell(0)) == "orders/broker-a/0: owned by m0, lag unknown, lag state unknown"
    for table, unknown in (("members", 3), ("topics", 2), ("queues", 5), ("rebalances", 2)):
        line = await browser.evaluate(f"document.querySelector('#{table} tr').innerText")
        assert line.count("unknown") == unknown, line
    await browser.evaluate("location.hash = ''")
    line = await browser.wait_for(text("#groups tr"))
    assert line.count("unknown") == 3


async def test_page_names_failing_messages_and_estimates_delayed_ones(browser: Browser, served: ServedGroups) -> None:
    message = "orders/broker-a/3, offset 17: failed 4 times, most recently with status 500"
    member = a_member("m0", troubles=["The app answers 404"], failing=[message])
    served.put(a_detail(summary=a_summary(retrying=3, delayed=40), members=[member]))
    await open_group(browser, served.url)
    line = await browser.evaluate("document.querySelector('#members tr').innerText")
    assert f"The app answers 404; {message}" in line
    assert "3, about 40 delayed" in await browser.evaluate("document.querySelector('dl').innerText")


async def test_page_shows_that_the_operator_is_standby(browser: Browser, served: ServedGroups) -> None:
    served.operator = replace(LEADS, leads=False)
    await open_group(browser, served.url)
    words = await browser.evaluate(text("#standby"))
    assert words.startswith("The operator rota-0 is a standby: ")
    assert words.endswith("so lag is unknown.")
    served.operator = LEADS
    served.hub.publish()
    await browser.wait_for("document.querySelector('#standby').hidden")


# One group.


MOVING = [
    *(a_queue(number) for number in range(3)),
    a_queue(3, state="Releasing", to="m1", lag=12, verdict="Slow"),
    a_queue(4, "m1", forced=True),
    a_queue(5, None, lag=4, verdict="Stopped"),
]


async def test_page_distinguishes_queues_of_unmanaged_consumers_from_free_queues(
    browser: Browser, served: ServedGroups
) -> None:
    served.put(a_detail(queues=[a_queue(0, None), a_queue(1, None, state="Foreign")]))
    await open_group(browser, served.url)
    assert await browser.evaluate(LABELS) == [
        "orders/broker-a/0: free, lag 0, KeepingUp",
        "orders/broker-a/1: unmanaged consumer, lag 0, KeepingUp",
    ]
    drawn = await browser.evaluate("[...document.querySelectorAll('.cell')].map(it => it.textContent)")
    assert drawn == ["", "-"], "whoever sees no colours reads the sign"
    rows = await browser.evaluate("[...document.querySelectorAll('#queues tr')].map(it => it.innerText)")
    assert ["none" in line for line in rows] == [True, False]
    assert "unmanaged consumer" in rows[1]


async def test_page_map_labels_each_queue_with_its_owner(browser: Browser, served: ServedGroups) -> None:
    served.put(a_detail(queues=[*MOVING, a_queue(0, "m1", "payments", estimate=True, lag=7)]))
    await open_group(browser, served.url)
    assert await browser.evaluate(LABELS) == [
        "orders/broker-a/0: owned by m0, lag 0, KeepingUp",
        "orders/broker-a/1: owned by m0, lag 0, KeepingUp",
        "orders/broker-a/2: owned by m0, lag 0, KeepingUp",
        "orders/broker-a/3: being released by m0, next m1, lag 12, Slow",
        "orders/broker-a/4: owned by m1, forced, lag 0, KeepingUp",
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


async def test_page_gives_screen_readers_landmarks_headings_and_queues(browser: Browser, served: ServedGroups) -> None:
    served.put(a_detail(queues=MOVING))
    await open_group(browser, served.url)
    expected = (
        ("banner", ""),
        ("main", ""),
        ("contentinfo", ""),
        ("heading", "shop/orders"),
        ("heading", "Members"),
        ("heading", "Conditions"),
        ("heading", "Last rebalances"),
        ("listbox", "Queue map"),
        ("group", "orders on broker-a"),
        ("option", "orders/broker-a/3: being released by m0, next m1, lag 12, Slow"),
        ("rowheader", "orders/broker-a/3"),
        ("status", ""),
    )

    async def has_all_nodes() -> bool:
        return {*expected} <= {*await browser.accessible()}

    with suppress(TimeoutError):  # the accessibility tree follows the drawing a moment later
        await soon(has_all_nodes)
    nodes = await browser.accessible()
    for expected_node in expected:
        assert expected_node in nodes
    assert [name for role, name in nodes if role in {"button", "link", "searchbox", "combobox"} and not name] == []


async def test_page_arrow_keys_move_between_queues_and_enter_explains(browser: Browser, served: ServedGroups) -> None:
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
    assert await browser.evaluate(f"{text('#description')} === document.activeElement.ariaLabel")
    await browser.press("ArrowUp")
    await browser.wait_for(f"{here} === 'orders/broker-a/0'")
    await browser.press("Enter")
    await browser.wait_for(has("#explanation", "orders/broker-a/0: m0 had it before. (Sticky, generation 42)"))
    assert await browser.evaluate("document.activeElement.ariaSelected") == "true"
    assert await browser.evaluate("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1


async def test_page_shows_a_handover_live(browser: Browser, served: ServedGroups) -> None:
    served.put(a_detail(queues=[a_queue(0), a_queue(1)]))
    await open_group(browser, served.url)
    await browser.evaluate("window.same = document.querySelector('.cell'); window.same.focus()")
    assert await browser.evaluate(cell(0)) == "orders/broker-a/0: owned by m0, lag 0, KeepingUp"
    releasing = a_queue(0, state="Releasing", to="m1")
    served.change(a_detail(summary=a_summary(moving=True), queues=[releasing, a_queue(1)]))
    await browser.wait_for(f"{cell(0)} === 'orders/broker-a/0: being released by m0, next m1, lag 0, KeepingUp'")
    assert "A handover is in progress." in await browser.evaluate(text("#state"))
    assert "being released" in await browser.evaluate(text("#description"))
    served.change(a_detail(queues=[a_queue(0, "m1"), a_queue(1)]))
    await browser.wait_for(f"{cell(0)} === 'orders/broker-a/0: owned by m1, lag 0, KeepingUp'")
    assert await browser.evaluate("document.activeElement === window.same"), "no reload, and the focus stays"


async def test_page_reports_a_deleted_group_and_shows_it_again_when_recreated(
    browser: Browser, served: ServedGroups
) -> None:
    await open_group(browser, served.url)
    deleted = served.details.pop("orders")
    served.hub.publish(("shop", "orders"))
    await browser.wait_for(has("#error", "Group shop/orders does not exist"))
    assert await browser.evaluate("document.querySelector('#content').hidden")
    served.change(deleted)
    await browser.wait_for("document.querySelector('#error').hidden && !document.querySelector('#content').hidden")
    assert all("404" in error for error in browser.errors), "the browser itself logs failed requests"
    browser.forget()


async def test_page_renders_html_in_names_as_text(browser: Browser, served: ServedGroups) -> None:
    bad = replace(JOINED, reason=EVIL, message=EVIL)
    served.put(
        a_detail(
            EVIL,
            summary=a_summary(EVIL, reason=EVIL, message=EVIL, strategy=EVIL, last_rebalance=bad),
            conditions=[schema.ConditionInfo(EVIL, EVIL, EVIL, EVIL, EVIL)],
            members=[a_member(EVIL, troubles=[EVIL], failing=[EVIL], version=EVIL, state=EVIL)],
            topics=[schema.TopicInfo(EVIL, "Subscribed", 1)],
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
    await browser.wait_for(has("#explanation", EVIL))
    assert await browser.evaluate("document.images.length") == 0
    assert await browser.evaluate("document.title") == f"shop/{EVIL} - Rota"


TURNS = "a\u202eb\x9bc\u2066d\u200be"
MARKED = "a\ufffdb\ufffdc\ufffdd\ufffde"


async def test_page_replaces_bidi_and_invisible_characters_with_a_mark(browser: Browser, served: ServedGroups) -> None:
    served.put(
        a_detail(
            TURNS,
            summary=a_summary(TURNS, reason=TURNS, message=TURNS),
            members=[a_member(TURNS, troubles=[TURNS])],
            queues=[a_queue(0, TURNS, TURNS, verdict=TURNS)],
            topics=[schema.TopicInfo(TURNS, "Subscribed", 1)],
        )
    )
    await browser.open(served.url)
    await browser.wait_for(has("#list-count", "2 groups"))
    await browser.evaluate("document.querySelectorAll('#groups a')[1].click()")
    await browser.wait_for(has("#name", MARKED))
    await browser.wait_for(f"{LABELS}.length === 1")
    await browser.evaluate("document.querySelector('.cell').click()")
    await browser.wait_for(has("#explanation", MARKED))
    visible = "document.title + document.body.innerText + document.querySelector('.cell').ariaLabel"
    assert [
        letter for letter in await browser.evaluate(visible) if not letter.isprintable() and letter not in "\n\t"
    ] == []
    await browser.evaluate("document.querySelector('#members button').click()")
    await browser.wait_for("document.querySelectorAll('.cell.aside').length === 0")


async def test_page_counts_one_group_in_the_singular(browser: Browser, served: ServedGroups) -> None:
    await browser.open(served.url)
    await browser.wait_for("document.querySelector('#list-count')?.innerText === '1 group'")


@pytest.mark.slow("the page of 10,000 queues")
async def test_page_with_10000_queues_shows_and_reaches_each(browser: Browser, served: ServedGroups) -> None:
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
    await browser.evaluate("for (let page = 1; page < 100; page++) document.querySelector('#next').click()")
    assert (
        await browser.evaluate(
            "document.querySelector('#next').disabled && document.querySelectorAll('#queues tr').length"
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

# The contrast of each visible text with its background, by WCAG 2.


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_text_has_enough_contrast_in_light_and_dark(
    browser: Browser, served: ServedGroups, scheme: str
) -> None:
    members = [a_member(f"m{number}", troubles=["BrokerUnreachable"]) for number in range(40)]
    queues = [*MOVING, *(a_queue(number, f"m{number}") for number in range(6, 40))]
    served.put(a_detail(members=members, queues=queues))
    served.put(a_detail("parcels", summary=a_summary("parcels", ready=False, reason="NoMembers")))
    served.operator = replace(LEADS, leads=False)
    await browser.prefer(scheme)
    await open_group(browser, served.url)
    contrasts = await browser.evaluate(CONTRASTS)
    await browser.evaluate("location.hash = ''")
    await browser.wait_for(text("#groups tr"))
    contrasts += await browser.evaluate(CONTRASTS)
    assert len(contrasts) > 200
    assert [contrast for contrast in contrasts if contrast[1] < 4.5] == []
    ground = await browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


async def test_page_is_marked_stale_while_disconnected_and_reconnects(browser: Browser, served: ServedGroups) -> None:
    await open_group(browser, served.url)
    await served.stop()
    await browser.wait_for(has("#live", "Stale since 20"))
    assert await browser.evaluate(cell(0)) == "orders/broker-a/0: owned by m0, lag 0, KeepingUp", "the last known state"
    served.put(a_detail(queues=[a_queue(0, "m1")]))
    await served.start()
    await browser.wait_for(LIVE)
    assert await browser.evaluate(LABELS) == ["orders/broker-a/0: owned by m1, lag 0, KeepingUp"]
    assert all("ERR_" in error for error in browser.errors), "the browser itself logs failed requests"
    browser.forget()


async def respond_503() -> None:
    raise web.HTTPServiceUnavailable


async def test_page_retries_failed_requests_without_a_change_event(browser: Browser, served: ServedGroups) -> None:
    served.failures = [respond_503, respond_503, respond_503]
    await open_group(browser, served.url)
    assert not served.failures
    assert len(await browser.evaluate(LABELS)) == 8
    assert all("503" in error for error in browser.errors), "the browser itself logs failed requests"
    browser.forget()


async def test_page_retries_a_failed_request_for_an_explanation(browser: Browser, served: ServedGroups) -> None:
    async def succeed() -> None:
        pass

    await open_group(browser, served.url)
    served.failures = [
        respond_503,
        succeed,
        respond_503,
    ]  # the explanation fails; the group succeeds; the explanation fails again
    await browser.evaluate("document.querySelector('.cell').click()")
    await browser.wait_for(has("#explanation", "m0 had it before."))
    assert not served.failures
    assert all("503" in error for error in browser.errors), "the browser itself logs failed requests"
    browser.forget()


@pytest.mark.slow("a request of the page that is never answered")
async def test_page_reports_a_response_that_times_out_and_retries(browser: Browser, served: ServedGroups) -> None:
    never = asyncio.Event()
    await open_group(browser, served.url)
    served.failures = [never.wait]
    served.change(a_detail(queues=[a_queue(0, "m1")]))
    await browser.wait_for(has("#live", "the operator does not respond. Retrying."))
    await browser.wait_for(LIVE)
    assert await browser.evaluate(LABELS) == ["orders/broker-a/0: owned by m1, lag 0, KeepingUp"]
    never.set()


async def test_page_works_below_the_path_prefix_of_a_proxy(
    browser: Browser, served: ServedGroups, instance: Instance
) -> None:
    prefix = "/api/v1/namespaces/rota/services/rota:http/proxy/"
    page_app = web.Application()
    app = web.Application()
    page_app.add_routes(site.page_routes(served, served.hub))
    app.add_subapp(prefix, page_app)
    runner = await listen(app, instance.address(), instance.port("proxy", 8081))
    port = instance.port("proxy", 8081)
    await open_group(browser, f"http://{instance.address()}:{port}{prefix}")
    assert len(await browser.evaluate(LABELS)) == 8
    assert [url for url in browser.requests if prefix not in url and not url.startswith(("about:", "data:"))] == []
    await browser.open("about:blank")  # until then the page may send requests
    browser.requests.clear()
    await runner.cleanup()


# The API.


@asynccontextmanager
async def get(url: str, **options: Any) -> AsyncIterator[ClientResponse]:
    async with ClientSession(timeout=ClientTimeout(60)) as session, session.get(url, **options) as answer:
        yield answer


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        (
            "v1/groups/shop/nobody",
            404,
            "Group shop/nobody does not exist, or this operator does not watch its namespace",
        ),
        (
            "v1/groups/shop/nobody/why",
            404,
            "Group shop/nobody does not exist, or this operator does not watch its namespace",
        ),
        ("v1/groups/shop/orders/why?queue=x", 400, "x is no queue of shop/orders; give TOPIC/BROKER/ID"),
        ("v1/events?group=orders", 400, "group must be NAMESPACE/NAME, not 'orders'"),
        ("v1/events?group=shop/orders/x", 400, "group must be NAMESPACE/NAME, not 'shop/orders/x'"),
        (
            "v1/events?group=shop/nobody",
            404,
            "Group shop/nobody does not exist, or this operator does not watch its namespace",
        ),
        ("v1/nothing", 404, "No such path: /v1/nothing; see docs/page.md"),
        ("v1/groups/shop", 404, "No such path: /v1/groups/shop; see docs/page.md"),
        ("v1", 404, "No such path: /v1; see docs/page.md"),
        ("web/..%2Fsite.py", 404, "No such file"),
    ],
)
async def test_api_rejects_unknown_or_invalid_requests_with_a_sentence(
    served: ServedGroups, path: str, status: int, words: str
) -> None:
    async with get(served.url + path) as answer:
        assert (answer.status, await answer.json()) == (status, {"error": words})


@pytest.mark.parametrize(
    "path", ["", "web/page.js", "v1/groups", "v1/groups/shop/orders", "v1/events", "v1/groups/a/b"]
)
async def test_http_server_content_security_policy_allows_only_own_sources(served: ServedGroups, path: str) -> None:
    async with get(served.url + path) as answer:
        rules = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= {*rules}
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_http_server_responds_304_to_a_known_etag(served: ServedGroups) -> None:
    async with get(f"{served.url}web/page.js") as answer:
        tag, cache_control = answer.headers["etag"], answer.headers["cache-control"]
        assert (answer.content_type, cache_control) == ("text/javascript", "no-cache")
    async with get(f"{served.url}web/page.js", headers={"if-none-match": tag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")


async def test_http_server_compresses_a_large_response(served: ServedGroups) -> None:
    served.put(a_detail(queues=MANY))
    async with get(f"{served.url}v1/groups/shop/orders", headers={"accept-encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert len((await answer.json())["queues"]) == 10_000


async def _next(response: ClientResponse) -> dict[str, Any]:
    """Return the data of the next event."""
    while not (line := await response.content.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return event


async def test_api_event_stream_coalesces_changes_and_filters_by_group(served: ServedGroups) -> None:
    served.put(a_detail("b"))
    async with get(f"{served.url}v1/events") as unfiltered, get(f"{served.url}v1/events?group=shop/b") as filtered:
        for _ in range(100):
            served.hub.publish(("shop", "a"))
            served.hub.publish(("shop", "b"), ("shop", "c"))
        assert await _next(unfiltered) == {"groups": ["shop/a", "shop/b", "shop/c"]}
        assert await _next(filtered) == {"groups": ["shop/b"]}
        served.hub.publish()
        served.hub.publish(("shop", "a"))
        assert await _next(unfiltered) == {"groups": ["shop/a"]}
        assert await _next(filtered) == {"groups": []}, "the operator itself has changed"


async def test_api_event_stream_beyond_the_limit_ends_the_oldest(
    served: ServedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "MAX_STREAMS", 1)
    async with get(f"{served.url}v1/events") as oldest:
        await oldest.content.readline()
        async with get(f"{served.url}v1/events") as newest:
            assert newest.status == 200
            assert await oldest.content.read() == b"\n"
            served.hub.publish(("shop", "a"))
            assert await _next(newest) == {"groups": ["shop/a"]}


async def test_api_event_stream_ends_when_the_server_stops(served: ServedGroups) -> None:
    async with get(f"{served.url}v1/events") as answer:
        await answer.content.readline()
        await served.stop()
        assert await answer.content.read() == b"\n"


# The screenshot of the docs.


async def test_page_screenshot_of_a_handover_is_drawn(browser: Browser, served: ServedGroups, tmp_path: Path) -> None:
    """Draw a group during the handovers to a member that has just joined; with ROTA_PICTURES=1 for the docs."""
    folder = PICTURES if "ROTA_PICTURES" in os.environ else tmp_path
    members = [
        a_member(f"orders-7d9f-{name}", language="Python", version="V5_3_0") for name in ("4kx2p", "9bd7w", "m2vzq")
    ]
    a, b, new = [member.name for member in members]
    members = [replace(members[0], queues=12), replace(members[1], queues=12), replace(members[2], queues=4, rate=3.0)]

    def picture_queue(number: int, topic: str, broker: str) -> schema.QueueDetail:
        owner = a if broker == "broker-a" else b
        lag = (number * 37 + len(topic)) % 23
        detail = replace(a_queue(number, owner, topic, lag=lag, delay=lag / 10), broker=broker)
        if number >= 6:
            return replace(detail, owner=new) if topic == "orders" else replace(detail, state="Releasing", to=new)
        return detail

    queues = [
        picture_queue(n, t, b) for t in ("orders", "payments") for b in ("broker-a", "broker-b") for n in range(8)
    ]
    queues[3] = replace(queues[3], lag=4180, delay=95.0, verdict="Slow")
    joined = replace(JOINED, message=f"{new} has joined", moved=8, seconds=None)
    message = f"4 queues are being handed to {new}."
    served.put(
        a_detail(
            summary=a_summary(
                queues=32,
                members=3,
                moving=True,
                ready=False,
                reason="HandoverInFlight",
                message=message,
                lag=sum(queue.lag or 0 for queue in queues),
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
    assert await browser.evaluate("document.querySelectorAll('.cell').length") == len(queues)
    assert await browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the picture is cut off"
    await browser.screenshot(folder / "page.png")
    assert 10_000 < (folder / "page.png").stat().st_size < 150_000
