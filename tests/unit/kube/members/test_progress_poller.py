"""Members' progress in their queues: when each page is read, and messages redelivered after a change of owner."""

import asyncio
from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest

from builders import a_document
from rota.documents import Assignment
from rota.kube.client.objects import ObjectKey, Pod
from rota.kube.members import polling_schedule, progress_poller
from rota.kube.members.polling_schedule import PollSchedule
from rota.kube.members.progress_poller import MAX_PAGES_PER_TURN, ProgressPoller
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.state.group import Group
from rota.kube.state.stored_assignment import StoredAssignment
from rota.model import Queue
from rota.queue_offsets import ProgressPage, QueueProgress
from rota.ranges import to_ranges
from rota.redelivery import Redelivery, RedeliveryCause
from rota.reports import Report

KEY = ("shop", "orders")
Q, R = Queue("orders", "a", 0), Queue("orders", "a", 1)


class RoundsOverError(Exception):
    """Ends the poller after a number of rounds."""


class Members(ReportClient):
    """Members with pages that a test sets."""

    def __init__(self) -> None:
        self.reads: Counter[tuple[str, int]] = Counter()
        self.pages: dict[str, ProgressPage] = {}

    async def read_progress(self, member: Endpoint, start: int) -> ProgressPage | None:
        self.reads[member.uid, start] += 1
        return self.pages.get(member.uid)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Members:
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.0)
    return Members()


def a_pod(name: str, phase: str = "Running") -> Pod:
    sidecar = {"name": "rota-sidecar", "volumeMounts": [{"name": "documents", "mountPath": "/etc/rota"}]}
    body = {
        "metadata": {"name": name, "namespace": "shop", "uid": f"uid-{name}", "labels": {"rota.dev/group": "orders"}},
        "spec": {"initContainers": [sidecar], "volumes": [{"name": "documents", "configMap": {"name": "orders-rota"}}]},
        "status": {
            "podIP": "10.0.0.1",
            "phase": phase,
            "initContainerStatuses": [{"name": "rota-sidecar", "state": {"running": {}}}],
        },
    }
    return msgspec.convert(body, Pod)


def a_group(*names: str) -> Group:
    group = Group("shop", "orders")
    for name in names:
        group.pods.upsert(a_pod(name), now=0.0)
    return group


def record_report(group: Group, name: str, *held: Queue, incarnation: str = "one", **changed: object) -> None:
    report = Report(member=name, uid=f"uid-{name}", generation=5, held=to_ranges(held), incarnation=incarnation)
    group.pods[name].record_report(msgspec.structs.replace(report, **changed), 1.0, 1.0)


def assign(group: Group, **shares: list[Queue]) -> None:
    document: Assignment = a_document(members=shares)
    group.assignment.stored = StoredAssignment(document=document)


def a_page(
    queues: Mapping[Queue, tuple[int | None, int | None, int | None]], next_start: int | None = None
) -> ProgressPage:
    return ProgressPage("one", {queue: QueueProgress(*progress) for queue, progress in queues.items()}, next_start)


async def poll(members: Members, group: Group, rounds: int) -> list[tuple[ObjectKey, Redelivery]]:
    """Poll for some rounds; return the redelivered messages by group."""
    remaining = rounds
    redelivered: list[tuple[ObjectKey, Redelivery]] = []

    def groups() -> Mapping[ObjectKey, Group]:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise RoundsOverError
        return {KEY: group}

    poller = ProgressPoller(groups, members, lambda key, entries: redelivered.extend((key, entry) for entry in entries))
    with pytest.RaisesGroup(RoundsOverError):
        await poller.run()
    return redelivered


async def test_report_page_of_each_member_is_read_once_in_a_round(members: Members) -> None:
    names = [f"m{number}" for number in range(100)]
    group = a_group(*names)
    for name in names:
        record_report(group, name)
    await poll(members, group, 10)
    assert members.reads == Counter((f"uid-{name}", 0) for name in names)


async def test_report_page_is_not_read_from_members_without_a_report_or_terminated(members: Members) -> None:
    group = a_group("m1", "m2", "m3")
    record_report(group, "m1")
    record_report(group, "m2")
    group.pods.upsert(a_pod("m2", "Failed"), now=2.0)
    await poll(members, group, 5)
    assert members.reads == Counter([("uid-m1", 0)])


async def test_report_page_is_not_read_in_a_broadcasting_group(members: Members) -> None:
    group = a_group("m1")
    record_report(group, "m1")
    group.assignment.stored = StoredAssignment(document=a_document(members={"m1": ()}, everyone=(Q, R)))
    await poll(members, group, 5)
    assert not members.reads


async def test_broadcasting_model_forgets_recorded_progress(members: Members) -> None:
    group = a_group("m1")
    assign(group, m1=[Q])
    record_report(group, "m1", Q)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    await poll(members, group, 5)
    assert group.pods.delivery_tracker.by_queue
    group.assignment.stored = StoredAssignment(document=a_document(members={"m1": ()}, everyone=(Q, R)))
    await poll(members, group, 1)
    assert group.pods.delivery_tracker.by_queue == {}


