"""Sidecars of a simulation: processes that drive the real `Member` and respond to its commands later."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from rota.model import Queue
from rota.reports import Report
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent
from rota.spec.resolved import settings_digest
from simulation.clock import Process

if TYPE_CHECKING:
    from simulation.fleet import Kubelet


READER_FAILURE_RATE = 0.03


@dataclass(slots=True)
class Disk:
    """The emptyDir volume: it outlives the container, not the pod."""

    obeyed: int = 0
    final: bool = False


class Sidecar(Process):
    """One container: runs the commands of its Member, and responds later."""

    def __init__(self, pod: "Kubelet") -> None:
        super().__init__(pod.world.clock)
        self.pod = pod
        self.world = pod.world
        self.random = pod.random
        self.name = f"{pod.name}/{pod.uid}"
        self.reader_random = Random(f"{pod.world.seed}/{pod.name}/{pod.uid}/readers")
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
        self._settings_digest = ""  # of the settings in force
        self._fetches: dict[Queue, int] = {}
        self._frozen_at = 0.0
        self._timer_at: float | None = None
        self.after(self._short_delay(), self.read_document)

    def read_document(self) -> None:
        """Read the mounted document; the settings next to it take effect with it."""
        effects = self.member.apply_assignment(self.pod.mounted, self.clock.now)
        if not effects.rejection:
            self._settings_digest = settings_digest(self.pod.mounted_settings)
        self._apply_effects(effects)

    def receive_assignment(self, text: str | bytes, digest: str) -> None:
        """Obey a document that the operator has sent, if the settings that are stored with it are in force."""
        if digest != self._settings_digest:
            return
        effects = self.member.apply_sent_assignment(text, self.clock.now)
        if effects.store_generation is not None:
            self.world.judge.on_sent_document_obeyed(self, effects.store_generation, text)
        self._apply_effects(effects)

    def freeze(self) -> None:
        """Freeze the process, and note the time."""
        super().freeze()
        self._frozen_at = self.clock.now

    def thaw(self) -> None:
        """Resume; after more than 5 s the member reads its document first."""
        if self.alive and self.frozen and self.clock.now - self._frozen_at > 5:
            self.member.mark_stalled()
            self.frozen = False
            self.read_document()
        super().thaw()

    def kill(self) -> None:
        """End without a drain."""
        super().kill()
        self.world.judge.on_process_end(self)

    def drain(self, *, final: bool) -> None:
        """Receive a request to drain."""
        if self.alive and not self.frozen and not (self.member.final and final):
            self._apply_effects(self.member.drain(final=final, now=self.clock.now))

    def end_drain(self) -> None:
        """Receive the request that ends a drain: the app is back."""
        self._apply_effects(self.member.end_drain(self.clock.now))

    def report(self) -> Report | None:
        """Return the report if the operator can reach the sidecar."""
        return self.member.report() if self.alive and not self.frozen and not self.pod.cut_off else None

    def _apply_effects(self, effects: Effects) -> None:
        if effects.store_generation is not None:
            self.world.judge.on_generation_stored(self, self.pod.disk.obeyed, effects.store_generation)
            self.pod.disk.obeyed = effects.store_generation
        self.pod.disk.final |= effects.store_final
        for command in effects.commands:
            self._start_command(command)
        self._schedule_timers()
        self.world.notify_report(self.pod)

    def _start_command(self, command: Command) -> None:
        queue = command.queue
        match command.action:
            case LeaseAction.LOCK:
                self.after(self._short_delay(), lambda: self._lock(command, self.clock.now))
            case LeaseAction.FIND_START:
                self.after(
                    self._short_delay(),
                    lambda: self._respond(command, LeaseEvent.START_FOUND if self._succeeds() else LeaseEvent.FAILED),
                )
            case LeaseAction.FETCH:
                self._fetches[queue] = self._fetches.get(queue, 0) + 1
                self.world.judge.on_fetch(self, queue)
                if self.reader_random.random() < READER_FAILURE_RATE:
                    self.after(self.reader_random.uniform(0.01, 120.0), lambda: self._reader_fails(command))
            case LeaseAction.STOP:
                self.after(self._drain_seconds(), lambda: self._finish_drain(command, self._fetches.get(queue, 0)))
            case LeaseAction.ABORT:
                self.after(self._short_delay(), lambda: self._finish_drain(command, self._fetches.get(queue, 0)))
            case LeaseAction.UNLOCK:
                self.after(self._short_delay(), lambda: self._unlock(command))

    def _reader_fails(self, command: Command) -> None:
        if not self.world.is_calm:
            self._respond(command, LeaseEvent.READER_FAILED)

    def _lock(self, command: Command, sent: float) -> None:
        granted = self.world.broker.lock(command.queue, self.name) if self._succeeds() else None
        events = {None: LeaseEvent.FAILED, True: LeaseEvent.LOCKED, False: LeaseEvent.REFUSED}
        event = events[granted]
        self.after(self._short_delay(), lambda: self._respond(command, event, sent))

    def _unlock(self, command: Command) -> None:
        self.world.broker.unlock(command.queue, self.name)
        self._respond(command, LeaseEvent.UNLOCKED)

    def _finish_drain(self, command: Command, fetches: int) -> None:
        """Respond to Stop. If the queue has been fetched again meanwhile, deliveries are still open."""
        lease = self.member.leases.get(command.queue)
        if fetches == self._fetches.get(command.queue, 0) and lease and lease.number == command.lease_number:
            self.world.judge.on_drained(self, command.queue)
        self._respond(command, LeaseEvent.DRAINED)

    def _respond(self, command: Command, event: LeaseEvent, sent: float | None = None) -> None:
        self._apply_effects(self.member.on_event(event, command.queue, command.lease_number, self.clock.now, sent))

    def _schedule_timers(self) -> None:
        due_at = self.member.next_timer_at()
        if due_at is not None and (self._timer_at is None or due_at < self._timer_at):
            self._timer_at = due_at
            self.after(due_at - self.clock.now, self._run_timers)

    def _run_timers(self) -> None:
        self._timer_at = None
        self._apply_effects(self.member.run_due_timers(self.clock.now))

    def _short_delay(self) -> float:
        return self.random.uniform(0.001, 0.05)

    def _drain_seconds(self) -> float:
        """Return how long the open deliveries take: most end soon, some hang."""
        return self.random.choice([0.01, 0.1, 0.5, 2.0, 60.0 if self.random.random() < 0.2 else 0.2])

    def _succeeds(self) -> bool:
        return not self.pod.offline and (self.world.is_calm or self.random.random() > 0.03)
