"""Long polls of reports: which members are polled, and recovery from errors."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from builders import a_document
from rota import aio
from rota.http_server import AdmissionLimit
from rota.kube.client.objects import Pod
from rota.kube.members.report_client import LONG_POLL_SECONDS, Endpoint, MemberResponse, ReportClient
from rota.kube.members.report_watchers import STANDING_POLL_SECONDS, ReportWatchers, WatcherEvents
from rota.kube.state.group import Group
from rota.reports import Report
from unit.kube.members.test_report_poller import a_group, a_report


class FailingOnce(ReportClient):
    """Members; the first read of each raises an error."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    async def read(self, member: Endpoint) -> MemberResponse:
        if member.uid not in self.failed:
            self.failed.add(member.uid)
            raise ZeroDivisionError
        return MemberResponse(a_report(member.uid.removeprefix("uid-")), 1.0)

    async def long_poll(self, member: Endpoint, after: int, seconds: int = LONG_POLL_SECONDS) -> MemberResponse:
        await asyncio.Event().wait()
        raise AssertionError(member, after, seconds)


def reports_of(group: Group) -> dict[str, Report | None]:
    return {
        name: pod_state.decoded_report.report if pod_state.decoded_report else None
        for name, pod_state in group.pods.items()
    }


async def test_report_of_an_awaited_member_is_read_again_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio, "MIN_RESTART_PAUSE_SECONDS", 0.0)
    group = a_group("m1")
    report_changed = asyncio.Event()
    group.members_to_poll = frozenset({"m1"})
    events = WatcherEvents(lambda _: report_changed.set(), report_changed.set)
    watchers = ReportWatchers(group, FailingOnce(), events, AdmissionLimit(0))
    watchers.update_polls()
    await report_changed.wait()
    assert reports_of(group) == {"m1": a_report("m1")}
    watchers.stop()


class PolledMembers(ReportClient):
    """Members with reports that a test sets; `polls` lists the long polls under way."""

    def __init__(self, *names: str) -> None:
        self.notices: dict[str, int | None] = dict.fromkeys(names, 0)
        self.polls: list[tuple[str, int]] = []  # long polls under way: uid of the member, seconds
        self.condition = asyncio.Condition()

    def report(self, uid: str) -> Report:
        notices = self.notices[uid.removeprefix("uid-")]
        report = a_report(uid.removeprefix("uid-"))
        return msgspec.structs.replace(report, revision=notices or 0, consumers_changed=notices)

    async def read(self, member: Endpoint) -> MemberResponse:
        return MemberResponse(self.report(member.uid), 1.0)

    async def long_poll(self, member: Endpoint, after: int, seconds: int = LONG_POLL_SECONDS) -> MemberResponse:
        async with self.condition:
            self.polls.append((member.uid, seconds))
            self.condition.notify_all()
            try:
                await self.condition.wait_for(lambda: self.report(member.uid).revision != after)
            finally:
                self.polls.remove((member.uid, seconds))
                self.condition.notify_all()
        return MemberResponse(self.report(member.uid), 1.0)

    async def notify(self, name: str) -> None:
        async with self.condition:
            self.notices[name] = (self.notices[name] or 0) + 1
            self.condition.notify_all()

    async def wait_for_polls(self, **polls: int) -> None:
        """Wait until exactly these members are polled, each for its number of seconds."""
        expected = [(f"uid-{name}", seconds) for name, seconds in polls.items()]
        async with self.condition:
            await self.condition.wait_for(lambda: sorted(self.polls) == expected)


def with_readiness(pod: Pod, ready: str) -> Pod:
    status = msgspec.to_builtins(pod.status) | {"conditions": [{"type": "Ready", "status": ready}]}
    return msgspec.structs.replace(pod, status=msgspec.convert(status, type(pod.status)))


