"""The commands that read a live group: their requests to the operator, the ways to it, and their output."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

from rota.cli import main
from rota.cli.client import http
from rota.cli.console import formatting
from rota.kube.http.schema import (
    BrokerSettings,
    ConditionInfo,
    GroupDetail,
    GroupList,
    GroupSummary,
    MemberInfo,
    OperatorInfo,
    OwnerReasons,
    QueueDetail,
    QueueExplanation,
    SubscriptionInfo,
    TopicInfo,
)
from rota.kube.state.rebalance import Rebalance
from shop import ConsumerFleet

ROOT = Path(__file__).parents[3]
LONG_AGO = (datetime.now(UTC) - timedelta(days=2, hours=4, minutes=1)).isoformat()
AGE_OF_LONG_AGO = re.compile(r"\b2d([4-9]|1\d)h ago")  # the age is larger in a test run that lasts for hours
AGE = re.compile(r"\b(?:\d+[hm])*\d+[hms] ago")

JOINED = Rebalance("MemberJoined", "m-2 joined", LONG_AGO, 7, 5, 1, 3.4, 1.2)
LEADS = OperatorInfo("rota-0", "0.1.0", leads=True)


def a_summary(namespace: str = "shop", name: str = "orders", **changes: Any) -> GroupSummary:
    fields: dict[str, Any] = {
        "ready": True,
        "reason": "Settled",
        "message": "Each of 16 queues has an owner that consumes it",
        "moving": False,
        "members": 3,
        "queues": 16,
        "idle": 0,
        "unowned": 0,
        "generation": 7,
        "strategy": "Sticky",
        "lag": 120,
        "retrying": 0,
        "dead": 2,
        "delay": 130.0,
        "verdicts": {"KeepingUp": 15, "Slow": 1},
        "last_rebalance": JOINED,
    }
    return GroupSummary(namespace, name, **fields | changes)


def a_queue(number: int, lag: int | None = 0, **changes: Any) -> QueueDetail:
    fields: dict[str, Any] = {"topic": "orders", "broker": "broker-a", "id": number, "kind": "Subscribed"}
    fields |= {"state": "Owned", "owner": f"m-{number % 3}", "verdict": "KeepingUp", "lag": lag}
    if lag is not None:
        fields |= {"first": 0, "last": 500 + lag, "committed": 500, "delay": float(lag)}
    return QueueDetail(**fields | changes)


MEMBERS = [
    MemberInfo("m-0", "10.0.0.1@m-0#1", "Rota", "Ready", "10.0.0.1", "V5_1_4", "PYTHON", 6, 7, 12.34),
    MemberInfo("m-1", "10.0.0.2@m-1#2", "Rota", "Ready", queues=5, troubles=["its app answers 500"]),
    MemberInfo("10.0.0.9@1", "10.0.0.9@1", "Foreign", "Foreign", "10.0.0.9", "V4_9_4", "JAVA"),
]
QUEUES = [a_queue(0, 3), a_queue(1, None), a_queue(2, 117, estimate=True), a_queue(3, 0)]
RETRIES = QueueDetail("%RETRY%orders", "broker-a", 0, "Retry", "Free", to="m-1")
DETAIL = GroupDetail(
    LEADS,
    a_summary(),
    "orders",
    [ConditionInfo("Ready", "True", "Settled", "All is well", LONG_AGO)],
    MEMBERS,
    [
        TopicInfo("orders", "Subscribed", 4, 120, 130.0, estimate=True),
        TopicInfo("%RETRY%orders", "Retry", 1, 0, 0.0),
    ],
    [*QUEUES, RETRIES],
    [JOINED],
    datetime.now(UTC).isoformat(),
    [
        BrokerSettings("broker-a", enabled=True, retries=16, retry_queues=1),
        BrokerSettings("broker-b", enabled=False, retries=1, retry_queues=2),
    ],
)
OTHER = a_summary(
    "pay", "bills", ready=False, reason="BrokerMetadataUnavailable", lag=None, delay=None, last_rebalance=None, idle=1
)
GROUPS = GroupList(LEADS, [OTHER, a_summary()])
REASONS = OwnerReasons(
    "Sticky",
    7,
    [
        QueueExplanation(
            "orders",
            "broker-a",
            3,
            "m-0",
            "orders/broker-a/3 stays with m-0: m-0 keeps 6 of its 8 queues (an even share is 5 or 6)",
        )
    ],
    JOINED,
)


class StubServer:
    """An HTTP server that gives prepared responses, and records the requests."""

    def __init__(self) -> None:
        self.responses: dict[str, tuple[int, Any]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.url = ""
        self.request_received = asyncio.Condition()

    async def answer(self, request: web.Request) -> web.Response:
        async with self.request_received:
            self.requests.append((request.path, dict(request.query)))
            self.request_received.notify_all()
        status, content = self.responses.get(request.path, (404, {"error": "There is no such group"}))
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        return web.Response(status=status, body=body)

    async def wait_for_requests(self, count: int) -> None:
        """Wait for that many further requests."""
        async with self.request_received:
            expected_count = len(self.requests) + count
            await self.request_received.wait_for(lambda: len(self.requests) >= expected_count)


async def run_stub_server() -> AsyncIterator[StubServer]:
    service = StubServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", service.answer)
    async with TestServer(app) as server:
        service.url = str(server.make_url("/")).rstrip("/")
        yield service


@pytest.fixture(autouse=True)
def no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that no kubeconfig is found but the test's own."""
    for name in ("KUBECONFIG", "ROTA_OPERATOR", "ROTA_OPERATOR_NAMESPACE", "ROTA_LEASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
async def operator() -> AsyncIterator[StubServer]:
    async for service in run_stub_server():
        service.responses = {
            "/v1/groups": (200, GROUPS),
            "/v1/groups/shop/orders": (200, DETAIL),
            "/v1/groups/shop/orders/why": (200, REASONS),
        }
        yield service


async def rota(*arguments: str, **env: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env)


async def printed_lines(service: StubServer, *arguments: str) -> list[str]:
    """Return the lines that a command prints, without the spaces that pad a table."""
    result = await rota(*arguments, "--operator", service.url)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines() if line.strip(" ─")]
    return [AGE_OF_LONG_AGO.sub("2d4h ago", line) for line in lines]


