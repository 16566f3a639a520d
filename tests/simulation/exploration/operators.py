"""The operator: what it observes of pods, what it plans with the real `plan()`, and its writes."""

from collections.abc import Iterator

from builders import GROUP, LONG, NOW
from rota.planner import Plan, PodSnapshot, QueueView, Snapshot, plan
from simulation.exploration import invariants, pods
from simulation.exploration.setting import Setting
from simulation.exploration.state import (
    ApiPod,
    ExploredState,
    PodSlot,
    Transition,
    Write,
    accepted,
    age,
    replace_slot,
    slot_of,
)
from simulation.judge import InvariantError


def observations(state: ExploredState, slot: PodSlot) -> Iterator[Transition]:
    """Return the observations of a pod that the operator can make next."""
    name = slot.name
    observed = slot.observed
    api_pod = slot.api_pod
    if observed != api_pod:
        yield Transition("see", f"the operator sees {api_pod or f'that {name} is gone'}", see(state, slot))
    if observed is None or api_pod is None or api_pod.ended:
        return
    is_awaited = state.awaited_reports is not None and name in state.awaited_reports
    awaited = state.awaited_reports - {name} if state.awaited_reports else state.awaited_reports
    if slot.is_reachable and slot.process and observed.uid == api_pod.uid:
        report = slot.process.report
        if is_awaited or slot.report is not report or slot.silent_since is not None:
            reported = slot._replace(report=report, silent_since=None)
            yield Transition(
                "hear",
                f"the operator reads {name}'s report: {report}",
                replace_slot(state, reported, awaited_reports=awaited),
            )
    elif is_awaited:
        unanswered = slot._replace(silent_since=state.now if slot.silent_since is None else slot.silent_since)
        yield Transition(
            "deaf", f"the operator is not answered by {name}", replace_slot(state, unanswered, awaited_reports=awaited)
        )


def see(state: ExploredState, slot: PodSlot) -> ExploredState:
    """Update what the operator knows of a pod to its present state at the API server."""
    observed = slot.observed
    deleted_uids = state.deleted_uids
    awaited = state.awaited_reports
    if observed and (slot.api_pod is None or slot.api_pod.uid != observed.uid):
        deleted_uids |= {observed.uid}
        slot = slot._replace(report=None, silent_since=None)
        awaited = awaited - {slot.name} if awaited else awaited
    return replace_slot(state, slot._replace(observed=slot.api_pod), deleted_uids=deleted_uids, awaited_reports=awaited)


def transitions(setting: Setting, state: ExploredState) -> Iterator[Transition]:
    """Return what the operator, and a former leader with an open write, can do next."""
    outcome = _plan(setting, state)
    for holder in outcome.verify_ended:
        slot = slot_of(state, holder.name)
        next_state = see(state, slot)
        if slot.api_pod is None or slot.api_pod.uid != holder.uid:
            next_state = next_state._replace(deleted_uids=next_state.deleted_uids | {holder.uid})
        yield Transition("confirm", f"the operator looks for {holder.uid}", next_state)
    for holder in outcome.members_to_drain:
        slot = slot_of(state, holder.name)
        if slot.process and slot.is_reachable and slot.process.member.uid == holder.uid:
            drained = pods.run_step(setting, state, slot, "drain for good")
            yield Transition("drain", f"the operator asks {holder.name} to drain for good", drained)
    if state.write is None:
        yield from _plan_transitions(setting, state, outcome)
    else:
        yield _write_transition("the operator", state.write, state, state._replace(write=None))
    if state.former:
        yield _write_transition("the former leader", state.former, state, state._replace(former=None))


def _plan_transitions(setting: Setting, state: ExploredState, outcome: Plan) -> Iterator[Transition]:
    if outcome.document:
        document = setting.documents.of(outcome.document, str(outcome.config_map_data["assignment.json"]))
        if problem := invariants.early_force(state, document):
            raise InvariantError(problem)
        write = Write(document, state.version if state.stored else None)
        yield Transition("plan", f"the operator plans {document}", state._replace(write=write, awaited_reports=None))
    if outcome.refetch and not state.awaited_reports:
        yield Transition(
            "reread", "the operator refetches everything, as the stored assignment is missing", _refetch(state)
        )


