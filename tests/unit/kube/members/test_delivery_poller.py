"""Polls of members' deliveries: how often, which members, and the effect on their group."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from rota.deliveries import DeliveriesPage, LastFailure, QueueCounts
from rota.delivery_totals import GroupDeliveries, MemberDeliveries
from rota.kube.client.objects import CustomResource, Metadata, Pod
from rota.kube.members import polling_schedule
from rota.kube.members.delivery_poller import SCHEDULE, poll_deliveries
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.state.group import Group
from rota.model import Queue, Reason

KEY = ("shop", "orders")
Q = Queue("orders", "a", 0)


class RoundsOverError(Exception):
    """Ends the poller after a number of rounds."""


class Members(ReportClient):
    """Members with pages that a test sets."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.pages: dict[str, DeliveriesPage] = {}

    async def read_deliveries(self, member: Endpoint) -> MemberDeliveries | None:
        self.reads[member.uid] += 1
        page = self.pages.get(member.uid)
        return MemberDeliveries.from_page(page) if page else None


def a_pod(name: str, phase: str = "Running", *, started: bool = True, labels: Mapping[str, str] | None = None) -> Pod:
    sidecar = {"name": "rota-sidecar", "volumeMounts": [{"name": "documents", "mountPath": "/etc/rota"}]}
    states = [{"name": "rota-sidecar", "state": {"running": {}}}] if started else []
    all_labels = {"rota.dev/group": "orders", **(labels or {})}
    body = {
        "metadata": {"name": name, "namespace": "shop", "uid": f"uid-{name}", "labels": all_labels},
        "spec": {"initContainers": [sidecar], "volumes": [{"name": "documents", "configMap": {"name": "orders-rota"}}]},
        "status": {"podIP": "10.0.0.1", "phase": phase, "initContainerStatuses": states},
    }
    return msgspec.convert(body, Pod)


def a_group(*pods: Pod, status: dict[str, Any] | None = None) -> Group:
    group = Group("shop", "orders")
    spec = {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": "orders"}]}
    group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop"), spec, status or {}), None)
    for pod in pods:
        group.pods.upsert(pod, now=0.0)
    return group


def failing_page(failed: int = 100, incarnation: str = "one", queue: Queue = Q) -> DeliveriesPage:
    counts = QueueCounts(*queue, failures={"5xx": failed})
    return DeliveriesPage(incarnation, 10.0, [counts], last_failure=LastFailure("5xx", 1.0, 500))


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Members:
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.0)
    return Members()


async def poll(members: Members, group: Group, rounds: int = 1) -> list[tuple[str, str]]:
    """Poll for some rounds; return the keys of groups with a changed problem."""
    steps = 0
    changed_keys: list[tuple[str, str]] = []

    def groups_of_round() -> Mapping[tuple[str, str], Group]:
        nonlocal steps
        steps += 1
        if steps > rounds * SCHEDULE.cycle_steps(len(group.pods)):
            raise RoundsOverError
        return {KEY: group}

    with pytest.RaisesGroup(RoundsOverError):
        await poll_deliveries(groups_of_round, members, changed_keys.append)
    return changed_keys


@pytest.mark.parametrize(("members", "seconds"), [(0, 15), (3, 15), (750, 15), (3000, 60), (10_000, 200)])
def test_delivery_poll_reads_at_most_fifty_members_a_second(members: int, seconds: int) -> None:
    assert SCHEDULE.cycle_steps(members) * polling_schedule.STEP_SECONDS == seconds


async def test_delivery_poll_reads_each_running_member_once_a_round(members: Members) -> None:
    group = a_group(a_pod("m1"), a_pod("m2"), a_pod("m3", started=False), a_pod("m4", phase="Failed"))
    await poll(members, group, rounds=2)
    assert members.reads == {"uid-m1": 2, "uid-m2": 2}


async def test_condition_of_failing_deliveries_notifies_its_group_once(members: Members) -> None:
    group = a_group(a_pod("m1"))
    members.pages["uid-m1"] = failing_page()
    assert await poll(members, group, rounds=3) == [KEY]
    assert group.deliveries.problem
    assert group.deliveries.problem.reason is Reason.DELIVERIES_FAILING


async def test_delivery_totals_are_kept_by_the_revision_that_the_pods_label_names(members: Members) -> None:
    group = a_group(
        a_pod("m1", labels={"pod-template-hash": "6d4cf"}),
        a_pod("m2", labels={"controller-revision-hash": "web-7"}),
        a_pod("m3"),
    )
    members.pages = {f"uid-{name}": failing_page() for name in ("m1", "m2", "m3")}
    await poll(members, group)
    assert {revision for _, revision in group.deliveries.totals_by_queue} == {"6d4cf", "web-7", ""}


async def test_delivery_totals_leave_out_queues_of_other_topics_and_have_retries(members: Members) -> None:
    group = a_group(a_pod("m1"), a_pod("m2"))
    members.pages["uid-m1"] = failing_page(queue=Queue("bills", "a", 0))
    members.pages["uid-m2"] = failing_page(queue=Queue("%RETRY%orders", "a", 0))
    await poll(members, group)
    assert group.deliveries.totals_by_topic.keys() == {"%RETRY%orders"}


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_delivery_totals_of_a_pod_that_ended_are_forgotten(
    members: Members,
    is_deleted: bool,  # noqa: FBT001 - a case
) -> None:
    group = a_group(a_pod("m1"))
    members.pages["uid-m1"] = failing_page()
    await poll(members, group)
    assert group.deliveries.totals_by_queue
    if is_deleted:
        group.pods.clear()
    else:
        group.pods.upsert(a_pod("m1", phase="Failed"), now=1.0)
    await poll(members, group, rounds=2)
    assert (group.deliveries.totals_by_queue, group.deliveries.delayed_messages) == ({}, None)


async def test_leader_election_resumes_the_published_condition_of_failing_deliveries(members: Members) -> None:
    published = {"type": "DeliveriesFailing", "status": "True", "message": "93 % of 412 deliveries failed"}
    group = a_group(a_pod("m1"), status={"conditions": [published]})
    await poll(members, group)
    assert group.deliveries.problem == (Reason.DELIVERIES_FAILING, "93 % of 412 deliveries failed")
    group.reset_observations()
    assert group.deliveries.problem
    group.set_spec(CustomResource(Metadata("orders", uid="2", namespace="shop")), None)
    assert group.deliveries.problem is None, "a recreated group"


async def test_leader_election_does_not_resume_a_condition_of_failing_deliveries_that_is_over(members: Members) -> None:
    published = {
        "type": "DeliveriesFailing",
        "status": "False",
        "message": "Resolved. The last message was: 93 % failed",
    }
    group = a_group(a_pod("m1"), status={"conditions": [published]})
    await poll(members, group)
    assert group.deliveries.problem is None


async def test_delivery_poll_does_not_count_for_a_leader_that_has_started_over(members: Members) -> None:
    group = a_group(a_pod("m1"))
    members.pages["uid-m1"] = failing_page()
    previous_deliveries = group.deliveries

    class ResetDuringRead(Members):
        async def read_deliveries(self, member: Endpoint) -> MemberDeliveries | None:
            group.deliveries = GroupDeliveries()
            return await super().read_deliveries(member)

    reset_members = ResetDuringRead()
    reset_members.pages = members.pages
    await poll(reset_members, group)
    assert (previous_deliveries.totals_by_topic, group.deliveries.totals_by_topic) == ({}, {})