async def assert_rejected(sentence: str, *arguments: str, **env: str) -> None:
    result = await rota(*arguments, **env)
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.startswith("rota: ")
    assert len(result.output.splitlines()) == 1


async def test_cli_status_shows_one_line_per_group_of_a_namespace(operator: StubServer) -> None:
    head, line = await printed_lines(operator, "status", "-n", "shop")
    assert head == "GROUP READY MEMBERS QUEUES LAG DELAY STRATEGY LAST REBALANCE"
    assert line == "orders yes (Settled) 3 16 120 2m10s Sticky MemberJoined 2d4h ago, 5 queues moved, 1 forced"


async def test_cli_status_of_all_namespaces_shows_unknown_figures(operator: StubServer) -> None:
    _, line, _ = await printed_lines(operator, "status", "-A")
    assert line == "pay/bills no (BrokerMetadataUnavailable) 3 (1 idle) 16 unknown unknown Sticky none"


async def test_cli_shows_impossible_figures_as_unknown(operator: StubServer) -> None:
    impossible = a_summary(members=-1, queues=-2, idle=-1, unowned=-1, lag=-5, delay=1e300)
    operator.responses["/v1/groups"] = 200, GroupList(LEADS, [impossible])
    assert (await printed_lines(operator, "status", "-A"))[1].startswith(
        f"shop/orders yes (Settled) {'unknown ' * 4}Sticky"
    )
    member = MemberInfo("m-0", "it", "Rota", "Ready", queues=-1, generation=-1, rate=1e300)
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, members=[member])
    assert (await printed_lines(operator, "members", "shop/orders"))[1].endswith("Ready unknown unknown unknown")


async def test_cli_status_wide_adds_generation_retries_dead_letters_and_message(operator: StubServer) -> None:
    head, line = await printed_lines(operator, "status", "-n", "shop", "-o", "wide")
    assert head.endswith("LAST REBALANCE GENERATION RETRYING DEAD LETTERS MESSAGE")
    assert line.endswith("1 forced 7 0 2 Each of 16 queues has an owner that consumes it")


async def test_cli_output_name_prints_objects_in_the_form_that_kubectl_accepts(operator: StubServer) -> None:
    assert await printed_lines(operator, "status", "-n", "shop", "-o", "name") == ["consumergroup.rota.dev/orders"]
    assert await printed_lines(operator, "status", "shop/orders", "-o", "name") == ["consumergroup.rota.dev/orders"]
    assert await printed_lines(operator, "members", "shop/orders", "-o", "name") == ["pod/m-0", "pod/m-1"]


async def test_cli_table_in_a_pipe_has_no_lines_and_columns_three_spaces_apart(operator: StubServer) -> None:
    head, line = (await rota("status", "-n", "shop", "--operator", operator.url)).output.splitlines()
    assert head.startswith("GROUP    READY           MEMBERS")
    assert line.startswith("orders   yes (Settled)   3")


@pytest.mark.parametrize(
    ("shell", "line"), [("bash", "complete -o nosort -F"), ("zsh", "compdef"), ("fish", "complete")]
)
async def test_cli_completion_prints_a_script_for_the_shell(shell: str, line: str) -> None:
    result = await rota("completion", shell)
    assert result.exit_code == 0
    assert "_ROTA_COMPLETE" in result.output
    assert line in result.output


async def test_cli_status_rejects_namespace_with_all_namespaces() -> None:
    await assert_rejected("remove one of them", "status", "-n", "default", "-A")


async def test_cli_status_without_groups_hints_at_all_namespaces(operator: StubServer) -> None:
    assert await printed_lines(operator, "status") == [
        "There is no group in namespace default; -A shows those in all namespaces"
    ]


async def test_cli_status_of_one_group_shows_conditions_verdicts_and_rebalances(operator: StubServer) -> None:
    lines = await printed_lines(operator, "status", "shop/orders")
    assert "Each of 16 queues has an owner that consumes it" in lines
    assert "Lag states: 15 queues KeepingUp, 1 queue Slow" in lines
    assert "At broker-a: consumption on, 16 retries, 1 retry queue" in lines
    assert "At broker-b: consumption OFF, 1 retry, 2 retry queues" in lines
    assert "Retrying: 0; dead letters: 2" in lines
    assert "Ready True Settled 2d4h ago All is well" in lines
    assert "MemberJoined 2d4h ago 7 5 1 3s 1s m-2 joined" in lines


