"""Replay of a history that writes the journal an operator would write."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from rota.documents import Assignment
from rota.model import Holder, Queue
from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.replay.simulated_members import SimulatedMember
from rota.planner import Plan, owners_record
from rota.planner.record import holders
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.timestamps import format_time

HOUR, MINUTE, MOMENT = 3600.0, 60.0, 0.001

Line = Mapping[str, Any]


class JournalingReplay(Replay):
    """Replays a history under the policies in force; `write` gets each record. All queues' ends start at `offset`."""

    def __init__(self, story: GroupHistory, write: Callable[[Line], None], offset: int = 1_000_000) -> None:
        super().__init__(story, None, ReplayMetrics(story))
        self._write = write
        self._last: Plan | None = None
        self._given: dict[Queue, tuple[Holder, int]] = {}  # grants not obeyed yet: owner, generation
        self._began = (0, 0)  # of the current rebalance: first generation, number of forced queues
        self._columns = [
            (topic, broker, [queue.id for queue in queues])
            for (topic, broker), queues in groupby(story.queues, key=lambda queue: (queue.topic, queue.broker))
        ]
        self._last_offsets = np.full(len(story.queues), float(offset))
        self._looked = story.begins

    def run(self) -> None:
        """Replay to the end of the history; write `offsets` every minute, and `owners` every hour."""
        begins, ends = self.story.begins, self.story.ends
        for minute in range(int((ends - begins) // MINUTE) + 1):
            # The last sample is taken just before the end, where a new hour may start that has no other records.
            self.at(min(begins + minute * MINUTE, ends - MOMENT), self._look_at_queues)
        hour = begins - begins % HOUR + HOUR
        while hour < ends:
            self.at(hour, self._whole)
            hour += HOUR
        super().run()

    def told(self, decided: Plan, before: Assignment) -> None:
        """Write the records of a plan, and of a rebalance that it completes."""
        for line in decided.records:
            self._write(line)
        if decided.document:
            self._follow(before, decided.document)
        first, self._last = self._last is None, decided
        if first:
            self._whole()
        self._ended(decided)

    def _follow(self, old: Assignment, new: Assignment) -> None:
        previous = holders(old)
        for queue, holder in self.owned.items():
            if previous.get(queue) != holder:
                self._given[queue] = (holder, new.generation)

    def _ended(self, decided: Plan) -> None:
        """Write the `rebalance` record if the plan's status reports a completed rebalance."""
        last, at = decided.status.get("lastRebalance"), format_time(self.now)
        if last is None:
            return
        generation, forced = self._began
        if last["at"] == at and decided.document:
            generation, forced = decided.document.generation, 0
        if decided.document:
            forced += sum(since == decided.document.generation for since in decided.document.forced.values())
        self._began = (generation, forced)
        if "seconds" in last and generation:
            facts = {"reason": last["reason"], "began": last["at"], "moved": last["moved"], "seconds": last["seconds"]}
            facts |= {"outcome": "Forced" if forced else "Settled", "forced": forced}
            self._write(journal_record("rebalance", self.story.group, at, generation=generation, **facts))
            self._began = (0, 0)

    def obeyed(self, body: SimulatedMember) -> None:
        """Write `obeyed` records for the grants that a member now follows."""
        by_generation: defaultdict[int, list[Queue]] = defaultdict(list)
        member = body.holder
        pending = [(queue, since) for queue, (holder, since) in self._given.items() if holder == member]
        for queue, generation in pending:
            if generation <= body.generation:
                del self._given[queue]
                by_generation[generation].append(queue)
        for generation, queues in sorted(by_generation.items()):
            facts = {"generation": generation, "member": body.name, "uid": body.uid, "queues": to_ranges(queues)}
            self._write(journal_record("obeyed", self.story.group, format_time(self.now), **facts))

    def _whole(self) -> None:
        if self._last:
            self._write(owners_record(self.snapshot(), self._last, self.document, self.story.spec, self.now))

    def _look_at_queues(self) -> None:
        fluid = self.figures.fluid
        self._last_offsets += (self.now - self._looked) * fluid.rates(max(self._looked, self.story.begins))
        self._looked = self.now
        ends = np.floor(self._last_offsets)
        done = np.maximum(ends - np.ceil(fluid.lag), 0.0)
        last, committed = ends.astype(int).tolist(), done.astype(int).tolist()
        topics: dict[str, dict[str, Any]] = {}
        place = 0
        for topic, broker, ids in self._columns:
            rows = slice(place, place + len(ids))
            place += len(ids)
            columns = {"ids": ids, "first": [0] * len(ids), "last": last[rows], "committed": committed[rows]}
            topics.setdefault(topic, {})[broker] = columns
        self._write(journal_record("offsets", self.story.group, format_time(self.now), topics=topics, verdicts={}))
