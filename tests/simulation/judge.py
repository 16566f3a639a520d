"""Invariants of a simulated fleet, checked at every event of a run."""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builders import owners_of
from rota.documents import Assignment, decode_assignment
from rota.model import Holder, Queue
from simulation.server import StoredConfigMap

if TYPE_CHECKING:
    from simulation.fleet import Kubelet
    from simulation.sidecar import Sidecar
    from simulation.world import Simulation


RESTLESS_SECONDS = 15.0
PUSH_TIMEOUT_SECONDS = 20.0  # of a delivery in an Orderly group


class InvariantError(BaseException):
    """An invariant does not hold."""


@dataclass(slots=True)
class Consumer:
    """A process that consumes a queue, since a time and by a generation."""

    sidecar: "Sidecar"
    since: float
    generation: int


class Judge:
    """Follows the events of a simulation and raises InvariantError at the first violation."""

    def __init__(self, world: "Simulation") -> None:
        self.world = world
        self.consumers: dict[Queue, list[Consumer]] = {}
        self.texts: dict[int, str | bytes] = {}
        self.documents: dict[int, Assignment] = {}
        self._ever_stored: set[str | bytes] = set()  # texts, also those that a restored old copy has undone
        self.obeyed: defaultdict[int, list[Kubelet]] = defaultdict(list)
        self.document: Assignment | None = None
        self._recent_plans: deque[float] = deque(maxlen=300)  # times; the busiest 15 s of a run have a hundred plans
        self.forced: dict[Queue, int] = {}  # the generation of the last forced grant
        self.moves: list[tuple[float, int]] = []
        self.granted = 0
        self.written = 0
        self.plans = 0
        self.obeyed_before_mounted = 0  # documents that a member obeyed because the operator had sent them
        self.contested = 0
        self.statuses = 0
        world.api.on_config_map_change.append(self.on_config_map_change)

    def on_plan(self) -> None:
        """Count a plan; no fault is a reason to plan continuously.

        Two operators that both lead are not counted: if they have measured different weights, they revert each other's
        moves until one of them loses the Lease.
        """
        self.plans += 1
        now = self.world.clock.now
        if now < self.world.both_lead_until:
            self._recent_plans.clear()
            return
        self._recent_plans.append(now)
        if len(self._recent_plans) == self._recent_plans.maxlen and now - self._recent_plans[0] < RESTLESS_SECONDS:
            raise InvariantError(f"{len(self._recent_plans)} plans within {RESTLESS_SECONDS:g} s")

    def on_status_write(self) -> None:
        """Count a status."""
        self.statuses += 1

    def on_fetch(self, sidecar: "Sidecar", queue: Queue) -> None:
        """Record that a process starts to consume a queue."""
        if not self._is_assigned(sidecar, queue):
            raise InvariantError(
                f"{sidecar.name} fetches {queue}, but generation {sidecar.member.obeyed_generation} does not assign it"
            )
        consumers = self.consumers.setdefault(queue, [])
        consumers[:] = [consumer for consumer in consumers if consumer.sidecar is not sidecar]
        for present in consumers:
            self._check_overlap(sidecar, present, queue)
        consumers.append(Consumer(sidecar, self.world.clock.now, sidecar.member.obeyed_generation))

    def _is_assigned(self, sidecar: "Sidecar", queue: Queue) -> bool:
        document = self.documents.get(sidecar.member.obeyed_generation)
        if document is None:
            return False
        share = document.members.get(sidecar.pod.name)
        if share is None or share.uid != sidecar.pod.uid:
            return False
        return queue in (share.queues if document.everyone is None else document.everyone)

    def _check_overlap(self, sidecar: "Sidecar", present: Consumer, queue: Queue) -> None:
        now = self.world.clock.now
        world = self.world
        if world.spec.message_model == "Broadcasting" or world.may_overlap:
            return
        if world.orderly:
            both_deliver = all(
                candidate.member.may_deliver(queue, now, PUSH_TIMEOUT_SECONDS)
                for candidate in (sidecar, present.sidecar)
            )
            if both_deliver and not present.sidecar.frozen:
                raise InvariantError(f"{queue} is delivered in order by {present.sidecar.name} and by {sidecar.name}")
            return
        older_generation = min(present.generation, sidecar.member.obeyed_generation)
        if older_generation < self.forced.get(queue, 0):  # one of them started before the forced grant
            self.contested += 1
            return
        raise InvariantError(
            f"{queue} is consumed by {present.sidecar.name} (since {present.since:.2f}) and by {sidecar.name}"
        )

    def on_drained(self, sidecar: "Sidecar", queue: Queue) -> None:
        """Record that a process has no open delivery of a queue any more."""
        consumers = self.consumers.get(queue, [])
        consumers[:] = [consumer for consumer in consumers if consumer.sidecar is not sidecar]

    def on_process_end(self, sidecar: "Sidecar") -> None:
        """Record that a process has ended and consumes no queue any more."""
        for queue in self.consumers:
            self.on_drained(sidecar, queue)

    def on_generation_stored(self, sidecar: "Sidecar", previous_generation: int, generation: int) -> None:
        """Record the generation that a member obeys; it must not decrease."""
        self.obeyed[generation].append(sidecar.pod)
        if generation < previous_generation:
            raise InvariantError(f"{sidecar.name} steps back from generation {previous_generation} to {generation}")

    def on_sent_document_obeyed(self, sidecar: "Sidecar", generation: int, text: str | bytes) -> None:
        """Check a document that a member obeys because the operator has sent it: only a stored document may be sent."""
        if text not in self._ever_stored:
            raise InvariantError(f"{sidecar.name} obeys a document of generation {generation} that was never stored")
        self.obeyed_before_mounted += text != sidecar.pod.mounted

    def on_config_map_change(self, stored: StoredConfigMap | None) -> None:
        """Check a change of the stored assignment."""
        try:
            document = decode_assignment(stored.text) if stored else None
        except ValueError:
            document = None
        if stored is None or document is None:
            self.document = None
            return
        self._ever_stored.add(stored.text)
        # Restoring an old copy removes every trace of the next generation, unless a pod that obeyed it still runs.
        following = document.generation + 1
        if self.world.is_manual_edit and all(pod.is_over for pod in self.obeyed[following]):
            self.texts.pop(following, None)
            self.moves.clear()  # the budget that they used is forgotten, too
        known_text = self.texts.setdefault(document.generation, stored.text)
        if known_text != stored.text:
            raise InvariantError(f"Generation {document.generation} has two texts")
        self.documents[document.generation] = document
        if not self.world.is_manual_edit:
            self.written += 1
            self._check_change(self.document, document)
        self.document = document

    def _check_change(self, previous: Assignment | None, document: Assignment) -> None:
        owners = owners_of(document)
        for queue in owners:
            if queue in document.releasing:
                raise InvariantError(f"{queue} is owned and under release at once in generation {document.generation}")
        for queue, generation in document.forced.items():
            if generation == document.generation:
                self._check_forced_grant(queue, previous)
                self.forced[queue] = generation
        if previous is None or document.barrier == document.generation:
            return
        owned = owners_of(previous)
        self.granted += sum(queue not in owned or owned[queue].name != owner.name for queue, owner in owners.items())
        revoked = [queue for queue in owned if queue in document.releasing and document.releasing[queue].to]
        self._check_budget(document, len(revoked))
        for queue in [*owned, *previous.releasing]:
            if queue not in owners and queue not in document.releasing:
                self._check_dropped(queue, document)

    def _check_forced_grant(self, queue: Queue, previous: Assignment | None) -> None:
        """A queue may be forced only from a pod that was unreachable for long enough."""
        if previous is None:
            return
        holders = [Holder(name, share.uid) for name, share in previous.members.items() if queue in share.queues]
        holders += [previous.releasing[queue].holder] if queue in previous.releasing else []
        for holder in holders:
            kubelet = self.world.kubelets.get(holder.name)
            if kubelet is None or kubelet.uid != holder.uid:  # ended, and possibly replaced by a pod of the same name
                continue
            now = self.world.clock.now
            if not kubelet.is_over and now > kubelet.unreachable_until + 5:
                raise InvariantError(f"{queue} was forced from {holder.name}, which was reachable")
            if now < kubelet.unreachable_since + self.world.policy.handover.lost_after:
                raise InvariantError(f"{queue} was forced from {holder.name} too early")

    def _check_budget(self, document: Assignment, moves: int) -> None:
        budget = self.world.policy.budget
        if not moves:
            return
        at = self.world.clock.now
        self.moves.append((at, moves))
        if budget and not self.world.clock_leapt and self.world.policy.handover.mode == "Cooperative":
            moved_queues = sum(count for moved, count in self.moves if at - moved < budget.per - 0.5)
            if moved_queues > budget.max_moves and at - self.world.policy_changed_at > budget.per:
                raise InvariantError(
                    f"{moved_queues} queues moved within {budget.per:g} s in generation {document.generation}"
                )

    def _check_dropped(self, queue: Queue, document: Assignment) -> None:
        """A queue may be dropped only after it has left the route or the subscription, or on a user's request."""
        world = self.world
        if world.spec.paused or world.broker.unmanaged_consumers or world.clock.now - world.queues_may_drop_at < 60:
            return
        if world.clock.now - world.route_grown_at < 6:  # routes are polled every 5 s: it may just have come back
            return
        if queue.topic in world.topics and queue in world.broker.queues(queue.topic):
            raise InvariantError(f"{queue} exists, but generation {document.generation} has dropped it")

    def check_quiet(self, writes: int, statuses: int) -> None:
        """Check that neither assignment nor status was written since these counts."""
        if len(self.world.api.writes) > writes or self.statuses > statuses:
            raise InvariantError("The assignment or the status was written in a quiet fleet")

    def check_settled(self) -> None:
        """Check that the fleet has come to rest: each queue has one owner, which alone consumes it."""
        world = self.world
        document = self.document
        if document is None:
            raise InvariantError("No assignment is stored in a quiet fleet")
        expected = {queue for topic in world.topics for queue in world.broker.queues(topic)}
        if document.everyone is not None:
            if set(document.everyone) != expected:
                raise InvariantError("Not every member consumes every queue in a quiet fleet")
            return
        if document.releasing:
            raise InvariantError(f"Still under release in a quiet fleet: {sorted(document.releasing)[:3]}")
        owners = owners_of(document)
        if set(owners) != expected:
            raise InvariantError(
                f"Unowned: {sorted(expected - set(owners))[:3]}; too many: {sorted(set(owners) - expected)[:3]}"
            )
        self._check_consumers(owners)
        conditions = {condition["type"]: condition for condition in world.api.status["conditions"]}
        if conditions["Ready"]["status"] != "True" or conditions["Progressing"]["status"] != "False":
            raise InvariantError(f"The status does not show a quiet fleet: {conditions}")

    def _check_consumers(self, owners: Mapping[Queue, Holder]) -> None:
        for queue, owner in owners.items():
            consuming = [consumer.sidecar.pod.name for consumer in self.consumers.get(queue, [])]
            if consuming != [owner.name]:
                raise InvariantError(f"{queue} is owned by {owner.name} but consumed by {consuming} in a quiet fleet")
