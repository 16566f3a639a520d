"""What befalls the pods of a fleet under load, by hand or by accident, on a real node."""

import pytest

from e2e.consumers import IN_FLIGHT, WORK, Consumers
from e2e.release import SECONDS
from ground.poll import eventually
from rota.kube.objects import SIDECAR

pytestmark = pytest.mark.node

# Of a container that is full the kernel ends the largest process: that is the sidecar, and none of those that fill it.
FILL = "for it in `seq 40`; do python -c 'import time; it = b\"x\" * 6_000_000; time.sleep(60)' & done; wait"


def restarts(consumers: Consumers, pod: str, container: str) -> tuple[int, str, bool]:
    """Return how often a container was started again, why it ended the last time, and whether it is ready."""
    status = consumers.status(pod)
    every = [*status["initContainerStatuses"], *status["containerStatuses"]]
    (found,) = (it for it in every if it["name"] == container)
    return found["restartCount"], found["lastState"].get("terminated", {}).get("reason", ""), found["ready"]


def test_ten_pods_come_are_replaced_and_go_and_nothing_is_lost_or_comes_twice(consumers: Consumers) -> None:
    with consumers.under_load("scaled from 3 to 10 by kubectl"):
        consumers.scale(10)
        consumers.works(10)
    before = {*consumers.pods()}
    with consumers.under_load("rolling update of 10 pods"):
        consumers.roll()
        eventually(lambda: before.isdisjoint(consumers.pods()), SECONDS)
        consumers.works(10)
    with consumers.under_load("scaled from 10 to 3 by kubectl"):
        consumers.scale(3)
        consumers.works(3)


def test_a_pod_is_deleted(consumers: Consumers) -> None:
    pod, *_ = consumers.pods()
    with consumers.under_load("a pod deleted"):
        consumers.installed.shop("delete", "pod", pod)
        consumers.works(3)
    assert pod not in consumers.pods()


def test_a_pod_is_deleted_by_force(consumers: Consumers) -> None:
    pod, *_ = consumers.pods()
    with consumers.under_load("a pod deleted by force", twice=IN_FLIGHT), consumers.lingering(pod):
        consumers.installed.shop("delete", "pod", pod, "--grace-period=0", "--force")
        eventually(lambda: pod not in consumers.pods(), SECONDS)
        consumers.works(3)


def test_a_sidecar_takes_more_memory_than_it_has(consumers: Consumers) -> None:
    pod, *_ = consumers.pods()
    with consumers.under_load("a sidecar out of memory", twice=IN_FLIGHT):
        consumers.installed.shop("exec", pod, "-c", SIDECAR, "--", "sh", "-c", FILL, check=False)
        consumers.note("sidecar", pod)
        eventually(lambda: restarts(consumers, pod, SIDECAR) == (1, "OOMKilled", True), SECONDS)
        consumers.works(3)


def test_an_app_crashes_again_and_again(consumers: Consumers) -> None:
    pod, *_ = consumers.pods()
    with consumers.under_load("an app that crashes again and again", twice=2 * IN_FLIGHT):
        consumers.rules({"act": "die"}, pod=pod)
        eventually(lambda: restarts(consumers, pod, "app")[0] >= 2, SECONDS)
        consumers.rules(WORK, pod=pod)
        consumers.works(3)
