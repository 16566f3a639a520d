"""Stand-ins for the clients of the operator's controller: API server, brokers and members of a simulation."""

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
from simulation.server import StaleVersionError, StoredConfigMap, UnreachableError

if TYPE_CHECKING:
    from simulation.replica import Operator

T = TypeVar("T")

UID = "uid-of-the-group"


def as_config_map(key: tuple[str, str], stored: StoredConfigMap) -> ConfigMap:
    """Return the stored ConfigMap as the API server has it."""
    namespace, group = key
    metadata = Metadata(
        name=f"{group}-rota",
        namespace=namespace,
        uid="uid-of-the-record",
        resource_version=str(stored.version),
        labels={GROUP_LABEL: group},
        owner_references=[OwnerReference(UID, controller=True)],
    )
    plain = {key: value for key, value in stored.data.items() if isinstance(value, str)}
    packed = {key: value for key, value in stored.data.items() if isinstance(value, bytes)}
    return ConfigMap(metadata, plain | {SETTINGS_KEY: stored.settings}, packed)


class SimulatedGroup(Group):
    """The group of a simulation, with parsed specs."""

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
    """The broker's state as of the operator's last poll."""

    def __init__(self, operator: "Operator") -> None:
        self._operator = operator
        self.on_change: Callable[[tuple[str, str]], None] = lambda _: None

    def update_group(self, group: Group) -> None:
        pass

    async def poll_group(self, _: Group) -> None:
        await asyncio.sleep(self._operator.random.uniform(0.0, 0.02))
        self._operator.read_routes()

    def state_of(self, _: Group, now: float) -> BrokerState:
        views = {
            topic: None if queues is None else QueueView(queues, now - since)
            for topic, (queues, since) in self._operator.views.items()
        }
        return BrokerState(views, self._operator.world.broker.unmanaged_consumers)

    def lag_of(self, _: tuple[str, str]) -> GroupLag:
        return GroupLag({})  # no invariant depends on lag

    async def unlock(self, _: Group, __: str, ___: object) -> None:
        pass  # locks expire by themselves

    def set_leading(self, *, is_leading: bool) -> None:
        pass


class Members:
    """The reports of members; the address of a member is its pod's name."""

    def __init__(self, operator: "Operator") -> None:
        self._operator = operator

    def _report_of(self, name: str, uid: str) -> Report | None:
        pod = self._operator.world.kubelets.get(name)
        return pod.sidecar.report() if pod and pod.sidecar and pod.uid == uid else None

    async def read(self, member: Endpoint) -> MemberResponse:
        """Read a report: the member creates it at one time, the operator receives it later."""
        requested_at = asyncio.get_running_loop().time()
        return MemberResponse(await self._read(member.address, member.uid), requested_at)

    async def _read(self, name: str, uid: str) -> Report | None:
        random = self._operator.random
        await asyncio.sleep(random.uniform(0.001, 0.02))
        report = self._report_of(name, uid)
        await asyncio.sleep(random.uniform(0.001, 0.03) if report else 2.0)
        return report

    async def read_if_present(self, member: Endpoint) -> MemberResponse | None:
        """Read a report; None if no process of this pod listens at the address."""
        name, uid = member.address, member.uid
        requested_at = asyncio.get_running_loop().time()
        pod = self._operator.world.kubelets.get(name)
        if not (pod and pod.sidecar and pod.uid == uid):
            await asyncio.sleep(self._operator.random.uniform(0.001, 0.02))
            return None
        return MemberResponse(await self._read(name, uid), requested_at)

    async def long_poll(self, member: Endpoint, after: int, seconds: int = 10) -> MemberResponse:
        """Wait for a changed report, for at most ten seconds; members send no notices of brokers."""
        until = asyncio.get_running_loop().time() + seconds
        report = await self._changed_report(member.address, member.uid, after)
        return MemberResponse(report, min(until, asyncio.get_running_loop().time()))

    async def _changed_report(self, name: str, uid: str, after: int) -> Report | None:
        changed = self._operator.polls.setdefault(name, asyncio.Event())
        until = asyncio.get_running_loop().time() + 10.0
        while (report := await self._read(name, uid)) and report.revision == after:
            remaining = until - asyncio.get_running_loop().time()
            if remaining <= 0:
                break
            changed.clear()
            try:
                async with asyncio.timeout(remaining):
                    await changed.wait()
            except TimeoutError:
                break
        return report

    async def drain(self, member: Endpoint) -> None:
        await asyncio.sleep(self._operator.random.uniform(0.0, 0.05))
        self._operator.world.request_drain(Holder(member.address, member.uid))

    async def send_assignment(self, member: Endpoint, document: str | bytes, settings_digest: str) -> None:
        """Send a stored assignment; the network may lose it, or deliver it late or twice."""
        kubelet = self._operator.world.kubelets.get(member.address)
        if member.is_signed and kubelet and kubelet.uid == member.uid:
            kubelet.send_assignment(document, settings_digest)


