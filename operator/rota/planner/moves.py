"""Draft of the next document: for each queue the desired owner, the proof about its holder, and the resulting act.

A handover usually takes two documents: the first revokes the queue, which is then in `releasing`; a later one grants
it, once there is a proof that the holder no longer consumes it. A revoke is voluntary if the holder could keep the
queue and only the policy wants to move it: gates and the budget hold back voluntary revokes only.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rota import gates
from rota.documents import Assignment, Release, Share
from rota.handover import Act, DesiredChange, OwnershipState, Proof, Revocation, choose_act, find_proof
from rota.model import NO_OWNER, Finding, Holder, Queue, Reason, Roster
from rota.planner import budget, record
from rota.planner.members import incarnations
from rota.planner.situation import Situation
from rota.planner.target import UNMANAGED_POLICY, StrategyInputs, compute_owners, share_with_unmanaged
from rota.sentences import pluralize
from rota.strategies import STRATEGIES
from rota.strategies.arrays import Owners, current_owners, no_owners

STRATEGY_FAILED_SUFFIX = "; every queue stays with its owner until that is corrected"
RELEASE_MARGIN_SECONDS = 5.0  # beyond drainTimeout: until the pod sees the document, and its report is read
# They move many queues when members change, and any member may own any queue: a rollout may suspend them.
CHURNING_STRATEGIES = ("Averagely", "AveragelyByCircle")


class Decision(NamedTuple):
    """The act on one queue, and the reasons for it."""

    queue: Queue
    state: OwnershipState
    proof: Proof
    desired_change: DesiredChange
    holder: Holder | None
    next_owner: Holder | None
    is_voluntary: bool = False  # the holder could keep the queue; a gate may postpone the move
    act: Act = Act.WAIT

    @property
    def awaits_release(self) -> bool:
        """Whether the queue waits for its holder's release, and is to go to another member or to none."""
        is_unproven = self.state is OwnershipState.RELEASING and self.proof is Proof.NONE
        return is_unproven and self.desired_change is not DesiredChange.STAY


@dataclass(frozen=True, slots=True)
class Draft:
    """The changes of the next document."""

    decisions: Sequence[Decision] = ()  # none about queues that simply stay with their owner
    hold: gates.Hold | None = None
    problem: Finding | None = None
    strategy: str = ""  # the one that the document names

    def with_acts(self, *acts: Act) -> list[Decision]:
        """Return the decisions with these acts."""
        return [decision for decision in self.decisions if decision.act in acts]

    @property
    def voluntary_moves(self) -> int:
        """The number of voluntary moves in this draft, which the budget counts; a postponed move has the act KEEP."""
        return sum(decision.is_voluntary and decision.act is not Act.KEEP for decision in self.decisions)


class DesiredOwners(NamedTuple):
    """The desired owners, the strategy that chose them, and that strategy's problem."""

    strategy: str
    roster: Roster | None = None  # None: there are no members or no queues, or the roster is invalid
    owners: Owners = no_owners(0)  # by index of a queue in the roster: a member's index, or NO_OWNER
    problem: Finding | None = None


def decide(situation: Situation) -> Draft:
    """Decide on every queue that does not simply stay with its owner."""
    desired = compute_desired_owners(situation)
    undecided = _undecided_queues(situation, desired)
    classified = [_classify_queue(situation, queue, next_owner) for queue, next_owner in undecided.items()]
    held_back, hold = _hold_back(situation, classified)
    is_immediate = situation.policy.handover.mode == "Immediate"
    decisions = []
    for decision in classified:
        state = decision.state
        proof = decision.proof
        change = decision.desired_change
        act = choose_act(state, proof, change, held_back=decision.queue in held_back, immediate=is_immediate)
        decisions.append(decision._replace(act=act))
    return Draft(decisions, hold, desired.problem, desired.strategy)


