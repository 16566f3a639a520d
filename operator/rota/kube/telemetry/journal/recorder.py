"""What the journal keeps besides what plans tell: what was obeyed, what rebalances came to, and who owns what.

The last is told when an operator begins to tell of a group, once an hour, and after each break in the generations.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rota.documents import Assignment
from rota.kube.reconcile.reconciler import Done
from rota.kube.telemetry.rebalances import News, Past
from rota.model import Queue
from rota.planner import Snapshot, beginning
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.redelivery import Cause, Reader, Redelivered
from rota.timestamps import format_time, parse_time

Line = Mapping[str, Any]
HOUR = len("2026-11-21T08")


class _Told(NamedTuple):
    hour: str
    generation: int


class Notes:
    """Of which groups it was told who owns what, and when."""

    def __init__(self) -> None:
        """Know of none."""
        self._told: dict[str, _Told] = {}

    def forget(self, known: Callable[[str], bool]) -> None:
        """Forget groups that are no more, or are somebody else's to tell of."""
        self._told = {group: it for group, it in self._told.items() if known(group)}

    def of(self, done: Done, news: News, now: float, snapshot: Callable[[], Snapshot]) -> Iterator[Line]:
        """Yield what a round of a group has to tell; `now` is the time of day."""
        group, at = done.group.spelled, format_time(now)
        yield from _obeyed(group, at, news)
        if news.past and (told := _rebalance(group, at, news.past)):
            yield told
        document, spec = done.group.record.document, done.group.wish.spec
        if document and spec and self._due(group, at[:HOUR], document):
            yield beginning(snapshot(), done.plan, document, spec, now)

    def _due(self, group: str, hour: str, document: Assignment) -> bool:
        last = self._told.get(group)
        self._told[group] = _Told(hour, document.generation)
        return last is None or last.hour != hour or _breaks(last.generation, document)


def _breaks(before: int, document: Assignment) -> bool:
    """Whether a document does not follow from the last one by what plans told of it."""
    if document.generation == before:
        return False
    return document.generation != before + 1 or document.barrier == document.generation


def _obeyed(group: str, at: str, news: News) -> Iterator[Line]:
    given: defaultdict[tuple[int, str, str], list[Queue]] = defaultdict(list)
    for it in news.handovers:
        given[it.generation, it.after.name, it.after.uid].append(it.queue)
    for (generation, member, uid), queues in sorted(given.items()):
        ranges = to_ranges(queues)
        yield journal_record("obeyed", group, at, generation=generation, member=member, uid=uid, queues=ranges)


def _rebalance(group: str, at: str, past: Past) -> Line | None:
    """Say what a rebalance came to; nothing, if nobody knows when it began."""
    it = past.rebalance
    if parse_time(it.at) is None or it.seconds is None:  # None in a status that a user edited
        return None
    told = {"reason": it.reason, "outcome": it.outcome, "began": it.at, "moved": it.moved, "forced": it.forced}
    return journal_record("rebalance", group, at, generation=it.generation, seconds=it.seconds, **told)


def redelivered(group: str, now: float, entries: Iterable[Redelivered]) -> Iterator[Line]:
    """Yield a line for what came again by one cause from one member to another; `now` is the time of day."""
    alike: defaultdict[tuple[Cause, bool, Reader, Reader], list[Redelivered]] = defaultdict(list)
    for entry in entries:
        alike[entry.cause, entry.is_estimate, entry.before, entry.after].append(entry)
    for (cause, is_estimate, before, after), some in sorted(alike.items()):
        yield journal_record(
            "redelivered",
            group,
            format_time(now),
            cause=str(cause),
            messages=sum(entry.messages for entry in some),
            estimate=is_estimate,
            **{"from": before.member, "fromUid": before.uid, "to": after.member, "toUid": after.uid},
            queues=to_ranges(entry.queue for entry in some),
        )