class Server:
    """The API server's client: objects by path."""

    def __init__(self, operator: "Operator") -> None:
        self._operator = operator
        self._world = operator.world

    async def get(self, path: str, _kind: type[T], _: Params | None = None) -> T:
        await self._respond()
        kind, name = path.split("/")[-2:]
        body: object = None
        if kind == "configmaps":
            body = as_config_map(self._operator.key, self._world.api.config_map) if self._world.api.config_map else None
        elif name in self._world.api.pods:
            body = self._operator.pod_body(self._world.api.pods[name])
        if body is None:
            raise ApiError(404, "NotFound", f"{path} is not there")
        return cast("T", body)

    async def list(self, _: str, _kind: type[T], __: Params | None = None) -> tuple[list[T], str]:
        await self._respond()
        pods = list(map(self._operator.pod_body, self._world.api.pods.values()))
        return cast("list[T]", pods), str(self._world.api.version)

    async def create(self, path: str, body: Mapping[str, Any], _kind: type[T], _: Params | None = None) -> T:
        if path.endswith("/events"):
            return cast("T", None)
        return cast("T", await self._write(body, None))

    async def replace(self, _: str, body: Mapping[str, Any], _kind: type[T]) -> T:
        return cast("T", await self._write(body, int(body["metadata"]["resourceVersion"])))

    async def merge_patch(self, path: str, body: Mapping[str, Any], _kind: type[T]) -> T:
        await asyncio.sleep(self._operator.random.uniform(0.0, 0.01))
        name, uid = path.rpartition("/")[2], body["metadata"]["uid"]
        self._require_up()
        pod = self._world.api.pods.get(name)
        if pod is None:
            raise ApiError(404, "NotFound", f"{path} is not there")
        if pod.uid != uid:
            raise ApiError(409, "Conflict", f"{path} is another one")
        annotations = {**pod.annotations, **body["metadata"]["annotations"]}
        if annotations != pod.annotations:  # the server writes nothing if nothing changes
            self._world.api.patch(name, annotations=annotations)
        if name in self._world.kubelets:
            self._world.kubelets[name].on_poke(parse_poke(annotations))
        version = str(self._world.api.pods[name].version)
        return cast("T", PartialObjectMetadata(Metadata(name=name, resource_version=version)))

    async def apply(self, _: str, body: Mapping[str, Any], _kind: type[T]) -> T:
        await asyncio.sleep(self._operator.random.uniform(0.0, 0.02))
        await self._crash_point()
        self._require_up()
        if body["status"] != self._world.api.status:
            self._world.api.version += 1
            self._world.api.status = body["status"]
            self._world.judge.on_status_write()
        return cast("T", self._operator.group_resource())

    async def _write(self, body: Mapping[str, Any], based_on: int | None) -> ConfigMap:
        await asyncio.sleep(self._operator.random.uniform(0.0, 0.05))
        await self._crash_point()
        data = {key: value for key, value in body["data"].items() if key != SETTINGS_KEY} | body["binaryData"]
        try:
            self._world.api.write_config_map(data, body["data"][SETTINGS_KEY], based_on)
        except StaleVersionError:
            raise ApiError(409, "Conflict", "The ConfigMap is another one") from None
        except UnreachableError:
            raise NoResponseError("The answer got lost") from None
        written = as_config_map(self._operator.key, cast("StoredConfigMap", self._world.api.config_map))
        await self._crash_point()
        return written

    async def _respond(self) -> None:
        await asyncio.sleep(self._operator.random.uniform(0.001, 0.02))
        self._require_up()

    def _require_up(self) -> None:
        if self._world.api.down:
            raise NoResponseError("The API server does not answer")

    async def _crash_point(self) -> None:
        """Let the operator crash here, if due; a crashed operator never resumes."""
        self._world.maybe_crash(self._operator)
        await asyncio.sleep(0)
