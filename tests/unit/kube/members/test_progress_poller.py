"""How far members are with their queues: who is read when, and what came again with queues that were taken over."""

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


class OverError(Exception):
    """So many rounds are over."""


class Members(ReportClient):
    """Members that say what is put there."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        self.pages: dict[str, ProgressPage] = {}

    async def read_progress(self, member: Endpoint, start: int) -> ProgressPage | None:
        self.asked[member.uid, start] += 1
        return self.pages.get(member.uid)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Members:
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.0)
    return Members()


def a_pod(name: str, phase: str = "Running") -> Pod:
    sidecar = {"name": "rota-sidecar", "volumeMounts": [{"name": "it", "mountPath": "/etc/rota"}]}
    body = {
        "metadata": {"name": name, "namespace": "shop", "uid": f"uid-{name}", "labels": {"rota.dev/group": "orders"}},
        "spec": {"initContainers": [sidecar], "volumes": [{"name": "it", "configMap": {"name": "orders-rota"}}]},
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


def say(group: Group, name: str, *held: Queue, incarnation: str = "one", **changed: object) -> None:
    report = Report(member=name, uid=f"uid-{name}", generation=5, held=to_ranges(held), incarnation=incarnation)
    group.pods[name].record_report(msgspec.structs.replace(report, **changed), 1.0, 1.0)


def assign(group: Group, **shares: list[Queue]) -> None:
    document: Assignment = a_document(members=shares)
    group.stored_assignment = StoredAssignment(document=document)


def a_page(
    queues: Mapping[Queue, tuple[int | None, int | None, int | None]], following: int | None = None
) -> ProgressPage:
    return ProgressPage("one", {queue: QueueProgress(*it) for queue, it in queues.items()}, following)


async def poll(members: Members, group: Group, steps: int) -> list[tuple[ObjectKey, Redelivery]]:
    """Poll so many times; return what came again."""
    left, news = steps, list[tuple[ObjectKey, Redelivery]]()

    def groups() -> Mapping[ObjectKey, Group]:
        nonlocal left
        left -= 1
        if left < 0:
            raise OverError
        return {KEY: group}

    poller = ProgressPoller(groups, members, lambda key, entries: news.extend((key, it) for it in entries))
    with pytest.RaisesGroup(OverError):
        await poller.run()
    return news


async def test_report_page_of_each_member_is_read_once_in_a_round(members: Members) -> None:
    names = [f"m{number}" for number in range(100)]
    group = a_group(*names)
    for name in names:
        say(group, name)
    await poll(members, group, 10)
    assert members.asked == Counter((f"uid-{name}", 0) for name in names)


async def test_report_page_is_not_read_of_members_that_were_not_heard_or_have_ended(members: Members) -> None:
    group = a_group("m1", "m2", "m3")
    say(group, "m1")
    say(group, "m2")
    group.pods.upsert(a_pod("m2", "Failed"), now=2.0)
    await poll(members, group, 5)
    assert members.asked == Counter([("uid-m1", 0)])


async def test_report_page_is_not_read_in_a_broadcasting_group(members: Members) -> None:
    group = a_group("m1")
    say(group, "m1")
    group.stored_assignment = StoredAssignment(document=a_document(members={"m1": ()}, everyone=(Q, R)))
    await poll(members, group, 5)
    assert not members.asked


async def test_broadcasting_model_forgets_what_was_read(members: Members) -> None:
    group = a_group("m1")
    assign(group, m1=[Q])
    say(group, "m1", Q)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    await poll(members, group, 5)
    assert group.pods.delivery_tracker.by_queue
    group.stored_assignment = StoredAssignment(document=a_document(members={"m1": ()}, everyone=(Q, R)))
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
    say(group, "m1", *queues)
    assign(group, m1=queues)
    page = a_page(dict.fromkeys(queues, (0, 9, 5)))
    group.pods.record_progress("m1", page, asyncio.get_running_loop().time(), max_tracked_queues=10)
    group.pods.mark_deleted(a_pod("m1"))
    assign(group, **{name: [queue] for name, queue in zip(names, queues, strict=True)})
    for name, queue in zip(names, queues, strict=True):
        say(group, name, queue)
    await poll(members, group, 30)
    assert sum(members.asked.values()) == 30, "each of the three has every third turn on average"


async def test_report_pages_beyond_a_limit_are_read_in_the_members_next_turn(members: Members) -> None:
    group = a_group("m1")
    say(group, "m1")

    class Endless(Members):
        async def read_progress(self, member: Endpoint, start: int) -> ProgressPage | None:
            await super().read_progress(member, start)
            return a_page({}, start + 400)

    members = Endless()
    await poll(members, group, 10)
    assert members.asked == Counter([("uid-m1", 400 * page) for page in range(2 * MAX_PAGES_PER_TURN)])


async def test_report_page_that_names_itself_as_the_next_is_read_once(members: Members) -> None:
    group = a_group("m1")
    say(group, "m1")
    members.pages["uid-m1"] = a_page({}, 0)
    await poll(members, group, 5)
    assert members.asked == Counter([("uid-m1", 0)])


async def test_crash_is_counted_from_the_last_page_as_soon_as_the_next_owner_begins(members: Members) -> None:
    group = a_group("m1", "m2")
    assign(group, m1=[Q], m2=[R])
    say(group, "m1", Q)
    say(group, "m2", R)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    members.pages["uid-m2"] = a_page({R: (0, 3, 4)})
    assert await poll(members, group, 5) == []
    assert group.pods.delivery_tracker.uncommitted_messages == 5
    group.pods.mark_deleted(a_pod("m1"))
    assign(group, m2=[Q, R])
    say(group, "m2", Q, R)
    members.pages["uid-m2"] = a_page({Q: (None, None, None), R: (0, 3, 4)})
    members.asked.clear()
    assert await poll(members, group, 5) == []
    assert members.asked["uid-m2", 0] == 5, "it is read in every step until it has begun"
    members.pages["uid-m2"] = a_page({Q: (5, None, 5), R: (0, 3, 4)})
    ((key, entry),) = await poll(members, group, 5)
    assert (key, entry.queue, entry.messages, entry.cause) == (KEY, Q, 5, RedeliveryCause.CRASH)
    assert (entry.previous_reader.member, entry.next_reader.member) == ("m1", "m2")


async def test_crash_of_a_sidecars_process_is_counted_when_its_next_one_begins(members: Members) -> None:
    group = a_group("m1")
    assign(group, m1=[Q])
    say(group, "m1", Q)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    await poll(members, group, 5)
    members.pages["uid-m1"] = a_page({Q: (5, None, 5)})._replace(incarnation="two")
    assert await poll(members, group, 5) == [], "its report is of the process before"
    say(group, "m1", Q, incarnation="two")
    ((_, entry),) = await poll(members, group, 5)
    assert (entry.messages, entry.cause) == (5, RedeliveryCause.CRASH)


async def test_upgrade_of_the_operator_reads_pages_of_the_previous_version_that_say_only_what_is_committed(
    members: Members,
) -> None:
    group = a_group("m1", "m2")
    assign(group, m1=[Q])
    say(group, "m1", Q)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5)})
    await poll(members, group, 5)
    group.pods.mark_deleted(a_pod("m1"))
    assign(group, m2=[Q])
    say(group, "m2", Q, incarnation="two")
    members.pages["uid-m2"] = a_page({Q: (None, None, 7)})._replace(incarnation="")
    assert await poll(members, group, 5) == []
    assert group.pods.delivery_tracker.by_queue == {}, "nothing more is awaited of it"


async def test_report_page_counts_only_for_queues_that_the_member_holds_and_owns(members: Members) -> None:
    group = a_group("m1")
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5), R: (0, 9, 5)})
    say(group, "m1", Q, R)
    await poll(members, group, 5)
    assert group.pods.delivery_tracker.by_queue == {}, "there is no assignment"
    assign(group, m1=[Q], m2=[R])
    await poll(members, group, 5)
    assert [*group.pods.delivery_tracker.by_queue] == [Q]
    assign(group, m1=[Q, R])
    say(group, "m1", Q)
    group.pods.delivery_tracker.clear()
    await poll(members, group, 5)
    assert [*group.pods.delivery_tracker.by_queue] == [Q]


async def test_leader_election_forgets_what_was_read(members: Members) -> None:
    group = a_group("m1")
    assign(group, m1=[Q])
    say(group, "m1", Q)
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
    say(group, "m1", Q, R)
    members.pages["uid-m1"] = a_page({Q: (0, 9, 5), R: (0, 9, 5)})
    await poll(members, group, 10)
    assert len(group.pods.delivery_tracker.by_queue) == 1
