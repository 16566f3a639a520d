"""Polls every member's report periodically. Between handovers nothing else detects a silent member.

A small fleet is polled every five seconds: by the time Kubernetes gives up a node, the silence of its members is known
and `lostAfter` has passed. A large fleet is polled once a minute, because each read opens a connection.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rota.kube.client.objects import Key
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.members.rounds import Groups, Rounds, Turn, count_pods, read_by_turns, running_members
from rota.model import Queue

ROUNDS = Rounds(members_per_step=10, shortest=5, longest=60)


async def poll_reports(groups: Groups, reports: ReportClient, on_change: Callable[[Key], None]) -> None:
    """Poll the reports of all members forever; call `on_change` for each group with a changed report."""

    def due(step: int) -> Iterable[Turn]:
        current = groups()
        return [
            turn for turn in ROUNDS.due(running_members(current), count_pods(current), step) if not _is_awaited(turn)
        ]

    await read_by_turns(due, partial(_read, reports, on_change))


def _is_awaited(turn: Turn) -> bool:
    """Whether a long poll reads the report already; Broadcasting members are polled anyway, for their offsets."""
    return turn.name in turn.group.awaited and not turn.group.record.broadcasting


async def _read(reports: ReportClient, on_change: Callable[[Key], None], turn: Turn) -> None:
    pod_state = turn.group.pods.get(turn.name)
    if pod_state is None or pod_state.pod.metadata.uid != turn.uid:
        return
    member = Endpoint.of(pod_state.pod, turn.group.uid)
    offsets: Mapping[Queue, int | None] | None = None
    if turn.group.record.broadcasting:
        response, offsets = await reports.read_with_offsets(member)
    else:
        response = await reports.read(member)
    if turn.group.pods.get(turn.name) is not pod_state:
        return
    pod_state.offsets = offsets
    if pod_state.hear(response.report, asyncio.get_running_loop().time(), response.asked, response.doubt):
        on_change(turn.key)