def _hold_back(situation: Situation, classified: Sequence[Decision]) -> tuple[set[Queue], gates.Hold | None]:
    """Return the queues that may not be revoked now, and why: a gate postpones all voluntary moves, a budget some."""
    draining: set[Queue] = set()
    voluntary: list[Decision] = []
    for decision in classified:
        if not decision.is_voluntary:
            continue
        # Do not revoke queues of a terminating pod: it sees no new document. The operator asks its sidecar to drain
        # (`Plan.members_to_drain`), and the queues move once the report proves that they are released.
        if decision.holder and situation.proofs.evidence_of(decision.holder).terminating:
            draining.add(decision.queue)
        else:
            voluntary.append(decision)
    facts = _gate_facts(situation, classified, len(voluntary))
    hold = gates.first_hold(facts)
    allowed = len(voluntary) if facts.moves_left is None else facts.moves_left
    ordered = _sort_by_owner_load(situation, voluntary)
    postponed = ordered if hold else ordered[allowed:]
    if postponed and not hold:
        message = f"The budget lets {allowed} of {pluralize(len(voluntary), 'queue')} move now"
        hold = gates.Hold(Reason.BUDGET_SPENT, message, facts.budget_refill_seconds)
    return draining.union(decision.queue for decision in postponed), hold


def next_document(situation: Situation, draft: Draft) -> Assignment:
    """Return the document that follows the present one, with the draft's changes."""
    current = situation.document
    generation = current.generation + 1
    at = situation.formatted_now
    releasing = dict(current.releasing)
    new_owners: dict[Queue, Holder | None] = {}  # of queues with another owner than before; None: no owner
    # Keep forced grants in the document: a later owner must know that the former holder may still consume the queue.
    forced = dict(situation.proofs.unresolved_grants)
    for decision in draft.decisions:  # a REVOKE always has a holder, and RETURN, GRANT and FORCE a next owner
        queue = decision.queue
        holder = decision.holder
        next_owner = decision.next_owner
        act = decision.act
        next_name = next_owner.name if next_owner else None
        if act is Act.REVOKE and holder:
            new_owners[queue] = None
            releasing[queue] = Release(holder, next_name, generation, at, situation.incarnation_of(holder))
        elif act is Act.WAIT and queue in releasing:
            releasing[queue] = replace(releasing[queue], to=next_name)
        elif act in {Act.RETURN, Act.GRANT, Act.FORCE} and next_owner:
            releasing.pop(queue, None)
            new_owners[queue] = next_owner
        elif act is Act.DROP:
            releasing.pop(queue, None)
            new_owners[queue] = None
        if act is Act.FORCE:
            forced[queue] = generation
    entries = record.member_entries(current, situation.snapshot, situation.counted_holders)
    # A document with a barrier grants a queue without an owner only if two conditions hold: each running pod has obeyed
    # the barrier's generation or is lost (`unowned_proof`), and no pod has the queue any more (`unrecorded_drains`).
    # Without a barrier, neither is checked. So the barrier stays until both hold for all queues.
    needs_barrier = bool(situation.proofs.unrecorded_drains) or situation.proofs.unowned_proof is not Proof.RELEASED
    if not situation.incarnations_since:  # a member may not be able to read incarnations, so the document names none
        releasing = {queue: replace(release, incarnation=0) for queue, release in releasing.items()}
    return replace(
        current,
        generation=generation,
        issued_at=at,
        strategy=draft.strategy,
        members=_shares(situation, entries, new_owners),
        releasing=releasing,
        forced=forced,
        spent=budget.updated_spent(situation, draft.voluntary_moves),
        barrier=current.barrier if needs_barrier else 0,
        begun=_topic_start_times(situation, draft, at),
        incarnations_since=situation.incarnations_since,
    )


