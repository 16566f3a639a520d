"""Faults, each at most as often as the configuration allows."""

from collections.abc import Iterator

from rota.sidecar.member.member import RESUME_SECONDS
from rota.sidecar.member.queue_lifecycle import LeaseState
from simulation.exploration import pods
from simulation.exploration.documents import Document
from simulation.exploration.setting import Setting
from simulation.exploration.state import ApiPod, ExploredState, PodSlot, Transition, replace_slot, slot_of

RECOVERY_INTERVAL_SECONDS = 9.0  # two recoveries within one second are not explored


def transitions(setting: Setting, state: ExploredState) -> Iterator[Transition]:
    """Return the faults that can happen next."""
    for slot in state.slots:
        if slot.api_pod and slot.name in setting.configuration.fault_targets:
            yield from _pod_faults(setting, state, slot, slot.api_pod)
    yield from _operator_faults(setting, state)
    for next_state in setting.spend(state, "delete") if state.stored else ():
        now = state.now + RECOVERY_INTERVAL_SECONDS
        lost = next_state._replace(stored=None, version=state.version + 1, replaced=state.stored, now=now)
        yield Transition("delete", "the stored assignment is deleted", lost)
    for next_state in setting.spend(state, "route"):
        shorter = setting.queues[:-1]
        route = setting.queues if state.route == shorter else shorter
        what = "leaves the route" if route == shorter else "is back in the route"
        text = f"queue {setting.queues[-1].id} {what}"
        yield Transition("route", text, next_state._replace(route=route))
    for next_state in setting.spend(state, "schema"):
        schema = 2 if state.schema == 1 else 1
        text = f"an operator starts that writes documents of schema {schema}"
        yield Transition("schema", text, _restart_operator(next_state)._replace(write=None, schema=schema))
    for next_state in setting.spend(state, "absence"):
        yield Transition("absence", "no operator runs for three minutes", _without_operator(setting, next_state))
    for next_state in setting.spend(state, "pause"):
        text = f"the group is {'resumed' if state.paused else 'paused'}"
        yield Transition("pause", text, next_state._replace(paused=not state.paused))


def _pod_faults(setting: Setting, state: ExploredState, slot: PodSlot, api_pod: ApiPod) -> Iterator[Transition]:
    for kind, text, changed in _process_faults(slot, api_pod):
        for next_state in setting.spend(state, kind):
            yield Transition(kind, text, replace_slot(next_state, changed))
    for document in _older_documents(state, slot):
        for next_state in setting.spend(state, "stale"):
            stale = pods.run_step(setting, next_state, slot._replace(mounted=document), "read", document)
            yield Transition("stale", f"{slot.name}'s volume falls back to generation {document.number}", stale)
    if slot.process and not slot.hung and not slot.process.member._is_draining:
        for next_state in setting.spend(state, "app"):
            drained = pods.run_step(setting, next_state, slot, "drain")
            yield Transition("app", f"the app of {slot.name} stops, and the member drains", drained)
    yield from _reader_faults(setting, state, slot)


def _reader_faults(setting: Setting, state: ExploredState, slot: PodSlot) -> Iterator[Transition]:
    leases = slot.process.member.leases.values() if slot.process and not slot.hung else ()
    for queue in [lease.queue for lease in leases if lease.state is LeaseState.RUNNING]:
        for next_state in setting.spend(state, "reader"):
            text = f"{slot.name}'s reader of {queue.id} fails"
            yield Transition("reader", text, pods.run_step(setting, next_state, slot, "reader fails", queue))


def _process_faults(slot: PodSlot, api_pod: ApiPod) -> Iterator[tuple[str, str, PodSlot]]:
    name = slot.name
    if slot.process and not slot.hung:
        yield "crash", f"{name}'s container dies", slot._replace(process=None)
        yield "hang", f"{name} hangs", slot._replace(hung=True)
    if not slot.dead and not slot.lost:
        yield "lose", f"{name}'s node is cut off", slot._replace(lost=True)
        yield "die", f"all processes of {name} end for good", slot._replace(process=None, dead=True, hung=False)
    if not slot.dead and not api_pod.terminating:
        yield "terminate", f"{name} is terminating", slot._replace(api_pod=api_pod._replace(terminating=True))


def _older_documents(state: ExploredState, slot: PodSlot) -> Iterator[Document]:
    """Return older documents that a member still obeys; a volume that falls back may show them again."""
    if slot.process and not slot.hung:
        obeyed = {other.process.document for other in state.slots if other.process and other.process.document}
        yield from (
            document
            for document in sorted(obeyed, key=_number)
            if document.number < slot.process.member.obeyed_generation
        )


def _number(document: Document) -> int:
    return document.number


def _operator_faults(setting: Setting, state: ExploredState) -> Iterator[Transition]:
    amid = " amid a write" if state.write else ""
    for next_state in setting.spend(state, "restart"):
        yield Transition(
            f"restart{amid}",
            "the operator restarts and lists all pods",
            _restart_operator(next_state)._replace(write=None),
        )
    if state.former:
        return
    new_leader = _restart_operator(state)._replace(former=state.write, write=None)
    for next_state in setting.spend(new_leader, "failover"):
        yield Transition(f"failover{amid}", "another operator leads and lists all pods", next_state)
    for next_state in setting.spend(new_leader, "blind"):
        for slot in next_state.slots:
            if slot.observed:
                text = f"another operator leads; its cache does not know {slot.name} yet"
                yield Transition("blind", text, replace_slot(next_state, slot._replace(observed=None)))


def _without_operator(setting: Setting, state: ExploredState) -> ExploredState:
    """Let members resume without an operator; they read the newest document before that."""
    state = _restart_operator(state)._replace(write=None, former=None, now=state.now + RESUME_SECONDS)
    for slot in state.slots:
        if slot.process and slot.is_reachable and not (slot.api_pod and slot.api_pod.terminating):
            if state.stored and slot.process.document is not state.stored:
                slot = slot._replace(mounted=state.stored)  # noqa: PLW2901 - the slot after that step
                state = pods.run_step(setting, state, slot, "read", state.stored)
                slot = slot_of(state, slot.name)  # noqa: PLW2901
            due = slot.process.member._resume_at() if slot.process else None
            if due is not None:
                state = pods.run_step(setting, state, slot, "tick", due)
    return _restart_operator(state)


def _restart_operator(state: ExploredState) -> ExploredState:
    """Start an operator: it lists the pods and knows no report."""
    slots = tuple(slot._replace(observed=slot.api_pod, report=None, silent_since=None) for slot in state.slots)
    return state._replace(slots=slots, deleted_uids=frozenset(), awaited_reports=None)