async def test_cli_omits_results_of_a_rebalance_under_way(operator: StubServer) -> None:
    begun = Rebalance("MemberLeft", "m-2 left", LONG_AGO, 8)
    operator.responses["/v1/groups"] = 200, GroupList(LEADS, [a_summary(last_rebalance=begun, moving=True)])
    assert "MemberLeft 2d4h ago, in progress" in (await printed_lines(operator, "status", "-A"))[1]
    operator.responses["/v1/groups"] = 200, GroupList(LEADS, [a_summary(last_rebalance=begun)])
    assert "MemberLeft 2d4h ago, 0 queues moved" in (await printed_lines(operator, "status", "-A"))[1]
    operator.responses["/v1/groups/shop/orders/why"] = 200, OwnerReasons("Sticky", 8, [], begun)
    lines = await printed_lines(operator, "explain", "shop/orders")
    assert lines == [
        "No queue has an owner in generation 8",
        "Last rebalance: MemberLeft 2d4h ago, generation 8: m-2 left",
        "It is in progress, or its end was not recorded",
    ]


async def test_cli_members_lists_members_with_their_problems(operator: StubServer) -> None:
    lines = await printed_lines(operator, "members", "orders", "-n", "shop")
    assert lines == [
        "NAME CLIENT ID ADDRESS VERSION ORIGIN STATE QUEUES GENERATION RATE",
        "m-0 10.0.0.1@m-0#1 10.0.0.1 V5_1_4 (PYTHON) Rota Ready 6 7 12.3/s",
        "m-1 10.0.0.2@m-1#2 unknown unknown Rota Ready 5 unknown unknown",
        "10.0.0.9@1 10.0.0.9@1 10.0.0.9 V4_9_4 (JAVA) Foreign Foreign unknown unknown unknown",
        "3 members, 1 of them unmanaged; generation 7",
        "m-1: its app answers 500",
    ]


FAILING = "orders/broker-a/3, offset 17: failed 4 times, most recently with status 500"


async def test_cli_members_names_messages_that_fail_or_hang(operator: StubServer) -> None:
    member = msgspec.structs.replace(MEMBERS[0], failing=[FAILING])
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, members=[member])
    assert (await printed_lines(operator, "members", "shop/orders"))[-1] == f"m-0: {FAILING}"


async def test_cli_status_and_lag_estimate_messages_that_brokers_delay(operator: StubServer) -> None:
    delayed = msgspec.structs.replace(DETAIL, summary=a_summary(delayed=1240))
    operator.responses["/v1/groups/shop/orders"] = 200, delayed
    expected = "Retrying: 0, and about 1240 delayed by brokers; dead letters: 2"
    assert expected in await printed_lines(operator, "status", "shop/orders")
    assert "Delayed by brokers until the next attempt: about 1240" in await printed_lines(
        operator, "lag", "shop/orders"
    )
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, summary=a_summary(delayed=0))
    assert "Retrying: 0; dead letters: 2" in await printed_lines(operator, "status", "shop/orders")


async def test_cli_lag_orders_by_queue_and_lists_retries_separately(operator: StubServer) -> None:
    lines = await printed_lines(operator, "lag", "shop/orders")
    assert AGE.sub("now", lines.pop()) == "Offsets were last read now"
    assert lines == [
        "TOPIC BROKER QUEUE FIRST LAST COMMITTED LAG DELAY LAG STATE MEMBER",
        "orders broker-a 0 0 503 500 3 3s KeepingUp m-0",
        "orders broker-a 1 unknown unknown unknown unknown unknown KeepingUp m-1",
        "orders broker-a 2 0 617 500 ~117 1m57s KeepingUp m-2",
        "orders broker-a 3 0 500 500 0 0s KeepingUp m-0",
        "orders: 4 queues, lag ~120, delay 2m10s",
        "Retry topic:",
        "TOPIC BROKER QUEUE FIRST LAST COMMITTED LAG DELAY LAG STATE MEMBER",
        "%RETRY%orders broker-a 0 unknown unknown unknown unknown unknown unknown none, moving to m-1",
        "%RETRY%orders: 1 queue, lag 0, delay 0s",
        "Dead letters: 2",
    ]


async def test_cli_lag_by_lag_shows_largest_first_and_unknown_last(operator: StubServer) -> None:
    shown = await rota("lag", "shop/orders", "--by", "lag", "--operator", operator.url, "-o", "json")
    assert [queue["id"] for queue in json.loads(shown.output)["queues"]] == [2, 0, 3, 1, 0]
    lines = await printed_lines(operator, "lag", "shop/orders", "--by", "lag", "--top", "1")
    assert lines[1:3] == [
        "orders broker-a 2 0 617 500 ~117 1m57s KeepingUp m-2",
        "orders: 4 queues, lag ~120, delay 2m10s; 3 queues not shown",
    ]


