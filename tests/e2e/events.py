"""Events of a fleet under load on a real node, by a user or by a failure; each ends with a settled group."""

import json
import time
from typing import NamedTuple

from chart.charts import CHART
from e2e.consumers import IN_FLIGHT, NAME, Consumers
from e2e.release import TIMEOUT_SECONDS, WAIT
from ground.poll import eventually
from rota.kube.client.pod_status import SIDECAR_CONTAINER

CONFIG_MAP = f"configmap/{NAME}-rota"
CUT_OFF_SECONDS = 10.0
UNREACHABLE_SECONDS = 15.0  # longer than handover.lostAfter
# At the memory limit the kernel kills the largest process of the container: the sidecar, not one of these.
FILL = "for it in `seq 40`; do python -c 'import time; it = b\"x\" * 6_000_000; time.sleep(60)' & done; wait"


class ContainerRestarts(NamedTuple):
    """How often a container was restarted, why it ended the last time, and whether it is ready."""

    restart_count: int
    last_reason: str
    is_ready: bool


def restarts(consumers: Consumers, pod: str, container: str) -> ContainerRestarts:
    """Return the restarts of a pod's container."""
    pod_status = consumers.status(pod)
    statuses = [*pod_status["initContainerStatuses"], *pod_status["containerStatuses"]]
    (status,) = (status for status in statuses if status["name"] == container)
    reason = status["lastState"].get("terminated", {}).get("reason", "")
    return ContainerRestarts(status["restartCount"], reason, status["ready"])


# Pods.


def scale_members(consumers: Consumers, members: int) -> None:
    """Change the number of members."""
    with consumers.under_load(f"scaled from {consumers.members} to {members} by kubectl"):
        consumers.scale(members)
        consumers.wait_settled()


def roll_pods(consumers: Consumers) -> None:
    """Replace all pods by a rolling update."""
    previous_pods = {*consumers.pods()}
    with consumers.under_load(f"rolling update of {consumers.members} pods"):
        consumers.roll()
        eventually(lambda: previous_pods.isdisjoint(consumers.pods()), TIMEOUT_SECONDS)
        consumers.wait_settled()


def delete_pod(consumers: Consumers, pod: str) -> None:
    """Delete a pod, which drains."""
    with consumers.under_load("a pod deleted"):
        consumers.installation.group_kubectl("delete", "pod", pod)
        consumers.wait_settled()
    assert pod not in consumers.pods()


def force_delete_pod(consumers: Consumers, pod: str) -> None:
    """Force-delete a pod: it is deleted before it has ended.

    Messages at the app may be duplicated, and messages handled since each queue's last pull, which include messages
    sent while the pod is killed.
    """
    with (
        consumers.under_load("a pod deleted by force", duplicates=IN_FLIGHT) as limits,
        consumers.expect_lingering(pod),
    ):
        sent = consumers.sent_count()
        consumers.installation.group_kubectl("delete", "pod", pod, "--grace-period=0", "--force")
        eventually(lambda: pod not in consumers.pods(), TIMEOUT_SECONDS)
        limits.duplicates += consumers.sent_count() - sent
        consumers.wait_settled()


def exhaust_sidecar_memory(consumers: Consumers, pod: str) -> None:
    """Let the kernel kill a sidecar for lack of memory, for the first time.

    A sidecar short of memory pulls late, and a queue's offset is committed with its next pull: messages that are sent
    while memory fills up may be duplicated, too.
    """
    with consumers.under_load("a sidecar out of memory", duplicates=IN_FLIGHT) as limits:
        sent = consumers.sent_count()
        consumers.installation.group_kubectl("exec", pod, "-c", SIDECAR_CONTAINER, "--", "sh", "-c", FILL, check=False)
        limits.duplicates += consumers.sent_count() - sent
        consumers.record_fact("sidecar", pod)
        killed_once = ContainerRestarts(1, "OOMKilled", is_ready=True)
        eventually(lambda: restarts(consumers, pod, SIDECAR_CONTAINER) == killed_once, TIMEOUT_SECONDS)
        consumers.wait_settled()


def crash_app(consumers: Consumers, pod: str) -> None:
    """Let an app crash on each message, for a while."""
    with consumers.under_load("an app that crashes again and again", duplicates=2 * IN_FLIGHT):
        consumers.set_rules({"act": "die"}, pod=pod)
        try:
            eventually(lambda: restarts(consumers, pod, "app").restart_count >= 2, TIMEOUT_SECONDS)
        finally:
            consumers.clear_rules(pod)
        consumers.wait_settled()


# Network.


def cut_off_from_broker(consumers: Consumers, pod: str) -> None:
    """Cut off a member from the broker: the other members own its queues until it reconnects."""
    with consumers.under_load("a member cut off from the broker", duplicates=3 * IN_FLIGHT):
        with consumers.without_broker(pod):
            eventually(lambda: _releasing_members(consumers) == {pod}, TIMEOUT_SECONDS)
            eventually(lambda: not consumers.document().releasing, TIMEOUT_SECONDS)
            assert consumers.document().members[pod].queues == ()
            eventually(lambda: consumers.last_reason() == "BrokerUnreachable", TIMEOUT_SECONDS)
            consumers.wait_for_progress()
            time.sleep(CUT_OFF_SECONDS)  # the member must get no queues meanwhile
            assert consumers.document().members[pod].queues == ()
        consumers.wait_settled()


