"""The next document: what is wanted of each queue, what is known of its holder, and what the handover makes of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rota import gates
from rota.documents import Assignment, Release, Share
from rota.handover import Act, Proof, State, Taken, Want, act, proof
from rota.model import NOBODY, Holder, Queue, Reason, Roster, Verdict
from rota.planner import record
from rota.planner.members import incarnations
from rota.planner.situation import Situation
from rota.planner.target import Measured, beside_foreigners, target
from rota.strategies import STRATEGIES
from rota.strategies.arrays import Owners, nobody, present
from rota.timestamps import format_time

RELEASE_MARGIN = 5.0  # seconds over the drain's own time: to be shown the document, and to be heard

# Strategies that say nothing about places, and move much when members come and go.
RESTLESS = ("Averagely", "AveragelyByCircle")


class Decision(NamedTuple):
    """What happens to one queue, and why."""

    queue: Queue
    state: State
    known: Proof
    want: Want
    holder: Holder | None
    to: Holder | None
    voluntary: bool = False  # the holder could keep it, only the policy wants it otherwise: what gates hold back
    act: Act = Act.WAIT


@dataclass(frozen=True, slots=True)
class Draft:
    """What the next document changes."""

    decisions: Sequence[Decision] = ()  # only on queues that do not simply stay with their owner
    held: gates.Held | None = None
    problem: Verdict | None = None
    strategy: str = ""

    def of(self, *acts: Act) -> list[Decision]:
        """Return the decisions for these acts."""
        return [decision for decision in self.decisions if decision.act in acts]


class Aim(NamedTuple):
    """Who shall own what, by which strategy, and what was wrong with it."""

    strategy: str
    roster: Roster | None = None  # None: nobody is there, or nothing to work; then nothing is wanted
    owners: Owners = nobody(0)
    problem: Verdict | None = None


def decide(it: Situation) -> Draft:
    """Decide on every queue that does not simply stay with its owner."""
    aim = aim_of(it)
    found = [_question(it, queue, to) for queue, to in _open(it, aim).items()]
    movable = [one for one in found if one.voluntary]
    # A terminating pod is shown no document any more: it is asked to drain, and until then it goes on.
    draining = {one.queue for one in movable if one.holder and it.seen(one.holder).terminating}
    voluntary = [one for one in movable if one.queue not in draining]
    facts = _facts(it, found, len(voluntary))
    held = gates.held(facts)
    allowed = 0 if held else len(voluntary) if facts.budget is None else facts.budget
    kept = {one.queue for one in _emptiest_takers_first(it, voluntary)[allowed:]}
    if kept and not held:
        told = f"The budget lets {allowed} of {len(voluntary)} queue{'s' * (len(voluntary) != 1)} move now"
        held = gates.Held(Reason.BUDGET_SPENT, told, facts.budget_back)
    kept |= draining
    immediate = it.policy.handover.mode == "Immediate"
    decisions = [
        one._replace(act=act(one.state, one.known, one.want, held_back=one.queue in kept, immediate=immediate))
        for one in found
    ]
    return Draft(decisions, held, aim.problem, aim.strategy)


def document_of(it: Situation, draft: Draft) -> Assignment:
    """Write the draft as the document that follows the present one."""
    before, generation, at = it.document, it.document.generation + 1, format_time(it.now)
    owned, releasing = dict(it.owned), dict(before.releasing)
    # Who takes over a forced queue, however much later, must know that the one it was forced from may still work it.
    forced = {queue: since for queue, since in before.forced.items() if not it.overcome(queue, since)}
    for queue, _, _, _, holder, to, _, chosen in draft.decisions:
        wish = to.name if to else None
        if chosen is Act.REVOKE and holder:
            del owned[queue]
            releasing[queue] = Release(holder, wish, generation, at, it.incarnation(*holder))
        elif chosen is Act.WAIT and queue in releasing:
            releasing[queue] = replace(releasing[queue], to=wish)
        elif chosen in {Act.RETURN, Act.GRANT, Act.FORCE} and to:
            releasing.pop(queue, None)
            owned[queue] = to
        elif chosen is Act.DROP:
            releasing.pop(queue, None)
            owned.pop(queue, None)
        if chosen is Act.FORCE:
            forced[queue] = generation
    return replace(
        before,
        generation=generation,
        issued_at=at,
        strategy=draft.strategy,
        members=_shares(it, record.entries(before, it.snapshot, it.counted), owned),
        releasing=releasing if it.incarnations_since else _without_incarnations(releasing),
        forced=forced,
        spent=_spent(it, draft),
        # Also while nobody shall own it, a queue that is still drained is only remembered by the barrier.
        barrier=before.barrier if it.strays or it.free_proof is not Proof.RELEASED else 0,
        begun=_begun(it, draft, at),
        incarnations_since=it.incarnations_since,
    )


def _begun(it: Situation, draft: Draft, at: str) -> dict[str, str]:
    """Say since when each topic is worked: what comes from then on is the group's, whoever takes it up and when."""
    begun, spec = it.document.begun, it.snapshot.spec
    wanted = {subscription.topic for subscription in spec.subscriptions} if spec else begun.keys()
    if new := wanted - begun.keys():
        new &= it.on_record.keys() | {one.queue.topic for one in draft.of(Act.GRANT, Act.FORCE)}
    return {topic: begun.get(topic, at) for topic in sorted(new | (wanted & begun.keys()))}