async def test_cli_lag_shows_current_and_next_owner_of_a_queue_in_handover(operator: StubServer) -> None:
    releasing = a_queue(0, state="Releasing", owner="m-0", to="m-1")
    forced = a_queue(1, owner="m-1", forced=True)
    without_next_owner = a_queue(2, state="Releasing", owner="m-2")
    operator.responses["/v1/groups/shop/orders"] = (
        200,
        msgspec.structs.replace(DETAIL, queues=[releasing, forced, without_next_owner]),
    )
    lines = await printed_lines(operator, "lag", "shop/orders")
    assert [line.partition("KeepingUp ")[2] for line in lines[1:4]] == [
        "m-0, moving to m-1",
        "m-1 (forced)",
        "m-2, being released",
    ]


async def test_cli_lag_shows_everyone_as_owner_in_a_broadcasting_group(operator: StubServer) -> None:
    shared = a_queue(0, None, state="Everyone", owner=None, verdict=None)
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, queues=[shared])
    assert (await printed_lines(operator, "lag", "shop/orders"))[1].split()[-1] == "everyone"


async def test_cli_lag_shows_an_unmanaged_consumer_as_owner(operator: StubServer) -> None:
    unmanaged = a_queue(0, 3, state="Foreign", owner=None)
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, queues=[unmanaged])
    assert (await printed_lines(operator, "lag", "shop/orders"))[1].endswith(" unmanaged consumer")


async def test_cli_explain_shows_known_parts_of_an_incomplete_rebalance(operator: StubServer) -> None:
    rebalance = Rebalance("MemberLeft", "", LONG_AGO, 0, 3, seconds=4.0)
    operator.responses["/v1/groups/shop/orders/why"] = 200, OwnerReasons("Sticky", 8, [], rebalance)
    lines = await printed_lines(operator, "explain", "shop/orders")
    assert lines[1:] == ["Last rebalance: MemberLeft 2d4h ago", "It moved 3 queues, and took 4s"]
    operator.responses["/v1/groups/shop/orders/why"] = 200, OwnerReasons("Sticky", 8, [])
    assert (await printed_lines(operator, "explain", "shop/orders"))[1:] == ["The operator knows of no rebalance"]


async def test_cli_shows_a_group_without_any_figures_as_unknown(operator: StubServer) -> None:
    blank = GroupSummary("shop", "orders", False, "", "", False, 0, 0, 0, 0, 0, "")  # noqa: FBT003 - in its order
    operator.responses["/v1/groups/shop/orders"] = 200, GroupDetail(LEADS, blank, "shop-orders", [], [], [], [], [])
    assert (await printed_lines(operator, "status", "shop/orders"))[1:] == [
        "shop/orders no (unknown) 0 0 unknown unknown unknown none",
        "Consumer group at the brokers: shop-orders",
        "Retrying: unknown; dead letters: unknown",
    ]
    assert await printed_lines(operator, "members", "shop/orders") == ["0 members; generation 0"]
    assert await printed_lines(operator, "lag", "shop/orders") == [
        "Dead letters: unknown",
        "No topic of the group is known yet",
        "Offsets have not been read yet",
    ]


async def test_cli_lag_of_a_standby_operator_states_that_it_reads_no_offsets(operator: StubServer) -> None:
    standby = msgspec.structs.replace(DETAIL, operator=OperatorInfo("rota-1", "0.1.0", leads=False), looked_at=None)
    operator.responses["/v1/groups/shop/orders"] = 200, standby
    last = (await printed_lines(operator, "lag", "shop/orders"))[-1]
    assert last.startswith("Operator rota-1 is not the leader and reads no offsets")


async def test_cli_explain_gives_reasons_and_the_last_rebalance(operator: StubServer) -> None:
    assert await printed_lines(operator, "explain", "shop/orders", "%RETRY%orders/b/3") == [
        "orders/broker-a/3 stays with m-0: m-0 keeps 6 of its 8 queues (an even share is 5 or 6)",
        "Last rebalance: MemberJoined 2d4h ago, generation 7: m-2 joined",
        "It moved 5 queues, 1 of them forced, and took 3s; the slowest queue took 1s",
    ]
    assert operator.requests == [("/v1/groups/shop/orders/why", {"queue": "%RETRY%orders/b/3"})]


@pytest.mark.parametrize(
    ("command", "response"), [("status", DETAIL), ("members", DETAIL), ("lag", DETAIL), ("explain", REASONS)]
)
@pytest.mark.parametrize("output", ["json", "yaml"])
async def test_cli_json_and_yaml_are_the_operators_response(
    command: str, response: msgspec.Struct, output: str, operator: StubServer
) -> None:
    shown = await rota(command, "shop/orders", "--operator", operator.url, "-o", output)
    assert yaml.safe_load(shown.output) == msgspec.to_builtins(response)  # JSON is YAML
    assert output == "yaml" or json.loads(shown.output)


async def test_cli_status_json_has_only_groups_of_the_namespace(operator: StubServer) -> None:
    shown = await rota("status", "-n", "shop", "--operator", operator.url, "-o", "json")
    assert [group["lastRebalance"]["reason"] for group in json.loads(shown.output)["groups"]] == ["MemberJoined"]


async def test_cli_members_wide_counts_unread_queues_by_reason(operator: StubServer) -> None:
    member = msgspec.structs.replace(DETAIL.members[0], queue_states={"full": 2, "failing": 1})
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, members=[member])
    lines = await printed_lines(operator, "members", "shop/orders", "-o", "wide")
    assert " RATE QUEUES NOT READ " in lines[0]
    assert any(" 1 failing, 2 full " in line for line in lines)
    assert "QUEUES NOT READ" not in (await printed_lines(operator, "members", "shop/orders"))[0]


