"""Hearing everybody once a round: who is asked, who is not, and what is news."""

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


class OverError(Exception):
    """So many rounds are over."""


class Members(ReportClient):
    """Members that say what is put there, and what happens while one is asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.addresses: set[str] = set()
        self.say: dict[str, Report | None] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.offsets: dict[str, dict[Queue, int | None]] = {}

    async def read(self, member: Endpoint) -> MemberResponse:
        self.asked[member.uid] += 1
        self.addresses.add(member.address)
        self.meanwhile()
        return MemberResponse(self.say.get(member.uid), 1.0)

    async def read_with_offsets(self, member: Endpoint) -> tuple[MemberResponse, dict[Queue, int | None] | None]:
        return await self.read(member), self.offsets.get(member.uid)


def a_pod(name: str, group: str = "orders", phase: str = "Running", *, started: bool = True) -> Pod:
    sidecar = {"name": "rota-sidecar", "volumeMounts": [{"name": "it", "mountPath": "/etc/rota"}]}
    states = [{"name": "rota-sidecar", "state": {"running": {}}}] if started else []
    body = {
        "metadata": {"name": name, "namespace": "shop", "uid": f"uid-{name}", "labels": {"rota.dev/group": group}},
        "spec": {"initContainers": [sidecar], "volumes": [{"name": "it", "configMap": {"name": f"{group}-rota"}}]},
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


async def hear(members: Members, *groups: Group, number: int = 1) -> list[tuple[str, str]]:
    """Hear everybody for some rounds; return of whom there was news."""
    steps, told = 0, list[tuple[str, str]]()
    most = number * SCHEDULE.steps(sum(len(it.pods) for it in groups))

    def known() -> Mapping[tuple[str, str], Group]:
        nonlocal steps
        steps += 1
        if steps > most:
            raise OverError
        return {(it.namespace, it.name): it for it in groups}

    with pytest.RaisesGroup(OverError):
        await poll_reports(known, members, told.append)
    return told


NAMES = [f"m{number}" for number in range(200)]


@pytest.mark.parametrize(("members", "seconds"), [(0, 5), (3, 5), (50, 5), (51, 6), (200, 20), (600, 60), (10_000, 60)])
def test_report_poll_interval_grows_with_the_fleet_from_5_to_60_seconds(members: int, seconds: int) -> None:
    assert SCHEDULE.steps(members) * polling_schedule.STEP_SECONDS == seconds


async def test_report_is_polled_once_per_interval_from_each_member(members: Members) -> None:
    group, other = a_group(*NAMES), a_group("b1", "b2", name="bills")
    await hear(members, group, other)
    assert members.asked == dict.fromkeys([*(f"uid-{name}" for name in NAMES), "uid-b1", "uid-b2"], 1)
    await hear(members, group, other, number=3)
    assert set(members.asked.values()) == {4}
    assert members.addresses == {"10.0.0.1"}


async def test_report_poll_skips_members_that_are_awaited_not_started_or_ended(members: Members) -> None:
    group = a_group("m1", "m2")
    group.awaited = frozenset({"m2"})
    group.pods.upsert(a_pod("m3", started=False), now=0.0)
    group.pods.upsert(a_pod("m4", phase="Failed"), now=0.0)
    await hear(members, group)
    assert members.asked == {"uid-m1": 1}
    group.awaited = frozenset()
    await hear(members, group)
    assert members.asked == {"uid-m1": 2, "uid-m2": 1}


async def test_report_poll_notifies_only_about_changed_reports(members: Members) -> None:
    group = a_group("m1")
    members.say["uid-m1"] = a_report("m1")
    assert await hear(members, group, number=3) == [KEY]
    assert await hear(members, group) == []
    members.say["uid-m1"] = a_report("m1", 2)
    assert await hear(members, group, number=2) == [KEY]
    heard = group.pods["m1"].decoded_report
    assert heard is not None
    assert heard.report.generation == 2


async def test_report_poll_notifies_once_when_a_member_falls_silent_and_when_it_returns(members: Members) -> None:
    group = a_group("m1")
    members.say["uid-m1"] = a_report("m1")
    await hear(members, group)
    members.say["uid-m1"] = None
    assert await hear(members, group, number=3) == [KEY]
    assert group.pods["m1"].unreachable_since == 1.0, "when it was asked"
    assert group.pods["m1"].decoded_report is not None, "what it said last is known"
    members.say["uid-m1"] = a_report("m1")
    assert await hear(members, group, number=2) == [KEY]
    assert group.pods["m1"].unreachable_since is None


async def test_report_poll_notifies_only_the_group_of_the_member(members: Members) -> None:
    group, other = a_group("m1"), a_group("b1", name="bills")
    members.say |= {"uid-m1": a_report("m1"), "uid-b1": a_report("b1")}
    assert sorted(await hear(members, group, other)) == [OTHER, KEY]
    members.say["uid-b1"] = a_report("b1", 7)
    assert await hear(members, group, other) == [OTHER]


async def test_report_poll_ignores_a_pod_deleted_during_the_request(members: Members) -> None:
    group = a_group("m1")
    members.say["uid-m1"] = a_report("m1")
    members.meanwhile = group.pods.clear
    assert await hear(members, group) == []
    assert members.asked == {"uid-m1": 1}


async def test_report_of_a_pod_is_not_attributed_to_its_successor(members: Members) -> None:
    group = a_group("m1")
    members.say["uid-m1"] = a_report("m1")
    new = a_pod("m1", started=False)  # so that it is not asked itself
    new = msgspec.structs.replace(new, metadata=msgspec.structs.replace(new.metadata, uid="new"))
    members.meanwhile = lambda: group.pods.upsert(new, now=1.0)
    assert await hear(members, group, number=1) == []
    assert group.pods["m1"].decoded_report is None


async def test_report_poll_skips_a_pod_deleted_before_its_turn(members: Members) -> None:
    group = a_group(*NAMES)
    members.say = {f"uid-{name}": a_report(name) for name in NAMES}
    members.meanwhile = group.pods.clear
    assert await hear(members, group, number=2) == []
    assert len(members.asked) < len(NAMES)


FIRST, SECOND = Queue("orders", "a", 0), Queue("orders", "a", 1)


def everyones(*names: str) -> Group:
    """Return a Broadcasting group: its record has an entry for each of these, and pods are there for them."""
    group = a_group(*names)
    group.stored_assignment = StoredAssignment(
        document=a_document(members=dict.fromkeys(names, ()), everyone=(FIRST, SECOND))
    )
    return group


async def test_broadcasting_polls_offsets_of_all_members_including_those_awaited(
    members: Members,
) -> None:
    group = everyones("m1", "m2")
    group.awaited = frozenset({"m2"})
    members.say = {f"uid-{name}": a_report(name) for name in ("m1", "m2")}
    members.offsets = {"uid-m1": {FIRST: 5, SECOND: 9}, "uid-m2": {FIRST: 7, SECOND: None}}
    assert group.reported_offsets == {}
    assert await hear(members, group) == [KEY, KEY]
    assert group.reported_offsets == {FIRST: 5}
    members.offsets["uid-m2"] = {FIRST: 3, SECOND: 4}
    assert await hear(members, group) == [], "where somebody is wakes nobody"
    assert group.reported_offsets == {FIRST: 3, SECOND: 4}


async def test_broadcasting_slowest_offset_is_unknown_while_a_member_is_unreachable(members: Members) -> None:
    group = everyones("m1", "m2")
    members.say = {f"uid-{name}": a_report(name) for name in ("m1", "m2")}
    members.offsets = {"uid-m1": {FIRST: 5}, "uid-m2": {FIRST: 7}}
    await hear(members, group)
    assert group.reported_offsets == {FIRST: 5}
    del members.say["uid-m2"], members.offsets["uid-m2"]
    await hear(members, group)
    assert group.reported_offsets == {}
    group.pods.upsert(a_pod("m2", phase="Failed"), now=0.0)
    assert group.reported_offsets == {FIRST: 5}, "who has ended reads nothing any more"
    group.pods.upsert(a_pod("m3", started=False), now=0.0)
    assert group.reported_offsets == {FIRST: 5}, "who has not begun is not behind"
    group.reset_observations()
    assert group.reported_offsets == {}, "who begins to lead hears everybody anew"


async def test_offset_is_not_polled_from_members_of_a_clustering_group(members: Members) -> None:
    group = a_group("m1")
    members.say["uid-m1"], members.offsets["uid-m1"] = a_report("m1"), {FIRST: 5}
    await hear(members, group)
    assert (group.pods["m1"].offsets, group.reported_offsets) == (None, {})
