"""A new operator beside sidecars of an earlier version, and back, under load on a real node."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chart.charts import CHART
from e2e import events
from e2e.consumers import NAME, Consumers
from e2e.release import SECONDS, WAIT, Installed
from ground.poll import eventually

pytestmark = [
    pytest.mark.node,
    pytest.mark.slow("on a node, the operator is upgraded from an earlier version, and back"),
]

EARLIER = "b0ea396"  # the last version whose members have no key, and whose apps' hooks begin the drain
ROOT = CHART.parents[1]


@pytest.fixture
def earlier(installed: Installed, tmp_path: Path) -> Iterator[Path]:
    """Install the earlier version's chart with its images; bring back the present one in the end."""
    source = tmp_path / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", EARLIER], cwd=ROOT, capture_output=True, check=False)
    assert archive.returncode == 0, f"The history lacks {EARLIER}; fetch it whole (git fetch --unshallow)"
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    for target in ("operator", "sidecar"):
        installed.node.build(target, tag="earlier", source=source)
    installed.release("uninstall")
    image = {"repository": "rota.local/operator", "tag": "earlier", "pullPolicy": "Never"}
    sidecar = {"image": {"repository": "rota.local/sidecar", "tag": "earlier"}}
    chart = source / CHART.relative_to(ROOT)
    installed.release("install", str(chart), *WAIT, values={**installed.values, "image": image, "sidecar": sidecar})
    yield chart
    installed.release("uninstall")
    installed.ensure()


def deployment(installed: Installed) -> tuple[int, list[str]]:
    """Return the generation of the group's Deployment, and the images of its sidecar."""
    found = json.loads(installed.shop("get", "deploy", NAME, "-o", "json"))
    pod = found["spec"]["template"]["spec"]
    return found["metadata"]["generation"], [it["image"] for it in pod["initContainers"]]


@pytest.mark.usefixtures("earlier")
def test_upgrade_from_members_without_a_key_and_back_loses_and_duplicates_no_message(
    installed: Installed, shipping: Consumers
) -> None:
    consumers = shipping
    consumers.gone()  # its pods have the present sidecar if other tests ran before
    consumers.up()
    before, pods = deployment(installed), consumers.pods()
    assert before[1] == ["rota.local/sidecar:earlier"]
    with consumers.under_load("the operator upgraded, beside members without a key"):
        installed.release("upgrade", str(CHART), *WAIT, values=installed.values)
        installed.whole()
        consumers.works()
    assert (deployment(installed), consumers.pods()) == (before, pods), "nothing is replaced"
    eventually(lambda: "UnsignedMembers" in installed.conditions(NAME), SECONDS)
    events.scaled(consumers, 4)
    events.pod_deleted(consumers, consumers.pods()[0])
    events.scaled(consumers, 3)
    assert deployment(installed)[1] == before[1]
    events.rolled(consumers)
    assert deployment(installed)[1] == ["rota.local/sidecar:test"]
    eventually(lambda: "UnsignedMembers" not in installed.conditions(NAME), SECONDS)
    assert "MemberNotAuthenticated" not in installed.conditions(NAME)
    events.pod_deleted(consumers, consumers.pods()[0])
    # As docs/operator.md says: the earlier version does not read assignments of schema 2.
    installed.release("upgrade", str(CHART), *WAIT, values={**installed.values, "documentSchema": 1})
    eventually(lambda: consumers.document().schema == 1, SECONDS)
    with consumers.under_load("the operator put back, beside members with a key", loses_rights=True):
        installed.release("rollback", "1")
        installed.home("rollout", "status", "deploy/rota", f"--timeout={SECONDS}s")
        eventually(lambda: installed.leader() in installed.pods(), SECONDS)
        consumers.works()
    events.scaled(consumers, 4)
    events.pod_deleted(consumers, consumers.pods()[0])
    assert deployment(installed)[1] == before[1], "an earlier version puts its own sidecar in"
