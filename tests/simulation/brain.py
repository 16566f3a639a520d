"""An operator of a simulated world: it gathers what it can see, lets the real planner decide, and applies."""

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rota.documents import Assignment, TooNew, read_assignment
from rota.model import Holder, Queue, Reason, Verdict
from rota.planner import Heard, Plan, Pod, Snapshot, View, plan
from simulation.clock import Process, Work
from simulation.server import Conflict, PodObject, Stored, Unreachable

if TYPE_CHECKING:
    from simulation.world import Simulation


@dataclass(slots=True)
class Known:
    """What an operator remembers of a pod; all of it may start anew."""

    pod: PodObject
    first_seen: float
    ready_changed: float
    leaving_since: float | None = None
    poke_changed: float = 0.0
    heard: Heard | None = None
    failed_since: float | None = None
    cut_off_since: dict[str, float] | None = None


class Operator(Process):
    """One replica. Only the leader works, as far as it knows."""

    def __init__(self, world: "Simulation", name: str) -> None:
        super().__init__(world.clock)
        self.world, self.chance = world, Random(f"{world.seed}/{name}")
        self.known: dict[str, Known] = {}
        self.gone: set[str] = set()
        self.views: dict[str, tuple[tuple[Queue, ...] | None, float]] = {}
        self.unsure: tuple[Holder, ...] = ()
        self.fresh = False
        self.leap = 0.0
        self._busy = self._woken = self._looked = False
        self._reading: set[str] = set()
        self._awaited: frozenset[str] = frozenset()
        self._read_as: tuple[str | bytes, Assignment | None, str, bool] = ("", None, "", False)
        self._alarm = 0
        self._deaf: dict[str, int] = {}
        world.api.watchers.append(self.hear)
        self.relist(stale=True)
        self.ask_routes()
        self.wake()

    # What it sees.

    def hear(self, name: str, pod: PodObject | None, version: int) -> None:
        """Be told of a change by the watch, later; some news are lost, late or told twice while the network is bad."""
        for _ in range(2 if self.world.bad_watch and self.chance.random() < 0.1 else 1):
            if self.world.silent_watch or (self.world.bad_watch and self.chance.random() < 0.1):
                continue
            late = self.chance.uniform(0.0, 5.0 if self.world.bad_watch else 0.02)
            self.after(late, lambda: self._see(name, pod, version))

    def relist(self, *, stale: bool = False) -> None:
        """List all pods anew; whoever was there and is not any more has ended. The first list comes from a cache."""
        if not self.world.api.down:
            there = dict(self.world.api.pods)
            for name in [name for name in there if stale and self.world.is_new(name) and self.chance.random() < 0.5]:
                late = there.pop(name)
                self.after(self.chance.uniform(1, 8), partial(self._see, late.name, late, late.version))
            for name in [name for name in self.known if name not in there]:
                self._see(name, None, self.world.api.version)
            for name, pod in there.items():
                self._see(name, pod, pod.version)
        self.after(self.chance.uniform(20, 40), self.relist)

    def _see(self, name: str, pod: PodObject | None, version: int) -> None:
        known = self.known.get(name)
        if version <= self._deaf.get(name, 0):
            return  # older than what is known
        self._deaf[name] = version
        if known and (pod is None or pod.uid != known.pod.uid):
            self.gone.add(known.pod.uid)
            del self.known[name]
            known = None
        now = self.clock.now
        if pod:
            known = known or Known(pod, now, now)
            if known.pod.ready != pod.ready:
                known.ready_changed = now
            if known.pod.poke != pod.poke:
                known.poke_changed = now
            if pod.terminating and known.leaving_since is None:
                known.leaving_since = now
            known.pod = pod
            self.known[name] = known
        self.wake()

    def ask_routes(self) -> None:
        """Ask the name server for every topic, and again in 5 s."""
        self._ask_routes()
        self.wake()
        self.after(5, self.ask_routes)

    def _ask_routes(self) -> None:
        for topic in self.world.topics:
            told = self.world.broker.told(topic)
            before = self.views.get(topic)
            if told is None:
                self.views[topic] = (None, self.clock.now)
            elif before is None or before[0] != told:
                self.views[topic] = (told, self.clock.now)
        for topic in set(self.views) - set(self.world.topics):
            del self.views[topic]

    def reported(self, name: str) -> None:
        """Have a long poll answered."""
        if name in self._awaited:
            self._read(name)

    def _read(self, name: str) -> None:
        """Read a report: it is cut at one moment, and known at a later one."""
        if name in self._reading:
            return
        self._reading.add(name)
        known = self.known.get(name)
        uid = known.pod.uid if known else ""

        def cut() -> None:
            pod = self.world.kubelets.get(name)
            report = pod.sidecar.report() if pod and pod.sidecar and pod.uid == uid else None
            self.after(
                self.chance.uniform(0.001, 0.03) if report else 2.0, lambda: heard(Heard(report) if report else None)
            )

        def heard(report: Heard | None) -> None:
            self._reading.discard(name)
            known = self.known.get(name)
            if known is None or known.pod.uid != uid:
                return
            if report is None:
                known.failed_since = self.clock.now if known.failed_since is None else known.failed_since
                self.after(1.0, partial(self.reported, name))
            else:
                changed = known.heard is None or known.heard.report != report.report or known.failed_since is not None
                known.heard, known.failed_since = report, None
                if not changed:
                    return
            self.wake()

        self.after(self.chance.uniform(0.001, 0.02), cut)

    # What it does.

    def wake(self) -> None:
        """Plan soon; being woken often plans once."""
        if self._busy:
            self._woken = True
        else:
            self._busy = True
            self.after(0.02, lambda: self.spawn(self._round()))

    def _round(self) -> Work:
        self._woken = False
        again = 5.0
        leads = self.world.leads(self)
        self._looked &= leads
        if leads:
            try:
                if not self._looked:  # a leader that is new looks at everything before it writes anything
                    yield from self._look()
                    self._looked = True
                yield from self._confirm()
                self.world.api.answer()
                record = self.world.api.record
                yield self.chance.uniform(0.001, 0.02)
                found = plan(self.snapshot(record), self.time)
                self.world.judge.planned()
                yield from self._apply(found, record)
                again = found.again
            except Unreachable:
                again = self.chance.uniform(0.5, 2.0)
            except Conflict:
                again = 0.0
        self._busy = False
        if self._woken:
            self.wake()
        self._alarm += 1
        self.after(again, partial(self._ring, self._alarm))

    def _ring(self, alarm: int) -> None:
        if alarm == self._alarm:
            self.wake()

    @property
    def time(self) -> float:
        """The time of day as this machine tells it."""
        return self.world.epoch + self.clock.now + self.leap

    def snapshot(self, record: Stored | None) -> Snapshot:
        """Put together what is seen."""
        world, now = self.world, self.clock.now
        text = record.text if record else ""
        if text != self._read_as[0]:
            self._read_as = (text, *_believed(text))
        _, document, damage, newer = self._read_as
        too_new = (Verdict(Reason.RECORD_TOO_NEW, damage),) if newer else ()
        return Snapshot(
            group=world.group,
            spec=None if world.bad_spec else world.spec,
            policy=None if world.bad_policy else world.policy,
            document=document if record else None,
            damage=damage if record and not too_new else "",
            settings=record.settings if record else "",
            wanted_settings=world.settings,
            fresh=self.fresh,
            pods=tuple(self._pod(known, now) for _, known in sorted(self.known.items())),
            gone=frozenset(self.gone),
            views={
                topic: None if queues is None else View(queues, now - since)
                for topic, (queues, since) in self.views.items()
            },
            foreigners=world.broker.foreigners,
            queue_weights=world.weights,
            status=world.api.status,
            problems=too_new,
        )

    def _pod(self, known: Known, now: float) -> Pod:
        pod = known.pod
        return Pod(
            name=pod.name,
            uid=pod.uid,
            started=pod.started,
            ready=pod.ready,
            steady=now - known.ready_changed,
            age=now - known.first_seen,
            terminating=pod.terminating,
            leaving=0.0 if known.leaving_since is None else now - known.leaving_since,
            ended=pod.ended,
            client_id=f"10.0.0.1@{pod.name}",
            heard=known.heard,
            unheard=0.0 if known.failed_since is None else now - known.failed_since,
            poke=pod.poke,
            poked=now - known.poke_changed,
        )

    def _apply(self, found: Plan, record: Stored | None) -> Work:
        if found.reread:
            yield from self._look()
            self.fresh = self._woken = True
            return
        world = self.world
        if found.document:
            yield self.chance.uniform(0.0, 0.05)
            world.crash_point(self)
            yield 0.0
            world.api.write_record(found.data, world.settings, record.version if record else None)
            self.fresh = False
            world.crash_point(self)
            yield 0.0
        for name, poke in found.pokes.items():
            yield self.chance.uniform(0.0, 0.01)
            world.api.answer()
            world.api.patch(name, poke=poke)
            if name in world.kubelets:
                world.kubelets[name].poked(poke)
        for holder in found.drains:
            self.after(self.chance.uniform(0.0, 0.05), partial(world.asked_to_drain, holder))
        if found.status != world.api.status:
            yield self.chance.uniform(0.0, 0.02)
            world.crash_point(self)
            yield 0.0
            world.api.answer()
            world.api.status = found.status
            world.judge.status_written()
        self.unsure, self._awaited = found.confirm, found.awaited
        for name in sorted(found.awaited):  # a set has an order of its own in each process
            self._read(name)

    def _confirm(self) -> Work:
        """Look for owners who are not among the pods by a consistent read."""
        for holder in self.unsure:
            yield self.chance.uniform(0.001, 0.01)
            self.world.api.answer()
            there = self.world.api.pods.get(holder.name)
            if there is None or there.uid != holder.uid:
                self.gone.add(holder.uid)
            if there:
                self._see(there.name, there, there.version)
        self.unsure = ()

    def _look(self) -> Work:
        """Read all routes, pods and reports."""
        self._ask_routes()
        self.world.api.answer()
        for name in [name for name in self.known if name not in self.world.api.pods]:
            self._see(name, None, self.world.api.version)
        for name, pod in self.world.api.pods.items():
            self._see(name, pod, pod.version)
        for name, known in self.known.items():
            kubelet = self.world.kubelets.get(name)
            report = kubelet.sidecar.report() if kubelet and kubelet.sidecar and kubelet.uid == known.pod.uid else None
            known.heard = Heard(report) if report else None
            if report is None and known.failed_since is None:
                known.failed_since = self.clock.now
        yield self.chance.uniform(0.01, 0.1)


def _believed(text: str | bytes) -> tuple[Assignment | None, str, bool]:
    """Return the document, or why it cannot be read, and whether that is because it is newer than we are."""
    try:
        return read_assignment(text), "", False
    except ValueError as error:
        return None, str(error), isinstance(error, TooNew)


def restarted(operator: Operator) -> Operator:
    """Replace an operator by a new process that remembers nothing."""
    operator.kill()
    operator.world.api.watchers.remove(operator.hear)
    fresh = type(operator)(operator.world, f"operator-{operator.chance.random():.6f}")
    fresh.leap = operator.leap
    return fresh
