"""Replay of a generated history that writes the journal which an operator would have written.

A replay runs the operator's planner in virtual time, with simulated members; a *document* is an assignment.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rota.documents import Assignment
from rota.model import Holder, Queue
from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.replay.simulated_members import SimulatedMember
from rota.planner import Plan, owners_record
from rota.planner.record import holders_of
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.timestamps import format_time

HOUR_SECONDS = 3600.0
MINUTE_SECONDS = 60.0
MOMENT_SECONDS = 0.001  # the last sample is taken so long before the end

JournalLine = Mapping[str, Any]


class RebalanceProgress(NamedTuple):
    """A rebalance in progress."""

    generation: int = 0  # the generation with which it started; 0: no rebalance is in progress
    forced: int = 0  # number of queues that were granted by force


class JournalingReplay(Replay):
    """Replays a history under its own policies; the end offsets of all queues start at `start_offset`."""

    def __init__(
        self, history: GroupHistory, write_record: Callable[[JournalLine], None], start_offset: int = 1_000_000
    ) -> None:
        super().__init__(history, policy=None, metrics=ReplayMetrics(history))  # None: the policies of the history
        self._write_record = write_record
        self._last_plan: Plan | None = None
        # Grants that the owner does not obey yet: the owner, and the generation of the grant.
        self._pending_grants: dict[Queue, tuple[Holder, int]] = {}
        self._rebalance = RebalanceProgress()
        # By topic and broker. The history's queues are sorted by topic and broker, so arrays by queue consist of one
        # slice for each entry of this dict, in its order.
        self._ids_by_broker: dict[tuple[str, str], list[int]] = {}
        for queue in history.queues:
            self._ids_by_broker.setdefault((queue.topic, queue.broker), []).append(queue.id)
        self._last_offsets = np.full(len(history.queues), float(start_offset))
        self._sampled_at = history.begins

    def run(self) -> None:
        """Replay to the end of the history; write `offsets` every minute, and `owners` every hour."""
        begins = self.history.begins
        ends = self.history.ends
        for minute in range(int((ends - begins) // MINUTE_SECONDS) + 1):
            # The last sample is just before the end: at the end, a new hour may start, without other records.
            self.clock.schedule(min(begins + minute * MINUTE_SECONDS, ends - MOMENT_SECONDS), self._write_offsets)
        hour = begins - begins % HOUR_SECONDS + HOUR_SECONDS
        while hour < ends:
            self.clock.schedule(hour, self._write_owners)
            hour += HOUR_SECONDS
        super().run()

    def on_planned(self, new_plan: Plan, previous: Assignment) -> None:
        """Write the records of a plan, and of a rebalance that it completes."""
        for line in new_plan.journal_records:
            self._write_record(line)
        if new_plan.document:
            self._add_pending_grants(holders_of(previous), new_plan.document.generation)
        is_first = self._last_plan is None
        self._last_plan = new_plan
        if is_first:
            self._write_owners()
        self._write_rebalance(new_plan)

    def _add_pending_grants(self, previous: Mapping[Queue, Holder], generation: int) -> None:
        """Remember the queues that the new document gives to another holder; `self.owned` has its owners."""
        for queue, holder in self.owned.items():
            # `previous` has the holders of revoked queues, too: a queue that returns to its holder is not granted.
            if previous.get(queue) != holder:
                self._pending_grants[queue] = (holder, generation)

    def _write_rebalance(self, new_plan: Plan) -> None:
        """Write the `rebalance` record if the plan's status reports a completed rebalance."""
        last = new_plan.status.get("lastRebalance")
        at = format_time(self.now)
        if last is None:
            return
        generation, forced = self._rebalance
        if last["at"] == at and new_plan.document:  # this plan has started the rebalance
            generation = new_plan.document.generation
            forced = 0
        if new_plan.document:
            forced += list(new_plan.document.forced.values()).count(new_plan.document.generation)
        self._rebalance = RebalanceProgress(generation, forced)
        if "seconds" in last and generation:
            facts = {"reason": last["reason"], "began": last["at"], "moved": last["moved"], "seconds": last["seconds"]}
            facts |= {"outcome": "Forced" if forced else "Settled", "forced": forced}
            self._write_record(journal_record("rebalance", self.history.group, at, generation=generation, **facts))
            self._rebalance = RebalanceProgress()

    def on_obeyed(self, member: SimulatedMember) -> None:
        """Write `obeyed` records for the grants that a member now follows."""
        by_generation: defaultdict[int, list[Queue]] = defaultdict(list)
        for queue, (holder, generation) in list(self._pending_grants.items()):
            if holder == member.holder and generation <= member.generation:
                del self._pending_grants[queue]
                by_generation[generation].append(queue)
        for generation, queues in sorted(by_generation.items()):
            facts = {"generation": generation, "member": member.name, "uid": member.uid, "queues": to_ranges(queues)}
            self._write_record(journal_record("obeyed", self.history.group, format_time(self.now), **facts))

    def _write_owners(self) -> None:
        if self._last_plan:
            record = owners_record(self.snapshot(), self._last_plan, self.document, self.history.spec, self.now)
            self._write_record(record)

    def _write_offsets(self) -> None:
        """Write an `offsets` record.

        The end offset of a queue has grown by the arrivals since the previous record; its committed offset is lower
        than the end offset by the lag.
        """
        traffic = self.metrics.traffic
        # Rates are constant within a step of the traffic. Steps take five minutes and start with the history, as the
        # minutes do, so no minute is in two steps.
        rates = traffic.arrival_rates(self._sampled_at)
        self._last_offsets += (self.now - self._sampled_at) * rates
        self._sampled_at = self.now
        ends = np.floor(self._last_offsets)
        committed_offsets = np.maximum(ends - np.ceil(traffic.lag), 0.0)
        last = ends.astype(int).tolist()
        committed = committed_offsets.astype(int).tolist()
        topics: dict[str, dict[str, Any]] = {}
        start = 0
        for (topic, broker), ids in self._ids_by_broker.items():
            rows = slice(start, start + len(ids))
            start += len(ids)
            columns = {"ids": ids, "first": [0] * len(ids), "last": last[rows], "committed": committed[rows]}
            topics.setdefault(topic, {})[broker] = columns
        at = format_time(self.now)
        self._write_record(journal_record("offsets", self.history.group, at, topics=topics, verdicts={}))
