"""Pod status, reduced to the fields that concern the sidecar."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from rota.model import single_line
from rota.timestamps import parse_time

SIDECAR_CONTAINER = "rota-sidecar"
MAX_OBSTACLE_CHARACTERS = 200

_NORMAL_WAITING_REASONS = {"", "ContainerCreating", "PodInitializing"}  # every container has them while it starts


class _Waiting(Struct, frozen=True):
    reason: str = ""


class _Terminated(Struct, frozen=True, rename="camel"):
    finished_at: str | None = None


class _ContainerState(Struct, frozen=True):
    waiting: _Waiting | None = None
    running: Mapping[str, Any] | None = None
    terminated: _Terminated | None = None

    @property
    def has_run(self) -> bool:
        return self.running is not None or self.terminated is not None


class _ContainerStatus(Struct, frozen=True, rename="camel"):
    name: str
    started: bool | None = None
    ready: bool = False
    restart_count: int = 0
    state: _ContainerState = _ContainerState()
    last_state: _ContainerState = _ContainerState()

    @property
    def obstacle(self) -> str:
        """Why the container is waiting; empty for the normal reasons of a start."""
        reason = self.state.waiting.reason if self.state.waiting else ""
        if reason in _NORMAL_WAITING_REASONS:
            return ""
        return single_line(f"{reason} of container {self.name}", MAX_OBSTACLE_CHARACTERS)

    @property
    def has_run(self) -> bool:
        return bool(self.started or self.ready or self.restart_count or self.state.has_run or self.last_state.has_run)


def _sidecars(containers: list[_ContainerStatus]) -> list[_ContainerStatus]:
    return [container for container in containers if container.name == SIDECAR_CONTAINER]


class _Condition(Struct, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""

    @property
    def obstacle(self) -> str:
        """Why no node was found for the pod."""
        is_unschedulable = self.type == "PodScheduled" and self.status == "False" and self.reason == "Unschedulable"
        return single_line(f"Unschedulable, {self.message}", MAX_OBSTACLE_CHARACTERS) if is_unschedulable else ""


class PodStatus(Struct, frozen=True, rename="camel"):
    """The status that the kubelet reports of a pod."""

    phase: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[_Condition] = []
    init_container_statuses: list[_ContainerStatus] = []
    container_statuses: list[_ContainerStatus] = []
    obstacle: str = ""  # not a field of Kubernetes: computed before conditions and containers are dropped

    @property
    def sidecar_statuses(self) -> list[_ContainerStatus]:
        """The status of the sidecar's container, in either list of containers."""
        return _sidecars([*self.init_container_statuses, *self.container_statuses])

    @property
    def process_ended_at(self) -> float:
        """When a process of the sidecar ended last, in seconds since 1970 by its node's clock; 0: none has."""
        states = [state for status in self.sidecar_statuses for state in (status.state, status.last_state)]
        return max(
            (parse_time(state.terminated.finished_at) or 0.0 for state in states if state.terminated), default=0.0
        )


def trim_status(status: PodStatus) -> PodStatus:
    """Return the fields that Rota uses; the obstacle is found first, as it may be in fields that are dropped."""
    return replace(
        status,
        conditions=[replace(condition, message="") for condition in status.conditions if condition.type == "Ready"],
        init_container_statuses=_sidecars(status.init_container_statuses),
        container_statuses=_sidecars(status.container_statuses),
        obstacle=_find_obstacle(status),
    )


def _find_obstacle(status: PodStatus) -> str:
    if status.obstacle:  # a status that was trimmed before: the fields with its obstacle are gone
        return status.obstacle
    obstacles = [condition.obstacle for condition in status.conditions]
    obstacles += [container.obstacle for container in (*status.init_container_statuses, *status.container_statuses)]
    return next(filter(None, obstacles), "")
