"""Long polls of reports: who is watched, and that a failed watch goes on."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from builders import a_document
from rota import aio
from rota.http_server import AdmissionLimit
from rota.kube.client.objects import Pod
from rota.kube.members.report_client import (
    LONG_POLL_SECONDS,
    STANDING_POLL_SECONDS,
    Endpoint,
    MemberResponse,
    ReportClient,
)
from rota.kube.members.report_watchers import ReportWatchers, WatcherEvents
from rota.kube.state.group import Group
from rota.reports import Report
from unit.kube.members.test_report_poller import a_group, a_report


class Failing(ReportClient):
    """Members of which each is read with an error the first time."""

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
    return {name: known.decoded_report.report if known.decoded_report else None for name, known in group.pods.items()}


async def test_report_of_an_awaited_member_is_read_again_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio, "MIN_RESTART_PAUSE_SECONDS", 0.0)
    group, heard = a_group("m1"), asyncio.Event()
    group.awaited = frozenset({"m1"})
    listeners = ReportWatchers(group, Failing(), WatcherEvents(heard.set, heard.set), AdmissionLimit(0))
    listeners.update_polls()
    await heard.wait()
    assert reports_of(group) == {"m1": a_report("m1")}
    listeners.stop()


class Polled(ReportClient):
    """Members whose reports are told by the test; it sees which are polled, and for how long."""

    def __init__(self, *names: str) -> None:
        self.notices: dict[str, int | None] = dict.fromkeys(names, 0)
        self.polls: list[tuple[str, int]] = []  # those that are held: of whom, and for how many seconds
        self.changed = asyncio.Condition()

    def report(self, uid: str) -> Report:
        notices = self.notices[uid.removeprefix("uid-")]
        report = a_report(uid.removeprefix("uid-"))
        return msgspec.structs.replace(report, revision=notices or 0, consumers_changed=notices)

    async def read(self, member: Endpoint) -> MemberResponse:
        return MemberResponse(self.report(member.uid), 1.0)

    async def long_poll(self, member: Endpoint, after: int, seconds: int = LONG_POLL_SECONDS) -> MemberResponse:
        async with self.changed:
            self.polls.append((member.uid, seconds))
            self.changed.notify_all()
            try:
                await self.changed.wait_for(lambda: self.report(member.uid).revision != after)
            finally:
                self.polls.remove((member.uid, seconds))
                self.changed.notify_all()
        return MemberResponse(self.report(member.uid), 1.0)

    async def notify(self, name: str) -> None:
        async with self.changed:
            self.notices[name] = (self.notices[name] or 0) + 1
            self.changed.notify_all()

    async def polled(self, **polls: int) -> None:
        """Wait until just these members are polled, for so many seconds each."""
        wanted = [(f"uid-{name}", seconds) for name, seconds in polls.items()]
        async with self.changed:
            await self.changed.wait_for(lambda: sorted(self.polls) == wanted)


def with_readiness(pod: Pod, ready: str) -> Pod:
    status = msgspec.to_builtins(pod.status) | {"conditions": [{"type": "Ready", "status": ready}]}
    return msgspec.structs.replace(pod, status=msgspec.convert(status, type(pod.status)))


class Watch:
    """The watchers of a group of Ready members that were read once."""

    def __init__(self, reports: Polled, limit: AdmissionLimit | None = None) -> None:
        self.group = a_group(*reports.notices)
        self.asked = asyncio.Event()
        for name, known in self.group.pods.items():
            known.update_pod(with_readiness(known.pod, "True"), 1.0)
            known.record_report(reports.report(f"uid-{name}"), 1.0, 1.0)
        events = WatcherEvents(lambda: None, self.asked.set)
        self.listeners = ReportWatchers(self.group, reports, events, limit or AdmissionLimit(10))

    async def rest(self) -> None:
        self.listeners.stop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_unmanaged_consumer_notice_is_carried_by_one_standing_poll_of_a_group_at_rest() -> None:
    reports = Polled("m1", "m2")
    watch = Watch(reports)
    watch.listeners.update_polls()
    await reports.polled(m1=STANDING_POLL_SECONDS)
    watch.listeners.update_polls()
    assert not watch.asked.is_set()
    await reports.notify("m1")
    await watch.asked.wait()
    await reports.polled(m1=STANDING_POLL_SECONDS)
    await watch.rest()


async def test_unmanaged_consumer_notice_is_carried_by_awaited_members_while_there_are_some() -> None:
    reports = Polled("m1", "m2")
    watch = Watch(reports)
    watch.listeners.update_polls()
    await reports.polled(m1=STANDING_POLL_SECONDS)
    watch.group.awaited = frozenset({"m1", "m2"})
    watch.listeners.update_polls()
    await reports.polled(m1=LONG_POLL_SECONDS, m2=LONG_POLL_SECONDS)
    await reports.notify("m2")
    await watch.asked.wait()
    await watch.rest()


async def test_unmanaged_consumer_notice_that_another_reader_saw_first_is_not_lost() -> None:
    reports = Polled("m1")
    watch = Watch(reports)
    reports.notices["m1"] = 1
    watch.group.pods["m1"].record_report(reports.report("uid-m1"), 2.0, 2.0)  # as the periodic poll does
    watch.listeners.update_polls()
    await watch.asked.wait()
    await watch.rest()


async def test_unmanaged_consumer_standing_poll_moves_on_when_its_member_is_not_ready() -> None:
    reports = Polled("m1", "m2")
    watch = Watch(reports)
    watch.listeners.update_polls()
    await reports.polled(m1=STANDING_POLL_SECONDS)
    watch.listeners.cancel_polls("m1")
    known = watch.group.pods["m1"]
    known.update_pod(with_readiness(known.pod, "False"), 2.0)
    watch.listeners.update_polls()
    await reports.polled(m2=STANDING_POLL_SECONDS)
    await watch.rest()


async def test_unmanaged_consumer_standing_polls_of_all_groups_are_limited() -> None:
    limit = AdmissionLimit(1)
    first, second = Polled("m1"), Polled("m1")
    watches = [Watch(first, limit), Watch(second, limit)]
    watches[0].listeners.update_polls()
    await first.polled(m1=STANDING_POLL_SECONDS)
    watches[1].listeners.update_polls()
    for _ in range(5):
        await asyncio.sleep(0)
    assert second.polls == []
    await watches[0].rest()
    watches[1].listeners.update_polls()
    await second.polled(m1=STANDING_POLL_SECONDS)
    await watches[1].rest()


async def test_unmanaged_consumer_standing_poll_is_not_held_at_earlier_sidecars_or_in_broadcasting_groups() -> None:
    earlier = Polled("m1")
    earlier.notices["m1"] = None  # sidecars of earlier versions do not report notices
    broadcasting = Polled("m1")
    watches = [Watch(earlier), Watch(broadcasting)]
    group = watches[1].group
    group.stored_assignment = replace(group.stored_assignment, document=a_document(everyone=()))
    for watch in watches:
        watch.listeners.update_polls()
    for _ in range(5):
        await asyncio.sleep(0)
    assert earlier.polls == broadcasting.polls == []
    for watch in watches:
        await watch.rest()
