"""What befalls a fleet under load on a real node, by hand or by accident; in the end of each all is at work again."""

import json
import time

from chart.charts import CHART
from e2e.consumers import IN_FLIGHT, NAME, Consumers
from e2e.release import SECONDS, WAIT
from ground.poll import eventually
from rota.kube.client.pod_status import SIDECAR_CONTAINER

RECORD = f"configmap/{NAME}-rota"
CUT_OFF = 10.0  # seconds
UNHEARD = 15.0  # seconds: longer than handover.lostAfter
# Of a container that is full the kernel ends the largest process: that is the sidecar, and none of those that fill it.
FILL = "for it in `seq 40`; do python -c 'import time; it = b\"x\" * 6_000_000; time.sleep(60)' & done; wait"


def restarts(consumers: Consumers, pod: str, container: str) -> tuple[int, str, bool]:
    """Return how often a container was started again, why it ended the last time, and whether it is ready."""
    status = consumers.status(pod)
    every = [*status["initContainerStatuses"], *status["containerStatuses"]]
    (found,) = (it for it in every if it["name"] == container)
    return found["restartCount"], found["lastState"].get("terminated", {}).get("reason", ""), found["ready"]


# Its pods.


def scaled(consumers: Consumers, members: int) -> None:
    """Have other members."""
    with consumers.under_load(f"scaled from {consumers.members} to {members} by kubectl"):
        consumers.scale(members)
        consumers.works()


def rolled(consumers: Consumers) -> None:
    """Have all pods replaced."""
    before = {*consumers.pods()}
    with consumers.under_load(f"rolling update of {consumers.members} pods"):
        consumers.roll()
        eventually(lambda: before.isdisjoint(consumers.pods()), SECONDS)
        consumers.works()


def pod_deleted(consumers: Consumers, pod: str) -> None:
    """Have a pod end in order."""
    with consumers.under_load("a pod deleted"):
        consumers.installed.shop("delete", "pod", pod)
        consumers.works()
    assert pod not in consumers.pods()


def pod_deleted_by_force(consumers: Consumers, pod: str) -> None:
    """Have a pod gone before it has ended.

    Besides the messages at the app, what was done since each queue's last pull comes twice: some of what is sent
    while the pod is killed.
    """
    with consumers.under_load("a pod deleted by force", twice=IN_FLIGHT) as limits, consumers.lingering(pod):
        sent = consumers.sent_count()
        consumers.installed.shop("delete", "pod", pod, "--grace-period=0", "--force")
        eventually(lambda: pod not in consumers.pods(), SECONDS)
        limits.twice += consumers.sent_count() - sent
        consumers.works()


def sidecar_out_of_memory(consumers: Consumers, pod: str) -> None:
    """Have the kernel end a sidecar, for the first time.

    A sidecar short of memory pulls late, and a queue's offset is committed with its next pull: what is sent while
    memory fills up may come twice, too.
    """
    with consumers.under_load("a sidecar out of memory", twice=IN_FLIGHT) as limits:
        sent = consumers.sent_count()
        consumers.installed.shop("exec", pod, "-c", SIDECAR_CONTAINER, "--", "sh", "-c", FILL, check=False)
        limits.twice += consumers.sent_count() - sent
        consumers.note("sidecar", pod)
        eventually(lambda: restarts(consumers, pod, SIDECAR_CONTAINER) == (1, "OOMKilled", True), SECONDS)
        consumers.works()


def app_crashing(consumers: Consumers, pod: str) -> None:
    """Have an app die of whatever it gets, for a while."""
    with consumers.under_load("an app that crashes again and again", twice=2 * IN_FLIGHT):
        consumers.rules({"act": "die"}, pod=pod)
        try:
            eventually(lambda: restarts(consumers, pod, "app")[0] >= 2, SECONDS)
        finally:
            consumers.no_rules(pod)
        consumers.works()


# Its network.


def cut_off_from_broker(consumers: Consumers, pod: str) -> None:
    """Have a member that reaches no broker, though others do: they have its queues, until it does again."""
    with consumers.under_load("a member cut off from the broker", twice=3 * IN_FLIGHT):
        with consumers.without_broker(pod):
            eventually(lambda: _owed_by(consumers) == {pod}, SECONDS)
            eventually(lambda: not consumers.document().releasing, SECONDS)
            assert consumers.document().members[pod].queues == ()
            eventually(lambda: consumers.last_cause() == "BrokerUnreachable", SECONDS)
            consumers.goes_on()
            time.sleep(CUT_OFF)  # nobody gives it anything meanwhile
            assert consumers.document().members[pod].queues == ()
        consumers.works()


