"""A replay that keeps a journal, as the operator would."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from rota.documents import Assignment
from rota.model import Holder, Queue
from rota.pipeline.replay.group_history import Story
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import Figures
from rota.pipeline.replay.simulated_members import Body
from rota.planner import Plan, beginning
from rota.planner.record import holders
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.timestamps import format_time

HOUR, MINUTE, MOMENT = 3600.0, 60.0, 0.001

Line = Mapping[str, Any]


class Chronicle(Replay):
    """A story as it happened, under the policies that were in force; `write` takes every record."""

    def __init__(self, story: Story, write: Callable[[Line], None], offset: int = 1_000_000) -> None:
        """Begin with queues that hold some messages already."""
        super().__init__(story, None, Figures(story))
        self._write = write
        self._last: Plan | None = None
        self._given: dict[Queue, tuple[Holder, int]] = {}  # to whom, by which document, and not obeyed yet
        self._began = (0, 0)  # the present rebalance's first generation, and how many were forced in it
        self._columns = [
            (topic, broker, [queue.id for queue in some])
            for (topic, broker), some in groupby(story.queues, key=lambda queue: (queue.topic, queue.broker))
        ]
        self._last_offsets = np.full(len(story.queues), float(offset))
        self._looked = story.begins

    def run(self) -> None:
        """Play it to its end, with a look a minute and everything an hour."""
        begins, ends = self.story.begins, self.story.ends
        for minute in range(int((ends - begins) // MINUTE) + 1):
            # The last one a moment earlier: at the end itself another hour may begin, of which nothing is told.
            self.at(min(begins + minute * MINUTE, ends - MOMENT), self._look_at_queues)
        hour = begins - begins % HOUR + HOUR
        while hour < ends:
            self.at(hour, self._whole)
            hour += HOUR
        super().run()

    def told(self, decided: Plan, before: Assignment) -> None:
        """Write down what a plan has to tell, and what it says of the rebalance before."""
        for line in decided.records:
            self._write(line)
        if decided.document:
            self._follow(before, decided.document)
        first, self._last = self._last is None, decided
        if first:
            self._whole()
        self._ended(decided)

    def _follow(self, before: Assignment, after: Assignment) -> None:
        was = holders(before)
        for queue, holder in self.owned.items():
            if was.get(queue) != holder:
                self._given[queue] = (holder, after.generation)

    def _ended(self, decided: Plan) -> None:
        """Say what a rebalance came to that is over."""
        told, at = decided.status.get("lastRebalance"), format_time(self.now)
        if told is None:
            return
        generation, forced = self._began
        if told["at"] == at and decided.document:
            generation, forced = decided.document.generation, 0
        if decided.document:
            forced += sum(it == decided.document.generation for it in decided.document.forced.values())
        self._began = (generation, forced)
        if "seconds" in told and generation:
            facts = {"reason": told["reason"], "began": told["at"], "moved": told["moved"], "seconds": told["seconds"]}
            facts |= {"outcome": "Forced" if forced else "Settled", "forced": forced}
            self._write(journal_record("rebalance", self.story.group, at, generation=generation, **facts))
            self._began = (0, 0)

    def obeyed(self, body: Body) -> None:
        """Write down that a member works what it was given."""
        mine: defaultdict[int, list[Queue]] = defaultdict(list)
        it = body.holder
        given = [(queue, since) for queue, (holder, since) in self._given.items() if holder == it]
        for queue, generation in given:
            if generation <= body.generation:
                del self._given[queue]
                mine[generation].append(queue)
        for generation, queues in sorted(mine.items()):
            facts = {"generation": generation, "member": body.name, "uid": body.uid, "queues": to_ranges(queues)}
            self._write(journal_record("obeyed", self.story.group, format_time(self.now), **facts))

    def _whole(self) -> None:
        if self._last:
            self._write(beginning(self.snapshot(), self._last, self.document, self.story.spec, self.now))

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
            here = slice(place, place + len(ids))
            place += len(ids)
            columns = {"ids": ids, "first": [0] * len(ids), "last": last[here], "committed": committed[here]}
            topics.setdefault(topic, {})[broker] = columns
        self._write(journal_record("offsets", self.story.group, format_time(self.now), topics=topics, verdicts={}))
