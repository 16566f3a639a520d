"""Pod status, reduced to the fields that concern the sidecar, so that the informer's cache stays small.

A *start obstacle* is the reason why a pod's containers cannot start, such as "ImagePullBackOff of container app".
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from rota.model import single_line
from rota.timestamps import parse_time

SIDECAR_CONTAINER = "rota-sidecar"
MAX_OBSTACLE_CHARACTERS = 200

_NORMAL_WAITING_REASONS = {"", "ContainerCreating", "PodInitializing"}  # every container has them while it starts


ContainerT = TypeVar("ContainerT", bound=Any)  # an entry with a name, of a pod's spec or of its status


def sidecars_in(containers: Iterable[ContainerT]) -> list[ContainerT]:
    """Return the sidecar's entries of a pod's containers, or of their statuses."""
    return [container for container in containers if container.name == SIDECAR_CONTAINER]


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
        """Whether a process runs in this state, or ran before it."""
        return self.running is not None or self.terminated is not None

    @property
    def ended_at(self) -> float:
        """When the container's process ended, in seconds since 1970; 0: it has not, or the time is not known."""
        return (parse_time(self.terminated.finished_at) or 0.0) if self.terminated else 0.0


class _ContainerStatus(Struct, frozen=True, rename="camel"):
    name: str
    started: bool | None = None
    ready: bool = False
    restart_count: int = 0
    state: _ContainerState = _ContainerState()
    last_state: _ContainerState = _ContainerState()

    @property
    def start_obstacle(self) -> str:
        """Why the container is waiting; empty for the normal reasons of a start."""
        reason = self.state.waiting.reason if self.state.waiting else ""
        if reason in _NORMAL_WAITING_REASONS:
            return ""
        return single_line(f"{reason} of container {self.name}", MAX_OBSTACLE_CHARACTERS)

    @property
    def has_run(self) -> bool:
        """Whether a process of the container has ever started."""
        return bool(self.started or self.ready or self.restart_count or self.state.has_run or self.last_state.has_run)


class _Condition(Struct, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""

    @property
    def is_ready(self) -> bool:
        return self.type == "Ready" and self.status == "True"

    @property
    def start_obstacle(self) -> str:
        """Why no node was found for the pod."""
        is_unschedulable = self.type == "PodScheduled" and self.status == "False" and self.reason == "Unschedulable"
        return single_line(f"Unschedulable, {self.message}", MAX_OBSTACLE_CHARACTERS) if is_unschedulable else ""


class PodStatus(Struct, frozen=True, rename="camel"):
    """A pod's `status`."""

    phase: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[_Condition] = []
    init_container_statuses: list[_ContainerStatus] = []
    container_statuses: list[_ContainerStatus] = []
    # Not a field of Kubernetes: why the pod's containers cannot start; empty if nothing prevents them.
    start_obstacle: str = ""

    @property
    def sidecar_statuses(self) -> list[_ContainerStatus]:
        """The status of the sidecar's container, in either list of containers."""
        return sidecars_in([*self.init_container_statuses, *self.container_statuses])

    @property
    def process_ended_at(self) -> float:
        """When a process of the sidecar ended last, in seconds since 1970 by its node's clock; 0: none has."""
        ended_at = 0.0
        for sidecar in self.sidecar_statuses:
            ended_at = max(ended_at, sidecar.state.ended_at, sidecar.last_state.ended_at)
        return ended_at


def trim_status(status: PodStatus) -> PodStatus:
    """Keep only the fields that Rota uses. Compute the start obstacle before: it may come from a dropped field."""
    conditions = [condition for condition in status.conditions if condition.type == "Ready"]
    return replace(
        status,
        conditions=[replace(condition, message="") for condition in conditions],
        init_container_statuses=sidecars_in(status.init_container_statuses),
        container_statuses=sidecars_in(status.container_statuses),
        start_obstacle=_find_obstacle(status),
    )


def _find_obstacle(status: PodStatus) -> str:
    """Return the first start obstacle: from a condition of the pod, otherwise from a container."""
    if status.start_obstacle:  # the status was trimmed before, so the fields with the obstacle are gone
        return status.start_obstacle
    containers = [*status.init_container_statuses, *status.container_statuses]
    subjects: list[_Condition | _ContainerStatus] = [*status.conditions, *containers]
    return next((subject.start_obstacle for subject in subjects if subject.start_obstacle), "")
