"""Long polls of reports: who is watched, and that a failed watch goes on."""

import asyncio

import pytest

from rota import aio
from rota.kube.members.report_client import Answer, Endpoint, Reports
from rota.kube.members.report_watchers import Listeners
from rota.kube.state.group import Group
from rota.reports import Report
from unit.kube.members.test_report_poller import a_group, a_report


class Failing(Reports):
    """Members of which each is read with an error the first time."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    async def read(self, member: Endpoint) -> Answer:
        if member.uid not in self.failed:
            self.failed.add(member.uid)
            raise ZeroDivisionError
        return Answer(a_report(member.uid.removeprefix("uid-")), 1.0)

    async def next(self, member: Endpoint, after: int) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError(member, after)


def reports_of(group: Group) -> dict[str, Report | None]:
    return {name: known.heard.report if known.heard else None for name, known in group.pods.items()}


async def test_report_of_an_awaited_member_is_read_again_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio, "FIRST_RESTART_SECONDS", 0.0)
    group, heard = a_group("m1"), asyncio.Event()
    group.awaited = frozenset({"m1"})
    listeners = Listeners(group, Failing(), heard.set)
    listeners.listen()
    await heard.wait()
    assert reports_of(group) == {"m1": a_report("m1")}
    listeners.rest()