def _topic_start_times(situation: Situation, draft: Draft, at: str) -> dict[str, str]:
    """Return since when each topic is consumed.

    With `startFrom` Latest, a member starts a queue without a committed offset at the messages of this time. At the
    queue's end, it would skip messages that were stored after the group began and before the member started.
    """
    begun = situation.document.begun
    granted = {decision.queue.topic for decision in draft.with_acts(Act.GRANT, Act.FORCE)}
    consumed = granted.union(begun)
    topics = situation.snapshot.subscribed_topics
    if not consumed.issuperset(topics):
        consumed.update(situation.subscribed.assigned_by_topic)
    return {topic: begun.get(topic, at) for topic in sorted(consumed.intersection(topics))}


def compute_desired_owners(situation: Situation) -> DesiredOwners:
    """Return the desired owner of each queue.

    - Without members or queues, no owner is desired.
    - With unmanaged consumers, Averagely shares the queues among them and the members.
    - Without a valid policy, or if the strategy fails, only queues of members that left get another owner.
    - In a rollout, the same holds for CHURNING_STRATEGIES, but queues without an owner get one, too.
    - Otherwise the policy's strategy decides.
    """
    chosen = situation.policy.strategy
    if not situation.counted_members or not situation.queues:
        return DesiredOwners(chosen)
    roster = None
    try:
        roster = Roster.of(situation.queues, situation.counted_members)
        roster = replace(roster, owners=_preferred_owners(situation, roster))
        if situation.snapshot.unmanaged_consumers:
            owners = share_with_unmanaged(roster, situation.snapshot.unmanaged_consumers, situation.client_ids)
            return DesiredOwners(UNMANAGED_POLICY.strategy, roster, owners)
        if situation.snapshot.policy is None:
            return DesiredOwners(situation.document.strategy, roster, _keep_present_owners(situation, roster))
        if situation.transition_seconds_left and chosen in CHURNING_STRATEGIES and situation.owners:
            # At each pod that leaves or joins, these strategies would move many queues. Apply them once, at the end.
            owners = _keep_present_owners(situation, roster, assign_unowned=True)
            return DesiredOwners(situation.document.strategy, roster, owners)
        return DesiredOwners(chosen, roster, compute_owners(situation.policy, roster, strategy_inputs_of(situation)))
    except ValueError as error:
        problem = Finding(Reason.STRATEGY_FAILED, f"{error}{STRATEGY_FAILED_SUFFIX}")
        owners = no_owners(0) if roster is None else _keep_present_owners(situation, roster)
        return DesiredOwners(situation.document.strategy, roster, owners, problem)


def unmanaged_queues(situation: Situation) -> frozenset[Queue]:
    """Return the queues of unmanaged consumers, which compute their share as the operator does."""
    if not situation.snapshot.unmanaged_consumers:
        return frozenset()
    if not situation.counted_members:
        return frozenset(situation.queues)
    desired = compute_desired_owners(situation)
    if desired.problem or desired.roster is None:
        return frozenset()
    queues = desired.roster.queues
    return frozenset(queues[index] for index in np.flatnonzero(desired.owners == NO_OWNER).tolist())


def _keep_present_owners(situation: Situation, roster: Roster, *, assign_unowned: bool = False) -> Owners:
    """Keep owners; the least loaded members get the queues of members that left and, if asked to, unowned ones."""
    owners = STRATEGIES["Sticky"](roster).copy()
    present_owners = current_owners(roster)
    has_owner = present_owners != NO_OWNER
    owners[has_owner] = present_owners[has_owner]
    if assign_unowned:
        return owners
    for index in np.flatnonzero(~has_owner).tolist():
        queue = roster.queues[index]
        if queue not in situation.owners and queue not in situation.document.releasing:
            owners[index] = NO_OWNER
    return owners


def strategy_inputs_of(situation: Situation) -> StrategyInputs:
    """Return what strategies use besides the roster: machine rooms of members, and measured weights."""
    rooms_by_member = {pod.name: pod.room for pod in situation.counted_pods if pod.room}
    return StrategyInputs(rooms_by_member, situation.snapshot.queue_weights, situation.snapshot.member_weights)


