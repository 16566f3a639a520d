"""A pod's status from its containers, without a pod."""

from dataclasses import replace

import pytest

from ground.api import Object
from ground.local.status import Ended, Running, Seen, Stage, Waiting, covers, pod_status, restored

NOW, LATER = "2026-11-21T08:00:00Z", "2026-11-21T08:00:09Z"
STAGE = Stage("127.16.1.1", "127.16.0.1", prepared=True)
FRESH = Seen("app", "image", Waiting("ContainerCreating"))
UP = replace(FRESH, state=Running(NOW), id="local://1", started=True, ready=True)
DONE = replace(FRESH, state=Ended(0, "Completed"), id="local://1")
BROKEN = replace(FRESH, state=Ended(1, "Error"), id="local://1")
CRASHED = replace(FRESH, state=Waiting("CrashLoopBackOff"), last=Ended(1, "Error"), restarts=4, id="local://1")


def pod(inits: tuple[str, ...] = (), sidecars: tuple[str, ...] = (), **spec: object) -> Object:
    both = [{"name": name} for name in inits] + [{"name": name, "restartPolicy": "Always"} for name in sidecars]
    return {"metadata": {"generation": 3}, "spec": {"containers": [{"name": "app"}], "initContainers": both, **spec}}


def status(made: Object, app: Seen, stage: Stage = STAGE, **others: Seen) -> Object:
    return pod_status(made, {"app": app, **others}, stage, [], NOW)


def condition(found: Object, kind: str) -> tuple[str, str | None]:
    one = next(condition for condition in found["conditions"] if condition["type"] == kind)
    return one["status"], one["reason"]


@pytest.mark.parametrize(
    ("seen", "over", "phase"),
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
def test_local_node_status_phase_follows_the_main_container(seen: Seen, over: bool, phase: str) -> None:  # noqa: FBT001
    assert status(pod(), seen, replace(STAGE, over=over))["phase"] == phase


def test_local_node_status_of_a_running_pod_is_ready_with_its_addresses() -> None:
    found = status(pod(), UP)
    assert condition(found, "Ready") == ("True", None)
    assert (found["podIP"], found["hostIP"]) == ("127.16.1.1", "127.16.0.1")
    assert found["observedGeneration"] == 3


def test_local_node_status_is_unready_while_a_sidecar_is_unready() -> None:
    found = status(pod(sidecars=("helper",)), UP, helper=replace(UP, name="helper", ready=False))
    assert condition(found, "Ready") == ("False", "ContainersNotReady")
    assert condition(found, "Initialized") == ("True", None)


def test_local_node_status_is_initialized_once_init_containers_end_and_sidecars_start() -> None:
    made = pod(inits=("first",), sidecars=("helper",))
    starting = status(made, FRESH, first=DONE, helper=replace(UP, started=False))
    assert condition(starting, "Initialized") == ("False", "ContainersNotInitialized")
    assert condition(status(made, FRESH, first=DONE, helper=UP), "Initialized") == ("True", None)


def test_local_node_status_stays_initialized_when_a_sidecar_restarts() -> None:
    found = status(pod(sidecars=("helper",)), UP, helper=CRASHED)
    assert condition(found, "Initialized") == ("True", None)
    assert found["phase"] == "Running"


def test_local_node_status_is_unready_until_its_readiness_gates_are_true() -> None:
    made = pod(readinessGates=[{"conditionType": "example.com/open"}])
    assert condition(status(made, UP), "Ready") == ("False", "ReadinessGatesNotReady")
    made["status"] = {"conditions": [{"type": "example.com/open", "status": "True"}]}
    assert condition(status(made, UP), "Ready") == ("True", None)


def test_local_node_status_of_a_finished_pod_is_unready_with_a_reason() -> None:
    assert condition(status(pod(), DONE, replace(STAGE, over=True)), "Ready") == ("False", "PodCompleted")
    assert condition(status(pod(), BROKEN, replace(STAGE, over=True)), "Ready") == ("False", "PodFailed")


def test_local_node_status_condition_keeps_its_transition_time_until_it_changes() -> None:
    first = status(pod(), UP)["conditions"]
    same = pod_status(pod(), {"app": UP}, STAGE, first, LATER)["conditions"]
    assert {one["lastTransitionTime"] for one in same} == {NOW}
    flipped = pod_status(pod(), {"app": replace(UP, ready=False)}, STAGE, first, LATER)["conditions"]
    assert {one["type"] for one in flipped if one["lastTransitionTime"] == LATER} == {"Ready", "ContainersReady"}


def test_local_node_status_comparison_ignores_fields_of_other_writers() -> None:
    wanted = status(pod(), UP)
    scheduled = {"type": "PodScheduled", "status": "True"}
    actual = {**wanted, "qosClass": "Burstable", "conditions": [scheduled, *wanted["conditions"]]}
    assert covers(actual, wanted)
    assert not covers({**actual, "phase": "Pending"}, wanted)
    assert not covers({**actual, "conditions": [scheduled]}, wanted)


def test_local_node_status_of_a_container_of_an_earlier_agent_is_terminated() -> None:
    entry = status(pod(), replace(UP, restarts=2))["containerStatuses"][0]
    seen = restored("app", entry)
    assert isinstance(seen.state, Ended)
    assert (seen.state.code, seen.state.started, seen.restarts) == (137, NOW, 2)


def test_local_node_status_of_ended_or_crashed_containers_is_restored_after_a_restart() -> None:
    done, crashed = (status(pod(), seen)["containerStatuses"][0] for seen in (DONE, CRASHED))
    assert restored("app", done).state == Ended(0, "Completed")
    assert restored("app", crashed).last == Ended(1, "Error")
    assert restored("app", crashed).restarts == 4
