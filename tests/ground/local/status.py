"""What a pod's status says, worked out from its containers: values in, a dict out; no I/O, no clock.

It follows the kubelet: which phase, which conditions with which reasons, and how a container's state is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Waiting:
    """Not running, and why."""

    reason: str
    message: str = ""


@dataclass(frozen=True)
class Running:
    """A process of it runs since `at`."""

    at: str


@dataclass(frozen=True)
class Ended:
    """Its process is over."""

    code: int
    reason: str
    signal: int = 0
    message: str = ""
    started: str = ""
    finished: str = ""
    id: str = ""


State = Waiting | Running | Ended


@dataclass(frozen=True)
class Seen:
    """One container as its pod's status shows it."""

    name: str
    image: str
    state: State
    id: str = ""
    last: Ended | None = None
    restarts: int = 0
    started: bool = False  # its startup probe passed, or it runs and has none
    ready: bool = False


@dataclass(frozen=True)
class Stage:
    """How far a pod is, besides its containers."""

    address: str
    host: str
    prepared: bool = False  # its volumes are there
    over: bool = False  # nothing of it will run again


def stamp(now: datetime | None = None) -> str:
    """Return a time as the API writes it."""
    return (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def sidecar(spec: Object) -> bool:
    """Whether an init container is a native sidecar."""
    return bool(spec.get("restartPolicy") == "Always")


def pod_status(pod: Object, seen: Mapping[str, Seen], stage: Stage, before: Sequence[Object], now: str) -> Object:
    """Return the part of a pod's status that the agent owns; `before` are the conditions it reported last."""
    spec = pod["spec"]
    inits, mains = spec.get("initContainers") or [], spec["containers"]
    status: Object = {
        "observedGeneration": pod["metadata"].get("generation", 0),
        "phase": phase(spec, seen, over=stage.over),
        "hostIP": stage.host,
        "hostIPs": [{"ip": stage.host}],
        "startTime": (pod.get("status") or {}).get("startTime") or now,
        "containerStatuses": [_container(seen[container["name"]]) for container in mains],
    }
    if stage.prepared:  # the kubelet gives an address once the volumes are there
        status |= {"podIP": stage.address, "podIPs": [{"ip": stage.address}]}
    if inits:
        status["initContainerStatuses"] = [_container(seen[container["name"]]) for container in inits]
    status["conditions"] = _since(list(_conditions(pod, seen, stage, status["phase"])), before, now)
    return status


def phase(spec: Object, seen: Mapping[str, Seen], *, over: bool) -> str:
    """Return the pod's phase; the final ones only once nothing of it runs any more."""
    states = [seen[container["name"]].state for container in spec["containers"]]
    if over:
        return "Succeeded" if all(_succeeded(state) for state in states) else "Failed"
    if not initialized(spec, seen) or any(fresh(seen[container["name"]]) for container in spec["containers"]):
        return "Pending"
    return "Running"


def initialized(spec: Object, seen: Mapping[str, Seen]) -> bool:
    """Whether all init containers did their work, now or earlier."""
    if any(not fresh(seen[container["name"]]) for container in spec["containers"]):
        return True
    return not _incomplete(spec, seen)


def fresh(container: Seen) -> bool:
    """Whether it never ran."""
    return isinstance(container.state, Waiting) and container.last is None


def covers(actual: Object, wanted: Object) -> bool:
    """Whether a pod's status already says everything that is wanted; others' conditions do not matter."""
    conditions = {condition["type"]: condition for condition in actual.get("conditions") or []}
    plain = all(actual.get(key) == value for key, value in wanted.items() if key != "conditions")
    return plain and all(_same(conditions.get(wish["type"], {}), wish) for wish in wanted["conditions"])


def restored(name: str, entry: Object) -> Seen:
    """Return a container from a status written by an earlier agent: what ran then has ended with it."""
    state, last = entry.get("state") or {}, (entry.get("lastState") or {}).get("terminated")
    seen = Seen(
        name, entry.get("image", ""), Waiting("ContainerCreating"), id=entry.get("containerID", ""),
        last=_ended(last) if last else None, restarts=entry.get("restartCount", 0),
    )  # fmt: skip
    if "terminated" in state:
        return replace(seen, state=_ended(state["terminated"]))
    if "running" in state:
        message = "The agent that ran this container ended, and the container with it"
        lost = Ended(
            137, "ContainerStatusUnknown", message=message, id=seen.id,
            started=state["running"].get("startedAt", ""), finished=stamp(),
        )  # fmt: skip
        return replace(seen, state=lost)
    return seen


def _ended(entry: Object) -> Ended:
    return Ended(
        entry["exitCode"], entry.get("reason", ""), signal=entry.get("signal", 0), message=entry.get("message", ""),
        started=entry.get("startedAt") or "", finished=entry.get("finishedAt") or "", id=entry.get("containerID", ""),
    )  # fmt: skip


def _succeeded(state: State) -> bool:
    return isinstance(state, Ended) and state.code == 0


def _incomplete(spec: Object, seen: Mapping[str, Seen]) -> list[str]:
    def done(container: Object) -> bool:
        known = seen[container["name"]]
        return known.started if sidecar(container) else _succeeded(known.state)

    return [container["name"] for container in spec.get("initContainers") or [] if not done(container)]


def _conditions(pod: Object, seen: Mapping[str, Seen], stage: Stage, phase: str) -> Iterable[Object]:
    spec = pod["spec"]
    incomplete = [] if initialized(spec, seen) else _incomplete(spec, seen)
    watched = [*spec["containers"], *(c for c in spec.get("initContainers") or [] if sidecar(c))]
    unready = [container["name"] for container in watched if not seen[container["name"]].ready]
    yield _condition("PodReadyToStartContainers", holds=stage.prepared and not stage.over)
    yield _condition(
        "Initialized",
        not incomplete,
        "ContainersNotInitialized",
        f"containers with incomplete status: {_names(incomplete)}",
    )
    trouble = ("ContainersNotReady", f"containers with unready status: {_names(unready)}") if unready else ("", "")
    if stage.over:
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
    # Both keys always: a merge would keep the old words beside the new status.
    return {**condition, "reason": None if holds else reason or None, "message": None if holds else message or None}


def _since(conditions: list[Object], before: Sequence[Object], now: str) -> list[Object]:
    """Give each condition the time of its last flip."""
    known = {condition["type"]: condition for condition in before}
    for condition in conditions:
        old = known.get(condition["type"], {})
        same = old.get("status") == condition["status"]
        condition["lastTransitionTime"] = old["lastTransitionTime"] if same else now
    return conditions


def _same(actual: Object, wanted: Object) -> bool:
    return all(actual.get(key) == value for key, value in wanted.items())


def _names(names: list[str]) -> str:
    return f"[{' '.join(names)}]"


def _container(seen: Seen) -> Object:
    return {
        "name": seen.name,
        "image": seen.image,
        "imageID": f"local://{seen.image}" if seen.id else "",
        "restartCount": seen.restarts,
        "ready": seen.ready,
        "started": seen.started,
        "state": _state(seen.state),
        "lastState": _state(seen.last) if seen.last else {},
        **({"containerID": seen.id} if seen.id else {}),
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
