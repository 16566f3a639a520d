"""Transitions of a pod by its processes, kubelet, node and controller."""

from collections.abc import Iterator
from typing import Any

from rota.model import Queue
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent, LeaseState
from simulation.exploration.documents import Document
from simulation.exploration.processes import DiskState, Process
from simulation.exploration.setting import Setting
from simulation.exploration.state import ApiPod, ExploredState, PodSlot, Transition, replace_slot

EXPECTED_EVENTS = {
    LeaseAction.LOCK: LeaseEvent.LOCKED,
    LeaseAction.FIND_START: LeaseEvent.START_FOUND,
    LeaseAction.STOP: LeaseEvent.DRAINED,
    LeaseAction.UNLOCK: LeaseEvent.UNLOCKED,
}
FAULTY_EVENTS = {
    LeaseAction.LOCK: (LeaseEvent.REFUSED, LeaseEvent.FAILED),
    LeaseAction.FIND_START: (LeaseEvent.FAILED,),
}
MAX_OPEN_LOCKS = 2  # unanswered lock requests; more change nothing


def transitions(setting: Setting, state: ExploredState, slot: PodSlot) -> Iterator[Transition]:
    """Return what can happen next to the pod of a slot, and in it."""
    if slot.api_pod is None:
        yield from _create(state, slot)
        return
    yield from _recover(setting, state, slot)
    if slot.dead:
        yield from _remove(state, slot, slot.api_pod)
        return
    yield from _probe(state, slot, slot.api_pod)
    if not slot.lost:
        yield from _kubelet_transitions(setting, state, slot, slot.api_pod)
    if slot.process and not slot.hung:
        yield from _process_transitions(setting, state, slot, slot.process)


def run_step(setting: Setting, state: ExploredState, slot: PodSlot, *action: Any) -> ExploredState:
    """Advance a process by one action, and store on its disk what its member requests."""
    assert slot.process
    process, step = setting.processes.advance(slot.process, *action)
    generation, final, starts = slot.disk
    if step.store_generation is not None:
        generation = step.store_generation
    highest = max(slot.highest, process.member.obeyed_generation)
    disk = DiskState(generation, final or step.store_final, starts)
    slot = slot._replace(process=process, disk=disk, highest=highest)
    return replace_slot(state, slot)


def can_mount(state: ExploredState, slot: PodSlot, api_pod: ApiPod) -> bool:
    """Return whether the kubelet can update the volume; volumes of terminating pods stay as they are."""
    is_current = slot.mounted is state.stored or state.stored is None
    return not (is_current or slot.dead or slot.lost or api_pod.terminating)


def sendable_documents(state: ExploredState) -> list[Document]:
    """Return what the operator may have sent to members: the stored document, and the one that it has replaced."""
    return [document for document in (state.stored, state.replaced) if document]


def _create(state: ExploredState, slot: PodSlot) -> Iterator[Transition]:
    uid = f"{slot.name}.{slot.pods_created + 1}"
    created = PodSlot(
        slot.name,
        slot.pods_created + 1,
        ApiPod(uid),
        observed=slot.observed,
        report=slot.report,
        silent_since=slot.silent_since,
    )
    yield Transition("make", f"pod {uid} is created", replace_slot(state, created))
    if slot.mounted and slot.mounted is not state.stored:
        text = f"pod {uid} is created; the node's kubelet still has generation {slot.mounted.number}"
        yield Transition("make old", text, replace_slot(state, created._replace(mounted=slot.mounted)))


def _remove(state: ExploredState, slot: PodSlot, api_pod: ApiPod) -> Iterator[Transition]:
    removed = slot._replace(api_pod=None, dead=False, disk=DiskState(), highest=0)
    yield Transition("end", f"pod {api_pod.uid} is removed", replace_slot(state, removed))
    if not api_pod.ended and not api_pod.terminating:
        ended = slot._replace(api_pod=api_pod._replace(ended=True, ready=False))
        yield Transition("phase", f"pod {api_pod.uid} has failed", replace_slot(state, ended))


