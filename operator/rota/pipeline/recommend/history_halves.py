"""Cuts a history in two at a time, so that advice from the first half can be tested on the second.

    first half:   begins ──────> cut      replayed under the recorded policies, this gives owners and lag at the cut
    second half:                 cut ──────> ends

Each half is a history of its own: the second starts with the members, queues, owners and lag that the first one ends
with. The capacity of a member is that of the whole history in both halves, for every policy: it belongs to the model,
and a history does not keep what it was measured from.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rota.documents import Assignment
from rota.model import Holder
from rota.pipeline.replay.group_history import STEP_SECONDS, Change, GroupHistory, MemberPresence
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import ReplayMetrics

MIN_HALF_STEPS = 12  # steps: advice from less than an hour, or tested for less, says nothing


class HistoryHalves(NamedTuple):
    """A history up to a time, and from then on."""

    first: GroupHistory
    second: GroupHistory


def cut_history(history: GroupHistory, fraction: float = 0.5) -> HistoryHalves:
    """Cut a history at the step in which `fraction` of it has passed; raise ValueError if it is too short."""
    steps = round(history.step_count * fraction)
    if min(steps, history.step_count - steps) < MIN_HALF_STEPS:
        hours = (history.ends - history.begins) / 3600
        raise ValueError(f"Group {history.group} has {hours:.1f} hours of history; to test advice it needs two hours")
    at = history.begins + steps * STEP_SECONDS
    first = replace(
        history,
        ends=at,
        changes=tuple(change for change in history.changes if change.at < at),
        arrivals=history.arrivals[:steps],
    )
    metrics = ReplayMetrics(first)
    recorded = Replay(first, None, metrics)
    recorded.run()
    second = replace(
        history,
        begins=at,
        document=recorded.document,
        changes=_changes_since(history.changes, at, recorded.document),
        arrivals=history.arrivals[steps:],
        lag=np.array(metrics.traffic.lag),
    )
    return HistoryHalves(first, second)


def _changes_since(changes: Sequence[Change], at: float, document: Assignment) -> tuple[Change, ...]:
    """Return the state just before a time, as the first change, and the changes from then on.

    Owners by the document whose pods are gone are in the first state as ended pods: otherwise the planner would wait
    for a proof that they have stopped, which a replay gives only when a pod goes.
    """
    present = next((change for change in reversed(changes) if change.at < at), changes[0])
    uids = {presence.uid for presence in present.members.values()}
    holders = {Holder(name, share.uid) for name, share in document.members.items()} | {*document.releases_by_holder}
    ended = {holder.name: MemberPresence(holder.uid, "Ended") for holder in holders if holder.uid not in uids}
    members = {**ended, **present.members}  # a new pod may have the name of an old one
    return replace(present, at=at, members=members), *(change for change in changes if change.at >= at)
