"""Pods of a simulation: a kubelet that updates volumes late, and starts and ends sidecars."""

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rota.model import Poke
from simulation.clock import Clock, Routine
from simulation.server import PodObject
from simulation.sidecar import Disk, Sidecar

if TYPE_CHECKING:
    from simulation.world import Simulation


class Kubelet:
    """A pod on its node: starts the sidecar, updates the volume, sets the pod's readiness, and terminates it."""

    def __init__(self, world: "Simulation", name: str, uid: str) -> None:
        self.world = world
        self.name = name
        self.uid = uid
        self.clock: Clock = world.clock
        self.random = Random(f"{world.seed}/{name}/{uid}")
        self._request_random = Random(f"{world.seed}/{name}/{uid}/requests")
        self.disk = Disk()
        self.mounted: str | bytes | None = None
        self.mounted_settings = ""
        self._mounted_version = 0
        self._mounted_text: str | bytes | None = None  # of that version; `mounted` may be corrupted
        self.sidecar: Sidecar | None = None
        self.cut_off = False  # unreachable for the operator
        self.lost = False  # unreachable for the API server, too
        self.offline = False  # cannot reach the broker
        self.unreachable_since = self.unreachable_until = 0.0  # for the judge
        self.created_at = world.clock.now
        self.delay_factor = 1.0
        self._poked = Poke()
        self.is_over = False
        world.api.put(PodObject(name=name, uid=uid))
        world.clock.after(self.random.uniform(0.2, 3.0), self._start)
        world.clock.after(self.random.uniform(30, 90), self._update_periodically)

    @property
    def api_pod(self) -> PodObject | None:
        """The pod at the API server; None if a pod of the same name has replaced it."""
        pod = self.world.api.pods.get(self.name)
        return pod if pod and pod.uid == self.uid else None

    @property
    def is_running(self) -> bool:
        """Whether the pod exists, does not terminate and has not ended."""
        pod = self.api_pod
        return pod is not None and not pod.terminating and not pod.ended

    @property
    def is_ready(self) -> bool:
        """Whether the pod runs and is Ready."""
        return self.is_running and self.api_pod is not None and self.api_pod.ready

    def on_poke(self, poke: Poke) -> None:
        """Update the volume soon after a changed poke annotation."""
        if poke != self._poked:
            self._poked = poke
            self.update_volume(self.random.uniform(0.05, 0.5) * self.delay_factor)

    def update_volume(self, delay: float = 0.0) -> None:
        """Mount the document that is newest now, after a delay; never an older one than before."""
        config_map = self.world.api.config_map

        def mount() -> None:
            pod = self.api_pod
            if self.is_over or self.lost or pod is None or pod.terminating:
                return
            # A deleted ConfigMap leaves the volume as it is.
            if config_map and config_map.version > self._mounted_version:
                self._mounted_version = config_map.version
                self._mounted_text = config_map.text
                self.mounted_settings = config_map.settings
                self._mount(config_map.text)

        self.clock.after(delay, mount)

    def corrupt_volume(self, text: str | bytes, seconds: float) -> None:
        """Mount another text for a while: an older document, or half of one."""
        self._mount(text)

        def restore() -> None:
            if self.mounted == text and self._mounted_text is not None:
                self._mount(self._mounted_text)

        self.clock.after(seconds, restore)

    def _mount(self, text: str | bytes) -> None:
        self.mounted = text
        if self.sidecar:
            self.sidecar.after(self.random.uniform(0.0, 0.05), self.sidecar.read_document)

    def send_assignment(self, text: str | bytes, digest: str) -> None:
        """Transfer an assignment from the operator to the pod: soon, after seconds, twice, or not at all."""
        random = self._request_random
        copies = random.choices([0, 1, 2], weights=[1, 17, 2])[0]
        for _ in range(copies):
            is_late = random.random() < 0.15
            delay = random.uniform(0.5, 10.0) if is_late else random.uniform(0.001, 0.05)
            self.clock.after(delay, partial(self._receive_assignment, text, digest))

    def _receive_assignment(self, text: str | bytes, digest: str) -> None:
        """Pass an assignment to the process that listens now; a frozen process gets it once it has thawed."""
        if self.sidecar and not self.cut_off:
            self.sidecar.after(0.0, partial(self.sidecar.receive_assignment, text, digest))

    def crash(self, seconds: float) -> None:
        """Crash the container; it restarts with the same disk."""
        if self.sidecar and self.sidecar.alive:
            self.mark_unreachable(seconds + 3)
            self.sidecar.kill()
            self._set_ready(ready=False)
            self.clock.after(seconds, self._start)

    def hang(self, seconds: float) -> None:
        """Freeze the sidecar for a while; its probes fail."""
        if self.sidecar and self.sidecar.alive and not self.sidecar.frozen:
            sidecar = self.sidecar
            self.mark_unreachable(seconds + 1)
            sidecar.freeze()
            self.clock.after(self.random.uniform(1, 6), partial(self._fail_probe, sidecar))
            self.clock.after(seconds, lambda: self._wake(sidecar))

    def cut_off_node(self, seconds: float) -> None:
        """Cut off the node for a while: the process keeps running, unreachable, and its volume is not updated."""
        self.lost = self.cut_off = True
        self.offline = self.random.random() < 0.5
        self.mark_unreachable(seconds + 1)
        self.clock.after(min(40.0, seconds / 2), self._mark_not_ready)
        self.clock.after(seconds, self._restore_node)

    def partition(self, seconds: float) -> None:
        """Cut off the pod from the operator only."""
        self.cut_off = True
        self.mark_unreachable(seconds + 1)
        self.clock.after(seconds, self._restore_connection)

    def mark_unreachable(self, seconds: float) -> None:
        """Record an unreachable period for the judge; the operator may miss a short gap between two periods."""
        if self.clock.now > self.unreachable_until + 4:
            self.unreachable_since = self.clock.now
        self.unreachable_until = max(self.unreachable_until, self.clock.now + seconds)

    def delete(self) -> None:
        """Terminate the pod, as `kubectl delete` does."""
        if self.api_pod and not self.api_pod.terminating:
            self.world.api.patch(self.name, terminating=True)
            self.clock.after(self.random.uniform(0.1, 1.0), lambda: self.world.background(self._take_down()))

    def vanish(self) -> None:
        """End the pod at once, as an eviction or a removed node does."""
        self.is_over = True
        if self.sidecar:
            self.sidecar.kill()
        if self.api_pod:
            self.world.api.remove(self.name)

    def finish(self) -> None:
        """Reach the phase Failed: the processes have ended, the object stays for a while."""
        self.is_over = True
        if self.sidecar:
            self.sidecar.kill()
        if self.api_pod:
            self.world.api.patch(self.name, ended=True, ready=False)
            self.clock.after(self.random.uniform(5, 40), self._remove)

    def flap(self) -> None:
        """Set the pod to not ready for 3 s, as a readiness probe at its limit does."""
        self._set_ready(ready=False)
        self.clock.after(3, lambda: self._set_ready(ready=self._is_healthy()))

    def _start(self) -> None:
        if self.is_over or self.api_pod is None or (self.sidecar and self.sidecar.alive):
            return
        self.update_volume(self.random.choice([0.0, 0.0, 1.0]))
        self.world.api.patch(self.name, started=True)
        self.sidecar = Sidecar(self)
        sidecar = self.sidecar
        self.clock.after(self.random.uniform(0.2, 2.0), partial(self._pass_probe, sidecar))

    def _is_healthy(self) -> bool:
        return self.sidecar is not None and self.sidecar.alive and not self.sidecar.frozen

    def _set_ready(self, *, ready: bool) -> None:
        if self.api_pod and not self.lost and not self.is_over:
            self.world.api.patch(self.name, ready=ready)

    def _pass_probe(self, sidecar: Sidecar) -> None:
        if sidecar.alive:
            self._set_ready(ready=self._is_healthy())

    def _fail_probe(self, sidecar: Sidecar) -> None:
        if sidecar.frozen:
            self._set_ready(ready=False)

    def _mark_not_ready(self) -> None:
        if self.lost and self.api_pod:
            self.world.api.patch(self.name, ready=False)

    def _remove(self) -> None:
        if self.api_pod:
            self.world.api.remove(self.name)

    def _wake(self, sidecar: Sidecar) -> None:
        sidecar.thaw()
        self.clock.after(1, lambda: self._set_ready(ready=self._is_healthy()))

    def _restore_connection(self) -> None:
        self.cut_off = False
        self.world.notify_report(self)

    def _restore_node(self) -> None:
        self.lost = self.offline = False
        self._restore_connection()
        self._set_ready(ready=self._is_healthy())
        self.update_volume()

    def _update_periodically(self) -> None:
        self.update_volume()
        if not self.is_over:
            self.clock.after(self.random.uniform(30, 90), self._update_periodically)

    def _take_down(self) -> Routine:
        """Drain by preStop, then finally by SIGTERM, until the grace period ends."""
        deadline = self.clock.now + self.world.policy.handover.drain_timeout + 15
        while self.lost:
            yield 1.0
        if self.sidecar:
            self.sidecar.drain(final=False)
        yield self.random.uniform(0.0, 2.0)
        restarts = 1
        while self.clock.now < deadline and self.sidecar:
            if not self.sidecar.alive and restarts:  # the kubelet restarts a sidecar while the app runs
                restarts -= 1
                self.sidecar = Sidecar(self)
            self.sidecar.drain(final=True)
            drained = not self.sidecar.frozen and self.sidecar.member.state == "drained"
            if not self.sidecar.alive or (drained and self.random.random() < 0.5):
                break
            yield 0.5
        self.is_over = True
        if self.sidecar:
            self.sidecar.kill()
        yield self.random.uniform(0.05, 1.0)
        self._remove()
