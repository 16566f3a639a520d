"""What the operator's controller sees of a simulated world: its API server, its brokers and its members."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.api import ApiError, NoResponseError, Params
from rota.kube.client.objects import (
    GROUP_LABEL,
    SETTINGS_KEY,
    ConfigMap,
    CustomResource,
    Metadata,
    OwnerReference,
    PartialObjectMetadata,
    parse_poke,
)
from rota.kube.members.report_client import Endpoint, MemberResponse
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.state.resolved_spec import ResolvedSpec
from rota.model import Holder
from rota.planner import QueueView
from rota.reports import Report
from simulation.server import Conflict, Stored, Unreachable

if TYPE_CHECKING:
    from simulation.replica import Operator

T = TypeVar("T")

UID = "uid-of-the-group"


def as_config_map(key: tuple[str, str], stored: Stored) -> ConfigMap:
    """Return the record as the API server has it."""
    namespace, group = key
    metadata = Metadata(
        name=f"{group}-rota",
        namespace=namespace,
        uid="uid-of-the-record",
        resource_version=str(stored.version),
        labels={GROUP_LABEL: group},
        owner_references=[OwnerReference(UID, controller=True)],
    )
    plain = {key: it for key, it in stored.data.items() if isinstance(it, str)}
    packed = {key: it for key, it in stored.data.items() if isinstance(it, bytes)}
    return ConfigMap(metadata, plain | {SETTINGS_KEY: stored.settings}, packed)


class GroupOfTheWorld(Group):
    """The group as the world has it, without a text to parse."""

    def __init__(self, operator: "Operator") -> None:
        self._world = operator.world
        super().__init__(*operator.key)

    def set_spec(self, body: CustomResource, policy: CustomResource | None) -> None:
        assert policy is None
        self.body = body

    @property
    def resolved_spec(self) -> ResolvedSpec:
        world = self._world
        return ResolvedSpec(None if world.bad_spec else world.spec, None if world.bad_policy else world.policy)

    @resolved_spec.setter
    def resolved_spec(self, _: ResolvedSpec) -> None:
        pass

    @property
    def desired_settings(self) -> str:
        return self._world.settings


class Brokers:
    """The broker, as the operator last heard of it."""

    def __init__(self, operator: "Operator") -> None:
        self._operator = operator
        self.on_change: Callable[[tuple[str, str]], None] = lambda _: None

    def update_group(self, group: Group) -> None:
        pass

    async def poll_group(self, _: Group) -> None:
        await asyncio.sleep(self._operator.chance.uniform(0.0, 0.02))
        self._operator.read_routes()

    def state_of(self, _: Group, now: float) -> BrokerState:
        views = {
            topic: None if queues is None else QueueView(queues, now - since)
            for topic, (queues, since) in self._operator.views.items()
        }
        return BrokerState(views, self._operator.world.broker.foreigners)

    def lag_of(self, _: tuple[str, str]) -> GroupLag:
        return GroupLag({})  # nobody asks how far a group is behind

    async def unlock(self, _: Group, __: str, ___: object) -> None:
        pass  # locks run out by themselves

    def set_leading(self, *, is_leading: bool) -> None:
        pass


class Members:
    """Members' reports; an address is a pod's name."""

    def __init__(self, operator: "Operator") -> None:
        self._operator = operator

    def _cut(self, name: str, uid: str) -> Report | None:
        pod = self._operator.world.kubelets.get(name)
        return pod.sidecar.report() if pod and pod.sidecar and pod.uid == uid else None

    async def read(self, member: Endpoint) -> MemberResponse:
        """Read a report: it is cut at one moment, and known at a later one."""
        asked = asyncio.get_running_loop().time()
        return MemberResponse(await self._read(member.address, member.uid), asked)

    async def _read(self, name: str, uid: str) -> Report | None:
        chance = self._operator.chance
        await asyncio.sleep(chance.uniform(0.001, 0.02))
        report = self._cut(name, uid)
        await asyncio.sleep(chance.uniform(0.001, 0.03) if report else 2.0)
        return report

    async def read_if_present(self, member: Endpoint) -> MemberResponse | None:
        """Read a report, or hear silence; nothing where no process is at an address, or another pod's."""
        name, uid = member.address, member.uid
        asked, pod = asyncio.get_running_loop().time(), self._operator.world.kubelets.get(name)
        if not (pod and pod.sidecar and pod.uid == uid):
            await asyncio.sleep(self._operator.chance.uniform(0.001, 0.02))
            return None
        return MemberResponse(await self._read(name, uid), asked)

    async def long_poll(self, member: Endpoint, after: int, seconds: int = 10) -> MemberResponse:
        """Hold a poll until there is something new, or for ten seconds: no member reports notices of brokers."""
        until = asyncio.get_running_loop().time() + seconds
        report = await self._next(member.address, member.uid, after)
        return MemberResponse(report, min(until, asyncio.get_running_loop().time()))

    async def _next(self, name: str, uid: str, after: int) -> Report | None:
        changed = self._operator.polls.setdefault(name, asyncio.Event())
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


class Server:
    """The API server, asked for objects by their paths."""

    def __init__(self, operator: "Operator") -> None:
        self._operator, self._world = operator, operator.world

    async def get(self, path: str, _kind: type[T], _: Params | None = None) -> T:
        await self._answer()
        what, name = path.split("/")[-2:]
        found: object = None
        if what == "configmaps":
            found = as_config_map(self._operator.key, self._world.api.record) if self._world.api.record else None
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

    async def merge_patch(self, path: str, body: Mapping[str, Any], _kind: type[T]) -> T:
        await asyncio.sleep(self._operator.chance.uniform(0.0, 0.01))
        name, uid = path.rpartition("/")[2], body["metadata"]["uid"]
        self._is_up()
        pod = self._world.api.pods.get(name)
        if pod is None:
            raise ApiError(404, "NotFound", f"{path} is not there")
        if pod.uid != uid:
            raise ApiError(409, "Conflict", f"{path} is another one")
        annotations = {**pod.annotations, **body["metadata"]["annotations"]}
        if annotations != pod.annotations:  # the server writes nothing if nothing changes
            self._world.api.patch(name, annotations=annotations)
        if name in self._world.kubelets:
            self._world.kubelets[name].poked(parse_poke(annotations))
        return cast("T", PartialObjectMetadata(Metadata(name=name)))

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
        data = {key: it for key, it in body["data"].items() if key != SETTINGS_KEY} | body["binaryData"]
        try:
            self._world.api.write_record(data, body["data"][SETTINGS_KEY], based_on)
        except Conflict:
            raise ApiError(409, "Conflict", "The ConfigMap is another one") from None
        except Unreachable:
            raise NoResponseError("The answer got lost") from None
        written = as_config_map(self._operator.key, cast("Stored", self._world.api.record))
        await self._point()
        return written

    async def _answer(self) -> None:
        await asyncio.sleep(self._operator.chance.uniform(0.001, 0.02))
        self._is_up()

    def _is_up(self) -> None:
        if self._world.api.down:
            raise NoResponseError("The API server does not answer")

    async def _point(self) -> None:
        """Be where an operator may crash: one that does never comes back from here."""
        self._world.crash_point(self._operator)
        await asyncio.sleep(0)
