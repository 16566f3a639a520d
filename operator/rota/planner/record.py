"""The stored assignment: whether it can be trusted, how it is rebuilt if it cannot, and its owners and members.

A missing or damaged assignment is replaced at once by a *recovery generation*:

- Its number is above every generation seen anywhere, and at least the present time in seconds since 1970: so it is also
  above generations that no pod reports.
- Its owners are those in the reports.
- Its `barrier` is its own number. A silent pod may consume queues that no report names, so queues without an owner are
  granted only when every pod has obeyed the barrier's generation, has ended, or is lost.
"""

from collections.abc import Iterable, Sequence

from rota.documents import Assignment, Share
from rota.handover import Proof
from rota.model import Holder, Queue
from rota.planner.members import incarnations
from rota.planner.snapshot import PodSnapshot, Snapshot
from rota.spec import Handover, PolicySpec
from rota.timestamps import format_time, parse_time

UNKNOWN_SPENT_MOVES = 1_000_000  # moves counted as spent if the budget is not known: as many as the largest budget
MAX_PLAUSIBLE_GENERATION = 2**52  # higher ones are ignored: half of `documents.MAX_GENERATION`, so others can follow


def seconds_since(at: str, now: float) -> float:
    """Return the seconds since a time in a document, 0 if unreadable; negative if the writer's clock was ahead."""
    seconds = parse_time(at)
    return 0.0 if seconds is None else now - seconds


def find_damage(snapshot: Snapshot) -> str:
    """Return why the stored assignment cannot be trusted; empty if it can, or if the group never had one."""
    document = snapshot.document
    highest_seen = highest_generation(snapshot)
    if snapshot.damage:
        return snapshot.damage
    if document is None:  # missing, unless the group is new
        is_missing = highest_seen or any(map(_may_obey_lost_document, snapshot.running_pods))
        return "The assignment is missing although the group has pods" if is_missing else ""
    if document.group != snapshot.group:
        return f"The assignment belongs to group {document.group}"
    if document.generation < highest_seen:
        return f"The assignment has generation {document.generation}, but generation {highest_seen} was already in use"
    return ""


def highest_generation(snapshot: Snapshot) -> int:
    """Return the highest generation in the status, reports and pokes, and in assignments seen earlier."""
    stored = (snapshot.highest_stored_generation, snapshot.status.get("generation"))
    highest = max(map(plausible_generation, stored))
    for pod in snapshot.pods:
        if not pod.ended:
            highest = max(highest, *map(plausible_generation, (pod.generation, pod.poke.generation)))
    return highest


def plausible_generation(generation: object) -> int:
    """Return a generation if a document can have had it, otherwise 0: users can write anything into a status."""
    return generation if isinstance(generation, int) and 0 <= generation <= MAX_PLAUSIBLE_GENERATION else 0


def rebuild_assignment(snapshot: Snapshot, now: float) -> Assignment:
    """Return the recovery generation; past moves are not known, so the whole budget counts as spent."""
    spent_moves = _moves_assumed_spent(snapshot.policy)
    last_generation = snapshot.document.generation if snapshot.document else 0
    generation = max(highest_generation(snapshot) + 1, last_generation + 1, int(now))
    # `incarnations_since` compares with the previous document, which may be lost. With an empty one it returns this
    # generation if every running member reports its incarnation, otherwise 0: then the shares name none.
    previous = Assignment(group=snapshot.group, generation=generation - 1, issued_at="")
    since = incarnations.incarnations_since(snapshot, previous)
    shares: dict[str, Share] = {}
    claimed: set[Queue] = set()
    # If two pods report a queue, the one that obeys the later generation keeps it; if they obey the same, the first by
    # name.
    ended = snapshot.ended_uids
    for pod in sorted(snapshot.pods, key=lambda pod: (-pod.generation, pod.name)):
        if pod.uid not in ended:
            held = pod.held_queues - claimed
            claimed |= held
            shares[pod.name] = Share(pod.uid, tuple(sorted(held)), pod.incarnation if since else 0)
    return Assignment(
        group=snapshot.group,
        generation=generation,
        issued_at=format_time(now),
        strategy=snapshot.policy.strategy if snapshot.policy else "",
        members=shares,
        spent=((format_time(now), spent_moves),) if spent_moves else (),
        barrier=generation,
        begun=_start_times(snapshot, now),
        incarnations_since=since,
    )


def _moves_assumed_spent(policy: PolicySpec | None) -> int:
    """Return the moves to count as spent when past moves are not known: the whole budget; none without a budget."""
    if policy is None:  # missing or invalid: its budget is not known
        return UNKNOWN_SPENT_MOVES
    return policy.budget.max_moves if policy.budget else 0


def _start_times(snapshot: Snapshot, now: float) -> dict[str, str]:
    """Return since when each topic is consumed: as in an older assignment of the group, otherwise since now."""
    previous = snapshot.document
    starts = previous.begun if previous and previous.group == snapshot.group else {}
    return {topic: starts.get(topic, format_time(now)) for topic in sorted(snapshot.subscribed_topics)}


def barrier_proof(document: Assignment, pods: Sequence[PodSnapshot], rules: Handover, now: float) -> Proof:
    """Return the proof that no pod consumes a queue without an owner in the document.

    - RELEASED: every running pod has obeyed the barrier's generation.
    - LOST: every pod that has not obeyed it is lost.
    - NONE: some pod has not obeyed it, and is not lost.
    """
    since = seconds_since(document.issued_at, now)
    proof = Proof.RELEASED
    for pod in pods:
        if pod.is_running and pod.generation < document.barrier:
            if not pod.is_lost(rules, since):
                return Proof.NONE
            proof = Proof.LOST
    return proof


def owners_of(document: Assignment) -> dict[Queue, Holder]:
    """Return the owner of each queue in the document; queues being released have none."""
    owners_by_queue: dict[Queue, Holder] = {}
    for name, share in document.members.items():
        holder = Holder(name, share.uid)
        for queue in share.queues:
            owners_by_queue[queue] = holder
    return owners_by_queue


def holders_of(document: Assignment) -> dict[Queue, Holder]:
    """Return the member that may consume each queue: its owner, or the holder from which it was revoked."""
    return {queue: release.holder for queue, release in document.releasing.items()} | owners_of(document)


def member_entries(document: Assignment, snapshot: Snapshot, counted: Iterable[Holder]) -> dict[str, str]:
    """Return the members of the next document, with the uids of their pods.

    These are the counted members, and those of the present document until their pods have ended.
    """
    ended = snapshot.ended_uids
    remaining = {name: share.uid for name, share in document.members.items() if share.uid not in ended}
    return remaining | dict(counted)


def _may_obey_lost_document(pod: PodSnapshot) -> bool:
    """Whether a running pod may obey a document that was lost: unless it has reported that it obeys none."""
    return pod.report is None or pod.generation > 0
