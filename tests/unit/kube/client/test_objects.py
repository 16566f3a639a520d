"""Decoding of Kubernetes objects: fields that are read and fields that are dropped."""

from typing import Any

import msgspec
import pytest

from rota.kube.client.objects import Pod
from rota.kube.client.pod_status import MAX_OBSTACLE_CHARACTERS


def a_pod(**status: Any) -> Pod:
    return msgspec.convert({"metadata": {"name": "orders-0"}, "status": status}, Pod)


def a_waiting_container(reason: str, name: str = "app") -> dict[str, Any]:
    return {"name": name, "state": {"waiting": {"reason": reason, "message": "x" * 10_000}}}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}


@pytest.mark.parametrize(
    ("status", "obstacle"),
    [
        ({}, ""),
        ({"containerStatuses": [a_waiting_container("ContainerCreating")]}, ""),
        ({"initContainerStatuses": [a_waiting_container("PodInitializing")]}, ""),
        ({"containerStatuses": [a_waiting_container("ImagePullBackOff")]}, "ImagePullBackOff of container app"),
        (
            {"initContainerStatuses": [a_waiting_container("CrashLoopBackOff", "rota-sidecar")]},
            "CrashLoopBackOff of container rota-sidecar",
        ),
        ({"conditions": [UNSCHEDULABLE]}, "Unschedulable, 0/3 nodes fit"),
        ({"conditions": [UNSCHEDULABLE | {"status": "True"}]}, ""),
    ],
)
def test_readiness_obstacle_of_a_pod_uses_the_words_of_kubernetes(status: dict[str, Any], obstacle: str) -> None:
    pod = a_pod(**status)
    assert pod.start_obstacle == obstacle
    assert msgspec.structs.replace(pod).start_obstacle == obstacle, "it is kept without the fields that it is made of"
    assert len(msgspec.json.encode(pod)) < 2000, "containers and messages are dropped"


def test_readiness_obstacle_of_a_pod_is_short_even_with_a_long_message() -> None:
    pod = a_pod(conditions=[UNSCHEDULABLE | {"message": "x" * 10_000}])
    assert len(pod.start_obstacle) <= MAX_OBSTACLE_CHARACTERS + 1
