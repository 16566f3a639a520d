"""What people see with kubectl: the examples applied, the columns, a fleet scaled, and what `describe` tells."""

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
from kube.brains import Operator
from kube.members import GroupMembers, a_pod
from kube.world import GROUP, OperatedNamespace
from rota.brokers.memory import MemoryCluster

pytestmark = pytest.mark.usefixtures("crds", "node")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SHOWN = [body for path in sorted(EXAMPLES.glob("*.yaml")) for body in yaml.safe_load_all(path.read_text())]
GROUPS = {body["metadata"]["name"] for body in SHOWN if body["kind"] == "ConsumerGroup"}
AGO = re.compile(r"\d+[smh](\d+s)?")


class Kubectl:
    """kubectl, for one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    def __call__(self, *arguments: str) -> str:
        return self._cluster.kubectl(*arguments, "-n", self._namespace)

    def groups(self) -> dict[str, dict[str, str]]:
        """Return what `kubectl get cg` shows, by name and column."""
        head, *rows = self("get", "cg").splitlines()
        starts = [found.start() for found in re.finditer(r"\S+", head)]
        columns = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
        shown = [{head[column].strip(): row[column].strip() for column in columns} for row in rows]
        return {row["NAME"]: row for row in shown}


@pytest.fixture
def kubectl(control_plane: Cluster, namespace: str) -> Kubectl:
    return Kubectl(control_plane, namespace)


@pytest.fixture
async def applied(
    api: Api, namespace: str, operator: Operator, kubectl: Kubectl, addresses: Callable[[], str]
) -> AsyncIterator[OperatedNamespace]:
    """Apply all examples, and let the members of `billing` come."""
    kubectl("apply", "-f", str(EXAMPLES))
    async with GroupMembers(api, namespace, "billing", addresses) as fleet:
        found = OperatedNamespace(api, namespace, fleet, operator)
        await fleet.add("billing-a", "billing-b")
        await found.until(4, 4)
        await soon(found.settled)
        yield found


async def test_example_groups_report_their_state_after_kubectl_apply(
    applied: OperatedNamespace, kubectl: Kubectl
) -> None:
    async def every_group_is_told_of() -> bool:
        return {row["READY"] for row in kubectl.groups().values()} <= {"True", "False"}

    await soon(every_group_is_told_of)
    rows = kubectl.groups()
    assert rows.keys() == GROUPS
    billing, orders, payments = rows["billing"], rows["orders"], rows["payments"]
    assert (billing["READY"], billing["MEMBERS"], billing["QUEUES"]) == ("True", "2", "8")
    assert billing["STRATEGY"] == "Sticky"
    assert AGO.fullmatch(billing["LAST-REBALANCE"])
    assert AGO.fullmatch(billing["AGE"])
    assert (orders["READY"], orders["MEMBERS"], orders["QUEUES"]) == ("False", "0", "8")
    assert payments["READY"] == "False"
    wide = kubectl("get", "cg", "-o", "wide")
    assert "8 queues, 2 members" in wide
    assert "8 queues wait for the group's first member" in wide
    assert "Secret rmq-ca, which spec.broker names, does not exist" in kubectl("describe", "cg/payments")
    every = kubectl("get", "rota", "-o", "name").split()
    wanted = {(body["kind"], body["metadata"]["name"]) for body in SHOWN if "rota.dev" in body["apiVersion"]}
    assert {*every} == {f"{kind.lower()}.rota.dev/{name}" for kind, name in wanted}
    kubectl("apply", "-f", str(EXAMPLES))  # once more: nothing begins anew

    async def told() -> bool:
        return bool((await applied.status())["generation"] == applied.fleet.documents[-1]["generation"])

    await soon(told)


def told(described: str) -> list[list[str]]:
    """Return the Events of a description: type, reason, age, from, message."""
    lines = described.partition("Events:")[2].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[3:] if line.strip()]


async def a_life(world: OperatedNamespace) -> list[str]:
    """Let a group come to life, share, and lose a member; return what its Events say."""
    await world.condition("Ready")
    await world.fleet.add("orders-a")
    await world.until(8)
    await soon(world.settled)
    world.fleet.members["orders-a"].takes = 3  # longer than what is told by its beginning only
    await world.fleet.add("orders-b")
    await world.until(4, 4)
    await soon(lambda: tells(world, "Settled", 1))
    await world.fleet.members.pop("orders-a").end()
    await world.until(8)
    await soon(lambda: tells(world, "MemberTerminated", 1))
    await soon(world.settled)
    return [
        "A new group; 8 queues change hands",
        "orders-b joined; 4 queues change hands",
        "MemberJoined: 4 queues moved in",
        "orders-a ended; 4 queues change hands",
    ]


async def tells(world: OperatedNamespace, reason: str, times: int) -> bool:
    return (await reasons(world))[reason] == times


async def test_status_and_events_in_kubectl_describe_tell_the_history_of_a_group(
    world: OperatedNamespace, kubectl: Kubectl
) -> None:
    story = await a_life(world)
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
    events = told(described)
    assert {event[3] for event in events} == {"rota"}
    assert all(AGO.fullmatch(event[2]) for event in events)
    assert {(kind, reason) for kind, reason, *_ in events} == {
        ("Normal", "FirstAssignment"),
        ("Normal", "MemberJoined"),
        ("Normal", "MemberTerminated"),
        ("Normal", "Settled"),
    }
    assert sorted(without_seconds(events)) == sorted(story)


def without_seconds(events: list[list[str]]) -> list[str]:
    return [re.sub(r" [\d.]+ s$", "", event[-1]) for event in events]


async def test_event_order_in_kubectl_describe_is_chronological(world: OperatedNamespace, kubectl: Kubectl) -> None:
    await a_life(world)
    last = {re.sub(r" [\d.]+ s$", "", event["message"]): event["lastTimestamp"] for event in await world.events()}
    assert len({*last.values()}) > 1  # they are shown by the second
    shown = [last[message] for message in without_seconds(told(kubectl("describe", f"cg/{GROUP}")))]
    assert shown == sorted(shown)


async def test_event_is_recorded_once_for_a_lasting_problem_and_for_each_rebalance(
    world: OperatedNamespace, control_plane: Cluster, memory: MemoryCluster
) -> None:
    await world.api.create(pods(world), a_pod("stranger", GROUP, sidecar=False))
    await world.condition("NoSidecar")
    await world.fleet.add("orders-a")
    await world.until(8)
    await soon(world.settled)
    for times in (1, 2):  # the same once more
        await world.fleet.add("orders-b")
        await world.until(4, 4)
        await soon(world.settled)
        await world.fleet.members.pop("orders-b").end()
        await world.until(8)
        await soon(partial(tells, world, "MemberTerminated", times))
        await soon(world.settled)
    wanted = {"NoSidecar": 1, "FirstAssignment": 1, "MemberJoined": 2, "MemberTerminated": 2}
    assert await without_ends(world) == wanted
    await world.operator.brain.close()
    async with Operator(control_plane.kubeconfig, world.namespace, memory) as another:
        await soon(lambda: has_looked(another))
        assert await without_ends(world) == wanted  # who comes to lead tells nothing that was told
    await world.api.delete(f"{pods(world)}/stranger", {"gracePeriodSeconds": 0})


async def without_ends(world: OperatedNamespace) -> dict[str, int]:
    """Return how often each reason was told; that a rebalance is over is told only of slow ones."""
    return {reason: times for reason, times in (await reasons(world)).items() if reason != "Settled"}


async def has_looked(operator: Operator) -> bool:
    return len(operator.done) > 2


async def reasons(world: OperatedNamespace) -> Counter[str]:
    """Return how often each reason was told, be it by one Event that counts or by several."""
    found: Counter[str] = Counter()
    for event in await world.events():
        found[event["reason"]] += event.get("count") or 1
    return found


def pods(world: OperatedNamespace) -> str:
    return f"/api/v1/namespaces/{world.namespace}/pods"
