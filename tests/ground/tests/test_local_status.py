"""A pod's status from its containers, without a pod."""

from dataclasses import replace

import pytest

from ground.api import Object
from ground.local.status import (
    ContainerStatus,
    PodProgress,
    Running,
    Terminated,
    Waiting,
    build_pod_status,
    covers,
    restore_status,
)

NOW, LATER = "2026-11-21T08:00:00Z", "2026-11-21T08:00:09Z"
PROGRESS = PodProgress("127.16.1.1", "127.16.0.1", prepared=True)
FRESH = ContainerStatus("app", "image", Waiting("ContainerCreating"))
UP = replace(FRESH, state=Running(NOW), id="local://1", started=True, ready=True)
DONE = replace(FRESH, state=Terminated(0, "Completed"), id="local://1")
BROKEN = replace(FRESH, state=Terminated(1, "Error"), id="local://1")
CRASHED = replace(FRESH, state=Waiting("CrashLoopBackOff"), last=Terminated(1, "Error"), restarts=4, id="local://1")


def pod(inits: tuple[str, ...] = (), sidecars: tuple[str, ...] = (), **spec: object) -> Object:
    entries = [{"name": name} for name in inits] + [{"name": name, "restartPolicy": "Always"} for name in sidecars]
    return {"metadata": {"generation": 3}, "spec": {"containers": [{"name": "app"}], "initContainers": entries, **spec}}


def status(pod: Object, app: ContainerStatus, progress: PodProgress = PROGRESS, **others: ContainerStatus) -> Object:
    return build_pod_status(pod, {"app": app, **others}, progress, [], NOW)


def condition(pod_status: Object, kind: str) -> tuple[str, str | None]:
    condition = next(condition for condition in pod_status["conditions"] if condition["type"] == kind)
    return condition["status"], condition["reason"]


@pytest.mark.parametrize(
    ("container", "over", "phase"),
    [
        pytest.param(FRESH, False, "Pending", id="it never ran"),
        pytest.param(UP, False, "Running", id="it runs"),
        pytest.param(DONE, False, "Running", id="it may be restarted"),
        pytest.param(CRASHED, False, "Running", id="it will be restarted"),
        pytest.param(DONE, True, "Succeeded", id="it is done"),
        pytest.param(BROKEN, True, "Failed", id="it failed"),
        pytest.param(FRESH, True, "Failed", id="it was ended before it ran"),
    ],
)
def test_local_node_status_phase_follows_the_main_container(container: ContainerStatus, over: bool, phase: str) -> None:  # noqa: FBT001
    assert status(pod(), container, replace(PROGRESS, over=over))["phase"] == phase


def test_local_node_status_of_a_running_pod_is_ready_with_its_addresses() -> None:
    running = status(pod(), UP)
    assert condition(running, "Ready") == ("True", None)
    assert (running["podIP"], running["hostIP"]) == ("127.16.1.1", "127.16.0.1")
    assert running["observedGeneration"] == 3


def test_local_node_status_is_unready_while_a_sidecar_is_unready() -> None:
    unready = status(pod(sidecars=("helper",)), UP, helper=replace(UP, name="helper", ready=False))
    assert condition(unready, "Ready") == ("False", "ContainersNotReady")
    assert condition(unready, "Initialized") == ("True", None)


def test_local_node_status_is_initialized_once_init_containers_end_and_sidecars_start() -> None:
    declared = pod(inits=("first",), sidecars=("helper",))
    starting = status(declared, FRESH, first=DONE, helper=replace(UP, started=False))
    assert condition(starting, "Initialized") == ("False", "ContainersNotInitialized")
    assert condition(status(declared, FRESH, first=DONE, helper=UP), "Initialized") == ("True", None)


def test_local_node_status_stays_initialized_when_a_sidecar_restarts() -> None:
    restarting = status(pod(sidecars=("helper",)), UP, helper=CRASHED)
    assert condition(restarting, "Initialized") == ("True", None)
    assert restarting["phase"] == "Running"


def test_local_node_status_is_unready_until_its_readiness_gates_are_true() -> None:
    gated = pod(readinessGates=[{"conditionType": "example.com/open"}])
    assert condition(status(gated, UP), "Ready") == ("False", "ReadinessGatesNotReady")
    gated["status"] = {"conditions": [{"type": "example.com/open", "status": "True"}]}
    assert condition(status(gated, UP), "Ready") == ("True", None)


def test_local_node_status_of_a_finished_pod_is_unready_with_a_reason() -> None:
    assert condition(status(pod(), DONE, replace(PROGRESS, over=True)), "Ready") == ("False", "PodCompleted")
    assert condition(status(pod(), BROKEN, replace(PROGRESS, over=True)), "Ready") == ("False", "PodFailed")


def test_local_node_status_condition_keeps_its_transition_time_until_it_changes() -> None:
    first = status(pod(), UP)["conditions"]
    same = build_pod_status(pod(), {"app": UP}, PROGRESS, first, LATER)["conditions"]
    assert {condition["lastTransitionTime"] for condition in same} == {NOW}
    flipped = build_pod_status(pod(), {"app": replace(UP, ready=False)}, PROGRESS, first, LATER)["conditions"]
    changed = {condition["type"] for condition in flipped if condition["lastTransitionTime"] == LATER}
    assert changed == {"Ready", "ContainersReady"}


def test_local_node_status_comparison_ignores_fields_of_other_writers() -> None:
    desired = status(pod(), UP)
    scheduled = {"type": "PodScheduled", "status": "True"}
    actual = {**desired, "qosClass": "Burstable", "conditions": [scheduled, *desired["conditions"]]}
    assert covers(actual, desired)
    assert not covers({**actual, "phase": "Pending"}, desired)
    assert not covers({**actual, "conditions": [scheduled]}, desired)


def test_local_node_status_of_a_container_of_an_earlier_agent_is_terminated() -> None:
    entry = status(pod(), replace(UP, restarts=2))["containerStatuses"][0]
    container = restore_status("app", entry)
    assert isinstance(container.state, Terminated)
    assert (container.state.code, container.state.started, container.restarts) == (137, NOW, 2)


def test_local_node_status_of_ended_or_crashed_containers_is_restored_after_a_restart() -> None:
    done, crashed = (status(pod(), container)["containerStatuses"][0] for container in (DONE, CRASHED))
    assert restore_status("app", done).state == Terminated(0, "Completed")
    assert restore_status("app", crashed).last == Terminated(1, "Error")
    assert restore_status("app", crashed).restarts == 4
