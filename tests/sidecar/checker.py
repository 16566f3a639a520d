"""Checks a fleet's history of messages, deliveries and decisions, and describes each broken guarantee.

The checker knows nothing of the sidecar's code, only the invariants of docs/handover.md. Times are recorded on the safe
side: an app logs a delivery's end before it responds, the operator logs a grant before it writes it and a release after
it has read it, and an offset is logged after the broker returned it. All times are from one machine's monotonic clock.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from rota.model import Queue

DEAD = 422  # the response with which an app rejects a message for good
NOT_FOUND = 404
KILLS = {"sidecar", "ended"}  # facts after which a sidecar sends nothing
ENDS = {"app", "stopped", "ended"}  # facts after which an app processes no message that it has received
SKEW_SECONDS = 0.5  # concurrent requests may be read in another order, or after their sidecar's end
# The broker flushes commits every 5 s, and sidecars commit as often: an older commit survives the broker's crash.
FLUSH_SECONDS = 15.0


class Sent(NamedTuple):
    """Producer's record of a message; without an acknowledgement the broker may have stored it or not."""

    number: int
    queue: Queue
    at: float
    acked: bool = True


class Delivery(NamedTuple):
    """App's record of one message of a request; `end` is missing if the app died or never responded."""

    begin: float
    end: float | None
    member: str
    queue: Queue
    offset: int
    number: int
    attempt: int = 1
    generation: int = 1
    status: int | None = 204
    batch_size: int = 1  # messages in the request
    id: str = ""

    @property
    def done(self) -> bool:
        """Whether the app accepted the message."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def dead(self) -> bool:
        """Whether the app rejected the message for good; the response to a batch does not name the rejected message."""
        return self.status == DEAD and self.batch_size == 1


class Fact(NamedTuple):
    """A decision about the fleet, a fault injected into it, or a report read from it.

    granted, released: queues of a member · forced: queues granted elsewhere while their owner is unreachable · settled:
    that owner obeys again · reported: the generation of a report · disconnected, reconnected: the member reaches no
    broker, and reaches it again · sidecar, app: the process was killed · stopped: the app was asked to end and did,
    which excuses no duplicate · terminated: the sidecar was asked to end and did; its next process remembers nothing ·
    ended: the whole pod was killed · reset: a queue's offset was set by a user · broker: the broker was killed and lost
    its latest offsets
    """

    at: float
    kind: str
    member: str = ""
    queues: frozenset[Queue] = frozenset()
    generation: int = 0


class Commit(NamedTuple):
    """Committed offset of a queue, as read from its broker."""

    at: float
    queue: Queue
    offset: int


@dataclass(kw_only=True)
class FleetHistory:
    """Everything that was recorded of a fleet."""

    sent: Iterable[Sent] = ()
    delivered: Iterable[Delivery] = ()
    facts: Iterable[Fact] = ()
    commits: Iterable[Commit] = ()
    orderly: bool = False
    timeout: float = 30.0  # seconds after which a sidecar stops waiting for a response
    max_in_flight: int = 16  # messages that one app may have at once
    dead_letters: frozenset[int] = frozenset()  # numbers that were read from the dead-letter topic


def violations(history: FleetHistory) -> list[str]:
    """Return a sentence for each broken guarantee."""
    return [*_Checker(history).find_all()]


@dataclass
class _Checker:
    history: FleetHistory
    by_queue: dict[Queue, list[Delivery]] = field(default_factory=lambda: defaultdict(list))
    by_member: dict[str, list[Delivery]] = field(default_factory=lambda: defaultdict(list))
    by_number: dict[int, list[Delivery]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.facts = sorted(self.history.facts)
        for delivery in sorted(self.history.delivered, key=lambda delivery: delivery.begin):
            self.by_queue[delivery.queue].append(delivery)
            self.by_member[delivery.member].append(delivery)
            self.by_number[delivery.number].append(delivery)
        self.spans = _ownership_spans(self.facts)
        self.contested = _contested_spans(self.facts)

    def find_all(self) -> Iterator[str]:
        yield from self.find_lost()
        yield from self.find_duplicates()
        yield from self.find_deliveries_without_ownership()
        yield from self.find_overlaps()
        yield from self.find_wrong_commits()
        yield from self.find_order_violations()
        yield from self.find_generation_regressions()

    # At least once, and offsets.

    def find_lost(self) -> Iterator[str]:
        """Each acknowledged message is delivered until an app accepts or finally rejects it."""
        for sent in self.history.sent:
            if not sent.acked:
                continue
            deliveries = self.by_number.get(sent.number, [])
            if not deliveries:
                yield f"{sent.number} was sent to {sent.queue} and never delivered"
            elif sent.number not in self.history.dead_letters and not any(
                delivery.done or delivery.dead for delivery in deliveries
            ):
                yield f"{sent.number} was delivered from {deliveries[-1].queue} and never done"

    def find_wrong_commits(self) -> Iterator[str]:
        """No committed offset passes an unfinished message, and none goes back."""
        finished = {queue: self._finish_times(deliveries) for queue, deliveries in self.by_queue.items()}
        latest: dict[Queue, Commit] = {}
        for commit in sorted(self.history.commits):
            if self._has_fact("reset", commit.queue, -inf, commit.at):
                continue
            previous = latest.get(commit.queue)
            if previous and commit.offset < previous.offset:
                yield f"the offset of {commit.queue} went back from {previous.offset} to {commit.offset}"
            latest[commit.queue] = commit
            for offset, finished_at in finished.get(commit.queue, {}).items():
                if offset < commit.offset and finished_at > commit.at:
                    yield f"{commit.offset} was committed of {commit.queue}, but {offset} was not finished"

    def _finish_times(self, deliveries: list[Delivery]) -> dict[int, float]:
        """Return when each message of a queue was finished, by offset: from then on its offset may be committed."""
        finished: dict[int, float] = {}
        for delivery in deliveries:
            finished[delivery.offset] = min(finished.get(delivery.offset, inf), self._finish_time(delivery))
        return finished

    def _finish_time(self, delivery: Delivery) -> float:
        if delivery.number in self.history.dead_letters:
            return delivery.begin
        is_settled = delivery.done or delivery.dead
        if self.history.orderly:  # retried in place
            return delivery.end if is_settled and delivery.end is not None else inf
        if delivery.status in {NOT_FOUND, DEAD} and not is_settled:  # retried, or split into single messages
            return self._unlogged_attempt(delivery)
        timed_out = delivery.begin + self.history.timeout  # then it goes to the retry topic, despite a late response
        return min(self._earliest_end(delivery), timed_out)

    def _earliest_end(self, delivery: Delivery) -> float:
        """Return the earliest possible end of a delivery: a pod's end is recorded some time after its app's.

        An end that was not logged came at the earliest with the member's last log entry before the recorded end.
        """
        end = self._end_of(delivery)
        if delivery.end is not None or end == delivery.begin + self.history.timeout:
            return end
        times: list[float | None] = []
        for entry in self.by_member[delivery.member]:
            times += (entry.begin, entry.end)
        return max(time for time in times if time is not None and time <= end)

    def _unlogged_attempt(self, delivery: Delivery) -> float:
        """Return when an owner's app died that may have received the message without a log entry.

        Only a later attempt, a copy from the retry topic, shows that there was such a delivery.
        """
        if all(attempt.attempt <= delivery.attempt for attempt in self.by_number[delivery.number]):
            return inf
        deaths = (fact for fact in self.facts if fact.kind == "app" and fact.at >= delivery.begin)
        return min((fact.at for fact in deaths if self._owned(fact.member, delivery.queue, fact.at)), default=inf)

    def _owned(self, member: str, queue: Queue, at: float) -> bool:
        return any(begin <= at <= end for begin, end in self.spans.get((member, queue), []))

    # No duplicate without a cause.

    def find_duplicates(self) -> Iterator[str]:
        """A finished message is repeated only for a cause; an app's death repeats at most the messages in flight."""
        deaths: dict[Fact, int] = defaultdict(int)
        for number, deliveries in self.by_number.items():
            for earlier, later in pairwise(deliveries):
                if (
                    self._may_repeat(earlier, later)
                    or self._was_copied(deliveries, later)
                    or self._original_remained(deliveries, later)
                ):
                    continue
                death = self._app_death(deliveries, earlier, later)
                if death is None:
                    yield f"{number} was delivered twice: {_describe_both(earlier, later)}"
                else:
                    deaths[death] += 1
        in_flight = self.history.max_in_flight
        for death, count in deaths.items():
            if count > in_flight:
                yield f"the end of {death.member}'s app repeated {count} messages; {in_flight} were in flight"

    def _may_repeat(self, earlier: Delivery, later: Delivery) -> bool:
        timed_out = earlier.end is None or earlier.end - earlier.begin >= self.history.timeout
        if timed_out or not (earlier.done or earlier.dead):
            return True
        return (
            any(self._is_contested(earlier.queue, delivery) for delivery in (earlier, later))
            or self._has_fact("reset", earlier.queue, earlier.begin, later.begin)
            or self._commit_was_prevented(earlier, later)
            or self._broker_lost_commit(earlier, later)
        )

    def _commit_was_prevented(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether the sidecar was killed, overruled or disconnected before the message was committed."""
        causes = self._facts_between(earlier, later, {"sidecar", "ended", "forced"})
        for fact in causes + self._disconnections(earlier, later):
            if fact.kind == "forced" and earlier.queue not in fact.queues:
                continue
            # A disconnected member commits again once it is reconnected, and other members commit meanwhile.
            until = later.begin if fact.kind == "disconnected" else fact.at
            commits = (commit for commit in self.history.commits if commit.queue == earlier.queue)
            if earlier.offset >= max((commit.offset for commit in commits if commit.at < until), default=0):
                return True
        return False

    def _broker_lost_commit(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether the broker was killed before it flushed the commit, and the later member does not know the offset."""
        end = earlier.begin if earlier.end is None else earlier.end
        killed = [fact.at for fact in self.facts if fact.kind == "broker" and end <= fact.at <= later.begin]
        knows_offset = earlier.member == later.member and not self._forgot_offset(earlier, later)
        return not knows_offset and bool(killed) and killed[0] - end < FLUSH_SECONDS

    def _forgot_offset(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether the sidecar terminated or released the queue in between, and so does not know its offset."""
        facts = self._facts_between(earlier, later, {"terminated", "released"})
        return any(fact.kind == "terminated" or earlier.queue in fact.queues for fact in facts)

    def _was_copied(self, deliveries: list[Delivery], later: Delivery) -> bool:
        """Whether a copy went to the retry topic, but the sidecar or the broker died before this was recorded."""
        for delivery in deliveries:
            if delivery.done or delivery.dead or delivery.attempt >= later.attempt:
                continue
            for fact in self.facts:
                died = fact.kind == "broker" or (fact.kind in KILLS and fact.member == delivery.member)
                if died and _is_between(fact, delivery, later):
                    return True
        return False

    def _original_remained(self, deliveries: list[Delivery], later: Delivery) -> bool:
        """Whether the original was uncommitted when its sidecar was killed, although a copy was finished."""
        return any(self._commit_was_prevented(delivery, later) for delivery in _at_same_offset(deliveries, later))

    def _app_death(self, deliveries: list[Delivery], earlier: Delivery, later: Delivery) -> Fact | None:
        """Return the death of an app that had the message before, or had its original although a copy was finished."""
        for delivery in [earlier, *_at_same_offset(deliveries, later)]:
            for death in self._facts_between(delivery, later, {"app"}):
                return death
        return None

    def _facts_between(self, earlier: Delivery, later: Delivery, kinds: set[str]) -> list[Fact]:
        return [
            fact
            for fact in self.facts
            if fact.kind in kinds and fact.member == earlier.member and _is_between(fact, earlier, later)
        ]

    def _disconnections(self, earlier: Delivery, later: Delivery) -> list[Fact]:
        """Return when the sidecar was disconnected from its broker, if it reconnected only after the delivery."""
        facts = [fact for fact in self.facts if fact.member == earlier.member]
        reconnected = [fact.at for fact in facts if fact.kind == "reconnected" and fact.at <= earlier.begin]
        disconnected = [fact for fact in facts if fact.kind == "disconnected" and fact.at <= later.begin]
        return [fact for fact in disconnected if not any(fact.at <= at for at in reconnected)]

    def _has_fact(self, kind: str, queue: Queue, begin: float, end: float) -> bool:
        return any(fact.kind == kind and queue in fact.queues and begin <= fact.at <= end for fact in self.facts)

    # One owner.

    def find_deliveries_without_ownership(self) -> Iterator[str]:
        """A member that delivers from a queue owns it from before the first delivery until after the last."""
        for queue, deliveries in self.by_queue.items():
            for delivery in deliveries:
                if not (self._is_owned(queue, delivery) or self._is_contested(queue, delivery)):
                    yield f"{delivery.member} delivered from {queue} without owning it: {_describe(delivery)}"

    def _is_owned(self, queue: Queue, delivery: Delivery) -> bool:
        end = delivery.begin if delivery.end is None else delivery.end
        owned = self.spans.get((delivery.member, queue), [])
        return any(granted <= delivery.begin and end <= released for granted, released in owned)

    def find_overlaps(self) -> Iterator[str]:
        """No two members deliver from one queue at a time."""
        for queue, deliveries in self.by_queue.items():
            open_deliveries: list[Delivery] = []
            for later in deliveries:
                open_deliveries = [earlier for earlier in open_deliveries if self._end_of(earlier) > later.begin]
                for earlier in open_deliveries:
                    contested = self._is_contested(queue, later) or self._is_contested(queue, earlier)
                    if earlier.member != later.member and (self.history.orderly or not contested):
                        yield f"{queue} was delivered by two members at a time: {_describe_both(earlier, later)}"
                open_deliveries.append(later)

    def _end_of(self, delivery: Delivery) -> float:
        """Return when a delivery was over: at its end, its app's end, or the timeout."""
        if delivery.end is not None:
            return delivery.end
        deaths = (fact.at for fact in self.facts if fact.kind in ENDS and fact.member == delivery.member)
        death = min((at for at in deaths if at >= delivery.begin), default=inf)
        return min(death, delivery.begin + self.history.timeout)

    def _is_contested(self, queue: Queue, delivery: Delivery) -> bool:
        delivery_end = inf if delivery.end is None else delivery.end
        return any(begin <= delivery_end and delivery.begin <= end for begin, end in self.contested.get(queue, []))

    # Order.

    def find_order_violations(self) -> Iterator[str]:
        """In Orderly groups a message begins once all earlier ones are finished, and none runs concurrently."""
        for queue, deliveries in self.by_queue.items() if self.history.orderly else ():
            finish_times = self._finish_times(deliveries)
            offsets = sorted(finish_times)
            latest_so_far = list(accumulate(map(finish_times.__getitem__, offsets), max))
            for delivery in _first_of_requests(deliveries):
                earlier_count = bisect_left(offsets, delivery.offset)
                if earlier_count and latest_so_far[earlier_count - 1] > delivery.begin:
                    yield f"{queue} is out of order: a message before {_describe(delivery)} was not finished"
            for earlier, later in pairwise(deliveries):
                if _in_same_request(earlier, later):
                    if later.offset < earlier.offset:
                        yield f"{queue} is out of order within one request: {_describe_both(earlier, later)}"
                    continue
                timed_out = earlier.begin + self.history.timeout
                if earlier.end is not None and later.begin < min(earlier.end, timed_out):
                    yield f"{queue} delivered two messages at a time: {_describe_both(earlier, later)}"

    # Generations.

    def find_generation_regressions(self) -> Iterator[str]:
        """No member returns to an earlier generation, neither in its deliveries nor in its reports."""
        for member, deliveries in self.by_member.items():
            ended = sorted((delivery.end, delivery.generation) for delivery in deliveries if delivery.end is not None)
            ends = [end for end, _ in ended]
            generations = [generation for _, generation in ended]
            highest_so_far = list(accumulate(generations, max, initial=0))  # before each end, and after all
            for delivery in deliveries:
                previous = highest_so_far[bisect_left(ends, delivery.begin - SKEW_SECONDS)]
                if delivery.generation < previous:
                    yield f"{member} went back from generation {previous}: {_describe(delivery)}"
        reported: dict[str, int] = {}
        for fact in self.facts:
            if fact.kind == "reported":
                if fact.generation < reported.get(fact.member, 0):
                    yield f"{fact.member} reported generation {fact.generation} after {reported[fact.member]}"
                reported[fact.member] = fact.generation


Spans = dict[tuple[str, Queue], list[tuple[float, float]]]


def _ownership_spans(facts: list[Fact]) -> Spans:
    """Return from when until when each member owned each queue."""
    spans: Spans = defaultdict(list)
    for fact in facts:
        if fact.kind == "granted":
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


def _contested_spans(facts: list[Fact]) -> dict[Queue, list[tuple[float, float]]]:
    """Return when an unreachable previous owner may have consumed a queue that was granted to another member."""
    contested: dict[Queue, list[tuple[float, float]]] = defaultdict(list)
    for fact in facts:
        if fact.kind == "forced":
            ends = (end.at for end in facts if end.kind in {"settled", "ended"} and end.member == fact.member)
            end = min((at for at in ends if at > fact.at), default=inf)
            for queue in fact.queues:
                contested[queue].append((fact.at, end))
    return contested


def _is_between(fact: Fact, earlier: Delivery, later: Delivery) -> bool:
    """Whether a fact lies between two deliveries; an app may read a request after its sidecar was killed."""
    begin = earlier.begin - SKEW_SECONDS if fact.kind in KILLS else earlier.begin
    return begin <= fact.at <= later.begin


def _at_same_offset(deliveries: list[Delivery], later: Delivery) -> list[Delivery]:
    """Return the previous deliveries from the same queue and offset."""
    return [
        earlier
        for earlier in deliveries
        if (earlier.queue, earlier.offset) == (later.queue, later.offset) and earlier.begin < later.begin
    ]


def _first_of_requests(deliveries: list[Delivery]) -> Iterator[Delivery]:
    yield from deliveries[:1]
    for earlier, later in pairwise(deliveries):
        if not _in_same_request(earlier, later):
            yield later


def _in_same_request(earlier: Delivery, later: Delivery) -> bool:
    request = (earlier.member, earlier.begin, earlier.end)
    return later.batch_size > 1 and request == (later.member, later.begin, later.end)


def _describe(delivery: Delivery) -> str:
    end = "…" if delivery.end is None else f"{delivery.end:.3f}"
    return (
        f"{delivery.member} {delivery.begin:.3f}-{end} {delivery.queue}@{delivery.offset} ({delivery.number}, "
        f"attempt {delivery.attempt}, generation {delivery.generation}, {delivery.status})"
    )


def _describe_both(earlier: Delivery, later: Delivery) -> str:
    return f"{_describe(earlier)}, and {_describe(later)}"
