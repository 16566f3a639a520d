"""Pods of a simulated world: a kubelet that shows documents late, and sidecars that drive the real `Member`."""

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rota.model import Poke, Queue
from rota.reports import Report
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent
from simulation.clock import Clock, Process, Work
from simulation.server import PodObject

if TYPE_CHECKING:
    from simulation.world import Simulation


READERS_THAT_FAIL = 0.03


@dataclass(slots=True)
class Disk:
    """The emptyDir: it outlives the container, not the pod."""

    obeyed: int = 0
    final: bool = False


class Sidecar(Process):
    """One container: carries out what its Member says, and answers later."""

    def __init__(self, pod: "Kubelet") -> None:
        super().__init__(pod.world.clock)
        self.pod, self.world, self.chance = pod, pod.world, pod.chance
        self.name = f"{pod.name}/{pod.uid}"
        self.reader_chance = Random(f"{pod.world.seed}/{pod.name}/{pod.uid}/readers")
        disk = pod.disk
        self.member = Member(
            pod.name,
            pod.uid,
            group=self.world.group,
            orderly=self.world.orderly,
            drain_timeout=self.world.policy.handover.drain_timeout,
            obeyed_generation=disk.obeyed,
            final=disk.final,
        )
        self._fetches: dict[Queue, int] = {}
        self._slept = 0.0
        self._tick: float | None = None
        self.after(self._soon(), self.look)

    def look(self) -> None:
        """Read the document that the volume shows."""
        self._carry(self.member.apply_assignment(self.pod.shown, self.clock.now))

    def freeze(self) -> None:
        """Stand still."""
        super().freeze()
        self._slept = self.clock.now

    def thaw(self) -> None:
        """Go on; after more than 5 s the document comes first."""
        if self.alive and self.frozen and self.clock.now - self._slept > 5:
            self.member.mark_stalled()
            self.frozen = False
            self.look()
        super().thaw()

    def kill(self) -> None:
        """End without a word."""
        super().kill()
        self.world.judge.died(self)

    def drain(self, final: bool) -> None:  # noqa: FBT001 - as Member.drain
        """Hear a request to drain."""
        if self.alive and not self.frozen and not (self.member.final and final):
            self._carry(self.member.drain(final, self.clock.now))

    def back(self) -> None:
        """Hear that the app is back."""
        self._carry(self.member.end_drain(self.clock.now))

    def report(self) -> Report | None:
        """Answer the operator, if it can be reached."""
        return self.member.report() if self.alive and not self.frozen and not self.pod.cut_off else None

    def _carry(self, step: Effects) -> None:
        if step.store_generation is not None:
            self.world.judge.remembered(self, self.pod.disk.obeyed, step.store_generation)
            self.pod.disk.obeyed = step.store_generation
        self.pod.disk.final |= step.store_final
        for command in step.commands:
            self._begin(command)
        self._wait_for_tick()
        self.world.reported(self.pod)

    def _begin(self, command: Command) -> None:
        queue = command.queue
        match command.action:
            case LeaseAction.LOCK:
                self.after(self._soon(), lambda: self._lock(command, self.clock.now))
            case LeaseAction.FIND_START:
                self.after(
                    self._soon(),
                    lambda: self._answer(command, LeaseEvent.START_FOUND if self._lucky() else LeaseEvent.FAILED),
                )
            case LeaseAction.FETCH:
                self._fetches[queue] = self._fetches.get(queue, 0) + 1
                self.world.judge.fetches(self, queue)
                if self.reader_chance.random() < READERS_THAT_FAIL:
                    self.after(self.reader_chance.uniform(0.01, 120.0), lambda: self._reader_fails(command))
            case LeaseAction.STOP:
                self.after(self._open_for(), lambda: self._emptied(command, self._fetches.get(queue, 0)))
            case LeaseAction.ABORT:
                self.after(self._soon(), lambda: self._emptied(command, self._fetches.get(queue, 0)))
            case LeaseAction.UNLOCK:
                self.after(self._soon(), lambda: self._unlock(command))

    def _reader_fails(self, command: Command) -> None:
        if not self.world.calm:
            self._answer(command, LeaseEvent.READER_FAILED)

    def _lock(self, command: Command, sent: float) -> None:
        given = self.world.broker.lock(command.queue, self.name) if self._lucky() else None
        event = LeaseEvent.FAILED if given is None else LeaseEvent.LOCKED if given else LeaseEvent.REFUSED
        self.after(self._soon(), lambda: self._answer(command, event, sent))

    def _unlock(self, command: Command) -> None:
        self.world.broker.unlock(command.queue, self.name)
        self._answer(command, LeaseEvent.UNLOCKED)

    def _emptied(self, command: Command, fetches: int) -> None:
        """Say that the last delivery has ended; if it has been given back meanwhile, it has not."""
        life = self.member.leases.get(command.queue)
        if fetches == self._fetches.get(command.queue, 0) and life and life.number == command.lease_number:
            self.world.judge.ended(self, command.queue)
        self._answer(command, LeaseEvent.DRAINED)

    def _answer(self, command: Command, event: LeaseEvent, sent: float | None = None) -> None:
        self._carry(self.member.on_event(event, command.queue, command.lease_number, self.clock.now, sent))

    def _wait_for_tick(self) -> None:
        at = self.member.next_timer_at()
        if at is not None and (self._tick is None or at < self._tick):
            self._tick = at
            self.after(at - self.clock.now, self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self._carry(self.member.run_due_timers(self.clock.now))

    def _soon(self) -> float:
        return self.chance.uniform(0.001, 0.05)

    def _open_for(self) -> float:
        """Return how long the deliveries that are open take: most end soon, some hang."""
        return self.chance.choice([0.01, 0.1, 0.5, 2.0, 60.0 if self.chance.random() < 0.2 else 0.2])

    def _lucky(self) -> bool:
        return not self.pod.offline and (self.world.calm or self.chance.random() > 0.03)


class Kubelet:
    """A pod on its node: it starts the sidecar, shows documents, tells how the pod is, and takes it down."""

    def __init__(self, world: "Simulation", name: str, uid: str) -> None:
        self.world, self.name, self.uid = world, name, uid
        self.clock: Clock = world.clock
        self.chance = Random(f"{world.seed}/{name}/{uid}")
        self.disk = Disk()
        self.shown: str | bytes | None = None
        self._shown_version = 0
        self.sidecar: Sidecar | None = None
        self.cut_off = False  # the operator cannot reach it
        self.lost = False  # neither can the API server
        self.offline = False  # nor can it reach the broker
        self.unwell_since = self.unwell_until = 0.0  # for the judge: when it could not be heard
        self.born = world.clock.now
        self.slow = 1.0
        self._poked = Poke()
        self.gone = False
        world.api.put(PodObject(name=name, uid=uid))
        world.clock.after(self.chance.uniform(0.2, 3.0), self._start)
        world.clock.after(self.chance.uniform(30, 90), self._show_by_itself)

    @property
    def object(self) -> PodObject | None:
        """The pod as the API server has it, if that is still this one."""
        found = self.world.api.pods.get(self.name)
        return found if found and found.uid == self.uid else None

    def poked(self, poke: Poke) -> None:
        """See the annotation change: the document is shown soon."""
        if poke != self._poked:
            self._poked = poke
            self.show(self.chance.uniform(0.05, 0.5) * self.slow)

    def show(self, late: float = 0.0) -> None:
        """Lay the document that is the newest now into the volume, a while later; never an older one than before."""
        record = self.world.api.record

        def lay() -> None:
            pod = self.object
            if self.gone or self.lost or pod is None or pod.terminating:
                return
            if record and record.version > self._shown_version:  # one that is gone leaves what was shown
                self._shown_version = record.version
                self._lay(record.text)

        self.clock.after(late, lay)

    def confuse(self, text: str | bytes, seconds: float) -> None:
        """Show something else for a while: an older document, or a torn one."""
        right = self.shown
        self._lay(text)

        def mend() -> None:
            if self.shown == text and right is not None:
                self._lay(right)

        self.clock.after(seconds, mend)

    def _lay(self, text: str | bytes) -> None:
        self.shown = text
        if self.sidecar:
            self.sidecar.after(self.chance.uniform(0.0, 0.05), self.sidecar.look)

    def crash(self, away: float) -> None:
        """Lose the container; it comes back with the same disk."""
        if self.sidecar and self.sidecar.alive:
            self.unwell(away + 3)
            self.sidecar.kill()
            self._tell(ready=False)
            self.clock.after(away, self._start)

    def hang(self, seconds: float) -> None:
        """Stand still for a while; the probes notice."""
        if self.sidecar and self.sidecar.alive and not self.sidecar.frozen:
            sidecar = self.sidecar
            self.unwell(seconds + 1)
            sidecar.freeze()
            self.clock.after(self.chance.uniform(1, 6), partial(self._noticed, sidecar))
            self.clock.after(seconds, lambda: self._wake(sidecar))

    def lose(self, seconds: float) -> None:
        """Lose the node for a while: the process goes on, nobody hears it, nothing new is shown."""
        self.lost = self.cut_off = True
        self.offline = self.chance.random() < 0.5
        self.unwell(seconds + 1)
        self.clock.after(min(40.0, seconds / 2), self._given_up)
        self.clock.after(seconds, self._found)

    def partition(self, seconds: float) -> None:
        """Let the operator not reach it, while all else goes on."""
        self.cut_off = True
        self.unwell(seconds + 1)
        self.clock.after(seconds, self._joined)

    def unwell(self, seconds: float) -> None:
        """Remember, for the judge, that it could not be heard; a moment between two silences nobody may notice."""
        if self.clock.now > self.unwell_until + 4:
            self.unwell_since = self.clock.now
        self.unwell_until = max(self.unwell_until, self.clock.now + seconds)

    def delete(self) -> None:
        """Take the pod down as `kubectl delete` does."""
        if self.object and not self.object.terminating:
            self.world.api.patch(self.name, terminating=True)
            self.clock.after(self.chance.uniform(0.1, 1.0), lambda: self.world.background(self._take_down()))

    def vanish(self) -> None:
        """End at once: evicted, or its node is known to be gone."""
        self.gone = True
        if self.sidecar:
            self.sidecar.kill()
        if self.object:
            self.world.api.remove(self.name)

    def finish(self) -> None:
        """Reach the phase Failed: the processes are over, the object stays for a while."""
        self.gone = True
        if self.sidecar:
            self.sidecar.kill()
        if self.object:
            self.world.api.patch(self.name, ended=True, ready=False)
            self.clock.after(self.chance.uniform(5, 40), self._removed)

    def flap(self) -> None:
        """Be unready for 3 s, as a readiness probe at its limit is."""
        self._tell(ready=False)
        self.clock.after(3, lambda: self._tell(ready=self._well()))

    def _start(self) -> None:
        if self.gone or self.object is None or (self.sidecar and self.sidecar.alive):
            return
        self.show(self.chance.choice([0.0, 0.0, 1.0]))
        self.world.api.patch(self.name, started=True)
        self.sidecar = Sidecar(self)
        sidecar = self.sidecar
        self.clock.after(self.chance.uniform(0.2, 2.0), partial(self._came_up, sidecar))

    def _well(self) -> bool:
        return self.sidecar is not None and self.sidecar.alive and not self.sidecar.frozen

    def _tell(self, *, ready: bool) -> None:
        if self.object and not self.lost and not self.gone:
            self.world.api.patch(self.name, ready=ready)

    def _came_up(self, sidecar: Sidecar) -> None:
        if sidecar.alive:
            self._tell(ready=self._well())

    def _noticed(self, sidecar: Sidecar) -> None:
        if sidecar.frozen:
            self._tell(ready=False)

    def _given_up(self) -> None:
        if self.lost and self.object:
            self.world.api.patch(self.name, ready=False)

    def _removed(self) -> None:
        if self.object:
            self.world.api.remove(self.name)

    def _wake(self, sidecar: Sidecar) -> None:
        sidecar.thaw()
        self.clock.after(1, lambda: self._tell(ready=self._well()))

    def _joined(self) -> None:
        self.cut_off = False
        self.world.reported(self)

    def _found(self) -> None:
        self.lost = self.offline = False
        self._joined()
        self._tell(ready=self._well())
        self.show()

    def _show_by_itself(self) -> None:
        self.show()
        if not self.gone:
            self.clock.after(self.chance.uniform(30, 90), self._show_by_itself)

    def _take_down(self) -> Work:
        """PreStop drains for the app, then SIGTERM drains for good, until the grace is over."""
        deadline = self.clock.now + self.world.policy.handover.drain_timeout + 15
        while self.lost:
            yield 1.0
        if self.sidecar:
            self.sidecar.drain(final=False)
        yield self.chance.uniform(0.0, 2.0)
        restarts = 1
        while self.clock.now < deadline and self.sidecar:
            if not self.sidecar.alive and restarts:  # the kubelet starts a sidecar anew as long as the app is there
                restarts -= 1
                self.sidecar = Sidecar(self)
            self.sidecar.drain(final=True)
            drained = not self.sidecar.frozen and self.sidecar.member.state == "drained"
            if not self.sidecar.alive or (drained and self.chance.random() < 0.5):
                break
            yield 0.5
        self.gone = True
        if self.sidecar:
            self.sidecar.kill()
        yield self.chance.uniform(0.05, 1.0)
        self._removed()
