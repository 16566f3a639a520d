"""What became of one group's rebalances: followed from plan to plan, for metrics, the page and traces.

A queue's handover begins when it is taken from its holder, and is over when its next owner says that it obeys the
document that grants it. What was under way when we began to look is not counted: nobody knows since when.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rota.documents import Assignment
from rota.kube.shown import Rebalance
from rota.model import Holder, Queue, Reason
from rota.planner import Plan

KEPT = 20  # rebalances


class Handover(NamedTuple):
    """A queue that has changed hands; times are seconds on the loop's clock."""

    queue: Queue
    before: Holder | None
    after: Holder
    revoked: float
    granted: float
    obeyed: float
    forced: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.obeyed - self.revoked


class News(NamedTuple):
    """What is to be counted."""

    moved: int = 0
    handovers: tuple[Handover, ...] = ()
    ended: Rebalance | None = None
    held: Reason | None = None  # what holds back queues since just now


@dataclass
class _Open:
    """A queue that is under way."""

    before: Holder | None
    revoked: float
    after: Holder | None = None
    generation: int = 0  # that grants it
    granted: float = 0.0
    forced: bool = False


@dataclass
class Tally:
    """What is known of one group's past; `take` follows what is."""

    plan: Plan = field(default_factory=Plan)
    rebalances: deque[Rebalance] = field(default_factory=lambda: deque(maxlen=KEPT))  # newest first
    unowned: float = 0.0  # queue-seconds
    contested: float = 0.0
    _document: Assignment | None = None
    _open: dict[Queue, _Open] = field(default_factory=dict)
    _longest: float = 0.0  # of the handovers of this rebalance
    _at: float | None = None

    def take(self, plan: Plan, document: Assignment | None, obeyed: Mapping[Holder, int], now: float) -> News:
        """Go on from a plan, the document that stands after it, and the generations that members say they obey."""
        self.wait(now)
        before, self.plan = self.plan, replace(plan, document=None, data={}, records=())
        moved, forced = self._follow(document, now) if document else (0, 0)
        over = tuple(self._over(obeyed, now))
        self._longest = max([self._longest, *(it.seconds for it in over if it.before)])
        held = plan.held.reason if plan.held else None
        news = held if held != (before.held.reason if before.held else None) else None
        return News(moved, over, self._rebalance(plan, forced), None if news is Reason.NOTHING_WOULD_CHANGE else news)

    def wait(self, now: float) -> None:
        """Let time pass: what nobody works, and what two may work, lasts on."""
        seconds, self._at = now - (now if self._at is None else self._at), now
        self.unowned += seconds * self.plan.status.get("unownedQueues", 0)
        self.contested += seconds * (len(self._document.forced) if self._document else 0)

    def oldest(self, now: float) -> float:
        """Return for how long the handover has been under way that began first."""
        return max((now - it.revoked for it in self._open.values() if it.before), default=0.0)

    def _follow(self, document: Assignment, now: float) -> tuple[int, int]:
        """Note what a document changes; return how many queues it gives to others than had them, and by force."""
        last, self._document = self._document, document
        if last is None or last.generation == document.generation:
            return 0, 0
        moved, forced, owned, was = 0, 0, _owners(document), _owners(last)
        for queue, release in document.releasing.items():
            if queue not in last.releasing or last.releasing[queue].since != release.since:
                self._open[queue] = _Open(release.holder, now)
        for queue, owner in owned.items():
            holder = was.get(queue) or (last.releasing[queue].holder if queue in last.releasing else None)
            if holder != owner:
                moved += holder is not None
                it = self._open.setdefault(queue, _Open(holder, now))
                it.after, it.generation, it.granted = owner, document.generation, now
                it.forced = document.forced.get(queue) == document.generation
                forced += it.forced
            elif queue in self._open and self._open[queue].after is None:
                del self._open[queue]  # it went back to him who had it
        for queue in self._open.keys() - owned.keys() - document.releasing.keys():
            del self._open[queue]
        return moved, forced

    def _over(self, obeyed: Mapping[Holder, int], now: float) -> Iterable[Handover]:
        """Yield the handovers that are over: a member has said that it obeys what grants it the queue."""
        for queue, it in list(self._open.items()):
            if it.after and obeyed.get(it.after, 0) >= it.generation:
                del self._open[queue]
                yield Handover(queue, it.before, it.after, it.revoked, it.granted, now, it.forced)

    def _rebalance(self, plan: Plan, forced: int) -> Rebalance | None:
        """Carry the group's last rebalance on; return it if it has just ended, and we saw it begin."""
        told = plan.status.get("lastRebalance")
        if not told:
            return None
        last = self.rebalances[0] if self.rebalances else None
        if last is None or last.at != told["at"]:
            self._longest = 0.0
            why: Mapping[str, Any] = next((it for it in plan.records if it.get("kind") == "plan"), {})
            generation = why.get("generation", plan.status.get("generation", 0))
            last = Rebalance(told["reason"], str(why.get("message", "")), told["at"], generation)
            self.rebalances.appendleft(last)
            if "seconds" in told and not why:  # it was over before we looked
                self.rebalances[0] = _now(last, told, 0, None)
                return None
        ended = last.seconds is None and "seconds" in told
        self.rebalances[0] = _now(last, told, last.forced + forced, round(self._longest, 3) if ended else last.longest)
        return self.rebalances[0] if ended else None


def _now(it: Rebalance, told: Mapping[str, Any], forced: int, longest: float | None) -> Rebalance:
    return Rebalance(it.reason, it.message, it.at, it.generation, told["moved"], forced, told.get("seconds"), longest)


def _owners(document: Assignment) -> dict[Queue, Holder]:
    owned: dict[Queue, Holder] = {}
    for name, share in document.members.items():
        owned |= dict.fromkeys(share.queues, Holder(name, share.uid))
    return owned