def _refetch(state: ExploredState) -> ExploredState:
    for slot in state.slots:
        state = see(state, slot)
    slots = tuple(slot._replace(report=None, silent_since=None) for slot in state.slots)
    return state._replace(slots=slots, awaited_reports=frozenset(slot.name for slot in slots if slot.observed))


def _write_transition(writer: str, write: Write, state: ExploredState, next_state: ExploredState) -> Transition:
    text = f"{writer}'s generation {write.document.number} is"
    if not accepted(write, state):
        return Transition("conflict", f"{text} refused", next_state)
    return Transition("write", f"{text} written", _store(next_state, write))


def _store(state: ExploredState, write: Write) -> ExploredState:
    """Replace the stored assignment; note the losers of forced grants, until they are granted the queue again."""
    document = write.document
    previous = state.stored
    documents = [previous, state.replaced, *(slot.mounted for slot in state.slots)]
    documents += [slot.process.document for slot in state.slots if slot.process]
    if any(other and other.number == document.number and other is not document for other in documents):
        raise InvariantError(f"Generation {document.number} has two texts")
    overruled = state.overruled
    if previous and document.assignment.barrier != document.number:  # a rebuilt assignment grants nothing
        granted = {(queue, holder.uid) for queue, holder in document.owners.items()} - previous.holding
        overruled = frozenset((queue, uid, since) for queue, uid, since in overruled if (queue, uid) not in granted)
    uids = {slot.api_pod.uid for slot in state.slots if slot.api_pod}
    for queue, since in document.assignment.forced.items():
        if since == document.number:
            overruled |= {(queue, uid, since) for uid in uids - {document.owners[queue].uid}}
    return state._replace(
        stored=document,
        version=state.version + 1,
        replaced=previous or state.replaced,
        awaited_reports=None,
        overruled=overruled,
    )


def _plan(setting: Setting, state: ExploredState) -> Plan:
    """Return the plan for what the operator knows; each distinct input is planned once."""
    deleted_uids = state.deleted_uids & state.stored.uids if state.stored else frozenset()
    observations_key = tuple((slot.observed, slot.report, age(slot.silent_since, state.now)) for slot in state.slots)
    key = (
        state.stored,
        state.now,
        observations_key,
        deleted_uids,
        state.route,
        state.paused,
        state.awaited_reports == frozenset(),
        state.schema,
    )
    planned = setting.plans.get(key)
    if planned is None:
        planned = setting.plans[key] = plan(_snapshot(setting, state, deleted_uids), NOW + state.now)
    return planned


def _snapshot(setting: Setting, state: ExploredState, deleted_uids: frozenset[str]) -> Snapshot:
    return Snapshot(
        group=GROUP,
        spec=setting.specs[state.paused],
        policy=setting.policy,
        document=state.stored.assignment if state.stored else None,
        refetched=state.awaited_reports == frozenset(),
        pods=tuple(_pod(slot, slot.observed, state.now) for slot in state.slots if slot.observed),
        deleted_uids=deleted_uids,
        views={"orders": QueueView(state.route, LONG)},
        max_schema=state.schema,
    )


def _pod(slot: PodSlot, observed: ApiPod, now: float) -> PodSnapshot:
    return PodSnapshot(
        name=slot.name,
        uid=observed.uid,
        started=observed.started,
        ready=observed.ready,
        stable_for=LONG,
        age=LONG,
        terminating=observed.terminating,
        terminating_for=LONG,
        ended=observed.ended,
        stopped_for=0.0 if slot.report and 0 < slot.report.incarnation <= observed.finished else None,
        decoded_report=slot.report.decoded if slot.report else None,
        unreachable_for=0.0 if slot.silent_since is None else now - slot.silent_since,
        poked_for=LONG,
    )