async def test_cli_members_wide_shows_subscriptions_model_and_start_of_each_consumer(operator: StubServer) -> None:
    subscriptions = [SubscriptionInfo("orders", "paid || open", "Tag"), SubscriptionInfo("bills", "price > 3", "SQL92")]
    member = msgspec.structs.replace(
        DETAIL.members[0], subscriptions=subscriptions, model="Clustering", start="Earliest"
    )
    unmanaged = MemberInfo("java", "java", "Foreign", "Foreign")
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, members=[member, unmanaged])
    lines = await printed_lines(operator, "members", "shop/orders", "-o", "wide")
    assert lines[0].endswith(" SUBSCRIPTIONS MODEL START")
    assert any(line.endswith(" orders: paid || open; bills: SQL92 price > 3 Clustering Earliest") for line in lines)
    assert any(line.endswith(" unknown unknown unknown") for line in lines)


async def test_cli_members_prints_hostile_names_as_plain_text(operator: StubServer) -> None:
    name = "[red]: #\x1b[2J'\"{\n%é"
    unmanaged = MemberInfo(name, name, "Foreign", "Foreign", troubles=[f"{name} sleeps"])
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, members=[unmanaged])
    lines = await printed_lines(operator, "members", "shop/orders")
    assert lines[1].startswith("[red]: #\N{REPLACEMENT CHARACTER}[2J'\"{ %é ")
    assert "\x1b" not in "".join(lines)
    shown = await rota("members", "shop/orders", "--operator", operator.url, "-o", "yaml")
    assert yaml.safe_load(shown.output)["members"][0]["name"] == name


@pytest.mark.parametrize("command", ["status", "members", "lag", "explain"])
async def test_cli_relays_the_operators_error_for_an_unknown_group(command: str, operator: StubServer) -> None:
    await assert_rejected("There is no such group", command, "shop/none", "--operator", operator.url)


async def test_cli_explain_relays_the_operators_error_for_an_unknown_queue(operator: StubServer) -> None:
    operator.responses["/v1/groups/shop/orders/why"] = 400, {"error": "There is no queue orders/a/9"}
    await assert_rejected(
        "rota: There is no queue orders/a/9", "explain", "shop/orders", "orders/a/9", "--operator", operator.url
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["members", "Orders!"], "GROUP 'Orders!' is not a valid name; write NAME or NAMESPACE/NAME"),
        (["members", "a/b/c"], "GROUP 'a/b/c' is not a valid name"),
        (["members", ""], "GROUP '' is not a valid name"),
        (["members", "../x"], "GROUP '../x' is not a valid name"),
        (["lag", "a/b", "-n", "c"], "GROUP a/b is in another namespace than --namespace c; remove one of them"),
        (["lag", "b", "-n", "Shop"], "--namespace 'Shop' is not a valid name; give one that kubectl get namespaces"),
        (["status", "b", "-A"], "--all-namespaces is for all groups, and b is one; remove one of them"),
        (["explain"], "No group is named; give a GROUP, or -f with a file"),
        (["explain", "b", "orders/x"], "Invalid queue 'orders/x': write it as TOPIC/BROKER/ID"),
        (["explain", "b", "--queues", "a=b:1"], "--queues describes a group in a file; add -f, or remove this option"),
        (["explain", "-f", "x", "--watch"], "--watch is for a live group; remove this option, or remove -f"),
        (["explain", "-f", "x", "a", "b"], "With -f the group is in the file; remove 'a', or remove -f"),
        (
            ["status", "--operator", "rota"],
            "--operator 'rota' is not a valid address; write it as http://127.0.0.1:8080",
        ),
        (["status", "--operator", "http://a:99999"], "--operator 'http://a:99999' is not a valid address"),
        (["status", "--operator", "http://"], "--operator 'http://' is not a valid address"),
        (["status", "--operator", "ftp://a"], "--operator 'ftp://a' is not a valid address"),
        (["status", "--operator", "http://a/?x=1"], "--operator 'http://a/?x=1' is not a valid address"),
        (
            ["status", "--operator-namespace", "A"],
            "--operator-namespace 'A' is not a valid name; give the operator's namespace, by default rota-system",
        ),
        (["status", "--lease", "a/b"], "--lease 'a/b' is not a valid name; give the operator's Lease, by default rota"),
    ],
)
async def test_cli_user_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    await assert_rejected(sentence, *arguments)


async def test_cli_explain_on_files_requires_queues() -> None:
    result = await rota("explain", "-f", str(ROOT / "docs/examples/group.yaml"))
    assert (result.exit_code, "Give either --queues" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>Please log in</html>"),
        (200, b""),
        (200, b"[" * 100_000),
        (200, b'{"groups": []}'),
        (200, b'{"operator": null, "groups": []}'),
        (404, b"404: Not Found"),
        (502, b"<html>Bad gateway</html>"),
        (500, b'{"error": 5}'),
    ],
)
async def test_cli_rejects_a_response_unlike_the_operators(status: int, body: bytes, operator: StubServer) -> None:
    operator.responses["/v1/groups"] = status, body
    await assert_rejected("check the address and the operator's version", "status", "--operator", operator.url)


