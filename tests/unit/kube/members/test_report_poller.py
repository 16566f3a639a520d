"""Periodic polls of members' reports: which members are polled, and which reports notify the group."""

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import pytest

from builders import a_document
from rota.kube.client.objects import Pod
from rota.kube.members import polling_schedule
from rota.kube.members.report_client import Endpoint, MemberResponse, ReportClient
from rota.kube.members.report_poller import SCHEDULE, poll_reports
from rota.kube.state.group import Group
from rota.kube.state.stored_assignment import StoredAssignment
from rota.model import Queue
from rota.reports import Report

KEY, OTHER = ("shop", "orders"), ("shop", "bills")


class RoundsOverError(Exception):
    """Ends the poller after a number of rounds."""


class Members(ReportClient):
    """Members with reports and offsets that a test sets; `on_read` runs during each read."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.addresses: set[str] = set()
        self.reports: dict[str, Report | None] = {}
        self.on_read: Callable[[], None] = lambda: None
        self.offsets: dict[str, dict[Queue, int | None]] = {}

    async def read(self, member: Endpoint) -> MemberResponse:
        self.reads[member.uid] += 1
        self.addresses.add(member.address)
        self.on_read()
        return MemberResponse(self.reports.get(member.uid), 1.0)

    async def read_with_offsets(self, member: Endpoint) -> tuple[MemberResponse, dict[Queue, int | None] | None]:
        return await self.read(member), self.offsets.get(member.uid)


def a_pod(name: str, group: str = "orders", phase: str = "Running", *, started: bool = True) -> Pod:
    sidecar = {"name": "rota-sidecar", "volumeMounts": [{"name": "documents", "mountPath": "/etc/rota"}]}
    states = [{"name": "rota-sidecar", "state": {"running": {}}}] if started else []
    body = {
        "metadata": {"name": name, "namespace": "shop", "uid": f"uid-{name}", "labels": {"rota.dev/group": group}},
        "spec": {
            "initContainers": [sidecar],
            "volumes": [{"name": "documents", "configMap": {"name": f"{group}-rota"}}],
        },
        "status": {"podIP": "10.0.0.1", "phase": phase, "initContainerStatuses": states},
    }
    return msgspec.convert(body, Pod)


def a_group(*names: str, name: str = "orders") -> Group:
    group = Group("shop", name)
    for pod in names:
        group.pods.upsert(a_pod(pod, name), now=0.0)
    return group


def a_report(name: str, generation: int = 1) -> Report:
    return Report(member=name, uid=f"uid-{name}", generation=generation)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Members:
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.0)
    return Members()


async def poll_rounds(members: Members, *groups: Group, rounds: int = 1) -> list[tuple[str, str]]:
    """Poll all members for some rounds; return the keys of notified groups."""
    steps = 0
    changed_keys: list[tuple[str, str]] = []
    most = rounds * SCHEDULE.cycle_steps(sum(len(group.pods) for group in groups))

    def groups_of_round() -> Mapping[tuple[str, str], Group]:
        nonlocal steps
        steps += 1
        if steps > most:
            raise RoundsOverError
        return {(group.namespace, group.name): group for group in groups}

    with pytest.RaisesGroup(RoundsOverError):
        await poll_reports(groups_of_round, members, changed_keys.append)
    return changed_keys


NAMES = [f"m{number}" for number in range(200)]


@pytest.mark.parametrize(("members", "seconds"), [(0, 5), (3, 5), (50, 5), (51, 6), (200, 20), (600, 60), (10_000, 60)])
def test_report_poll_interval_grows_with_the_fleet_from_5_to_60_seconds(members: int, seconds: int) -> None:
    assert SCHEDULE.cycle_steps(members) * polling_schedule.STEP_SECONDS == seconds


async def test_report_is_polled_once_per_interval_from_each_member(members: Members) -> None:
    group, other_group = a_group(*NAMES), a_group("b1", "b2", name="bills")
    await poll_rounds(members, group, other_group)
    assert members.reads == dict.fromkeys([*(f"uid-{name}" for name in NAMES), "uid-b1", "uid-b2"], 1)
    await poll_rounds(members, group, other_group, rounds=3)
    assert set(members.reads.values()) == {4}
    assert members.addresses == {"10.0.0.1"}


async def test_report_poll_skips_members_that_are_awaited_not_started_or_ended(members: Members) -> None:
    group = a_group("m1", "m2")
    group.members_to_poll = frozenset({"m2"})
    group.pods.upsert(a_pod("m3", started=False), now=0.0)
    group.pods.upsert(a_pod("m4", phase="Failed"), now=0.0)
    await poll_rounds(members, group)
    assert members.reads == {"uid-m1": 1}
    group.members_to_poll = frozenset()
    await poll_rounds(members, group)
    assert members.reads == {"uid-m1": 2, "uid-m2": 1}


async def test_report_poll_notifies_only_about_changed_reports(members: Members) -> None:
    group = a_group("m1")
    members.reports["uid-m1"] = a_report("m1")
    assert await poll_rounds(members, group, rounds=3) == [KEY]
    assert await poll_rounds(members, group) == []
    members.reports["uid-m1"] = a_report("m1", 2)
    assert await poll_rounds(members, group, rounds=2) == [KEY]
    report = group.pods["m1"].decoded_report
    assert report is not None
    assert report.report.generation == 2


async def test_report_poll_notifies_once_when_a_member_falls_silent_and_when_it_returns(members: Members) -> None:
    group = a_group("m1")
    members.reports["uid-m1"] = a_report("m1")
    await poll_rounds(members, group)
    members.reports["uid-m1"] = None
    assert await poll_rounds(members, group, rounds=3) == [KEY]
    assert group.pods["m1"].unreachable_since == 1.0, "the time of the request"
    assert group.pods["m1"].decoded_report is not None, "its last report is kept"
    members.reports["uid-m1"] = a_report("m1")
    assert await poll_rounds(members, group, rounds=2) == [KEY]
    assert group.pods["m1"].unreachable_since is None


async def test_report_poll_notifies_only_the_group_of_the_member(members: Members) -> None:
    group, other_group = a_group("m1"), a_group("b1", name="bills")
    members.reports |= {"uid-m1": a_report("m1"), "uid-b1": a_report("b1")}
    assert sorted(await poll_rounds(members, group, other_group)) == [OTHER, KEY]
    members.reports["uid-b1"] = a_report("b1", 7)
    assert await poll_rounds(members, group, other_group) == [OTHER]


async def test_report_poll_ignores_a_pod_deleted_during_the_request(members: Members) -> None:
    group = a_group("m1")
    members.reports["uid-m1"] = a_report("m1")
    members.on_read = group.pods.clear
    assert await poll_rounds(members, group) == []
    assert members.reads == {"uid-m1": 1}


async def test_report_of_a_pod_is_not_attributed_to_its_successor(members: Members) -> None:
    group = a_group("m1")
    members.reports["uid-m1"] = a_report("m1")
    successor = a_pod("m1", started=False)  # not polled itself
    successor = msgspec.structs.replace(successor, metadata=msgspec.structs.replace(successor.metadata, uid="new"))
    members.on_read = lambda: group.pods.upsert(successor, now=1.0)
    assert await poll_rounds(members, group, rounds=1) == []
    assert group.pods["m1"].decoded_report is None


async def test_report_poll_skips_a_pod_deleted_before_its_turn(members: Members) -> None:
    group = a_group(*NAMES)
    members.reports = {f"uid-{name}": a_report(name) for name in NAMES}
    members.on_read = group.pods.clear
    assert await poll_rounds(members, group, rounds=2) == []
    assert len(members.reads) < len(NAMES)


FIRST, SECOND = Queue("orders", "a", 0), Queue("orders", "a", 1)


def broadcasting_group(*names: str) -> Group:
    """Return a Broadcasting group with an entry in its stored assignment and a pod for each member."""
    group = a_group(*names)
    group.assignment.stored = StoredAssignment(
        document=a_document(members=dict.fromkeys(names, ()), everyone=(FIRST, SECOND))
    )
    return group


async def test_broadcasting_polls_offsets_of_all_members_including_those_awaited(
    members: Members,
) -> None:
    group = broadcasting_group("m1", "m2")
    group.members_to_poll = frozenset({"m2"})
    members.reports = {f"uid-{name}": a_report(name) for name in ("m1", "m2")}
    members.offsets = {"uid-m1": {FIRST: 5, SECOND: 9}, "uid-m2": {FIRST: 7, SECOND: None}}
    assert group.reported_offsets == {}
    assert await poll_rounds(members, group) == [KEY, KEY]
    assert group.reported_offsets == {FIRST: 5}
    members.offsets["uid-m2"] = {FIRST: 3, SECOND: 4}
    assert await poll_rounds(members, group) == [], "a changed offset notifies no group"
    assert group.reported_offsets == {FIRST: 3, SECOND: 4}


async def test_broadcasting_slowest_offset_is_unknown_while_a_member_is_unreachable(members: Members) -> None:
    group = broadcasting_group("m1", "m2")
    members.reports = {f"uid-{name}": a_report(name) for name in ("m1", "m2")}
    members.offsets = {"uid-m1": {FIRST: 5}, "uid-m2": {FIRST: 7}}
    await poll_rounds(members, group)
    assert group.reported_offsets == {FIRST: 5}
    del members.reports["uid-m2"], members.offsets["uid-m2"]
    await poll_rounds(members, group)
    assert group.reported_offsets == {}
    group.pods.upsert(a_pod("m2", phase="Failed"), now=0.0)
    assert group.reported_offsets == {FIRST: 5}, "a terminated member does not count"
    group.pods.upsert(a_pod("m3", started=False), now=0.0)
    assert group.reported_offsets == {FIRST: 5}, "a member that has not started does not count"
    group.reset_observations()
    assert group.reported_offsets == {}, "a new leader polls all members first"


async def test_offset_is_not_polled_from_members_of_a_clustering_group(members: Members) -> None:
    group = a_group("m1")
    members.reports["uid-m1"] = a_report("m1")
    members.offsets["uid-m1"] = {FIRST: 5}
    await poll_rounds(members, group)
    assert (group.pods["m1"].offsets, group.reported_offsets) == (None, {})
