"""What processes, kubelets, nodes and controllers do with a pod."""

from collections.abc import Iterator
from typing import Any

from rota.model import Queue
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent, LeaseState
from simulation.exploration.processes import Process
from simulation.exploration.setting import Setting
from simulation.exploration.world import ExploredState, Facts, Place, Turn, put

GOOD = {
    LeaseAction.LOCK: LeaseEvent.LOCKED,
    LeaseAction.FIND_START: LeaseEvent.START_FOUND,
    LeaseAction.STOP: LeaseEvent.DRAINED,
    LeaseAction.UNLOCK: LeaseEvent.UNLOCKED,
}
BAD = {LeaseAction.LOCK: (LeaseEvent.REFUSED, LeaseEvent.FAILED), LeaseAction.FIND_START: (LeaseEvent.FAILED,)}
LOCKS = 2  # unanswered ones; more of them change nothing


def turns(setting: Setting, world: ExploredState, place: Place) -> Iterator[Turn]:
    """Return what can happen next to the pod of a name, and in it."""
    if place.facts is None:
        yield from _made(world, place)
        return
    yield from _comes_back(setting, world, place)
    if place.over:
        yield from _ended(world, place, place.facts)
        return
    yield from _probed(world, place, place.facts)
    if not place.lost:
        yield from _kept(setting, world, place, place.facts)
    if place.process and not place.hung:
        yield from _works(setting, world, place, place.process)


def stepped(setting: Setting, world: ExploredState, place: Place, *action: Any) -> ExploredState:
    """Let a process take a step, and put on its disk what it wants to remember."""
    assert place.process
    process, step = setting.processes.after(place.process, *action)
    generation, final, started = place.disk
    if step.store_generation is not None:
        generation = step.store_generation
    highest = max(place.highest, process.member.obeyed_generation)
    disk = generation, final or step.store_final, started
    place = place._replace(process=process, disk=disk, highest=highest)
    return put(world, place)


def shows(world: ExploredState, place: Place, facts: Facts) -> bool:
    """Whether the kubelet has something to show; a terminating pod is shown nothing any more."""
    kept_up = place.shown is world.record or world.record is None
    return not (kept_up or place.over or place.lost or facts.terminating)


def _made(world: ExploredState, place: Place) -> Iterator[Turn]:
    uid = f"{place.name}.{place.made + 1}"
    made = Place(place.name, place.made + 1, Facts(uid), seen=place.seen, heard=place.heard, silent=place.silent)
    yield Turn("make", f"pod {uid} is made", put(world, made))
    if place.shown and place.shown is not world.record:
        text = f"pod {uid} is made; the node's kubelet still has generation {place.shown.number}"
        yield Turn("make old", text, put(world, made._replace(shown=place.shown)))


def _ended(world: ExploredState, place: Place, facts: Facts) -> Iterator[Turn]:
    removed = place._replace(facts=None, over=False, disk=(0, False, 0), highest=0)
    yield Turn("end", f"pod {facts.uid} is removed", put(world, removed))
    if not facts.ended and not facts.terminating:
        ended = place._replace(facts=facts._replace(ended=True, ready=False))
        yield Turn("phase", f"pod {facts.uid} has failed", put(world, ended))


def _comes_back(setting: Setting, world: ExploredState, place: Place) -> Iterator[Turn]:
    name = place.name
    if place.hung:
        awake = stepped(setting, world, place._replace(hung=False), "wake", place.shown)
        yield Turn("wake", f"{name} wakes and reads what its volume shows", awake)
    if place.lost:
        yield Turn("find", f"{name}'s node is back", put(world, place._replace(lost=False)))


def _probed(world: ExploredState, place: Place, facts: Facts) -> Iterator[Turn]:
    if facts.ready != place.answers:
        text = f"{place.name} is {'ready' if place.answers else 'not ready'}"
        yield Turn("ready", text, put(world, place._replace(facts=facts._replace(ready=place.answers))))


def _kept(setting: Setting, world: ExploredState, place: Place, facts: Facts) -> Iterator[Turn]:
    """What the kubelet does for a pod."""
    name, record = place.name, world.record
    if record and shows(world, place, facts):
        text = f"{name}'s volume shows generation {record.number}"
        yield Turn("show", text, put(world, place._replace(shown=record)))
    if place.finished > facts.finished:
        text = f"the kubelet says that process {place.finished} of {name} has ended"
        yield Turn("finished", text, put(world, place._replace(facts=facts._replace(finished=place.finished))))
    if place.process is None:
        disk = setting.begun(place.disk)
        process = setting.processes.start(name, facts.uid, disk)
        started = place._replace(process=process, disk=disk, facts=facts._replace(started=True))
        yield Turn("start", f"{name}'s container starts, remembering {disk}", put(world, started))
    if facts.terminating:
        over = place._replace(process=None, over=True, hung=False)
        yield Turn("exit", f"{name}'s processes end", put(world, over))


def _works(setting: Setting, world: ExploredState, place: Place, process: Process) -> Iterator[Turn]:
    """What a process does."""
    name, shown = place.name, place.shown
    if shown and shown is not process.document:
        read = stepped(setting, world, place, "read", shown)
        yield Turn("read", f"{name} reads generation {shown.number}", read)
    for queue, commands in process.waiting.items():
        yield from _answers(setting, world, place, queue, commands[0][0])
    if process.member._is_draining and not process.member.final:
        yield Turn("back", f"the app of {name} is back", stepped(setting, world, place, "back"))
    yield from _clock(setting, world, place, process)


def _answers(setting: Setting, world: ExploredState, place: Place, queue: Queue, command: Command) -> Iterator[Turn]:
    def turn(kind: str, event: LeaseEvent, before: ExploredState) -> Turn:
        text = f"{place.name} is told {event.value} for {command.action} {queue.id} of life {command.lease_number}"
        return Turn(kind, text, stepped(setting, before, place, "answer", event, queue))

    yield turn("answer", GOOD[command.action], world)
    for event in BAD.get(command.action, ()):
        for spent in setting.spend(world, "fail"):
            yield turn("fail", event, spent)


def _clock(setting: Setting, world: ExploredState, place: Place, process: Process) -> Iterator[Turn]:
    due, lives = process.member.next_timer_at(), process.member.leases.values()
    locks = [it for commands in process.waiting.values() for it, _ in commands if it.action is LeaseAction.LOCK]
    needed = any(life.state is LeaseState.STUCK or life.is_held for life in lives)
    if due is not None and len(locks) <= LOCKS and (needed or setting.configuration.late):
        ticked = stepped(setting, world, place, "tick", due)
        yield Turn("tick" if needed else "late", f"{place.name} does what is due", ticked)
