"""All transitions of a state."""

from collections.abc import Iterator

from rota.handover import MIN_READY_LOST_SECONDS
from simulation.exploration import faults, operators, pods
from simulation.exploration.setting import Setting
from simulation.exploration.state import LOST_AFTER, ExploredState, PodSlot, Transition, replace_slot

SHORT_JUMP = LOST_AFTER + 2
JUMPS = (SHORT_JUMP, MIN_READY_LOST_SECONDS + 1)  # each exceeds one more limit of state.AGES


def transitions(setting: Setting, state: ExploredState) -> Iterator[Transition]:
    """Return every transition of a state."""
    for slot in state.slots:
        yield from pods.transitions(setting, state, slot)
        yield from operators.observations(state, slot)
    yield from operators.transitions(setting, state)
    yield from _time_transitions(state)
    if state.faults_left[-1]:
        yield from faults.transitions(setting, state)


def apply_instant_transitions(setting: Setting, state: ExploredState) -> ExploredState:
    """Apply the transitions that take no time in this configuration."""
    instant = setting.instant
    for slot in state.slots:
        changed = slot
        api_pod = slot.api_pod
        if api_pod and "ready" in instant and api_pod.ready != changed.is_reachable and not changed.dead:
            changed = changed._replace(api_pod=api_pod._replace(ready=changed.is_reachable))
        if api_pod and "show" in instant and pods.can_mount(state, changed, api_pod):
            changed = changed._replace(mounted=state.stored)
        if changed.observed != changed.api_pod and "see" in instant:
            state = operators.see(state, changed)
        elif changed is not slot:
            state = replace_slot(state, changed)
    return state


def _time_transitions(state: ExploredState) -> Iterator[Transition]:
    """Return steps of time. Ages matter only during a handover or a barrier, and for pods that do not respond."""
    has_silent_pod = any(slot.observed and not slot.is_reachable for slot in state.slots)
    is_in_transition = state.stored and (state.stored.assignment.releasing or state.stored.assignment.barrier)
    jumps: tuple[float, ...] = ()
    if has_silent_pod:
        jumps = JUMPS
    elif is_in_transition:
        jumps = (SHORT_JUMP,)
    for jump in jumps:
        yield Transition("wait", f"{jump:g} s pass", _pass_time(state, jump))


def _pass_time(state: ExploredState, seconds: float) -> ExploredState:
    slots = tuple(_update_silence(slot, state.now) if slot.observed else slot for slot in state.slots)
    return state._replace(slots=slots, now=state.now + seconds)


def _update_silence(slot: PodSlot, now: float) -> PodSlot:
    """Mark an unreachable pod as silent while time passes; read the report of a pod that is reachable again."""
    if not slot.is_reachable:
        return slot if slot.silent_since is not None else slot._replace(silent_since=now)
    if (
        slot.silent_since is not None
        and slot.process
        and slot.api_pod
        and slot.observed
        and slot.observed.uid == slot.api_pod.uid
    ):
        return slot._replace(silent_since=None, report=slot.process.report)
    return slot
