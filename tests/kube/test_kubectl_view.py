"""The view of kubectl users: the examples applied, the columns, and the history in `kubectl describe`."""

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from ground.api import Api
from ground.cluster import Cluster
from ground.poll import soon
from kube.in_process_operator import Operator
from kube.members import GroupMembers, a_pod
from kube.world import GROUP, OperatedNamespace
from rota.brokers.memory import MemoryCluster

pytestmark = pytest.mark.usefixtures("crds", "node")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MANIFESTS = [body for path in sorted(EXAMPLES.glob("*.yaml")) for body in yaml.safe_load_all(path.read_text())]
GROUPS = {body["metadata"]["name"] for body in MANIFESTS if body["kind"] == "ConsumerGroup"}
AGE = re.compile(r"\d+[smh](\d+s)?")


class Kubectl:
    """kubectl, for one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    def __call__(self, *arguments: str) -> str:
        return self._cluster.kubectl(*arguments, "-n", self._namespace)

    def groups(self) -> dict[str, dict[str, str]]:
        """Return the cells of `kubectl get cg`, by group name and column."""
        head, *rows = self("get", "cg").splitlines()
        starts = [match.start() for match in re.finditer(r"\S+", head)]
        columns = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
        cells = [{head[column].strip(): row[column].strip() for column in columns} for row in rows]
        return {row["NAME"]: row for row in cells}


@pytest.fixture
def kubectl(control_plane: Cluster, namespace: str) -> Kubectl:
    return Kubectl(control_plane, namespace)


@pytest.fixture
async def applied(
    api: Api, namespace: str, operator: Operator, kubectl: Kubectl, addresses: Callable[[], str]
) -> AsyncIterator[OperatedNamespace]:
    """Apply all examples, and add the members of `billing`."""
    kubectl("apply", "-f", str(EXAMPLES))
    async with GroupMembers(api, namespace, "billing", addresses) as fleet:
        world = OperatedNamespace(api, namespace, fleet, operator)
        await fleet.add("billing-a", "billing-b")
        await world.wait_for_shares(4, 4)
        await soon(world.settled)
        yield world


async def test_example_groups_report_their_state_after_kubectl_apply(
    applied: OperatedNamespace, kubectl: Kubectl
) -> None:
    async def every_group_has_status() -> bool:
        return {row["READY"] for row in kubectl.groups().values()} <= {"True", "False"}

    await soon(every_group_has_status)
    rows = kubectl.groups()
    assert rows.keys() == GROUPS
    billing, orders, payments = rows["billing"], rows["orders"], rows["payments"]
    assert (billing["READY"], billing["MEMBERS"], billing["QUEUES"]) == ("True", "2", "8")
    assert billing["STRATEGY"] == "Sticky"
    assert AGE.fullmatch(billing["LAST-REBALANCE"])
    assert AGE.fullmatch(billing["AGE"])
    assert (orders["READY"], orders["MEMBERS"], orders["QUEUES"]) == ("False", "0", "8")
    assert payments["READY"] == "False"
    wide = kubectl("get", "cg", "-o", "wide")
    assert "8 queues, 2 members" in wide
    assert "8 queues wait for the group's first member" in wide
    assert "Secret rmq-ca, which spec.broker names, does not exist" in kubectl("describe", "cg/payments")
    names = kubectl("get", "rota", "-o", "name").split()
    expected = {(body["kind"], body["metadata"]["name"]) for body in MANIFESTS if "rota.dev" in body["apiVersion"]}
    assert {*names} == {f"{kind.lower()}.rota.dev/{name}" for kind, name in expected}
    kubectl("apply", "-f", str(EXAMPLES))  # a second time: nothing is rebalanced

    async def has_last_generation() -> bool:
        return bool((await applied.status())["generation"] == applied.fleet.documents[-1]["generation"])

    await soon(has_last_generation)


def described_events(described: str) -> list[list[str]]:
    """Return the Events of a description: type, reason, age, from, message."""
    lines = described.partition("Events:")[2].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[3:] if line.strip()]


async def run_history(world: OperatedNamespace) -> list[str]:
    """Give a group its first member, add a second, kill the first; return the messages of the Events."""
    await world.wait_for_condition("Ready")
    await world.fleet.add("orders-a")
    await world.wait_for_shares(8)
    await soon(world.settled)
    world.fleet.members["orders-a"].drain_seconds = 3  # long enough for a Settled Event
    await world.fleet.add("orders-b")
    await world.wait_for_shares(4, 4)
    await soon(lambda: has_event_count(world, "Settled", 1))
    await world.fleet.members.pop("orders-a").kill()
    await world.wait_for_shares(8)
    await soon(lambda: has_event_count(world, "MemberTerminated", 1))
    await soon(world.settled)
    return [
        "A new group; 8 queues change hands",
        "orders-b joined; 4 queues change hands",
        "MemberJoined: 4 queues moved in",
        "orders-a ended; 4 queues change hands",
    ]


async def has_event_count(world: OperatedNamespace, reason: str, times: int) -> bool:
    return (await reasons(world))[reason] == times


async def test_status_and_events_in_kubectl_describe_show_the_history_of_a_group(
    world: OperatedNamespace, kubectl: Kubectl
) -> None:
    messages = await run_history(world)
    described = kubectl("describe", f"cg/{GROUP}")
    status = described.partition("Status:")[2].partition("Events:")[0]
    for line in (
        r"Members: +1",
        r"Queues: +8",
        r"Reason: +MemberTerminated",
        r"Strategy: +Averagely",
        r"Message: +8 queues, 1 member",
        r"Message: +Every queue is with the member that the policy chooses",
        r"Message: +No problems",
    ):
        assert re.search(line, status), line
    events = described_events(described)
    assert {event[3] for event in events} == {"rota"}
    assert all(AGE.fullmatch(event[2]) for event in events)
    assert {(kind, reason) for kind, reason, *_ in events} == {
        ("Normal", "FirstAssignment"),
        ("Normal", "MemberJoined"),
        ("Normal", "MemberTerminated"),
        ("Normal", "Settled"),
    }
    assert sorted(without_seconds(events)) == sorted(messages)


def without_seconds(events: list[list[str]]) -> list[str]:
    return [re.sub(r" [\d.]+ s$", "", event[-1]) for event in events]


async def test_event_order_in_kubectl_describe_is_chronological(world: OperatedNamespace, kubectl: Kubectl) -> None:
    await run_history(world)
    time_of = {re.sub(r" [\d.]+ s$", "", event["message"]): event["lastTimestamp"] for event in await world.events()}
    assert len({*time_of.values()}) > 1  # kubectl sorts them by second
    times = [time_of[message] for message in without_seconds(described_events(kubectl("describe", f"cg/{GROUP}")))]
    assert times == sorted(times)


async def test_event_is_recorded_once_for_a_lasting_problem_and_for_each_rebalance(
    world: OperatedNamespace, control_plane: Cluster, memory: MemoryCluster
) -> None:
    await world.api.create(pods(world), a_pod("stranger", GROUP, sidecar=False))
    await world.wait_for_condition("NoSidecar")
    await world.fleet.add("orders-a")
    await world.wait_for_shares(8)
    await soon(world.settled)
    for times in (1, 2):  # the second rebalances are the same
        await world.fleet.add("orders-b")
        await world.wait_for_shares(4, 4)
        await soon(world.settled)
        await world.fleet.members.pop("orders-b").kill()
        await world.wait_for_shares(8)
        await soon(partial(has_event_count, world, "MemberTerminated", times))
        await soon(world.settled)
    expected = {"NoSidecar": 1, "FirstAssignment": 1, "MemberJoined": 2, "MemberTerminated": 2}
    assert await counts_without_settled(world) == expected
    await world.operator.controller.close()
    async with Operator(control_plane.kubeconfig, world.namespace, memory) as another:
        await soon(lambda: has_reconciled(another))
        assert await counts_without_settled(world) == expected  # a new leader repeats no Event
    await world.api.delete(f"{pods(world)}/stranger", {"gracePeriodSeconds": 0})


async def counts_without_settled(world: OperatedNamespace) -> dict[str, int]:
    """Return how often each reason was recorded, without Settled: only slow rebalances have that Event."""
    return {reason: times for reason, times in (await reasons(world)).items() if reason != "Settled"}


async def has_reconciled(operator: Operator) -> bool:
    return len(operator.reconciles) > 2


async def reasons(world: OperatedNamespace) -> Counter[str]:
    """Return how often each reason was recorded, in one Event with a count or in several Events."""
    counts: Counter[str] = Counter()
    for event in await world.events():
        counts[event["reason"]] += event.get("count") or 1
    return counts


def pods(world: OperatedNamespace) -> str:
    return f"/api/v1/namespaces/{world.namespace}/pods"
