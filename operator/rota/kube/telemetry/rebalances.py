"""What became of one group's rebalances: followed from plan to plan, for metrics, the page and traces.

A queue's handover begins when it is taken from its holder, and is over when its next owner says that it obeys the
document that grants it. What was under way when we began to look is not counted: nobody knows since when.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Any, NamedTuple

from rota.documents import Assignment
from rota.kube.state.rebalance import Rebalance
from rota.model import Holder, Queue, Reason
from rota.planner import Plan
from rota.planner.record import holders, owners

KEPT = 20  # rebalances
SLOWEST = 200  # handovers that are kept of one rebalance


class Handover(NamedTuple):
    """A queue that has changed hands; times are seconds on the loop's clock."""

    queue: Queue
    before: Holder | None
    after: Holder
    revoked: float
    granted: float
    obeyed: float
    forced: bool
    generation: int = 0  # of the document that granted it

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.obeyed - self.revoked


class Past(NamedTuple):
    """A rebalance that has ended, also one that began before we looked: what a trace tells of it."""

    rebalance: Rebalance
    slowest: tuple[Handover, ...]  # the forced ones, and those that took longest
    handed: int  # how many there were


class News(NamedTuple):
    """What is to be counted."""

    moved: int = 0
    handovers: tuple[Handover, ...] = ()
    ended: Rebalance | None = None
    held: Reason | None = None  # what holds back queues since just now
    past: Past | None = None


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
    _began: bool = False  # whether we saw this rebalance begin
    _longest: float = 0.0  # of its handovers
    _slowest: list[Handover] = field(default_factory=list)  # of the same
    _handed: int = 0
    _at: float | None = None

    def take(self, plan: Plan, document: Assignment | None, obeyed: Mapping[Holder, int], now: float) -> News:
        """Go on from a plan, the document that stands after it, and the generations that members say they obey."""
        begun = self._at is not None
        self.wait(now)
        before, self.plan = self.plan, replace(plan, document=None, data={}, records=())
        moved, forced = self._follow(document, now) if document else (0, 0)
        over = tuple(self._over(obeyed, now))
        self._longest = max([self._longest, *(it.seconds for it in over if it.before)])
        held = plan.held.reason if plan.held else None
        news = held if begun and held != (before.held.reason if before.held else None) else None
        past = self._rebalance(plan, forced, over)
        ended = past.rebalance if past and self._began else None
        return News(moved, over, ended, None if news is Reason.NOTHING_WOULD_CHANGE else news, past)

    def wait(self, now: float) -> None:
        """Let time pass: what nobody works, and what two may work, lasts on."""
        seconds, self._at = now - (now if self._at is None else self._at), now
        self.unowned += seconds * self.plan.status.get("unownedQueues", 0)
        self.contested += seconds * (len(self._document.forced) if self._document else 0)

    def seen(self, now: float) -> "Tally":
        """Return it as it is now, for who reads it while it goes on."""
        self.wait(now)
        return replace(self, rebalances=self.rebalances.copy(), _open=dict(self._open))

    def oldest(self, now: float) -> float:
        """Return for how long the handover has been under way that began first."""
        return max((now - it.revoked for it in self._open.values() if it.before), default=0.0)

    def _follow(self, document: Assignment, now: float) -> tuple[int, int]:
        """Note what a document changes; return how many queues it gives to others than had them, and by force."""
        last, self._document = self._document, document
        if last is None or last.generation == document.generation:
            return 0, 0
        if document.generation != last.generation + 1:  # a record or a group made anew, or others wrote meanwhile
            self._open.clear()
            if document.generation < last.generation:
                self.rebalances.clear()
            return 0, 0
        owned, was = owners(document), holders(last)
        for queue, release in document.releasing.items():
            if queue not in last.releasing:
                self._open[queue] = _Open(release.holder, now)
        given = {queue: owner for queue, owner in owned.items() if was.get(queue) != owner}
        forced = {queue for queue in given if document.forced.get(queue) == document.generation}
        for queue, owner in given.items():
            if queue in self._open or queue not in last.releasing:  # else it was under way before we looked
                it = self._open.setdefault(queue, _Open(was.get(queue), now))
                it.after, it.generation, it.granted, it.forced = owner, document.generation, now, queue in forced
        # What went back to whom had it is not under way any more, and neither is what nobody shall have.
        self._open = {
            queue: it for queue, it in self._open.items() if queue in (owned if it.after else document.releasing)
        }
        return len(given.keys() & was.keys()), len(forced)

    def _over(self, obeyed: Mapping[Holder, int], now: float) -> Iterable[Handover]:
        """Yield the handovers that are over: a member has said that it obeys what grants it the queue."""
        for queue, it in list(self._open.items()):
            if it.after and obeyed.get(it.after, 0) >= it.generation:
                del self._open[queue]
                yield Handover(queue, it.before, it.after, it.revoked, it.granted, now, it.forced, it.generation)

    def _rebalance(self, plan: Plan, forced: int, over: tuple[Handover, ...]) -> Past | None:
        """Carry the group's last rebalance on; return it if it has just ended."""
        told = plan.status.get("lastRebalance")
        if not told:
            return None
        last = self.rebalances[0] if self.rebalances else None
        if last is None or last.at != told["at"]:
            self._longest, self._slowest, self._handed = 0.0, [], 0
            began = [it for it in plan.records if it.get("kind") == "plan" and it.get("at") == told["at"]]
            why: Mapping[str, Any] = began[0] if began else {}  # of another document it says nothing of this one
            self._began = bool(why)
            generation = why.get("generation", plan.status.get("generation", 0))
            last = Rebalance(told["reason"], str(why.get("message", "")), told["at"], generation)
            self.rebalances.appendleft(last)
            if "seconds" in told and not why:  # it was over before we looked
                self.rebalances[0] = _now(last, told, 0, None)
                return None
        if over:
            self._handed += len(over)
            self._slowest = nlargest(SLOWEST, [*self._slowest, *over], key=lambda it: (it.forced, it.seconds))
        ended = last.seconds is None and "seconds" in told
        longest = (round(self._longest, 3) or None) if ended else last.longest  # None: no queue changed hands
        self.rebalances[0] = _now(last, told, last.forced + forced, longest)
        if not ended:
            return None
        past, self._slowest = Past(self.rebalances[0], tuple(self._slowest), self._handed), []
        return past


def _now(it: Rebalance, told: Mapping[str, Any], forced: int, longest: float | None) -> Rebalance:
    return Rebalance(it.reason, it.message, it.at, it.generation, told["moved"], forced, told.get("seconds"), longest)
