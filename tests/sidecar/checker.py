"""A neutral judge of a fleet: it reads what was sent, delivered and decided, and names every promise that was broken.

It knows nothing of how a sidecar works, only of docs/handover.md's invariants. What is seen of the two ends of a
thing is on the safe side: an app notes a delivery's end before it answers, an operator notes a grant before it writes
it and a release after it read it, and an offset is noted after it was asked for. All times are one machine's
monotonic clock.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

from rota.model import Queue

DEAD, NOT_FOUND = 422, 404
KILLS = {"sidecar", "ended"}  # facts after which a sidecar sends no more
ENDS = {"app", "stopped", "ended"}  # facts after which an app works no more on what it has
SKEW = 0.5  # seconds: requests that are sent side by side may be read in another order, or after their sidecar's end
KEPT = 15.0  # what was committed longer ago is on the broker's disk: it writes that every 5 s, and is told as often


class Sent(NamedTuple):
    """What a producer noted of a message; one that was not acknowledged may be there or not."""

    number: int
    queue: Queue
    at: float
    acked: bool = True


class Delivery(NamedTuple):
    """What an app noted of one message of a request; without an end it died, or was never to answer."""

    begin: float
    end: float | None
    member: str
    queue: Queue
    offset: int
    number: int
    attempt: int = 1
    generation: int = 1
    status: int | None = 204
    together: int = 1  # messages in the request
    id: str = ""

    @property
    def done(self) -> bool:
        """Whether the app said that it is done."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def dead(self) -> bool:
        """Whether the app said that it never will be; of several messages one is to blame, and nobody knows which."""
        return self.status == DEAD and self.together == 1


class Fact(NamedTuple):
    """What was decided about the fleet, done to it, or heard of it.

    given, released: a member's queues · forced: taken from a member that is not heard · settled: it is heard again ·
    heard: a report's generation · apart, together: it reaches no broker, and does again · sidecar, app: killed ·
    stopped: its app ended that was asked to, which excuses nothing that comes twice · left:
    a sidecar ended that was asked to, and remembers nothing when it begins again · ended: the whole pod · reset: a
    queue's offset was set · broker: killed, whatever it was told last is forgotten
    """

    at: float
    kind: str
    member: str = ""
    queues: frozenset[Queue] = frozenset()
    generation: int = 0


class Commit(NamedTuple):
    """What a broker said of where the group is with a queue."""

    at: float
    queue: Queue
    offset: int


@dataclass(kw_only=True)
class Story:
    """Everything that was noted."""

    sent: Iterable[Sent] = ()
    delivered: Iterable[Delivery] = ()
    facts: Iterable[Fact] = ()
    commits: Iterable[Commit] = ()
    orderly: bool = False
    timeout: float = 30.0  # after which a sidecar gives up waiting for an answer
    at_once: int = 16  # messages that may be at one app
    dead: frozenset[int] = frozenset()  # numbers that were seen among the dead letters


def violations(story: Story) -> list[str]:
    """Return a sentence for each promise that was broken."""
    return [*_Judge(story).all()]


