"""The upgrade of the operator with sidecars of an earlier version, and the rollback, under load on a real node."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chart.charts import CHART
from e2e import events
from e2e.consumers import NAME, Consumers
from e2e.release import TIMEOUT_SECONDS, WAIT, Installation
from ground.poll import eventually

pytestmark = [
    pytest.mark.node,
    pytest.mark.slow("on a node, the operator is upgraded from an earlier version, and back"),
]

EARLIER = "b0ea396"  # the last version with members without a key; apps' hooks start the drain
ROOT = CHART.parents[1]


@pytest.fixture
def earlier(installation: Installation, tmp_path: Path) -> Iterator[Path]:
    """Install the earlier version's chart with its images; install the present one again in the end."""
    source = tmp_path / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", EARLIER], cwd=ROOT, capture_output=True, check=False)
    assert archive.returncode == 0, f"The history lacks {EARLIER}; fetch it whole (git fetch --unshallow)"
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    for target in ("operator", "sidecar"):
        installation.node.build(target, tag="earlier", source=source)
    installation.helm_release("uninstall")
    image = {"repository": "rota.local/operator", "tag": "earlier", "pullPolicy": "Never"}
    sidecar = {"image": {"repository": "rota.local/sidecar", "tag": "earlier"}}
    chart = source / CHART.relative_to(ROOT)
    installation.helm_release(
        "install", str(chart), *WAIT, values={**installation.values, "image": image, "sidecar": sidecar}
    )
    yield chart
    installation.helm_release("uninstall")
    installation.ensure_installed()


def deployment(installation: Installation) -> tuple[int, list[str]]:
    """Return the generation of the group's Deployment, and the images of its sidecar."""
    body = json.loads(installation.group_kubectl("get", "deploy", NAME, "-o", "json"))
    pod = body["spec"]["template"]["spec"]
    return body["metadata"]["generation"], [container["image"] for container in pod["initContainers"]]


@pytest.mark.usefixtures("earlier")
def test_upgrade_from_members_without_a_key_and_back_loses_and_duplicates_no_message(
    installation: Installation, shared_consumers: Consumers
) -> None:
    consumers = shared_consumers
    consumers.delete_group()  # pods of other tests have the present sidecar
    consumers.reset()
    previous_deployment = deployment(installation)
    pods = consumers.pods()
    assert previous_deployment[1] == ["rota.local/sidecar:earlier"]
    with consumers.under_load("the operator upgraded, with members without a key"):
        installation.helm_release("upgrade", str(CHART), *WAIT, values=installation.values)
        installation.wait_for_operators()
        consumers.wait_settled()
    assert (deployment(installation), consumers.pods()) == (previous_deployment, pods), "the upgrade replaces no pod"
    eventually(lambda: "UnsignedMembers" in installation.conditions(NAME), TIMEOUT_SECONDS)
    events.scale_members(consumers, 4)
    events.delete_pod(consumers, consumers.pods()[0])
    events.scale_members(consumers, 3)
    assert deployment(installation)[1] == previous_deployment[1]
    events.roll_pods(consumers)
    assert deployment(installation)[1] == ["rota.local/sidecar:test"]
    eventually(lambda: "UnsignedMembers" not in installation.conditions(NAME), TIMEOUT_SECONDS)
    assert "MemberNotAuthenticated" not in installation.conditions(NAME)
    events.delete_pod(consumers, consumers.pods()[0])
    # As docs/operator.md says: the earlier version does not read assignments of schema 2.
    installation.helm_release("upgrade", str(CHART), *WAIT, values={**installation.values, "documentSchema": 1})
    eventually(lambda: consumers.document().schema == 1, TIMEOUT_SECONDS)
    with consumers.under_load("the operator rolled back, with members with a key", loses_rights=True):
        installation.helm_release("rollback", "1")
        installation.operator_kubectl("rollout", "status", "deploy/rota", f"--timeout={TIMEOUT_SECONDS}s")
        eventually(lambda: installation.leader() in installation.pods(), TIMEOUT_SECONDS)
        consumers.wait_settled()
    events.scale_members(consumers, 4)
    events.delete_pod(consumers, consumers.pods()[0])
    assert deployment(installation)[1] == previous_deployment[1], "the earlier version injects its own sidecar"
