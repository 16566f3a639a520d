"""What must hold (DESIGN page, §9), looked at after every step of a run."""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rota.documents import Assignment, decode_assignment
from rota.model import Queue
from simulation.server import Stored

if TYPE_CHECKING:
    from simulation.fleet import Kubelet, Sidecar
    from simulation.world import Simulation


RESTLESS = 15.0  # seconds
PUSH_TIMEOUT = 20.0  # seconds that a delivery may take in an Orderly group


class Broken(BaseException):
    """An invariant does not hold."""


@dataclass(slots=True)
class Worker:
    """A process at work on a queue: since when, and by which generation it began."""

    sidecar: "Sidecar"
    since: float
    began_by: int


class Judge:
    """Watches a world."""

    def __init__(self, world: "Simulation") -> None:
        self.world = world
        self.workers: dict[Queue, list[Worker]] = {}
        self.texts: dict[int, str | bytes] = {}
        self.documents: dict[int, Assignment] = {}
        self.obeyed: defaultdict[int, list[Kubelet]] = defaultdict(list)
        self.document: Assignment | None = None
        self._lately: deque[float] = deque(maxlen=300)  # when it was planned; the busiest quarter minute has a hundred
        self.forced: dict[Queue, int] = {}  # and by which generation
        self.moves: list[tuple[float, int]] = []
        self.granted = 0
        self.written = 0
        self.plans = 0
        self.contested = 0
        self.statuses = 0
        world.api.on_record.append(self.recorded)

    def planned(self) -> None:
        """Count a plan; nothing that happens is a reason to plan all the time.

        Two operators that both lead are not counted: if they have measured different weights, they revert each other's
        moves until one of them loses the Lease.
        """
        self.plans += 1
        now = self.world.clock.now
        if now < self.world.both_lead_until:
            self._lately.clear()
            return
        self._lately.append(now)
        if len(self._lately) == self._lately.maxlen and now - self._lately[0] < RESTLESS:
            raise Broken(f"{len(self._lately)} plans within {RESTLESS:g} s")

    def status_written(self) -> None:
        """Count a status."""
        self.statuses += 1

    def fetches(self, sidecar: "Sidecar", queue: Queue) -> None:
        """See a process begin to work a queue."""
        share = self._given(sidecar, queue)
        if not share:
            raise Broken(
                f"{sidecar.name} fetches {queue}, which generation {sidecar.member.obeyed_generation} does not give it"
            )
        workers = self.workers.setdefault(queue, [])
        workers[:] = [worker for worker in workers if worker.sidecar is not sidecar]
        for other in workers:
            self._meet(sidecar, other, queue)
        workers.append(Worker(sidecar, self.world.clock.now, sidecar.member.obeyed_generation))

    def _given(self, sidecar: "Sidecar", queue: Queue) -> bool:
        document = self.documents.get(sidecar.member.obeyed_generation)
        if document is None:
            return False
        share = document.members.get(sidecar.pod.name)
        if share is None or share.uid != sidecar.pod.uid:
            return False
        return queue in (share.queues if document.everyone is None else document.everyone)

    def _meet(self, sidecar: "Sidecar", other: Worker, queue: Queue) -> None:
        now, world = self.world.clock.now, self.world
        if world.spec.message_model == "Broadcasting" or world.loose:
            return
        if world.orderly:
            both = all(it.member.may_deliver(queue, now, PUSH_TIMEOUT) for it in (sidecar, other.sidecar))
            if both and not other.sidecar.frozen:
                raise Broken(f"{queue} is delivered in order by {other.sidecar.name} and by {sidecar.name}")
            return
        if min(other.began_by, sidecar.member.obeyed_generation) < self.forced.get(
            queue, 0
        ):  # one began before it was forced
            self.contested += 1
            return
        raise Broken(f"{queue} is worked by {other.sidecar.name} (since {other.since:.2f}) and by {sidecar.name}")

    def ended(self, sidecar: "Sidecar", queue: Queue) -> None:
        """See a process end its last delivery of a queue."""
        workers = self.workers.get(queue, [])
        workers[:] = [worker for worker in workers if worker.sidecar is not sidecar]

    def died(self, sidecar: "Sidecar") -> None:
        """See a process die, with everything it worked."""
        for queue in self.workers:
            self.ended(sidecar, queue)

    def remembered(self, sidecar: "Sidecar", before: int, generation: int) -> None:
        """See a member obey a generation."""
        self.obeyed[generation].append(sidecar.pod)
        if generation < before:
            raise Broken(f"{sidecar.name} steps back from generation {before} to {generation}")

    def recorded(self, stored: Stored | None) -> None:
        """See the record change."""
        try:
            document = decode_assignment(stored.text) if stored else None
        except ValueError:
            document = None
        if stored is None or document is None:
            self.document = None
            return
        # Restoring an old copy wipes out every trace of the next generation, unless a pod that obeyed it lives.
        following = document.generation + 1
        if self.world.by_hand and all(pod.gone for pod in self.obeyed[following]):
            self.texts.pop(following, None)
            self.moves.clear()  # with what it had spent
        known = self.texts.setdefault(document.generation, stored.text)
        if known != stored.text:
            raise Broken(f"Generation {document.generation} has two texts")
        self.documents[document.generation] = document
        if not self.world.by_hand:
            self.written += 1
            self._compare(self.document, document)
        self.document = document

    def _compare(self, before: Assignment | None, after: Assignment) -> None:
        owners = {queue: name for name, share in after.members.items() for queue in share.queues}
        for queue in owners:
            if queue in after.releasing:
                raise Broken(f"{queue} is owned and under release at once in generation {after.generation}")
        for queue, generation in after.forced.items():
            if generation == after.generation:
                self._force(queue, before)
                self.forced[queue] = generation
        if before is None or after.barrier == after.generation:
            return
        owned = {queue: (name, share.uid) for name, share in before.members.items() for queue in share.queues}
        self.granted += sum(owned.get(queue, ("",))[0] != name for queue, name in owners.items())
        taken = [queue for queue in owned if queue in after.releasing and after.releasing[queue].to]
        self._spend(after, len(taken))
        for queue in [*owned, *before.releasing]:
            if queue not in owners and queue not in after.releasing:
                self._dropped(queue, after)

    def _force(self, queue: Queue, before: Assignment | None) -> None:
        """Only who could not be heard is overruled."""
        if before is None:
            return
        holders = [name for name, share in before.members.items() if queue in share.queues]
        holders += [before.releasing[queue].holder.name] if queue in before.releasing else []
        for name in holders:
            kubelet, now = self.world.kubelets.get(name), self.world.clock.now
            if kubelet and not kubelet.gone and now > kubelet.unwell_until + 5:
                raise Broken(f"{queue} was forced from {name}, who could be heard")
            if kubelet and now < kubelet.unwell_since + self.world.policy.handover.lost_after:
                raise Broken(f"{queue} was forced from {name} too early")

    def _spend(self, after: Assignment, taken: int) -> None:
        budget = self.world.policy.budget
        if not taken:
            return
        at = self.world.clock.now
        self.moves.append((at, taken))
        if budget and not self.world.leapt and self.world.policy.handover.mode == "Cooperative":
            inside = sum(count for moved, count in self.moves if at - moved < budget.per - 0.5)
            if inside > budget.max_moves and at - self.world.policy_changed > budget.per:
                raise Broken(f"{inside} queues moved within {budget.per:g} s in generation {after.generation}")

    def _dropped(self, queue: Queue, after: Assignment) -> None:
        """A queue leaves the record only if it has left the route or the subscription, or somebody wants it so."""
        world = self.world
        if world.spec.paused or world.broker.foreigners or world.clock.now - world.permissive < 60:
            return
        if world.clock.now - world.grown < 6:  # routes are asked for every 5 s: it may just have come back
            return
        if queue.topic in world.topics and queue in world.broker.queues(queue.topic):
            raise Broken(f"{queue} is there, but generation {after.generation} knows it no more")

    def quiet(self, writes: int, statuses: int) -> None:
        """See that nothing was written since there were so many writes and statuses."""
        if len(self.world.api.writes) > writes or self.statuses > statuses:
            raise Broken("Something is written in a quiet world")

    def settled(self) -> None:
        """See that everything has come to rest: each queue owned and worked by exactly one."""
        world = self.world
        document = self.document
        if document is None:
            raise Broken("There is no record in a quiet world")
        wanted = {queue for topic in world.topics for queue in world.broker.queues(topic)}
        if document.everyone is not None:
            if set(document.everyone) != wanted:
                raise Broken("Not everyone works every queue in a quiet world")
            return
        if document.releasing:
            raise Broken(f"Still under way in a quiet world: {sorted(document.releasing)[:3]}")
        owners = {queue: name for name, share in document.members.items() for queue in share.queues}
        if set(owners) != wanted:
            raise Broken(f"Unowned: {sorted(wanted - set(owners))[:3]}; too much: {sorted(set(owners) - wanted)[:3]}")
        self._all_work(owners)
        conditions = {it["type"]: it for it in world.api.status["conditions"]}
        if conditions["Ready"]["status"] != "True" or conditions["Progressing"]["status"] != "False":
            raise Broken(f"The status does not tell of a quiet world: {conditions}")

    def _all_work(self, owners: Mapping[Queue, str]) -> None:
        for queue, name in owners.items():
            working = [worker.sidecar.pod.name for worker in self.workers.get(queue, [])]
            if working != [name]:
                raise Broken(f"{queue} is owned by {name} but worked by {working} in a quiet world")