@dataclass
class _Judge:
    story: Story
    by_queue: dict[Queue, list[Delivery]] = field(default_factory=lambda: defaultdict(list))
    by_member: dict[str, list[Delivery]] = field(default_factory=lambda: defaultdict(list))
    by_number: dict[int, list[Delivery]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.facts = sorted(self.story.facts)
        for it in sorted(self.story.delivered, key=lambda it: it.begin):
            self.by_queue[it.queue].append(it)
            self.by_member[it.member].append(it)
            self.by_number[it.number].append(it)
        self.spans = _spans(self.facts)
        self.contested = _contested(self.facts)

    def all(self) -> Iterator[str]:
        yield from self.lost()
        yield from self.twice()
        yield from self.strangers()
        yield from self.overlaps()
        yield from self.passed()
        yield from self.out_of_order()
        yield from self.steps_back()

    # 3: at least once, and offsets.

    def lost(self) -> Iterator[str]:
        """What was sent is delivered, until somebody is done with it."""
        for sent in self.story.sent:
            if not sent.acked:
                continue
            found = self.by_number.get(sent.number, [])
            if not found:
                yield f"{sent.number} was sent to {sent.queue} and never delivered"
            elif sent.number not in self.story.dead and not any(it.done or it.dead for it in found):
                yield f"{sent.number} was delivered from {found[-1].queue} and never done"

    def passed(self) -> Iterator[str]:
        """Offsets that are committed lie behind nothing unfinished, and do not go back."""
        finished = {queue: self._finished(of) for queue, of in self.by_queue.items()}
        before: dict[Queue, Commit] = {}
        for commit in sorted(self.story.commits):
            if self._between("reset", commit.queue, -inf, commit.at):
                continue
            last = before.get(commit.queue)
            if last and commit.offset < last.offset:
                yield f"the offset of {commit.queue} went back from {last.offset} to {commit.offset}"
            before[commit.queue] = commit
            for offset, when in finished.get(commit.queue, {}).items():
                if offset < commit.offset and when > commit.at:
                    yield f"{commit.offset} was committed of {commit.queue}, but {offset} was not finished"

    def _finished(self, deliveries: list[Delivery]) -> dict[int, float]:
        """Return since when the queue's messages are finished as far as it is concerned."""
        finished: dict[int, float] = {}
        for it in deliveries:
            finished[it.offset] = min(finished.get(it.offset, inf), self._finishes(it))
        return finished

    def _finishes(self, it: Delivery) -> float:
        if it.number in self.story.dead:
            return it.begin
        answered = it.done or it.dead
        if self.story.orderly:  # tried again in place
            return it.end if answered and it.end is not None else inf
        if it.status in {NOT_FOUND, DEAD} and not answered:  # tried again, or each alone
            return self._unnoted(it)
        given_up = it.begin + self.story.timeout  # then it goes to the retry topic, even if an answer comes later
        return min(self._earliest_end(it), given_up)

    def _earliest_end(self, it: Delivery) -> float:
        """Return when a delivery was over at the earliest: the end of a pod is noted some time after its app's."""
        until = self._until(it)
        if it.end is not None or until == it.begin + self.story.timeout:
            return until
        notes = (note for other in self.by_member[it.member] for note in (other.begin, other.end) if note is not None)
        return max(note for note in notes if note <= until)

    def _unnoted(self, it: Delivery) -> float:
        """Return when an owner's app died that may have had it once more, if a copy of it came by the retry topic."""
        if all(other.attempt <= it.attempt for other in self.by_number[it.number]):
            return inf
        deaths = (fact for fact in self.facts if fact.kind == "app" and fact.at >= it.begin)
        return min((fact.at for fact in deaths if self._owned(fact.member, it.queue, fact.at)), default=inf)

    def _owned(self, member: str, queue: Queue, at: float) -> bool:
        return any(begin <= at <= end for begin, end in self.spans.get((member, queue), []))

    # 4: nothing twice without a cause.

    def twice(self) -> Iterator[str]:
        """What is done is delivered again only for a cause, and what an app's death repeats was at the app."""
        deaths: dict[Fact, int] = defaultdict(int)
        for number, found in self.by_number.items():
            for earlier, later in pairwise(found):
                if self._may_be_again(earlier, later) or self._copied(found, later) or self._fell_back(found, later):
                    continue
                death = self._death(found, earlier, later)
                if death is None:
                    yield f"{number} was delivered twice: {_told(earlier)}, and {_told(later)}"
                else:
                    deaths[death] += 1
        for death, count in deaths.items():
            if count > self.story.at_once:
                yield f"the end of {death.member}'s app repeated {count} messages; {self.story.at_once} were in flight"

    def _may_be_again(self, earlier: Delivery, later: Delivery) -> bool:
        gave_up = earlier.end is None or earlier.end - earlier.begin >= self.story.timeout
        if gave_up or not (earlier.done or earlier.dead):
            return True
        return (
            any(self._in_dispute(earlier.queue, it) for it in (earlier, later))
            or self._between("reset", earlier.queue, earlier.begin, later.begin)
            or self._cut_short(earlier, later)
            or self._forgotten(earlier, later)
        )

    def _cut_short(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether its sidecar was killed, overruled or cut off, and was not known to have committed it before."""
        for fact in self._killed(earlier, later, {"sidecar", "ended", "forced"}) + self._apart(earlier, later):
            if fact.kind == "forced" and earlier.queue not in fact.queues:
                continue
            # Who is cut off commits again once it is not, and others do meanwhile.
            until = later.begin if fact.kind == "apart" else fact.at
            known = [it.offset for it in self.story.commits if it.queue == earlier.queue and it.at < until]
            if earlier.offset >= max(known, default=0):
                return True
        return False

    def _forgotten(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether the broker was killed before it had kept it, and was asked by one who did not know better."""
        end = earlier.begin if earlier.end is None else earlier.end
        killed = [fact.at for fact in self.facts if fact.kind == "broker" and end <= fact.at <= later.begin]
        knows = earlier.member == later.member and not self._gave_up(earlier, later)
        return not knows and bool(killed) and killed[0] - end < KEPT

    def _gave_up(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether its sidecar ended in good order in between, or gave the queue back: then it knows nothing of it."""
        given_up = self._killed(earlier, later, {"left", "released"})
        return any(fact.kind == "left" or earlier.queue in fact.queues for fact in given_up)

    def _copied(self, found: list[Delivery], later: Delivery) -> bool:
        """Whether it was sent to the retry topic by one who died, or at a broker that died, before that was known."""
        for it in found:
            if it.done or it.dead or it.attempt >= later.attempt:
                continue
            for fact in self.facts:
                died = fact.kind == "broker" or (fact.kind in KILLS and fact.member == it.member)
                if died and _is_between(fact, it, later):
                    return True
        return False

    def _fell_back(self, found: list[Delivery], later: Delivery) -> bool:
        """Whether it still lay where it was not committed when its sidecar was killed, though a copy of it was done."""
        return any(self._cut_short(it, later) for it in _there(found, later))

    def _death(self, found: list[Delivery], earlier: Delivery, later: Delivery) -> Fact | None:
        """Return the end of an app that had it before, or that had it where it still lay though its copy was done."""
        deaths = (self._killed(it, later, {"app"}) for it in [earlier, *_there(found, later)])
        return next((fact for facts in deaths for fact in facts), None)

    def _killed(self, earlier: Delivery, later: Delivery, kinds: set[str]) -> list[Fact]:
        return [
            fact
            for fact in self.facts
            if fact.kind in kinds and fact.member == earlier.member and _is_between(fact, earlier, later)
        ]

    def _apart(self, earlier: Delivery, later: Delivery) -> list[Fact]:
        """Return since when its sidecar reached no broker, if it was done with it before it did again."""
        of_it = [fact for fact in self.facts if fact.member == earlier.member]
        back = [fact.at for fact in of_it if fact.kind == "together" and fact.at <= earlier.begin]
        apart = [fact for fact in of_it if fact.kind == "apart" and fact.at <= later.begin]
        return [fact for fact in apart if not any(fact.at <= at for at in back)]

    def _between(self, kind: str, queue: Queue, begin: float, end: float) -> bool:
        return any(it.kind == kind and queue in it.queues and begin <= it.at <= end for it in self.facts)

    # 1: one owner.

    def strangers(self) -> Iterator[str]:
        """Who delivers from a queue owns it, from before the first delivery until after the last."""
        for queue, deliveries in self.by_queue.items():
            for it in deliveries:
                end = it.begin if it.end is None else it.end
                owned = self.spans.get((it.member, queue), [])
                if not (any(a <= it.begin and end <= b for a, b in owned) or self._in_dispute(queue, it)):
                    yield f"{it.member} delivered from {queue} without owning it: {_told(it)}"

    def overlaps(self) -> Iterator[str]:
        """No two members deliver from one queue at a time."""
        for queue, deliveries in self.by_queue.items():
            going: list[Delivery] = []
            for it in deliveries:
                going = [other for other in going if self._until(other) > it.begin]
                for other in going:
                    disputed = self._in_dispute(queue, it) or self._in_dispute(queue, other)
                    if other.member != it.member and (self.story.orderly or not disputed):
                        yield f"{queue} was delivered by two members at a time: {_told(other)}, and {_told(it)}"
                going.append(it)

    def _until(self, it: Delivery) -> float:
        """Return when a delivery was over: at its end, with its app, or when it was waited for no more."""
        if it.end is not None:
            return it.end
        deaths = (fact.at for fact in self.facts if fact.kind in ENDS and fact.member == it.member)
        return min(min((at for at in deaths if at >= it.begin), default=inf), it.begin + self.story.timeout)

    def _in_dispute(self, queue: Queue, it: Delivery) -> bool:
        end = inf if it.end is None else it.end
        return any(a <= end and it.begin <= b for a, b in self.contested.get(queue, []))

    # 5: order.

    def out_of_order(self) -> Iterator[str]:
        """In Orderly groups a message begins when all before it are finished, and nothing runs beside it."""
        for queue, deliveries in self.by_queue.items() if self.story.orderly else ():
            finished = sorted(self._finished(deliveries).items())
            offsets = [offset for offset, _ in finished]
            latest = -inf  # of all that lie before
            latests = [latest := max(latest, when) for _, when in finished]
            firsts = [*deliveries[:1], *(it for one, it in pairwise(deliveries) if not _one_request(one, it))]
            for it in firsts:
                place = bisect_left(offsets, it.offset)
                if place and latests[place - 1] > it.begin:
                    yield f"{queue} is out of order: one before was not finished when this began: {_told(it)}"
            for one, other in pairwise(deliveries):
                if _one_request(one, other):
                    if other.offset < one.offset:
                        yield f"{queue} is out of order within one request: {_told(one)}, and {_told(other)}"
                    continue
                if one.end is not None and other.begin < min(one.end, one.begin + self.story.timeout):
                    yield f"{queue} delivered two messages at a time: {_told(one)}, and {_told(other)}"

    # 6: generations.

    def steps_back(self) -> Iterator[str]:
        """No member goes back to an earlier generation, neither in what it delivers nor in what it reports."""
        for member, deliveries in self.by_member.items():
            ended = sorted((it.end, it.generation) for it in deliveries if it.end is not None)
            ends, highest = [end for end, _ in ended], 0
            highests = [0, *(highest := max(highest, generation) for _, generation in ended)]
            for it in deliveries:
                before = highests[bisect_left(ends, it.begin - SKEW)]
                if it.generation < before:
                    yield f"{member} went back from generation {before}: {_told(it)}"
        heard: dict[str, int] = {}
        for fact in self.facts:
            if fact.kind == "heard":
                if fact.generation < heard.get(fact.member, 0):
                    yield f"{fact.member} reported generation {fact.generation} after {heard[fact.member]}"
                heard[fact.member] = fact.generation


Spans = dict[tuple[str, Queue], list[tuple[float, float]]]


def _spans(facts: list[Fact]) -> Spans:
    """Return from when until when a member owned a queue."""
    spans: Spans = defaultdict(list)
    for fact in facts:
        if fact.kind == "given":
            for queue in fact.queues:
                owned = spans[fact.member, queue]
                if not owned or owned[-1][1] < inf:
                    owned.append((fact.at, inf))
        elif fact.kind in {"released", "forced", "ended"}:
            for (member, queue), owned in spans.items():
                named = queue in fact.queues or fact.kind == "ended"
                if member == fact.member and named and owned[-1][1] == inf:
                    owned[-1] = owned[-1][0], fact.at
    return spans


def _contested(facts: list[Fact]) -> dict[Queue, list[tuple[float, float]]]:
    """Return when somebody who was not heard may have gone on with a queue that another one has."""
    contested: dict[Queue, list[tuple[float, float]]] = defaultdict(list)
    for fact in facts:
        if fact.kind == "forced":
            over = [it.at for it in facts if it.kind in {"settled", "ended"} and it.member == fact.member]
            for queue in fact.queues:
                contested[queue].append((fact.at, min((at for at in over if at > fact.at), default=inf)))
    return contested


def _is_between(fact: Fact, earlier: Delivery, later: Delivery) -> bool:
    """Whether it happened between two deliveries; an app may read a request when its sidecar was killed already."""
    begin = earlier.begin - SKEW if fact.kind in KILLS else earlier.begin
    return begin <= fact.at <= later.begin


def _there(found: list[Delivery], later: Delivery) -> list[Delivery]:
    """Return the deliveries before of what lies at the very same place."""
    return [it for it in found if (it.queue, it.offset) == (later.queue, later.offset) and it.begin < later.begin]


def _one_request(one: Delivery, other: Delivery) -> bool:
    return other.together > 1 and (one.member, one.begin, one.end) == (other.member, other.begin, other.end)


def _told(it: Delivery) -> str:
    end = "…" if it.end is None else f"{it.end:.3f}"
    return (
        f"{it.member} {it.begin:.3f}-{end} {it.queue}@{it.offset} ({it.number}, attempt {it.attempt}, "
        f"generation {it.generation}, {it.status})"
    )