def _preferred_owners(situation: Situation, roster: Roster) -> "array[int]":
    """Return present owners as the strategy sees them: a queue being released already belongs to its next owner."""
    holders = situation.holders_by_member
    preferred = dict(situation.owners)
    for queue, release in situation.document.releasing.items():
        preferred[queue] = holders.get(release.to or "", release.holder)
    indexes: dict[Holder | None, int] = {holders[name]: index for index, name in enumerate(roster.members)}
    return array("i", [indexes.get(preferred.get(queue), NO_OWNER) for queue in roster.queues])


def _undecided_queues(situation: Situation, desired: DesiredOwners) -> dict[Queue, Holder | None]:
    """Return the queues that need a decision, with their desired owners (None: no owner).

    Array operations leave out the queues that stay with their owner: nearly all of them in a usual plan.
    """
    releasing = situation.document.releasing
    if desired.roster is None:
        return dict.fromkeys(situation.subscribed.unsubscribed)
    queues = desired.roster.queues
    present_owners = current_owners(desired.roster)
    members: list[Holder | None] = [situation.holders_by_member[name] for name in desired.roster.members]
    members.append(None)  # members[NO_OWNER] is members[-1]
    undecided: dict[Queue, Holder | None] = {}
    for index in np.flatnonzero((desired.owners != present_owners) | (present_owners == NO_OWNER)).tolist():
        queue = queues[index]
        next_owner = members[desired.owners[index]]
        if next_owner or queue in situation.owners:  # nothing happens to a queue that has no owner and gets none
            undecided[queue] = next_owner
    # A queue in release may return to its holder, and a queue of a restarted member be granted to the member's next
    # process: both need a decision even if their owner is to stay the same.
    pending = [*releasing, *_queues_of_restarted(situation)]
    indexes = {queue: index for index, queue in enumerate(queues)} if pending else {}
    for queue in pending:
        if queue in indexes:
            undecided[queue] = members[desired.owners[indexes[queue]]]
    return undecided | dict.fromkeys(situation.subscribed.unsubscribed)


def _queues_of_restarted(situation: Situation) -> Iterator[Queue]:
    """Yield the queues of counted members whose sidecar has restarted, and has not inherited them.

    A process that no operator has polled for long inherits the queues of the earlier process: it already consumes them.
    """
    document = situation.document
    for pod in situation.counted_pods:
        if incarnations.has_restarted(document, pod) and not incarnations.consumes_inherited_queues(document, pod):
            yield from document.members[pod.name].queues


def _classify_queue(situation: Situation, queue: Queue, next_owner: Holder | None) -> Decision:
    """Return a queue's state, the proof about its holder and the desired change, with no act yet."""
    release = situation.document.releasing.get(queue)
    owner = situation.owners.get(queue)
    if release:
        are_consumers_unknown = situation.snapshot.unmanaged_consumers is None
        if are_consumers_unknown and release.to is None:
            next_owner = None  # the queue may be the share of an unmanaged consumer, which may consume it already
        revocation = Revocation(release.since, situation.seconds_since(release.at))
        evidence = situation.proofs.evidence_of(release.holder, release.incarnation)
        proven = find_proof(queue, release.holder, revocation, evidence, situation.policy.handover)
        change = _desired_change(release.holder, next_owner)
        return Decision(queue, OwnershipState.RELEASING, proven, change, release.holder, next_owner)
    if owner:
        evidence = situation.proofs.evidence_of_owner(owner)
        proven = find_proof(queue, owner, None, evidence, situation.policy.handover)
        change = _desired_change(owner, next_owner)
        # A queue that no member is to get may stay with its owner for a while, unless the group no longer consumes it
        # or an unmanaged consumer gets it.
        may_keep = change is DesiredChange.MOVE or queue in situation.subscribed.postponable
        # With a proof, the queue counts as without a consumer, so no gate may delay its grant. STAY always has a proof:
        # of the owned queues that stay, only those of a restarted owner need a decision.
        is_voluntary = proven is Proof.NONE and may_keep
        return Decision(queue, OwnershipState.OWNED, proven, change, owner, next_owner, is_voluntary=is_voluntary)
    proven = situation.proofs.unowned_proof_of(queue)
    return Decision(queue, OwnershipState.FREE, proven, DesiredChange.MOVE, None, next_owner)