def voluntary_moves(draft: Draft) -> int:
    """Return how many queues were taken from a member that could have kept them: what a budget counts."""
    return sum(one.voluntary and one.act is not Act.KEEP for one in draft.decisions)


def aim_of(it: Situation) -> Aim:
    """Say who shall own each queue. Where nobody is there to take one over, nothing is wanted of it."""
    chosen = it.policy.strategy
    if not it.counted or not it.queues:
        return Aim(chosen)
    roster = None
    try:
        roster = Roster.of(it.queues, it.counted, _preferred(it))
        if it.snapshot.foreigners:
            ids = {name: it.pods[name].client_id or name for name in it.counted}
            return Aim("Averagely", roster, beside_foreigners(roster, it.snapshot.foreigners, ids))
        if it.snapshot.policy is None:
            return Aim(it.document.strategy, roster, _as_it_is(it, roster))
        if it.motion and chosen in RESTLESS and it.owned:
            # In the middle of a rollout only what must move does: so each queue moves once, and once more after it.
            return Aim(it.document.strategy, roster, _as_it_is(it, roster, free=True))
        return Aim(chosen, roster, target(it.policy, roster, measured(it)))
    except ValueError as error:
        told = Verdict(Reason.STRATEGY_FAILED, f"{error}; until then every queue stays where it is")
        owners = nobody(0) if roster is None else _as_it_is(it, roster)
        return Aim(it.document.strategy, roster, owners, told)


def foreign_queues(it: Situation) -> frozenset[Queue]:
    """Return the foreigners' share: what they work while they are there, for they compute it as we do."""
    if not it.snapshot.foreigners:
        return frozenset()
    if not it.counted:
        return frozenset(it.queues)
    aim = aim_of(it)
    if aim.problem or aim.roster is None:
        return frozenset()
    return frozenset(aim.roster.queues[index] for index in np.flatnonzero(aim.owners == NOBODY).tolist())


def _as_it_is(it: Situation, roster: Roster, *, free: bool = False) -> Owners:
    """Let everybody keep what he has; what somebody left, and what is `free` if it shall, goes to who owns least."""
    owners = STRATEGIES["Sticky"](roster).copy()
    mine = present(roster)
    owners[mine != NOBODY] = mine[mine != NOBODY]
    for index in np.flatnonzero(mine == NOBODY).tolist() if not free else ():
        queue = roster.queues[index]
        if queue not in it.owned and queue not in it.document.releasing:
            owners[index] = NOBODY
    return owners


def measured(it: Situation) -> Measured:
    """Return what is known of queues and members besides their names."""
    rooms = {name: room for name in it.counted if (room := it.pods[name].room)}
    return Measured(rooms, it.snapshot.queue_weights, it.snapshot.member_weights)


def _preferred(it: Situation) -> dict[Queue, str]:
    """Say who owns each queue as a strategy shall see it: one that is under way is already where it goes."""
    counted = {it.pods[name].holder for name in it.counted}
    found = {queue: holder.name for queue, holder in it.owned.items() if holder in counted}
    for queue, release in it.document.releasing.items():
        if release.to and it.counts(release.to):
            found[queue] = release.to
        elif release.holder in counted:
            found[queue] = release.holder.name
    return found


def _open(it: Situation, aim: Aim) -> dict[Queue, Holder | None]:
    """Return the queues of which something must be decided, and who shall own them; the many that stay cost nothing."""
    known = (it.owned, it.document.releasing)
    if aim.roster is None:
        still = frozenset(it.queues)
        return {queue: None for queues in known for queue in queues if queue not in still}
    queues, mine = aim.roster.queues, present(aim.roster)
    members: list[Holder | None] = [it.pods[name].holder for name in aim.roster.members]
    members.append(None)  # an owner of -1 finds the last one
    differing = np.flatnonzero((aim.owners != mine) | (mine == NOBODY)).tolist()
    found = {queues[index]: members[aim.owners[index]] for index in differing}
    if pending := [*it.document.releasing, *_of_restarted(it)]:
        places = {queue: index for index, queue in enumerate(queues)}
        found |= {queue: members[aim.owners[places[queue]]] for queue in pending if queue in places}
    return {queue: to for queue, to in found.items() if to or any(queue in some for some in known)} | _outside(it, mine)


def _of_restarted(it: Situation) -> list[Queue]:
    """Return the queues of members whose next process may take them up."""
    document = it.document
    names = [name for name in it.counted if incarnations.has_restarted(document, it.pods[name])]
    lost = [name for name in names if not incarnations.inherits(document, it.pods[name])]
    return [queue for name in lost for queue in document.members[name].queues]


