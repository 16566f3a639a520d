"""The record of who owns what: whether it can be believed, and how it is made anew where it cannot.

A record that is missing or damaged is replaced at once by a *recovery generation*: higher than any that was seen
anywhere and not below the time in seconds (so that it is above those that nobody can tell us of), with the owners that
the reports name, and its own number as `barrier`. What the reports do not name may be worked by a pod that we cannot
hear, so queues without an owner are granted only when every pod is past the barrier, has ended, or is lost.
"""

from collections.abc import Mapping, Sequence

from rota.documents import Assignment, Share
from rota.handover import Proof
from rota.model import Holder, Queue
from rota.planner.members import incarnations
from rota.planner.snapshot import Pod, Snapshot
from rota.spec import Handover
from rota.timestamps import format_time, parse_time

EVERYTHING = 1_000_000  # moves: of a budget that nobody knows
BELIEVED = 2**52  # the highest generation that somebody may have seen: those that go on from it can be read, too


def ago(at: str, now: float) -> float:
    """Return the seconds since a time that a document tells; what lies ahead was told by a clock that was wrong."""
    seconds = parse_time(at)
    return 0.0 if seconds is None else now - seconds


def damage(snapshot: Snapshot) -> str:
    """Say why the record cannot be believed; nothing: it can, or there never was one."""
    document, seen = snapshot.document, newest(snapshot)
    if snapshot.damage:
        return snapshot.damage
    if document is None:
        told = seen or any(_may_work(pod, snapshot) for pod in snapshot.pods)
        return "The assignment is gone, but pods of the group are there" if told else ""
    if document.group != snapshot.group:
        return f"The assignment is that of {document.group}"
    if document.generation < seen:
        return f"The assignment has generation {document.generation}, but {seen} was seen"
    return ""


def newest(snapshot: Snapshot) -> int:
    """Return the highest generation that was seen anywhere."""
    told = [number for pod in snapshot.pods if not pod.ended for number in (pod.generation, pod.poke.generation)]
    return max(believed(number) for number in [snapshot.status.get("generation"), *told, 0])


def believed(generation: object) -> int:
    """Return a generation that a document can have had: what somebody wrote by hand may be anything."""
    return generation if isinstance(generation, int) and 0 <= generation <= BELIEVED else 0


def recovered(snapshot: Snapshot, now: float) -> Assignment:
    """Return the recovery generation; what was spent of a budget is not known, so all of it is taken as spent."""
    policy = snapshot.policy
    all_of_it = policy.budget.max_moves if policy and policy.budget else 0 if policy else EVERYTHING
    known = snapshot.document.generation if snapshot.document else 0
    generation = max(newest(snapshot) + 1, known + 1, int(now))
    before = Assignment(group=snapshot.group, generation=generation - 1, issued_at="")
    since = incarnations.since(snapshot, before)
    shares: dict[str, Share] = {}
    claimed: set[Queue] = set()
    # Where two hold one queue already, the one that obeys the later generation keeps it.
    for pod in sorted(snapshot.pods, key=lambda pod: (-pod.generation, pod.name)):
        if not pod.ended and pod.uid not in snapshot.gone:
            held = (pod.heard.held if pod.heard else frozenset()) - claimed
            claimed |= held
            shares[pod.name] = Share(pod.uid, tuple(sorted(held)), pod.incarnation if since else 0)
    return Assignment(
        group=snapshot.group,
        generation=generation,
        issued_at=format_time(now),
        strategy=snapshot.policy.strategy if snapshot.policy else "",
        members=shares,
        spent=((format_time(now), all_of_it),) if all_of_it else (),
        barrier=generation,
        begun=_begun_anew(snapshot, now),
        incarnations_since=since,
    )


def _begun_anew(snapshot: Snapshot, now: float) -> dict[str, str]:
    """Say of every topic that it is worked since now, unless an older record of the group says since when it is."""
    subscriptions = snapshot.spec.subscriptions if snapshot.spec else ()
    before = snapshot.document
    known = before.begun if before and before.group == snapshot.group else {}
    return {topic: known.get(topic, format_time(now)) for topic in sorted({it.topic for it in subscriptions})}


def past_barrier(document: Assignment, pods: Sequence[Pod], rules: Handover, now: float) -> Proof:
    """Say what is known of a queue that the record gives to nobody."""
    since = ago(document.issued_at, now)
    behind = [pod for pod in pods if pod.started and not pod.ended and pod.generation < document.barrier]
    if not behind:
        return Proof.RELEASED
    return Proof.LOST if all(pod.seen.lost(rules, since) for pod in behind) else Proof.NONE


def owners(document: Assignment) -> dict[Queue, Holder]:
    """Return the present owner of each queue."""
    found: dict[Queue, Holder] = {}
    for name, share in document.members.items():
        found.update(dict.fromkeys(share.queues, Holder(name, share.uid)))
    return found


def holders(document: Assignment) -> dict[Queue, Holder]:
    """Return who may work each queue: its owner, or the one that it was taken from and not yet granted to another."""
    return {queue: release.holder for queue, release in document.releasing.items()} | owners(document)


def entries(document: Assignment, snapshot: Snapshot, counted: Sequence[str]) -> dict[str, str]:
    """Return the name and uid of everybody who has an entry: who counts, and who had one until it has ended."""
    pods: Mapping[str, Pod] = {pod.name: pod for pod in snapshot.pods}
    kept = {
        name: share.uid
        for name, share in document.members.items()
        if share.uid not in snapshot.gone and not (name in pods and pods[name].ended and pods[name].uid == share.uid)
    }
    return kept | {name: pods[name].uid for name in counted}


def _may_work(pod: Pod, snapshot: Snapshot) -> bool:
    """Whether it may obey a document that we do not know: it runs, and did not say that it obeys none."""
    return pod.started and not pod.ended and pod.uid not in snapshot.gone and not (pod.heard and not pod.generation)