def cut_off_from_operators(consumers: Consumers) -> None:
    """Have a member that nobody hears while it shall give queues up: who is Ready is waited for."""
    shares = consumers.document().members
    pod = max(shares, key=lambda name: len(shares[name].queues))  # which gives some up to a newcomer
    with consumers.under_load("a member cut off from the operators"):
        with consumers.unheard(pod):
            consumers.scale(consumers.members + 1)
            eventually(lambda: _owed_by(consumers) == {pod}, SECONDS)
            time.sleep(UNHEARD)  # this is what happens
            assert _owed_by(consumers) == {pod}
        consumers.works()


def _owed_by(consumers: Consumers) -> set[str]:
    """Return who has not given up yet what it shall."""
    return {release.holder.name for release in consumers.document().releasing.values()}


# Its operators.


def leader_deleted(consumers: Consumers) -> None:
    """Have the other operator go on with what the leader began."""
    installed = consumers.installed
    leader = eventually(installed.leader, SECONDS)
    (other,) = installed.pods() - {leader}
    with consumers.under_load("the leader's pod deleted in the middle of a handover"):
        with consumers.moving():
            installed.home("delete", leader)
            eventually(lambda: installed.leader() == other, SECONDS)
        consumers.works()
    installed.whole()


def operators_deleted_by_force(consumers: Consumers) -> None:
    """Have an operator that is new go on with what another one began."""
    installed = consumers.installed
    before = installed.pods()
    with consumers.under_load("both operators deleted by force in the middle of a handover"):
        with consumers.moving():
            installed.home("delete", *before, "--grace-period=0", "--force")
            eventually(lambda: installed.leader() not in before, SECONDS)
        consumers.works()
    installed.whole()


def no_operator(consumers: Consumers, seconds: float) -> None:
    """Have the group alone for a while, which changes nothing."""
    installed, before = consumers.installed, consumers.document()
    with consumers.under_load(f"no operator for {seconds:.0f} s"):
        installed.home("scale", "deploy/rota", "--replicas=0")
        eventually(lambda: not installed.pods(), SECONDS)
        time.sleep(seconds)  # this is what happens
        installed.home("scale", "deploy/rota", "--replicas=2")
        installed.whole()
        consumers.works()
    assert consumers.document() == before


def chart_upgraded(consumers: Consumers) -> None:
    """Have all operators replaced by helm."""
    installed = consumers.installed
    before = installed.pods()
    changed = {**installed.values, "podAnnotations": {"upgraded": str(time.monotonic())}}
    with consumers.under_load("the chart upgraded in the middle of a handover"):
        with consumers.moving():
            installed.release("upgrade", str(CHART), *WAIT, values=changed)
            eventually(lambda: installed.leader() in installed.pods() - before, SECONDS)
        consumers.works()
    installed.whole()
    assert before.isdisjoint(installed.pods())


# Its record, and its broker.


def record_edited(consumers: Consumers) -> None:
    """Have the record say that a member is another one, or somebody who is not there."""
    record = json.loads(consumers.installed.shop("get", RECORD, "-o", "json"))["data"]["assignment.json"]
    one, other, *_ = [*consumers.pods(), "nobody"]
    swapped = record.replace(one, "?").replace(other, one).replace("?", other)
    before = consumers.document().generation
    with consumers.under_load("the record edited"):
        edit = {"data": {"assignment.json": swapped}}
        consumers.installed.shop("patch", RECORD, "--type=merge", "-p", json.dumps(edit))
        eventually(lambda: consumers.document().generation > before, SECONDS)
        consumers.works()


def record_deleted(consumers: Consumers) -> None:
    """Have no record."""
    before = consumers.document().generation
    with consumers.under_load("the record deleted"):
        consumers.installed.shop("delete", RECORD)
        eventually(lambda: consumers.document().generation > before, SECONDS)
        consumers.works()


def broker_killed(consumers: Consumers) -> None:
    """Have the broker crash and come back."""
    with consumers.under_load("the broker killed and started again", twice=consumers.members * IN_FLIGHT):
        consumers.kill_broker()
        consumers.broker.start_broker(0)
        consumers.goes_on()
        consumers.works()


def broker_killed_while_scaling(consumers: Consumers, members: int) -> None:
    """Have other members while the broker crashes and comes back."""
    before = consumers.members
    what = f"the broker killed and started again while scaled from {before} to {members}"
    with consumers.under_load(what, twice=max(before, members) * IN_FLIGHT):
        consumers.scale(members)
        consumers.kill_broker()
        consumers.broker.start_broker(0)
        consumers.goes_on()
        consumers.works()
