"""Reads every member's report by turns: of a member of which nothing is awaited, only this shows that it is silent.

The members of a small fleet are read every five seconds, so a member's silence is known, and `lostAfter` has run, by
the time its node is given up. Those of a large one are read once a minute, for each read opens a connection.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rota.kube.client.objects import Key
from rota.kube.members.report_client import Endpoint, Reports
from rota.kube.members.rounds import Groups, Rounds, Turn, count_pods, read_by_turns, running_members
from rota.model import Queue

ROUNDS = Rounds(members_per_step=10, shortest=5, longest=60)


async def poll_reports(groups: Groups, reports: Reports, on_change: Callable[[Key], None]) -> None:
    """Read the reports of all members for ever; `on_change` is called for a group of which one has changed."""

    def due(step: int) -> Iterable[Turn]:
        current = groups()
        return [
            turn for turn in ROUNDS.due(running_members(current), count_pods(current), step) if not _is_awaited(turn)
        ]

    await read_by_turns(due, partial(_read, reports, on_change))


def _is_awaited(turn: Turn) -> bool:
    """Whether a long poll reads the member's report; in a Broadcasting group its offsets are read all the same."""
    return turn.name in turn.group.awaited and not turn.group.record.broadcasting


async def _read(reports: Reports, on_change: Callable[[Key], None], turn: Turn) -> None:
    known = turn.group.pods.get(turn.name)
    if known is None or known.pod.metadata.uid != turn.uid:
        return
    member = Endpoint.of(known.pod, turn.group.uid)
    offsets: Mapping[Queue, int | None] | None = None
    if turn.group.record.broadcasting:
        answer, offsets = await reports.read_with_offsets(member)
    else:
        answer = await reports.read(member)
    if turn.group.pods.get(turn.name) is not known:
        return
    known.offsets = offsets
    if known.hear(answer.report, asyncio.get_running_loop().time(), answer.asked, answer.doubt):
        on_change(turn.key)
