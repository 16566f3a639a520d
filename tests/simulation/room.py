"""The operator's own room in a simulated world: its gathering, its rounds and its writes, on an API server of ours.

What `brain.Operator` does by itself is done here by `rota.kube`: the same code that runs against a real API server,
with asyncio on virtual time.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from rota.documents import Report
from rota.kube.api import Api, ApiError, Params, Unanswered
from rota.kube.brain import Brain, Done
from rota.kube.fleets import Fleets
from rota.kube.group import AtBroker, Group
from rota.kube.lags import Lag
from rota.kube.objects import (
    DOCUMENTS,
    GROUP_LABEL,
    POKE,
    SETTINGS,
    SIDECAR,
    ConfigMap,
    Custom,
    Metadata,
    Object,
    Owner,
    Pod,
    poke_of,
    record_of,
)
from rota.kube.places import Places
from rota.kube.reports import Answer, Endpoint, Reports
from rota.kube.wishes import Wish
from rota.model import Holder
from rota.planner import Poke, View
from simulation.brain import Operator
from simulation.clock import Process
from simulation.judge import Broken
from simulation.run import Failure, failures
from simulation.server import Conflict, PodObject, Stored, Unreachable
from simulation.world import Simulation

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

UID = "uid-of-the-group"


class VirtualLoop:
    """asyncio on a process of a simulated world: it stands still while that is frozen, and ends with it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = cast("asyncio.AbstractEventLoop", self)  # what of it is never asked for is not there

    def time(self) -> float:
        return self._process.clock.now

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(0.0, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.time() + delay, callback, args, self._loop, context)
        self._process.after(delay, partial(self._run, handle))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self._loop)

    def create_task(self, coro: Coroutine[Any, Any, T], **named: Any) -> "asyncio.Task[T]":
        task = asyncio.Task(coro, loop=self._loop, **named)
        task.add_done_callback(_broken)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "exception" in context:  # tasks of a process that was killed are no news
            raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _run(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            with self.running():
                handle._run()

    @contextmanager
    def running(self) -> "Iterator[None]":
        """Be the loop that runs."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)


def _broken(task: "asyncio.Task[Any]") -> None:
    """Let what the judge finds end the run, wherever it was found."""
    if not task.cancelled() and isinstance(task.exception(), Broken):
        raise cast("Broken", task.exception())


class InTheRoom(Operator):
    """One replica: sees and hears as `Operator` does; decides and writes by the kube room."""

    def __init__(self, world: "Simulation", name: str) -> None:
        self._brain: Brain | None = None
        self._named = tuple(world.group.split("/"))
        self._kept: Stored | None = None
        super().__init__(world, name)
        world.api.on_record.append(self._recorded)
        self._watch_over()

    def _recorded(self, stored: Stored | None) -> None:
        """Be told of the record by its watch, later."""
        if not self.world.silent_watch:
            self.after(self.chance.uniform(0.0, 5.0 if self.world.bad_watch else 0.02), partial(self._keep, stored))

    def _keep(self, stored: Stored | None) -> None:
        before, self._kept = self._kept, stored
        with self.loop.running():
            if stored:
                self.brain.record_seen(as_config_map(self._key, stored))
            elif before:
                self.brain.record_gone(as_config_map(self._key, before))

    @property
    def brain(self) -> Brain:
        if self._brain is None:
            self.loop = VirtualLoop(self)
            self.told: dict[str, asyncio.Event] = {}
            api, reports = cast("Api", Requests(self)), cast("Reports", Polls(self))
            with self.loop.running():
                self._brain = Brain(api, reports, cast("Places", Around(self)), Fleets(api))
                self._brain.done = self._planned
                self._brain.time = lambda: self.time
                self._brain.adopt(Watched(self))
                self._brain.group_seen(self.body())
        return self._brain

    def body(self) -> Custom:
        """Return the ConsumerGroup."""
        namespace, name = self._named
        version = str(self.world.api.version)
        metadata = Metadata(name=name, namespace=namespace, uid=UID, resource_version=version)
        return Custom(metadata, {}, dict(self.world.api.status))

    def _planned(self, _: Done) -> None:
        self.world.judge.planned()

    def _watch_over(self) -> None:
        """See whether it leads, and what the status is now."""
        with self.loop.running():
            if self.world.leads(self) != self.brain.leads:
                self.brain.lead(leads=self.world.leads(self))
            self.brain.group_seen(self.body())
        self.after(0.1, self._watch_over)

    def _see(self, name: str, pod: PodObject | None, version: int) -> None:
        if version <= self._deaf.get(name, 0):
            return
        self._deaf[name] = version
        brain = self.brain
        known = brain.groups[self._key].pods.get(name)
        with self.loop.running():
            if pod:
                brain.pod_seen(self.shown(pod))
            elif known:
                brain.pod_gone(known.pod)

    @property
    def _key(self) -> tuple[str, str]:
        return self._named[0], self._named[1]

    def relist(self, *, stale: bool = False) -> None:
        self.known = dict.fromkeys(self.brain.groups[self._key].pods)  # type: ignore[assignment]
        super().relist(stale=stale)
        if not self.world.api.down:  # what a watch did not tell, a list does
            self._keep(self.world.api.record)

    def wake(self) -> None:
        """Look at the group soon."""
        with self.loop.running() if self._brain else _nothing():
            self.brain.wake(self._key)

    def reported(self, name: str) -> None:
        """Have a long poll answered."""
        if name in self.told:
            with self.loop.running():
                self.told[name].set()

    def shown(self, pod: PodObject) -> Pod:
        """Return a pod as the API server has it."""
        namespace, group = self._named
        notes = {POKE: str(pod.poke)} if pod.poke != Poke() else {}
        running = {"started": pod.started, "state": {"running": {}} if pod.started else {}}
        body = {
            "metadata": {
                "name": pod.name,
                "namespace": namespace,
                "uid": pod.uid,
                "resourceVersion": str(pod.version),
                "labels": {GROUP_LABEL: group},
                "annotations": notes,
                "deletionTimestamp": "2026-11-21T08:00:00Z" if pod.terminating else None,
            },
            "spec": {
                "initContainers": [{"name": SIDECAR, "volumeMounts": [{"name": "it", "mountPath": DOCUMENTS}]}],
                "volumes": [{"name": "it", "configMap": {"name": record_of(group)}}],
            },
            "status": {
                "phase": "Failed" if pod.ended else "Running",
                "podIP": pod.name,
                "conditions": [{"type": "Ready", "status": str(pod.ready)}],
                "initContainerStatuses": [{"name": SIDECAR, **running}],
            },
        }
        return msgspec.convert(body, Pod)


@contextmanager
def _nothing() -> "Iterator[None]":
    yield


def as_config_map(key: tuple[str, str], stored: Stored) -> ConfigMap:
    """Return the record as the API server has it."""
    namespace, group = key
    metadata = Metadata(
        name=f"{group}-rota",
        namespace=namespace,
        uid="uid-of-the-record",
        resource_version=str(stored.version),
        labels={GROUP_LABEL: group},
        owner_references=[Owner(UID, controller=True)],
    )
    plain = {key: it for key, it in stored.data.items() if isinstance(it, str)}
    packed = {key: it for key, it in stored.data.items() if isinstance(it, bytes)}
    return ConfigMap(metadata, plain | {SETTINGS: stored.settings}, packed)


class Watched(Group):
    """The group as the world has it, without a text to parse."""

    def __init__(self, operator: InTheRoom) -> None:
        self._world = operator.world
        super().__init__(*operator._key)

    def wants(self, body: Custom, policy: Custom | None) -> None:
        assert policy is None
        self.body = body

    @property
    def wish(self) -> Wish:
        world = self._world
        return Wish(None if world.bad_spec else world.spec, None if world.bad_policy else world.policy)

    @wish.setter
    def wish(self, _: Wish) -> None:
        pass

    @property
    def wanted_settings(self) -> str:
        return self._world.settings


class Around:
    """The broker, as the operator last heard of it."""

    def __init__(self, operator: InTheRoom) -> None:
        self._operator = operator
        self.news: Callable[[tuple[str, str]], None] = lambda _: None

    def want(self, group: Group) -> None:
        pass

    async def look(self, _: Group) -> None:
        await asyncio.sleep(self._operator.chance.uniform(0.0, 0.02))
        self._operator._ask_routes()

    def of(self, _: Group, now: float) -> AtBroker:
        views = {
            topic: None if queues is None else View(queues, now - since)
            for topic, (queues, since) in self._operator.views.items()
        }
        return AtBroker(views, self._operator.world.broker.foreigners)

    def lag(self, _: tuple[str, str]) -> Lag:
        return Lag({})  # nobody asks how far a group is behind

    async def unlock(self, _: Group, __: str, ___: object) -> None:
        pass  # locks run out by themselves

    def lead(self, *, leads: bool) -> None:
        pass


class Polls:
    """Members' reports; an address is a pod's name."""

    def __init__(self, operator: InTheRoom) -> None:
        self._operator = operator

    def _cut(self, name: str, uid: str) -> Report | None:
        pod = self._operator.world.kubelets.get(name)
        return pod.sidecar.report() if pod and pod.sidecar and pod.uid == uid else None

    async def read(self, member: Endpoint) -> Answer:
        """Read a report: it is cut at one moment, and known at a later one."""
        asked = asyncio.get_running_loop().time()
        return Answer(await self._read(member.address, member.uid), asked)

    async def _read(self, name: str, uid: str) -> Report | None:
        chance = self._operator.chance
        await asyncio.sleep(chance.uniform(0.001, 0.02))
        report = self._cut(name, uid)
        await asyncio.sleep(chance.uniform(0.001, 0.03) if report else 2.0)
        return report

    async def last_words(self, member: Endpoint) -> Answer | None:
        """Read a report, or hear silence; nothing where no process is at an address, or another pod's."""
        name, uid = member.address, member.uid
        asked, pod = asyncio.get_running_loop().time(), self._operator.world.kubelets.get(name)
        if not (pod and pod.sidecar and pod.uid == uid):
            await asyncio.sleep(self._operator.chance.uniform(0.001, 0.02))
            return None
        return Answer(await self._read(name, uid), asked)

    async def next(self, member: Endpoint, after: int) -> Answer:
        """Hold a poll until there is something new, or for ten seconds."""
        until = asyncio.get_running_loop().time() + 10.0
        report = await self._next(member.address, member.uid, after)
        return Answer(report, min(until, asyncio.get_running_loop().time()))

    async def _next(self, name: str, uid: str, after: int) -> Report | None:
        changed = self._operator.told.setdefault(name, asyncio.Event())
        until = asyncio.get_running_loop().time() + 10.0
        while (report := await self._read(name, uid)) and report.revision == after:
            left = until - asyncio.get_running_loop().time()
            if left <= 0:
                break
            changed.clear()
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                break
        return report

    async def drain(self, member: Endpoint) -> None:
        await asyncio.sleep(self._operator.chance.uniform(0.0, 0.05))
        self._operator.world.asked_to_drain(Holder(member.address, member.uid))


class Requests:
    """The API server, asked for objects by their paths."""

    def __init__(self, operator: InTheRoom) -> None:
        self._operator, self._world = operator, operator.world

    async def get(self, path: str, _kind: type[T], _: Params | None = None) -> T:
        await self._answer()
        what, name = path.split("/")[-2:]
        found: object = None
        if what == "configmaps":
            found = as_config_map(self._operator._key, self._world.api.record) if self._world.api.record else None
        elif name in self._world.api.pods:
            found = self._operator.shown(self._world.api.pods[name])
        if found is None:
            raise ApiError(404, "NotFound", f"{path} is not there")
        return cast("T", found)

    async def list(self, _: str, _kind: type[T], __: Params | None = None) -> tuple[list[T], str]:
        await self._answer()
        pods = [self._operator.shown(pod) for pod in self._world.api.pods.values()]
        return cast("list[T]", pods), str(self._world.api.version)

    async def create(self, path: str, body: Mapping[str, Any], _kind: type[T], _: Params | None = None) -> T:
        if path.endswith("/events"):
            return cast("T", None)
        return cast("T", await self._write(body, None))

    async def replace(self, _: str, body: Mapping[str, Any], _kind: type[T]) -> T:
        return cast("T", await self._write(body, int(body["metadata"]["resourceVersion"])))

    async def merge(self, path: str, body: Mapping[str, Any], _kind: type[T]) -> T:
        await asyncio.sleep(self._operator.chance.uniform(0.0, 0.01))
        name, uid = path.rpartition("/")[2], body["metadata"]["uid"]
        self._is_up()
        pod = self._world.api.pods.get(name)
        if pod is None:
            raise ApiError(404, "NotFound", f"{path} is not there")
        if pod.uid != uid:
            raise ApiError(409, "Conflict", f"{path} is another one")
        poke = poke_of(body["metadata"]["annotations"])
        self._world.api.patch(name, poke=poke)
        if name in self._world.kubelets:
            self._world.kubelets[name].poked(poke)
        return cast("T", Object(Metadata(name=name)))

    async def apply(self, _: str, body: Mapping[str, Any], _kind: type[T]) -> T:
        await asyncio.sleep(self._operator.chance.uniform(0.0, 0.02))
        await self._point()
        self._is_up()
        if body["status"] != self._world.api.status:
            self._world.api.version += 1
            self._world.api.status = body["status"]
            self._world.judge.status_written()
        return cast("T", self._operator.body())

    async def _write(self, body: Mapping[str, Any], based_on: int | None) -> ConfigMap:
        await asyncio.sleep(self._operator.chance.uniform(0.0, 0.05))
        await self._point()
        data = {key: it for key, it in body["data"].items() if key != SETTINGS} | body["binaryData"]
        try:
            self._world.api.write_record(data, body["data"][SETTINGS], based_on)
        except Conflict:
            raise ApiError(409, "Conflict", "The ConfigMap is another one") from None
        except Unreachable:
            raise Unanswered("The answer got lost") from None
        written = as_config_map(self._operator._key, cast("Stored", self._world.api.record))
        await self._point()
        return written

    async def _answer(self) -> None:
        await asyncio.sleep(self._operator.chance.uniform(0.001, 0.02))
        self._is_up()

    def _is_up(self) -> None:
        if self._world.api.down:
            raise Unanswered("The API server does not answer")

    async def _point(self) -> None:
        """Be where an operator may crash: one that does never comes back from here."""
        self._world.crash_point(self._operator)
        await asyncio.sleep(0)


def failures_in_the_room(seeds: range) -> list[Failure]:
    """Run seeds, in a process that runs nothing else, and return what failed."""
    Simulation.operator = InTheRoom
    return failures(seeds)