def _recover(setting: Setting, state: ExploredState, slot: PodSlot) -> Iterator[Transition]:
    name = slot.name
    if slot.hung:
        awake = run_step(setting, state, slot._replace(hung=False), "wake", slot.mounted)
        yield Transition("wake", f"{name} wakes and reads what its volume shows", awake)
    if slot.lost:
        yield Transition("find", f"{name}'s node is back", replace_slot(state, slot._replace(lost=False)))


def _probe(state: ExploredState, slot: PodSlot, api_pod: ApiPod) -> Iterator[Transition]:
    if api_pod.ready != slot.is_reachable:
        text = f"{slot.name} is {'ready' if slot.is_reachable else 'not ready'}"
        yield Transition(
            "ready", text, replace_slot(state, slot._replace(api_pod=api_pod._replace(ready=slot.is_reachable)))
        )


def _kubelet_transitions(
    setting: Setting, state: ExploredState, slot: PodSlot, api_pod: ApiPod
) -> Iterator[Transition]:
    """Return what the kubelet does for a pod."""
    name = slot.name
    stored = state.stored
    if stored and can_mount(state, slot, api_pod):
        text = f"{name}'s volume shows generation {stored.number}"
        yield Transition("show", text, replace_slot(state, slot._replace(mounted=stored)))
    if slot.finished > api_pod.finished:
        text = f"the kubelet says that process {slot.finished} of {name} has ended"
        yield Transition(
            "finished", text, replace_slot(state, slot._replace(api_pod=api_pod._replace(finished=slot.finished)))
        )
    if slot.process is None:
        disk = setting.disk_after_start(slot.disk)
        process = setting.processes.start(name, api_pod.uid, disk)
        started = slot._replace(process=process, disk=disk, api_pod=api_pod._replace(started=True))
        yield Transition("start", f"{name}'s container starts, remembering {tuple(disk)}", replace_slot(state, started))
    if api_pod.terminating:
        dead = slot._replace(process=None, dead=True, hung=False)
        yield Transition("exit", f"{name}'s processes end", replace_slot(state, dead))


def _process_transitions(
    setting: Setting, state: ExploredState, slot: PodSlot, process: Process
) -> Iterator[Transition]:
    """Return what a process does."""
    name = slot.name
    mounted = slot.mounted
    if mounted and mounted is not process.document:
        read = run_step(setting, state, slot, "read", mounted)
        yield Transition("read", f"{name} reads generation {mounted.number}", read)
    if slot.is_reachable and process.document:  # it has read its settings, which a sent document does not contain
        for document in sendable_documents(state):
            obeyed = run_step(setting, state, slot, "send", document)
            yield Transition("send", f"{name} gets generation {document.number} from the operator", obeyed)
    for queue, commands in process.pending_commands.items():
        yield from _responses(setting, state, slot, queue, commands[0][0])
    if process.member._is_draining and not process.member.final:
        yield Transition("back", f"the app of {name} is back", run_step(setting, state, slot, "back"))
    yield from _timers(setting, state, slot, process)


def _responses(
    setting: Setting, state: ExploredState, slot: PodSlot, queue: Queue, command: Command
) -> Iterator[Transition]:
    def response(kind: str, event: LeaseEvent, previous_state: ExploredState) -> Transition:
        text = f"{slot.name} gets {event.value} for {command.action} {queue.id} of lease {command.lease_number}"
        return Transition(kind, text, run_step(setting, previous_state, slot, "answer", event, queue))

    yield response("answer", EXPECTED_EVENTS[command.action], state)
    for event in FAULTY_EVENTS.get(command.action, ()):
        for spent in setting.spend(state, "fail"):
            yield response("fail", event, spent)


def _timers(setting: Setting, state: ExploredState, slot: PodSlot, process: Process) -> Iterator[Transition]:
    due = process.member.next_timer_at()
    leases = process.member.leases.values()
    open_locks = 0
    for commands in process.pending_commands.values():
        open_locks += sum(command.action is LeaseAction.LOCK for command, _ in commands)
    is_needed = any(lease.state is LeaseState.STUCK or lease.is_held for lease in leases)
    if due is not None and open_locks <= MAX_OPEN_LOCKS and (is_needed or setting.configuration.late_timers):
        ticked = run_step(setting, state, slot, "tick", due)
        yield Transition("tick" if is_needed else "late", f"{slot.name}'s due timers run", ticked)