async def test_cli_connection_refused_is_one_sentence(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    sentence = f"The operator does not answer at {url}: Connection refused; start the operator, or give another"
    await assert_rejected(sentence, "status", ROTA_OPERATOR=url)


async def test_cli_gives_up_on_an_operator_that_never_responds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RESPONSE_TIMEOUT_SECONDS", 0.1)
    test_ended = asyncio.Event()

    async def hold_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await test_ended.wait()
        writer.close()

    async with await asyncio.start_server(hold_connection, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await assert_rejected("no response within 0.1 s", "status", "--operator", f"http://127.0.0.1:{port}")
        test_ended.set()


LEASE = "/apis/coordination.k8s.io/v1/namespaces/rota-system/leases/rota"
PROXY = "/api/v1/namespaces/rota-system/pods/rota-0:8080/proxy"


def a_lease(holder: str | None, renewed: str = "2999-01-01T00:00:00.000000Z") -> dict[str, Any]:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed}
    return {"kind": "Lease", "metadata": {"name": "rota"}, "spec": spec}


def api_error(code: int, message: str = "no") -> tuple[int, Mapping[str, Any]]:
    """Return an error response of the API server."""
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StubServer]:
    """Run an API server with an operator behind it, and set a kubeconfig that points to it."""
    async for service in run_stub_server():
        service.responses = {
            LEASE: (200, a_lease("rota-0")),
            f"{PROXY}/v1/groups": (200, GROUPS),
            f"{PROXY}/v1/groups/shop/orders/why": (200, REASONS),
            f"{PROXY}/v1/groups/shop/none": (404, {"error": "There is no group shop/none"}),
        }
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me", "namespace": "shop"}}],
            "clusters": [{"name": "one", "cluster": {"server": service.url}}],
            "users": [{"name": "me", "user": {"token": "t"}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield service


async def test_cli_with_kubeconfig_reaches_the_leader_through_the_api_server(api: StubServer) -> None:
    shown = await rota("explain", "orders", "%RETRY%orders/b/3", "-o", "json")
    assert json.loads(shown.output)["queues"][0]["owner"] == "m-0"
    assert api.requests == [(LEASE, {}), (f"{PROXY}/v1/groups/shop/orders/why", {"queue": "%RETRY%orders/b/3"})]


async def test_cli_namespace_defaults_to_that_of_the_kubeconfig_context(api: StubServer, operator: StubServer) -> None:
    assert [line.split()[0] for line in (await rota("status")).output.splitlines()[1:2]] == ["orders"]
    assert (await printed_lines(operator, "status"))[1].startswith("orders ")
    assert len(api.requests) == 2


async def test_cli_finds_the_operator_by_lease_name_and_namespace(api: StubServer) -> None:
    api.responses["/apis/coordination.k8s.io/v1/namespaces/ops/leases/mine"] = 200, a_lease("rota-7")
    api.responses["/api/v1/namespaces/ops/pods/rota-7:8080/proxy/v1/groups"] = 200, GROUPS
    assert (await rota("status", "--lease", "mine", ROTA_OPERATOR_NAMESPACE="ops")).exit_code == 0


async def test_cli_relays_the_operators_error_through_the_api_server(api: StubServer) -> None:
    await assert_rejected("rota: There is no group shop/none\n", "members", "none")
    api.responses[f"{PROXY}/v1/groups"] = 404, b"404: Not Found"
    await assert_rejected("check the address and the operator's version", "status")


@pytest.mark.parametrize(
    ("lease_response", "proxy_response", "sentence"),
    [
        (api_error(404), None, "There is no Lease rota in namespace rota-system; check that the operator runs"),
        (
            api_error(403),
            None,
            "You have no permission to read the Lease rota in namespace rota-system; ask for get on leases",
        ),
        (
            api_error(401),
            None,
            "The API server rejects the credentials of the kubeconfig; log in again, or give --operator",
        ),
        (api_error(403, 'User "system:anonymous" cannot get leases'), None, "The API server rejects the credentials"),
        (api_error(500, "etcd is away"), None, "The Lease rota in namespace rota-system cannot be read: etcd is away"),
        ((200, b"<html>log in</html>"), None, "check the kubeconfig and the cluster"),
        ((200, a_lease("")), None, "No operator is leader: the Lease rota in namespace rota-system has no holder"),
        ((200, a_lease(None)), None, "No operator is leader"),
        (
            (200, a_lease("", "2026-01-01T00:00:00.000000Z")),
            None,
            "No operator is leader: the Lease rota in namespace rota-system has no holder and was last renewed ",
        ),
        (
            (200, a_lease("my laptop/7")),
            None,
            "is held by 'my laptop/7', which is not a valid pod name; run the operator in the cluster, or give",
        ),
        (
            None,
            api_error(404),
            "rota-0 holds the Lease rota, but is not a pod in namespace rota-system; wait until another pod",
        ),
        (
            None,
            api_error(403),
            "You have no permission to send requests to the leading pod rota-0; ask for get on pods/proxy",
        ),
        (None, api_error(401), "The API server rejects the credentials"),
        (
            None,
            api_error(503, "connection refused"),
            "The API server cannot reach pod rota-0 in namespace rota-system: conn",
        ),
        (
            (200, a_lease("rota-0", "2026-01-01T00:00:00.000000Z")),
            api_error(404),
            "No operator is leader: rota-0 should have renewed",
        ),
        (
            (200, a_lease("rota-0", "2026-01-01T00:00:00.000000Z")),
            api_error(503),
            "No operator is leader: rota-0 should have renewed",
        ),
    ],
)
async def test_cli_lease_or_proxy_failure_is_one_sentence(
    lease_response: tuple[int, Any] | None, proxy_response: tuple[int, Any] | None, sentence: str, api: StubServer
) -> None:
    api.responses[LEASE] = lease_response or api.responses[LEASE]
    api.responses[f"{PROXY}/v1/groups"] = proxy_response or api.responses[f"{PROXY}/v1/groups"]
    await assert_rejected(sentence, "status")


async def test_cli_ignores_an_expired_lease_while_its_holder_responds(api: StubServer) -> None:
    api.responses[LEASE] = 200, a_lease("rota-0", "2026-01-01T00:00:00.000000Z")  # clocks may differ
    assert (await rota("status")).exit_code == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "config does not exist; set KUBECONFIG to the cluster's file, or give"),
        ("a: [", "config is not valid YAML; correct it, or give --operator"),
        (
            "current-context: gone",
            "The kubeconfig has no context 'gone'; kubectl config view shows its entries, or",
        ),
    ],
)
async def test_cli_kubeconfig_that_is_unusable_is_one_sentence(text: str | None, sentence: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config").write_text(text)
    await assert_rejected(sentence, "status", KUBECONFIG=str(tmp_path / "config"))


async def test_cli_without_kubeconfig_says_how_to_set_one() -> None:
    await assert_rejected("There is no kubeconfig (~/.kube/config) and no service account; set KUBECONFIG", "status")


async def test_cli_unreachable_api_server_is_one_sentence(
    api: StubServer, tmp_path: Path, unused_tcp_port: int
) -> None:
    text = (tmp_path / "config").read_text().replace(api.url, f"http://127.0.0.1:{unused_tcp_port}")
    (tmp_path / "config").write_text(text)
    await assert_rejected("The API server did not respond to GET", "status")


def _restore_sigint() -> None:
    """Handle interrupts even if the tests run in the background, where a shell ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class RotaProcess:
    """`rota` as a process, with a terminal or a pipe as its output."""

    def __init__(self, service: StubServer, *arguments: str, columns: int = 0) -> None:
        self.service = service
        read_end, write_end = os.openpty() if columns else os.pipe()
        program = "from rota.cli import main; from rota.cli.client import watch; watch.POLL_SECONDS = 0.05; main()"
        command = [sys.executable, "-c", program, *arguments, "--operator", service.url]
        env = os.environ | {"COLUMNS": str(columns), "LINES": "50", "TERM": "xterm"}
        self.process = subprocess.Popen(
            command,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            preexec_fn=_restore_sigint,  # noqa: PLW1509 - no other thread holds a lock that it needs
        )
        os.close(write_end)
        self._read_end = read_end
        self.text = ""

    async def read_until(self, expected: str) -> str:
        """Wait for a text in the output; return all output since the previous call."""
        while expected not in self.text:
            data = await asyncio.to_thread(os.read, self._read_end, 65536)
            assert data, "the process has ended"
            self.text += data.decode()
        printed = self.text
        self.text = ""
        return printed

    async def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, stderr = await asyncio.to_thread(self.process.communicate)
        os.close(self._read_end)
        return self.process.returncode, stderr


async def test_cli_watch_to_a_pipe_prints_changes_until_interrupted(operator: StubServer) -> None:
    running = RotaProcess(operator, "status", "-n", "shop", "--watch", "-o", "json")
    assert json.loads(await running.read_until("\n}\n"))["groups"][0]["members"] == 3
    await operator.wait_for_requests(2)
    operator.responses["/v1/groups"] = 503, {"error": "It has just begun"}
    await operator.wait_for_requests(2)
    operator.responses["/v1/groups"] = 200, GroupList(LEADS, [a_summary(members=4)])
    assert json.loads(await running.read_until("\n}\n"))["groups"][0]["members"] == 4
    assert await running.interrupt() == (130, "rota: It has just begun\n")


async def test_cli_watch_prints_nothing_for_a_new_poll_time_alone(operator: StubServer) -> None:
    running = RotaProcess(operator, "lag", "shop/orders", "--watch", "-o", "yaml")
    await running.read_until("lookedAt")
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, looked_at=LONG_AGO)
    await operator.wait_for_requests(2)
    operator.responses["/v1/groups/shop/orders"] = 200, msgspec.structs.replace(DETAIL, at_broker="changed")
    printed = await running.read_until("atBroker: changed")
    assert (printed.count("---"), printed.count("atBroker")) == (1, 1)
    assert (await running.interrupt())[0] == 130


async def test_cli_watch_on_a_terminal_updates_in_place(operator: StubServer) -> None:
    running = RotaProcess(operator, "status", "-n", "shop", "--watch", columns=120)
    assert "yes (Settled)" in await running.read_until("moved")
    operator.responses["/v1/groups"] = 503, {"error": "It has just begun"}
    printed = await running.read_until("rota: It has just begun")
    assert "\x1b[2K" in printed  # lines are rewritten
    assert "yes (Settled)" in printed  # the last known state stays
    code, stderr = await running.interrupt()
    assert (code, stderr) == (130, "")


async def test_cli_watch_that_cannot_start_ends_with_a_sentence(operator: StubServer) -> None:
    await assert_rejected("There is no such group", "lag", "shop/none", "--watch", "--operator", operator.url)


async def test_cli_lag_on_a_narrow_terminal_prints_a_line_per_cell(operator: StubServer) -> None:
    running = RotaProcess(operator, "lag", "shop/orders", columns=40)
    lines = (await running.read_until("Offsets were last read")).splitlines()
    assert lines[1:11] == [
        "TOPIC: orders",
        "BROKER: broker-a",
        "QUEUE: 0",
        "FIRST: 0",
        "LAST: 503",
        "COMMITTED: 500",
        "LAG: 3",
        "DELAY: 3s",
        "LAG STATE: KeepingUp",
        "MEMBER: m-0",
    ]
    await asyncio.to_thread(running.process.communicate)
    os.close(running._read_end)


@pytest.mark.parametrize(
    ("seconds", "formatted"),
    [
        (None, "unknown"),
        (-5.0, "0s"),
        (0.0, "0s"),
        (0.44, "0.4s"),
        (3.4, "3s"),
        (59.9, "1m"),
        (130.0, "2m10s"),
        (3900.0, "1h5m"),
        (3599.0, "59m59s"),
        (187_200.0, "2d4h"),
        (1e300, "unknown"),
        (float("inf"), "unknown"),
        (float("nan"), "unknown"),
    ],
)
def test_cli_duration_has_at_most_two_units(seconds: float | None, formatted: str) -> None:
    assert formatting.format_duration(seconds) == formatted


@pytest.mark.parametrize(
    ("at", "formatted"),
    [
        ("2026-11-21T08:00:00Z", "1m5s ago"),
        ("2026-11-21T08:00:00", "1m5s ago"),
        ("2027-01-01T00:00:00Z", "0s ago"),
        ("", "unknown"),
        ("soon", "soon"),
    ],
)
def test_cli_time_is_shown_as_age(at: str, formatted: str) -> None:
    assert formatting.format_age(at, datetime(2026, 11, 21, 8, 1, 5, tzinfo=UTC)) == formatted


def test_cli_live_commands_import_no_kopf_numpy_or_planner() -> None:
    program = (
        "import sys; from rota.cli.client import http, watch; from rota.cli.commands import status\n"
        "print([it for it in ('kopf', 'numpy', 'rich.console', 'rota.planner') if it in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


def test_cli_kubectl_plugin_is_the_same_program() -> None:
    (plugin,) = entry_points(group="console_scripts", name="kubectl-rota")
    assert plugin.load() is main


PAGE = (ROOT / "docs" / "command-line.md").read_text()


def test_docs_list_every_command_and_every_option_of_live_commands() -> None:
    headings = set(re.findall(r"^## rota (\w+)$", PAGE, re.MULTILINE))
    assert headings == set(main.commands)
    live_commands = [main.commands[name] for name in ("status", "members", "lag", "explain")]
    options: set[str] = set()
    for command in live_commands:
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                options.update(parameter.opts)
    assert sorted(option for option in options if f"`{option}" not in PAGE) == []


def shop_responses() -> Mapping[str, tuple[int, Any]]:
    """Return an operator's responses for groups that Rota's planner planned, so that the page shows real output."""
    began = datetime.fromisoformat(LONG_AGO).timestamp()
    orders = ConsumerFleet("orders", 16, began)
    payments = ConsumerFleet("payments", 8, began, expression="paid")
    orders.join(0, 1)
    orders.join(2)
    orders.sample_offsets({0: (3, 40), 2: (117, 40)})
    payments.join(0, 1)
    payments.report_problem("m-1", "AppPathNotFound", "The app answers 404 to POST /; correct spec.delivery.push.path")
    payments.add_unmanaged_consumer("10.0.0.9@1", "10.0.0.9:41000", "JAVA", "V4_9_4")
    payments.sample_offsets({0: (10, 40), 5: (6, 20)})
    details = {f"/v1/groups/shop/{fleet.name}": (200, fleet.detail()) for fleet in (orders, payments)}
    groups = GroupList(LEADS, [detail.summary for _, detail in details.values()])
    return {
        **details,
        "/v1/groups": (200, groups),
        "/v1/groups/shop/orders/why": (200, orders.explain(orders.queues[3])),
    }


SAMPLES = re.findall(r"^```text\n\$ rota (.*?)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), SAMPLES, ids=[command for command, _ in SAMPLES])
async def test_docs_command_line_samples_match_the_output(command: str, shown: str, operator: StubServer) -> None:
    operator.responses = {**shop_responses()}
    printed = (await rota(*command.split(), "--operator", operator.url)).output
    documented, printed_text = (
        [line.rstrip() for line in text.splitlines() if line.strip()] for text in (shown, printed)
    )
    assert documented == [AGE_OF_LONG_AGO.sub("2d4h ago", AGE.sub("3s ago", line)) for line in printed_text]