class Watch:
    """The watchers of a group of Ready members; each report was read once."""

    def __init__(self, reports: PolledMembers, limit: AdmissionLimit | None = None) -> None:
        self.group = a_group(*reports.notices)
        self.consumers_changed = asyncio.Event()
        for name, pod_state in self.group.pods.items():
            pod_state.update_pod(with_readiness(pod_state.pod, "True"), 1.0)
            pod_state.record_report(reports.report(f"uid-{name}"), 1.0, 1.0)
        events = WatcherEvents(lambda _: None, self.consumers_changed.set)
        self.watchers = ReportWatchers(self.group, reports, events, limit or AdmissionLimit(10))

    async def stop(self) -> None:
        self.watchers.stop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_unmanaged_consumer_notice_is_carried_by_one_standing_poll_of_a_group_at_rest() -> None:
    reports = PolledMembers("m1", "m2")
    watch = Watch(reports)
    watch.watchers.update_polls()
    await reports.wait_for_polls(m1=STANDING_POLL_SECONDS)
    watch.watchers.update_polls()
    assert not watch.consumers_changed.is_set()
    await reports.notify("m1")
    await watch.consumers_changed.wait()
    await reports.wait_for_polls(m1=STANDING_POLL_SECONDS)
    await watch.stop()


async def test_unmanaged_consumer_notice_is_carried_by_the_polls_of_awaited_members() -> None:
    reports = PolledMembers("m1", "m2")
    watch = Watch(reports)
    watch.watchers.update_polls()
    await reports.wait_for_polls(m1=STANDING_POLL_SECONDS)
    watch.group.members_to_poll = frozenset({"m1", "m2"})
    watch.watchers.update_polls()
    await reports.wait_for_polls(m1=LONG_POLL_SECONDS, m2=LONG_POLL_SECONDS)
    await reports.notify("m2")
    await watch.consumers_changed.wait()
    await watch.stop()


async def test_unmanaged_consumer_notice_that_another_reader_saw_first_is_not_lost() -> None:
    reports = PolledMembers("m1")
    watch = Watch(reports)
    reports.notices["m1"] = 1
    watch.group.pods["m1"].record_report(reports.report("uid-m1"), 2.0, 2.0)  # the periodic poll records it
    watch.watchers.update_polls()
    await watch.consumers_changed.wait()
    await watch.stop()


async def test_unmanaged_consumer_standing_poll_moves_on_when_its_member_is_not_ready() -> None:
    reports = PolledMembers("m1", "m2")
    watch = Watch(reports)
    watch.watchers.update_polls()
    await reports.wait_for_polls(m1=STANDING_POLL_SECONDS)
    watch.watchers.cancel_polls("m1")
    pod_state = watch.group.pods["m1"]
    pod_state.update_pod(with_readiness(pod_state.pod, "False"), 2.0)
    watch.watchers.update_polls()
    await reports.wait_for_polls(m2=STANDING_POLL_SECONDS)
    await watch.stop()


async def test_unmanaged_consumer_standing_polls_of_all_groups_are_limited() -> None:
    limit = AdmissionLimit(1)
    first, second = PolledMembers("m1"), PolledMembers("m1")
    watches = [Watch(first, limit), Watch(second, limit)]
    watches[0].watchers.update_polls()
    await first.wait_for_polls(m1=STANDING_POLL_SECONDS)
    watches[1].watchers.update_polls()
    for _ in range(5):
        await asyncio.sleep(0)
    assert second.polls == []
    await watches[0].stop()
    watches[1].watchers.update_polls()
    await second.wait_for_polls(m1=STANDING_POLL_SECONDS)
    await watches[1].stop()


async def test_unmanaged_consumer_standing_poll_is_not_held_at_earlier_sidecars_or_in_broadcasting_groups() -> None:
    earlier = PolledMembers("m1")
    earlier.notices["m1"] = None  # sidecars of earlier versions do not report notices
    broadcasting = PolledMembers("m1")
    watches = [Watch(earlier), Watch(broadcasting)]
    group = watches[1].group
    group.assignment.stored = replace(group.stored_assignment, document=a_document(everyone=()))
    for watch in watches:
        watch.watchers.update_polls()
    for _ in range(5):
        await asyncio.sleep(0)
    assert earlier.polls == broadcasting.polls == []
    for watch in watches:
        await watch.stop()