async def test_failover_to_many_members_reads_some_of_them_in_each_step(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_poller, "URGENT_SCHEDULE", PollSchedule(members_per_step=1, min_steps=1))
    monkeypatch.setattr(progress_poller, "SCHEDULE", PollSchedule(members_per_step=1, min_steps=10**12))
    group = a_group("m1", "m2", "m3", "m4")
    names = ["m2", "m3", "m4"]
    queues = [Queue("orders", "a", number) for number in range(len(names))]
    record_report(group, "m1", *queues)
    assign(group, m1=queues)
    page = a_page(dict.fromkeys(queues, (0, 9, 5)))
    group.pods.record_progress("m1", page, asyncio.get_running_loop().time(), max_queues=10)
    group.pods.mark_deleted(a_pod("m1"))
    assign(group, **{name: [queue] for name, queue in zip(names, queues, strict=True)})
    for name, queue in zip(names, queues, strict=True):
        record_report(group, name, queue)
    await poll(members, group, 30)
    assert sum(members.reads.values()) == 30, "on average each of the three is read in every third round"


async def test_report_pages_beyond_a_limit_are_read_in_the_members_next_turn(members: Members) -> None:
    group = a_group("m1")
    record_report(group, "m1")

    class Endless(Members):
        async def read_progress(self, member: Endpoint, start: int) -> ProgressPage | None:
            await super().read_progress(member, start)
            return a_page({}, start + 400)

    members = Endless()
    await poll(members, group, 10)
    assert members.reads == Counter([("uid-m1", 400 * page) for page in range(2 * MAX_PAGES_PER_TURN)])


async def test_report_page_that_names_itself_as_the_next_is_read_once(members: Members) -> None:
    group = a_group("m1")
    record_report(group, "m1")
    members.pages["uid-m1"] = a_page({}, 0)
    await poll(members, group, 5)
    assert members.reads == Counter([("uid-m1", 0)])


async def test_crash_is_counted_from_the_last_page_as_soon_as_the_next_owner_starts(members: Members) -> None:
    group = a_group("m1", "m2")
    assign(group, m1=[Q], m2=[R])
    record_report(group, "m1", Q)
    record_report(group, "m2", R)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    members.pages["uid-m2"] = a_page({R: (0, 3, 4)})
    assert await poll(members, group, 5) == []
    assert group.pods.delivery_tracker.uncommitted_messages == 5
    group.pods.mark_deleted(a_pod("m1"))
    assign(group, m2=[Q, R])
    record_report(group, "m2", Q, R)
    members.pages["uid-m2"] = a_page({Q: (None, None, None), R: (0, 3, 4)})
    members.reads.clear()
    assert await poll(members, group, 5) == []
    assert members.reads["uid-m2", 0] == 5, "it is read in every round until it starts to consume"
    members.pages["uid-m2"] = a_page({Q: (5, None, 5), R: (0, 3, 4)})
    ((key, entry),) = await poll(members, group, 5)
    assert (key, entry.queue, entry.messages, entry.cause) == (KEY, Q, 5, RedeliveryCause.CRASH)
    assert (entry.previous_reader.member, entry.next_reader.member) == ("m1", "m2")


async def test_crash_of_a_sidecars_process_is_counted_when_its_successor_starts(members: Members) -> None:
    group = a_group("m1")
    assign(group, m1=[Q])
    record_report(group, "m1", Q)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    await poll(members, group, 5)
    members.pages["uid-m1"] = a_page({Q: (5, None, 5)})._replace(incarnation="two")
    assert await poll(members, group, 5) == [], "its report is from the previous process"
    record_report(group, "m1", Q, incarnation="two")
    ((_, entry),) = await poll(members, group, 5)
    assert (entry.messages, entry.cause) == (5, RedeliveryCause.CRASH)


async def test_upgrade_of_the_operator_reads_pages_of_the_previous_version_with_committed_offsets_only(
    members: Members,
) -> None:
    group = a_group("m1", "m2")
    assign(group, m1=[Q])
    record_report(group, "m1", Q)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    await poll(members, group, 5)
    group.pods.mark_deleted(a_pod("m1"))
    assign(group, m2=[Q])
    record_report(group, "m2", Q, incarnation="two")
    members.pages["uid-m2"] = a_page({Q: (None, None, 7)})._replace(incarnation="")
    assert await poll(members, group, 5) == []
    assert group.pods.delivery_tracker.by_queue == {}, "no further page is awaited"


async def test_report_page_counts_only_for_queues_that_the_member_holds_and_owns(members: Members) -> None:
    group = a_group("m1")
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5), R: (0, 9, 5)})
    record_report(group, "m1", Q, R)
    await poll(members, group, 5)
    assert group.pods.delivery_tracker.by_queue == {}, "no assignment yet"
    assign(group, m1=[Q], m2=[R])
    await poll(members, group, 5)
    assert [*group.pods.delivery_tracker.by_queue] == [Q]
    assign(group, m1=[Q, R])
    record_report(group, "m1", Q)
    group.pods.delivery_tracker.clear()
    await poll(members, group, 5)
    assert [*group.pods.delivery_tracker.by_queue] == [Q]


async def test_leader_election_forgets_recorded_progress(members: Members) -> None:
    group = a_group("m1")
    assign(group, m1=[Q])
    record_report(group, "m1", Q)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    await poll(members, group, 5)
    assert group.pods.delivery_tracker.by_queue
    group.reset_observations()
    assert group.pods.delivery_tracker.by_queue == {}


async def test_offset_of_no_more_queues_than_the_limit_is_kept(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_poller, "MAX_TRACKED_QUEUES", 1)
    group = a_group("m1")
    assign(group, m1=[Q, R])
    record_report(group, "m1", Q, R)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5), R: (0, 9, 5)})
    await poll(members, group, 10)
    assert len(group.pods.delivery_tracker.by_queue) == 1
