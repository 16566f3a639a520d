"""What must hold in every world, and in one that has come to rest."""

from itertools import combinations

from rota.documents import Assignment
from rota.model import Holder, Queue
from simulation.exploration.documents import Document
from simulation.exploration.world import ExploredState, Facts, Place, age


def objection(world: ExploredState) -> str:
    """Say what does not hold in a world."""
    for one, other in combinations(world.places, 2):
        if one.process and other.process:
            for queue in one.process.working & other.process.working:
                uids = {one.process.member.uid, other.process.member.uid}
                if not any(lost[0] == queue and lost[1] in uids for lost in world.overruled):
                    return f"{queue} is worked by {one.name} and by {other.name}, and nobody forced it"
    for place in world.places:
        if place.process and place.process.member.obeyed_generation < place.highest:
            return (
                f"{place.name} steps back from generation {place.highest} to {place.process.member.obeyed_generation}"
            )
    return ""


def overruling(world: ExploredState, document: Document) -> str:
    """Say who is overruled too early: silent for too short a time, or Ready, as far as the operator knows."""
    forced = {queue for queue, since in document.assignment.forced.items() if since == document.number}
    losers = {uid for queue, uid in world.record.holding if queue in forced} if world.record else set()
    for place in world.places:
        if place.seen and place.seen.uid in losers and age(place.silent, world.now) < 1 + place.seen.ready:
            return f"{document} overrules {place.seen.uid} too early"
    return ""


def excused(world: ExploredState) -> ExploredState:
    """Forget who lost a queue by force once it is gone, or knows of it and has stopped: it is no excuse any more.

    Where the record gets lost right after a force, reports that are read one after another may show the old owner
    at work and the new one not yet. Recovery gives the queue back to the old one, which has meanwhile seen the
    force and stopped, while the new one begins. No order of reading avoids that, so nothing is forgotten while a
    record is missing or not everybody is known to be past its barrier.
    """
    if not world.overruled:
        return world
    there = {place.facts.uid: place for place in world.places if place.facts}
    kept = frozenset(it for it in world.overruled if it[1] in there)
    if world.record and not world.record.assignment.barrier:
        kept = frozenset(it for it in kept if _may_still(it[0], it[2], there[it[1]]))
    return world._replace(overruled=kept)


def _may_still(queue: Queue, since: int, place: Place) -> bool:
    return place.highest < since or (place.process is not None and queue in place.process.working)


def unrest(world: ExploredState, *, healed: bool) -> str:
    """Say what is wrong in a world where nothing is left to happen; `healed`: who hung or was cut off is back."""
    able = {place.facts.uid for place in world.places if place.facts and _able(place, place.facts)}
    if not able:
        return ""
    if world.record is None:
        return "There is no record, and nobody will write one"
    document, owners = world.record.assignment, world.record.owners
    wanted = () if world.paused else world.route
    return (
        _unowned(wanted, owners, able)
        or _unworked(world, owners, able, healed=healed)
        or _unfinished(document, able, healed=healed)
    )


def _unowned(wanted: tuple[Queue, ...], owners: dict[Queue, Holder], able: set[str]) -> str:
    if set(owners) != set(wanted):
        return f"Owned are {sorted(owners)}, wanted are {wanted}"
    unable = [
        f"{queue} is owned by {holder}, who cannot work it"
        for queue, holder in owners.items()
        if holder.uid not in able
    ]
    return "; ".join(unable)


def _unworked(world: ExploredState, owners: dict[Queue, Holder], able: set[str], *, healed: bool) -> str:
    """Each queue is worked by its owner; besides by nobody, but whom nobody can tell to stop."""
    processes = [place.process for place in world.places if place.process]
    for queue in {*owners, *(queue for process in processes for queue in process.working)}:
        working = {process.member.uid for process in processes if queue in process.working}
        owner = {owners[queue].uid} if queue in owners else set()
        if not owner <= working or (working - owner) & (working if healed else able):
            return f"{queue} is owned by {owner or 'nobody'} and worked by {working or 'nobody'}"
    return ""


def _unfinished(document: Assignment, able: set[str], *, healed: bool) -> str:
    waiting = [queue for queue, release in document.releasing.items() if healed or release.holder.uid in able]
    return f"Still under release: {sorted(waiting)}" if waiting else ""


def _able(place: Place, facts: Facts) -> bool:
    final = place.process is not None and place.process.member.final
    return place.answers and facts.ready and not facts.terminating and not facts.ended and not final