def _desired_change(holder: Holder, next_owner: Holder | None) -> DesiredChange:
    if next_owner is None:
        return DesiredChange.LEAVE
    return DesiredChange.STAY if next_owner == holder else DesiredChange.MOVE


def _gate_facts(situation: Situation, decisions: Sequence[Decision], moves: int) -> gates.GateFacts:
    awaited = [situation.document.releasing[decision.queue] for decision in decisions if decision.awaits_release]
    seconds_since_last_revoke = min((situation.seconds_since(release.at) for release in awaited), default=0.0)
    age = situation.seconds_since(situation.document.issued_at)
    release_limit = situation.policy.handover.drain_timeout + RELEASE_MARGIN_SECONDS
    budget_left = budget.budget_left(situation)
    return gates.GateFacts(
        moves=moves,
        paused=situation.policy.paused,
        is_policy_valid=situation.snapshot.policy is not None,
        missing_metadata=tuple(situation.subscribed.missing_metadata),
        debounce=situation.policy.triggers.debounce,
        # A negative age is from a clock ahead of ours: debounce must not wait until our clock reaches that time.
        seconds_since_write=age if age >= 0 else float("inf"),
        members_in_transition=tuple(situation.transition_seconds_left),
        transition_seconds_left=min(situation.transition_seconds_left.values(), default=0.0),
        queues_releasing=len(awaited),
        release_seconds_left=release_limit - max(seconds_since_last_revoke, 0.0),
        moves_left=budget_left.moves,
        budget_refill_seconds=budget_left.refill_seconds,
    )


def _sort_by_owner_load(situation: Situation, voluntary: Sequence[Decision]) -> list[Decision]:
    """Sort moves by the number of queues that the next owner has: a budget may allow only the first moves.

    A queue that no member gets sorts like one for a member without queues. Equal moves keep their order.
    """
    if not voluntary:
        return []
    counts = {name: len(share.queues) for name, share in situation.document.members.items()}
    return sorted(voluntary, key=lambda decision: counts.get(decision.next_owner.name, 0) if decision.next_owner else 0)


def _shares(
    situation: Situation, entries: Mapping[str, str], new_owners: Mapping[Queue, Holder | None]
) -> dict[str, Share]:
    """Return the next document's shares: of all entries, and of ended members without an entry that still own queues.

    An unchanged share stays the same object: `Situation.unowned_queues` compares shares by identity.
    """
    losers = {situation.owners[queue].name for queue in new_owners if queue in situation.owners}
    gains: defaultdict[Holder, list[Queue]] = defaultdict(list)
    for queue, new_owner in new_owners.items():
        if new_owner:
            gains[new_owner].append(queue)
    queues_by_name: dict[str, tuple[Queue, ...]] = dict.fromkeys(entries, ())
    uids = dict(entries)
    for name, share in situation.document.members.items():
        queues = share.queues
        if name in losers:
            queues = tuple(queue for queue in queues if queue not in new_owners)
        if queues:
            queues_by_name[name] = queues
            uids[name] = share.uid
    for holder, gained in gains.items():
        queues_by_name[holder.name] = tuple(sorted([*queues_by_name[holder.name], *gained]))
        uids[holder.name] = holder.uid
    shares = {}
    for name, queues in queues_by_name.items():
        share = Share(uids[name], queues, situation.incarnation_of(Holder(name, uids[name])))
        present = situation.document.members.get(name)
        shares[name] = present if present == share else share
    return shares