def _outside(it: Situation, mine: Owners) -> dict[Queue, None]:
    """Return the queues on record that shall not be worked any more."""
    if not it.document.releasing and len(it.owned) == np.count_nonzero(mine != NOBODY):
        return {}
    wanted = set(it.queues)
    return dict.fromkeys(
        queue for queues in (it.owned, it.document.releasing) for queue in queues if queue not in wanted
    )


def _question(it: Situation, queue: Queue, to: Holder | None) -> Decision:
    """Say what is wanted of a queue and what is known of its holder."""
    release, owner = it.document.releasing.get(queue), it.owned.get(queue)
    if release:
        if it.snapshot.foreigners is None and release.to is None:
            to = None  # it may be on its way to a foreigner, who takes it up once we are out of sight of it
        taken = Taken(release.since, record.ago(release.at, it.now))
        seen = it.seen(release.holder, release.incarnation)
        known = proof(queue, release.holder, taken, seen, it.policy.handover)
        return Decision(queue, State.RELEASING, known, _want(release.holder, to), release.holder, to)
    if owner:
        known = proof(queue, owner, None, it.seen_of_owner(owner), it.policy.handover)
        want = _want(owner, to)
        voluntary = known is Proof.NONE and (want is Want.MOVE or (want is Want.LEAVE and queue in it.freely_left))
        return Decision(queue, State.OWNED, known, want, owner, to, voluntary)
    return Decision(queue, State.FREE, it.free(queue), Want.MOVE, None, to)


def _want(holder: Holder, to: Holder | None) -> Want:
    return Want.LEAVE if to is None else Want.STAY if to == holder else Want.MOVE


def _facts(it: Situation, found: Sequence[Decision], wanted: int) -> gates.Facts:
    under_way = [
        it.document.releasing[one.queue]
        for one in found
        if one.state is State.RELEASING and one.known is Proof.NONE and one.want is not Want.STAY
    ]
    youngest = min((record.ago(release.at, it.now) for release in under_way), default=0.0)
    written = record.ago(it.document.issued_at, it.now)
    left, back = _budget(it)
    return gates.Facts(
        wanted=wanted,
        paused=it.policy.paused,
        followed=it.snapshot.policy is not None,
        unseen=tuple(it.unseen),
        debounce=it.policy.triggers.debounce,
        written=written if written >= 0 else float("inf"),  # told by a clock that was ahead of ours
        moving=tuple(it.motion),
        patience=min(it.motion.values(), default=0.0),
        releasing=len(under_way),
        release_time=it.policy.handover.drain_timeout + RELEASE_MARGIN - max(youngest, 0.0),
        budget=left,
        budget_back=back,
    )


def _budget(it: Situation) -> tuple[int | None, float | None]:
    """Return how many moves are left in the budget's window, and in how many seconds there are more."""
    budget = it.policy.budget
    if budget is None:
        return None, 0.0
    if not budget.max_moves:
        return 0, None
    inside = _window(it)
    back = [budget.per - record.ago(at, it.now) for at, _ in inside]
    return max(budget.max_moves - sum(count for _, count in inside), 0), min(back, default=float(budget.per))


def _window(it: Situation) -> list[tuple[str, int]]:
    """Return what counts of the moves on record; what lies ahead was told by a clock that was wrong, and counts now."""
    per = it.policy.budget.per if it.policy.budget else 0.0
    counting = [(at, count) for at, count in it.document.spent if record.ago(at, it.now) < per]
    return [(min(at, format_time(it.now)), count) for at, count in counting]


def _spent(it: Situation, draft: Draft) -> tuple[tuple[str, int], ...]:
    if it.snapshot.policy is None:  # whether it has a budget is not known
        return it.document.spent
    moved = voluntary_moves(draft) if it.policy.budget else 0
    return (*_window(it), *([(format_time(it.now), moved)] if moved else []))


def _emptiest_takers_first(it: Situation, voluntary: Sequence[Decision]) -> list[Decision]:
    """If only some may move, those come first that feed the members who own least."""
    if not voluntary:
        return []
    owns = Counter(holder.name for holder in it.owned.values())
    return sorted(voluntary, key=lambda one: (owns[one.to.name] if one.to else 0, one.queue))


def _without_incarnations(releasing: Mapping[Queue, Release]) -> dict[Queue, Release]:
    return {queue: replace(release, incarnation=0) for queue, release in releasing.items()}


def _shares(it: Situation, entries: Mapping[str, str], owned: Mapping[Queue, Holder]) -> dict[str, Share]:
    """Give everybody his entry; who has ended keeps his only while nobody is there to take his queues over."""
    queues: dict[str, list[Queue]] = {name: [] for name in entries}
    uids = dict(entries)
    for queue, holder in owned.items():
        queues.setdefault(holder.name, []).append(queue)
        uids[holder.name] = holder.uid
    return {
        name: Share(uids[name], tuple(sorted(share)), it.incarnation(name, uids[name]))
        for name, share in queues.items()
    }
