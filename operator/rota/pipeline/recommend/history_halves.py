"""Cuts a history into two halves, so that advice from the first half can be tested on the second.

    first half:   begins ──────> cut      its replay under the recorded policies gives owners and lag at the cut
    second half:                 cut ──────> ends

Each half is a history of its own: the second one starts with the members, queues, owners and lag with which the first
one ends. Both halves keep a member's capacity as measured over the whole history: the samples by which it could be
measured again are not part of a history.
"""

from bisect import bisect_left
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from rota.pipeline.replay.group_history import STEP_SECONDS, GroupHistory
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import ReplayMetrics

MIN_HALF_STEPS = 12  # one hour: a shorter half says nothing about a policy


class HistoryHalves(NamedTuple):
    """A history up to the time of a cut, and from then on."""

    first: GroupHistory
    second: GroupHistory


def cut_history(history: GroupHistory) -> HistoryHalves:
    """Cut a history in the middle; raise ValueError if it is too short."""
    steps = history.step_count // 2
    if steps < MIN_HALF_STEPS:
        hours = (history.ends - history.begins) / 3600
        raise ValueError(f"Group {history.group} has {hours:.1f} hours of history; to test advice it needs two hours")
    at = history.begins + steps * STEP_SECONDS
    change_count = bisect_left(history.changes, at, key=attrgetter("at"))  # number of changes in the first half
    first = replace(
        history,
        ends=at,
        changes=history.changes[:change_count],
        arrivals=history.arrivals[:steps],
    )
    metrics = ReplayMetrics(first)
    recorded = Replay(first, None, metrics)  # None: under the recorded policies
    recorded.run()
    second = replace(
        history,
        begins=at,
        document=recorded.document,
        # A change has all members and queues from its time on, so the first half's last one is the state at the cut.
        changes=(replace(first.changes[-1], at=at), *history.changes[change_count:]),
        arrivals=history.arrivals[steps:],
        lag=np.array(metrics.traffic.lag),
    )
    return HistoryHalves(first, second)