def cut_off_from_operators(consumers: Consumers) -> None:
    """Cut off a releasing member from the operators: they wait for it as long as it is Ready."""
    shares = consumers.document().members
    pod = max(shares, key=lambda name: len(shares[name].queues))  # it must release queues for a new member
    with consumers.under_load("a member cut off from the operators"):
        with consumers.without_operators(pod):
            consumers.scale(consumers.members + 1)
            eventually(lambda: _releasing_members(consumers) == {pod}, TIMEOUT_SECONDS)
            time.sleep(UNREACHABLE_SECONDS)  # the duration of the event
            assert _releasing_members(consumers) == {pod}
        consumers.wait_settled()


def _releasing_members(consumers: Consumers) -> set[str]:
    """Return the members that have not released all revoked queues."""
    return {release.holder.name for release in consumers.document().releasing.values()}


# Operators.


def delete_leader(consumers: Consumers) -> None:
    """Delete the leader during a handover; the other operator completes it."""
    installation = consumers.installation
    leader = eventually(installation.leader, TIMEOUT_SECONDS)
    (successor,) = installation.pods() - {leader}
    with consumers.under_load("the leader's pod deleted in the middle of a handover"):
        with consumers.during_rebalance():
            installation.operator_kubectl("delete", leader)
            eventually(lambda: installation.leader() == successor, TIMEOUT_SECONDS)
        consumers.wait_settled()
    installation.wait_for_operators()


def force_delete_operators(consumers: Consumers) -> None:
    """Force-delete both operators during a handover; a new operator completes it."""
    installation = consumers.installation
    previous_pods = installation.pods()
    with consumers.under_load("both operators deleted by force in the middle of a handover"):
        with consumers.during_rebalance():
            installation.operator_kubectl("delete", *previous_pods, "--grace-period=0", "--force")
            eventually(lambda: installation.leader() not in previous_pods, TIMEOUT_SECONDS)
        consumers.wait_settled()
    installation.wait_for_operators()


def stop_operators(consumers: Consumers, seconds: float) -> None:
    """Stop all operators for a while; the assignment stays as it is."""
    installation = consumers.installation
    document = consumers.document()
    with consumers.under_load(f"no operator for {seconds:.0f} s"):
        installation.operator_kubectl("scale", "deploy/rota", "--replicas=0")
        eventually(lambda: not installation.pods(), TIMEOUT_SECONDS)
        time.sleep(seconds)  # the duration of the event
        installation.operator_kubectl("scale", "deploy/rota", "--replicas=2")
        installation.wait_for_operators()
        consumers.wait_settled()
    assert consumers.document() == document


def upgrade_chart(consumers: Consumers) -> None:
    """Upgrade the chart during a handover, which replaces all operators."""
    installation = consumers.installation
    previous_pods = installation.pods()
    values = {**installation.values, "podAnnotations": {"upgraded": str(time.monotonic())}}
    with consumers.under_load("the chart upgraded in the middle of a handover"):
        with consumers.during_rebalance():
            installation.helm_release("upgrade", str(CHART), *WAIT, values=values)
            eventually(lambda: installation.leader() in installation.pods() - previous_pods, TIMEOUT_SECONDS)
        consumers.wait_settled()
    installation.wait_for_operators()
    assert previous_pods.isdisjoint(installation.pods())


# Stored assignment and broker.


def edit_config_map(consumers: Consumers) -> None:
    """Edit the stored assignment: swap two members, or name a member that does not exist."""
    text = json.loads(consumers.installation.group_kubectl("get", CONFIG_MAP, "-o", "json"))["data"]["assignment.json"]
    first, second, *_ = [*consumers.pods(), "nobody"]
    edited = text.replace(first, "?").replace(second, first).replace("?", second)
    generation = consumers.document().generation
    with consumers.under_load("the stored assignment edited"):
        edit = {"data": {"assignment.json": edited}}
        consumers.installation.group_kubectl("patch", CONFIG_MAP, "--type=merge", "-p", json.dumps(edit))
        eventually(lambda: consumers.document().generation > generation, TIMEOUT_SECONDS)
        consumers.wait_settled()


def delete_config_map(consumers: Consumers) -> None:
    """Delete the stored assignment."""
    generation = consumers.document().generation
    with consumers.under_load("the stored assignment deleted"):
        consumers.installation.group_kubectl("delete", CONFIG_MAP)
        eventually(lambda: consumers.document().generation > generation, TIMEOUT_SECONDS)
        consumers.wait_settled()


def kill_broker_process(consumers: Consumers) -> None:
    """Kill the broker and start it again."""
    with consumers.under_load("the broker killed and started again", duplicates=consumers.members * IN_FLIGHT):
        consumers.kill_broker()
        consumers.broker.start_broker(0)
        consumers.wait_for_progress()
        consumers.wait_settled()


def kill_broker_while_scaling(consumers: Consumers, members: int) -> None:
    """Change the number of members while the broker is killed and started again."""
    members_before = consumers.members
    event = f"the broker killed and started again while scaled from {members_before} to {members}"
    with consumers.under_load(event, duplicates=max(members_before, members) * IN_FLIGHT):
        consumers.scale(members)
        consumers.kill_broker()
        consumers.broker.start_broker(0)
        consumers.wait_for_progress()
        consumers.wait_settled()
