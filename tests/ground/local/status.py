"""Computes a pod's status from its containers: values in, a dict out; no I/O, no clock.

It follows the kubelet: which phase, which conditions with which reasons, and how a container's state is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Waiting:
    """A container that does not run, and why."""

    reason: str
    message: str = ""


@dataclass(frozen=True)
class Running:
    """A container whose process runs since `at`."""

    at: str


@dataclass(frozen=True)
class Terminated:
    """A container whose process has ended."""

    code: int
    reason: str
    signal: int = 0
    message: str = ""
    started: str = ""
    finished: str = ""
    id: str = ""


State = Waiting | Running | Terminated


@dataclass(frozen=True)
class ContainerStatus:
    """One container as its pod's status shows it."""

    name: str
    image: str
    state: State
    id: str = ""
    last: Terminated | None = None
    restarts: int = 0
    started: bool = False  # its startup probe passed, or it runs and has none
    ready: bool = False


Statuses = Mapping[str, ContainerStatus]  # by the container's name


@dataclass(frozen=True)
class PodProgress:
    """How far a pod has come, apart from its containers."""

    address: str
    host: str
    prepared: bool = False  # its volumes are mounted
    over: bool = False  # nothing of it will run again


def timestamp(now: datetime | None = None) -> str:
    """Return a time in the format of the API."""
    return (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_sidecar(spec: Object) -> bool:
    """Whether an init container is a native sidecar."""
    return bool(spec.get("restartPolicy") == "Always")


def build_pod_status(
    pod: Object, statuses: Statuses, progress: PodProgress, previous: Sequence[Object], now: str
) -> Object:
    """Return the part of a pod's status that the agent owns; `previous` are the conditions that it reported last."""
    spec = pod["spec"]
    inits, mains = spec.get("initContainers") or [], spec["containers"]
    status: Object = {
        "observedGeneration": pod["metadata"].get("generation", 0),
        "phase": phase(spec, statuses, over=progress.over),
        "hostIP": progress.host,
        "hostIPs": [{"ip": progress.host}],
        "startTime": (pod.get("status") or {}).get("startTime") or now,
        "containerStatuses": [_container(statuses[container["name"]]) for container in mains],
    }
    if progress.prepared:  # the kubelet gives an address once the volumes are there
        status |= {"podIP": progress.address, "podIPs": [{"ip": progress.address}]}
    if inits:
        status["initContainerStatuses"] = [_container(statuses[container["name"]]) for container in inits]
    status["conditions"] = _since(list(_conditions(pod, statuses, progress, status["phase"])), previous, now)
    return status


def phase(spec: Object, statuses: Statuses, *, over: bool) -> str:
    """Return the pod's phase; the final ones only after its last process has ended."""
    states = [statuses[container["name"]].state for container in spec["containers"]]
    if over:
        return "Succeeded" if all(_succeeded(state) for state in states) else "Failed"
    if not is_initialized(spec, statuses) or any(
        never_ran(statuses[container["name"]]) for container in spec["containers"]
    ):
        return "Pending"
    return "Running"


def is_initialized(spec: Object, statuses: Statuses) -> bool:
    """Whether all init containers have completed, now or earlier."""
    if any(not never_ran(statuses[container["name"]]) for container in spec["containers"]):
        return True
    return not _incomplete(spec, statuses)


def never_ran(container: ContainerStatus) -> bool:
    """Whether a container never ran."""
    return isinstance(container.state, Waiting) and container.last is None


def covers(actual: Object, desired: Object) -> bool:
    """Whether a pod's status already contains all that is desired; conditions of other writers do not matter."""
    conditions = {condition["type"]: condition for condition in actual.get("conditions") or []}
    plain = all(actual.get(key) == value for key, value in desired.items() if key != "conditions")
    return plain and all(_same(conditions.get(condition["type"], {}), condition) for condition in desired["conditions"])


def restore_status(name: str, entry: Object) -> ContainerStatus:
    """Return a container from a status that an earlier agent wrote: its processes have ended with that agent."""
    state, last = entry.get("state") or {}, (entry.get("lastState") or {}).get("terminated")
    status = ContainerStatus(
        name, entry.get("image", ""), Waiting("ContainerCreating"), id=entry.get("containerID", ""),
        last=_parse_terminated(last) if last else None, restarts=entry.get("restartCount", 0),
    )  # fmt: skip
    if "terminated" in state:
        return replace(status, state=_parse_terminated(state["terminated"]))
    if "running" in state:
        message = "The agent that ran this container ended, and the container with it"
        lost = Terminated(
            137, "ContainerStatusUnknown", message=message, id=status.id,
            started=state["running"].get("startedAt", ""), finished=timestamp(),
        )  # fmt: skip
        return replace(status, state=lost)
    return status


def _parse_terminated(entry: Object) -> Terminated:
    return Terminated(
        entry["exitCode"], entry.get("reason", ""), signal=entry.get("signal", 0), message=entry.get("message", ""),
        started=entry.get("startedAt") or "", finished=entry.get("finishedAt") or "", id=entry.get("containerID", ""),
    )  # fmt: skip


def _succeeded(state: State) -> bool:
    return isinstance(state, Terminated) and state.code == 0


def _incomplete(spec: Object, statuses: Statuses) -> list[str]:
    def done(container: Object) -> bool:
        status = statuses[container["name"]]
        return status.started if is_sidecar(container) else _succeeded(status.state)

    return [container["name"] for container in spec.get("initContainers") or [] if not done(container)]


def _conditions(pod: Object, statuses: Statuses, progress: PodProgress, phase: str) -> Iterable[Object]:
    spec = pod["spec"]
    incomplete = [] if is_initialized(spec, statuses) else _incomplete(spec, statuses)
    watched = [*spec["containers"], *(c for c in spec.get("initContainers") or [] if is_sidecar(c))]
    unready = [container["name"] for container in watched if not statuses[container["name"]].ready]
    yield _condition("PodReadyToStartContainers", holds=progress.prepared and not progress.over)
    yield _condition(
        "Initialized",
        not incomplete,
        "ContainersNotInitialized",
        f"containers with incomplete status: {_names(incomplete)}",
    )
    trouble = ("ContainersNotReady", f"containers with unready status: {_names(unready)}") if unready else ("", "")
    if progress.over:
        trouble = ("PodCompleted" if phase == "Succeeded" else "PodFailed", "")
    yield _condition("ContainersReady", trouble == ("", ""), *trouble)
    if trouble == ("", ""):
        trouble = _gates(pod)
    yield _condition("Ready", trouble == ("", ""), *trouble)


def _gates(pod: Object) -> tuple[str, str]:
    true = {c["type"] for c in (pod.get("status") or {}).get("conditions") or [] if c["status"] == "True"}
    shut = [g["conditionType"] for g in pod["spec"].get("readinessGates") or [] if g["conditionType"] not in true]
    return ("ReadinessGatesNotReady", f"readiness gates not true: {_names(shut)}") if shut else ("", "")


def _condition(kind: str, holds: bool, reason: str = "", message: str = "") -> Object:  # noqa: FBT001
    condition: Object = {"type": kind, "status": str(holds)}
    # Set both keys always: a merge would keep the old reason and message with the new status.
    return {**condition, "reason": None if holds else reason or None, "message": None if holds else message or None}


def _since(conditions: list[Object], previous: Sequence[Object], now: str) -> list[Object]:
    """Set each condition's time of its last transition."""
    previous_by_type = {condition["type"]: condition for condition in previous}
    for condition in conditions:
        old = previous_by_type.get(condition["type"], {})
        same = old.get("status") == condition["status"]
        condition["lastTransitionTime"] = old["lastTransitionTime"] if same else now
    return conditions


def _same(actual: Object, desired: Object) -> bool:
    return all(actual.get(key) == value for key, value in desired.items())


def _names(names: list[str]) -> str:
    return f"[{' '.join(names)}]"


def _container(status: ContainerStatus) -> Object:
    return {
        "name": status.name,
        "image": status.image,
        "imageID": f"local://{status.image}" if status.id else "",
        "restartCount": status.restarts,
        "ready": status.ready,
        "started": status.started,
        "state": _state(status.state),
        "lastState": _state(status.last) if status.last else {},
        **({"containerID": status.id} if status.id else {}),
    }


def _state(state: State) -> Object:
    if isinstance(state, Running):
        return {"running": {"startedAt": state.at}}
    if isinstance(state, Waiting):
        return {"waiting": {"reason": state.reason, **({"message": state.message} if state.message else {})}}
    written: Object = {"exitCode": state.code, "reason": state.reason}
    optional = {
        "signal": state.signal, "message": state.message, "startedAt": state.started, "finishedAt": state.finished,
        "containerID": state.id,
    }  # fmt: skip
    return {"terminated": written | {key: value for key, value in optional.items() if value}}
