"""What befalls a world only so often as its configuration says."""

from collections.abc import Iterator

from rota.sidecar.member.member import RESUME_SECONDS
from rota.sidecar.member.queue_lifecycle import LeaseState
from simulation.exploration import pods
from simulation.exploration.documents import Document
from simulation.exploration.setting import Setting
from simulation.exploration.world import ExploredState, Facts, Place, Turn, named, put

RECOVERY_APART = 9.0  # seconds between two recoveries: one written within a second of another is not our matter


def turns(setting: Setting, world: ExploredState) -> Iterator[Turn]:
    """Return the faults that can happen next."""
    for place in world.places:
        if place.facts and place.name in setting.configuration.hit:
            yield from _of_a_pod(setting, world, place, place.facts)
    yield from _of_the_operator(setting, world)
    for spent in setting.spend(world, "delete") if world.record else ():
        lost = spent._replace(record=None, version=world.version + 1, now=world.now + RECOVERY_APART)
        yield Turn("delete", "the record is deleted", lost)
    for spent in setting.spend(world, "route"):
        shorter = setting.queues[:-1]
        route = setting.queues if world.route == shorter else shorter
        what = "leaves the route" if route == shorter else "is back in the route"
        text = f"queue {setting.queues[-1].id} {what}"
        yield Turn("route", text, spent._replace(route=route))
    for spent in setting.spend(world, "schema"):
        text = f"an operator begins that writes documents of schema {3 - world.schema}"
        yield Turn("schema", text, _anew(spent)._replace(write=None, schema=3 - world.schema))
    for spent in setting.spend(world, "absence"):
        yield Turn("absence", "no operator is there for three minutes", _resumed(setting, spent))
    for spent in setting.spend(world, "pause"):
        text = f"the group is {'resumed' if world.paused else 'paused'}"
        yield Turn("pause", text, spent._replace(paused=not world.paused))


def _of_a_pod(setting: Setting, world: ExploredState, place: Place, facts: Facts) -> Iterator[Turn]:
    for kind, text, after in _troubles(place, facts):
        for spent in setting.spend(world, kind):
            yield Turn(kind, text, put(spent, after))
    for document in _older(world, place):
        for spent in setting.spend(world, "stale"):
            stale = pods.stepped(setting, spent, place._replace(shown=document), "read", document)
            yield Turn("stale", f"{place.name}'s volume falls back to generation {document.number}", stale)
    if place.process and not place.hung and not place.process.member._is_draining:
        for spent in setting.spend(world, "app"):
            drained = pods.stepped(setting, spent, place, "drain")
            yield Turn("app", f"the app of {place.name} stops, and the member drains", drained)
    yield from _of_a_reader(setting, world, place)


def _of_a_reader(setting: Setting, world: ExploredState, place: Place) -> Iterator[Turn]:
    lives = place.process.member.leases.values() if place.process and not place.hung else ()
    for queue in [life.queue for life in lives if life.state is LeaseState.RUNNING]:
        for spent in setting.spend(world, "reader"):
            text = f"{place.name}'s reader of {queue.id} fails"
            yield Turn("reader", text, pods.stepped(setting, spent, place, "reader fails", queue))


def _troubles(place: Place, facts: Facts) -> Iterator[tuple[str, str, Place]]:
    name = place.name
    if place.process and not place.hung:
        yield "crash", f"{name}'s container dies", place._replace(process=None)
        yield "hang", f"{name} hangs", place._replace(hung=True)
    if not place.over and not place.lost:
        yield "lose", f"{name}'s node is cut off", place._replace(lost=True)
        yield "die", f"all processes of {name} end for good", place._replace(process=None, over=True, hung=False)
    if not place.over and not facts.terminating:
        yield "terminate", f"{name} is terminating", place._replace(facts=facts._replace(terminating=True))


def _older(world: ExploredState, place: Place) -> Iterator[Document]:
    """Return documents that somebody still obeys, and that a node which falls back may show again."""
    if place.process and not place.hung:
        obeyed = {it.process.document for it in world.places if it.process and it.process.document}
        yield from (it for it in sorted(obeyed, key=_number) if it.number < place.process.member.obeyed_generation)


def _number(document: Document) -> int:
    return document.number


def _of_the_operator(setting: Setting, world: ExploredState) -> Iterator[Turn]:
    amid = " amid a write" if world.write else ""
    for spent in setting.spend(world, "restart"):
        yield Turn(f"restart{amid}", "the operator restarts and lists all pods", _anew(spent)._replace(write=None))
    if world.former:
        return
    led = _anew(world)._replace(former=world.write, write=None)
    for spent in setting.spend(led, "failover"):
        yield Turn(f"failover{amid}", "another operator leads and lists all pods", spent)
    for spent in setting.spend(led, "blind"):
        for place in spent.places:
            if place.seen:
                text = f"another operator leads, whose cache does not know {place.name} yet"
                yield Turn("blind", text, put(spent, place._replace(seen=None)))


def _resumed(setting: Setting, world: ExploredState) -> ExploredState:
    """Let members that wait for an operator go on by themselves; what was written before that is shown to them."""
    world = _anew(world)._replace(write=None, former=None, now=world.now + RESUME_SECONDS)
    for place in world.places:
        if place.process and place.answers and not (place.facts and place.facts.terminating):
            if world.record and place.process.document is not world.record:
                place = place._replace(shown=world.record)  # noqa: PLW2901 - the place as it is after that
                world = pods.stepped(setting, world, place, "read", world.record)
                place = named(world, place.name)  # noqa: PLW2901
            due = place.process.member._resume_at() if place.process else None
            if due is not None:
                world = pods.stepped(setting, world, place, "tick", due)
    return _anew(world)


def _anew(world: ExploredState) -> ExploredState:
    """Let an operator begin: it knows the pods, and nothing of what was before."""
    places = tuple(place._replace(seen=place.facts, heard=None, silent=None) for place in world.places)
    return world._replace(places=places, gone=frozenset(), asking=None)
