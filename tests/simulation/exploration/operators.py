"""What the operator comes to know, what it plans with the real `plan()`, and what becomes of that."""

from collections.abc import Iterator

from builders import GROUP, LONG, NOW
from rota.planner import Plan, PodSnapshot, QueueView, Snapshot, plan
from simulation.exploration import laws, pods
from simulation.exploration.setting import Setting
from simulation.exploration.world import ExploredState, Facts, Place, Turn, Write, accepted, age, named, put
from simulation.judge import Broken


def looks(world: ExploredState, place: Place) -> Iterator[Turn]:
    """Return what the operator can come to know of a pod."""
    name, seen, facts = place.name, place.seen, place.facts
    if seen != facts:
        yield Turn("see", f"the operator sees {facts or f'that {name} is gone'}", see(world, place))
    if seen is None or facts is None or facts.ended:
        return
    asked = world.asking is not None and name in world.asking
    left = world.asking - {name} if world.asking else world.asking
    if place.answers and place.process and seen.uid == facts.uid:
        told = place.process.told
        if asked or place.heard is not told or place.silent is not None:
            heard = place._replace(heard=told, silent=None)
            yield Turn("hear", f"the operator reads {name}'s report: {told}", put(world, heard, asking=left))
    elif asked:
        deaf = place._replace(silent=world.now if place.silent is None else place.silent)
        yield Turn("deaf", f"the operator is not answered by {name}", put(world, deaf, asking=left))


def see(world: ExploredState, place: Place) -> ExploredState:
    """Let the operator see a pod as it is."""
    seen, gone, asking = place.seen, world.gone, world.asking
    if seen and (place.facts is None or place.facts.uid != seen.uid):
        gone |= {seen.uid}
        place = place._replace(heard=None, silent=None)
        asking = asking - {place.name} if asking else asking
    return put(world, place._replace(seen=place.facts), gone=gone, asking=asking)


def turns(setting: Setting, world: ExploredState) -> Iterator[Turn]:
    """Return what the operator, and one that does not know that it was replaced, can do next."""
    planned = _plan(setting, world)
    for holder in planned.verify_ended:
        place = named(world, holder.name)
        after = see(world, place)
        if place.facts is None or place.facts.uid != holder.uid:
            after = after._replace(gone=after.gone | {holder.uid})
        yield Turn("confirm", f"the operator looks for {holder.uid}", after)
    for holder in planned.members_to_drain:
        place = named(world, holder.name)
        if place.process and place.answers and place.process.member.uid == holder.uid:
            drained = pods.stepped(setting, world, place, "drain for good")
            yield Turn("drain", f"the operator asks {holder.name} to drain for good", drained)
    if world.write is None:
        yield from _plans(setting, world, planned)
    else:
        yield _arrives("the operator", world.write, world, world._replace(write=None))
    if world.former:
        yield _arrives("the former leader", world.former, world, world._replace(former=None))


def _plans(setting: Setting, world: ExploredState, planned: Plan) -> Iterator[Turn]:
    if planned.document:
        document = setting.documents.of(planned.document, str(planned.config_map_data["assignment.json"]))
        if wrong := laws.overruling(world, document):
            raise Broken(wrong)
        write = Write(document, world.version if world.record else None)
        yield Turn("plan", f"the operator plans {document}", world._replace(write=write, asking=None))
    if planned.refetch and not world.asking:
        yield Turn("reread", "the operator reads everything anew, for the record is missing", _reread(world))


def _reread(world: ExploredState) -> ExploredState:
    for place in world.places:
        world = see(world, place)
    places = tuple(place._replace(heard=None, silent=None) for place in world.places)
    return world._replace(places=places, asking=frozenset(place.name for place in places if place.seen))


def _arrives(whose: str, write: Write, world: ExploredState, after: ExploredState) -> Turn:
    text = f"{whose}'s generation {write.document.number} is"
    if not accepted(write, world):
        return Turn("conflict", f"{text} refused", after)
    return Turn("write", f"{text} written", _written(after, write))


def _written(world: ExploredState, write: Write) -> ExploredState:
    """Replace the record; who loses a queue by force is remembered until it is granted to him again."""
    document, before = write.document, world.record
    known = [before, *(place.shown for place in world.places)]
    known += [place.process.document for place in world.places if place.process]
    if any(it and it.number == document.number and it is not document for it in known):
        raise Broken(f"Generation {document.number} has two texts")
    overruled = world.overruled
    if before and document.assignment.barrier != document.number:  # else it grants nothing
        granted = {(queue, holder.uid) for queue, holder in document.owners.items()} - before.holding
        overruled = frozenset(it for it in overruled if it[:2] not in granted)
    uids = {place.facts.uid for place in world.places if place.facts}
    for queue, since in document.assignment.forced.items():
        if since == document.number:
            overruled |= {(queue, uid, since) for uid in uids - {document.owners[queue].uid}}
    return world._replace(record=document, version=world.version + 1, asking=None, overruled=overruled)


def _plan(setting: Setting, world: ExploredState) -> Plan:
    """Return what the planner says to what the operator knows; it is asked once."""
    gone = world.gone & world.record.uids if world.record else frozenset()
    sights = tuple((it.seen, it.heard, age(it.silent, world.now)) for it in world.places)
    key = (world.record, world.now, sights, gone, world.route, world.paused, world.asking == frozenset(), world.schema)
    found = setting.plans.get(key)
    if found is None:
        found = setting.plans[key] = plan(_snapshot(setting, world, gone), NOW + world.now)
    return found


def _snapshot(setting: Setting, world: ExploredState, gone: frozenset[str]) -> Snapshot:
    return Snapshot(
        group=GROUP,
        spec=setting.specs[world.paused],
        policy=setting.policy,
        document=world.record.assignment if world.record else None,
        revalidated=world.asking == frozenset(),
        pods=tuple(_pod(place, place.seen, world.now) for place in world.places if place.seen),
        deleted_uids=gone,
        views={"orders": QueueView(world.route, LONG)},
        max_schema=world.schema,
    )


def _pod(place: Place, seen: Facts, now: float) -> PodSnapshot:
    return PodSnapshot(
        name=place.name,
        uid=seen.uid,
        started=seen.started,
        ready=seen.ready,
        stable_for=LONG,
        age=LONG,
        terminating=seen.terminating,
        terminating_for=LONG,
        ended=seen.ended,
        stopped_for=0.0 if place.heard and 0 < place.heard.incarnation <= seen.finished else None,
        decoded_report=place.heard.heard if place.heard else None,
        unreachable_for=0.0 if place.silent is None else now - place.silent,
        poked_for=LONG,
    )
