"""Verdicts of kstatus (Flux, Helm) and of Argo CD, with the health checks of docs/gitops.md, on groups and policies."""

import json
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from ground.api import Object
from ground.cluster import Cluster
from ground.ours import made
from ground.poll import soon
from ground.programs import ensure, program
from kube.world import OperatedNamespace, add_two_members
from rota.planner.status import conditions

PAGE = Path(__file__).parents[2] / "docs" / "gitops.md"

pytestmark = [
    pytest.mark.usefixtures("crds", "node"),
    pytest.mark.slow("how kstatus and Argo CD judge groups and policies"),
]


@pytest.fixture(scope="module", autouse=True)
def _health() -> None:
    ensure("health")


def judge(resource: Object) -> tuple[str, str]:
    """Return the verdicts of kstatus and of Argo CD."""
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = yaml.safe_load(block)["data"][f"resource.customizations.health.rota.dev_{resource['kind']}"]
    request = json.dumps({"lua": script, "object": resource})
    printed = subprocess.run([program("health")], input=request, capture_output=True, text=True, check=True).stdout
    verdicts = json.loads(printed)
    return verdicts["kstatus"], verdicts["argo"]["status"]


async def wait_for_verdicts(world: OperatedNamespace, path: str, expected: tuple[str, str]) -> None:
    async def is_judged() -> bool:
        return judge(await world.api.get(path)) == expected

    await soon(is_judged)


async def test_gitops_health_of_a_group_from_its_creation_to_a_corrected_mistake(
    world: OperatedNamespace, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = partial(wait_for_verdicts, world, world.path)
    await judged(("InProgress", "Progressing"))
    await add_two_members(world)
    await judged(("Current", "Healthy"))

    for kind in ("Reconciling", "Stalled"):
        wait = ("wait", "-n", world.namespace, "cg/orders", f"--for=condition={kind}=false", "--timeout=60s")
        assert control_plane.kubectl(*wait).endswith("condition met\n")

    unread = await world.api.get(world.path)
    unread["metadata"]["generation"] += 1
    assert judge(unread) == ("InProgress", "Progressing")

    # A problem that only a user can fix is Failed after a while; until then it is never Current.
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "missing"}}})
    await world.wait_for_condition("MissingPolicy")
    assert judge(await world.api.get(world.path)) == ("InProgress", "Progressing")
    monkeypatch.setattr(conditions, "STALL_SECONDS", 0.5)
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "absent"}}})  # the same problem in a new plan
    await judged(("Failed", "Degraded"))
    await world.api.patch(world.path, {"spec": {"policyRef": None}})
    await judged(("Current", "Healthy"))

    await world.api.patch(world.path, {"spec": {"paused": True}})
    await judged(("Current", "Suspended"))
    await world.api.patch(world.path, {"spec": {"paused": False}})
    await judged(("Current", "Healthy"))

    for member in list(world.fleet.members):
        await world.fleet.members.pop(member).kill()
    await judged(("InProgress", "Degraded"))


async def test_gitops_health_of_a_group_while_its_own_deployment_is_rolled_out(
    world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = partial(wait_for_verdicts, world, world.path)
    await add_two_members(world)
    await judged(("Current", "Healthy"))

    async def reason_is(reason: str) -> bool:
        return bool((await world.conditions())["Reconciling"]["reason"] == reason)

    # Its image does not exist here, so the rollout never completes.
    template = {"spec": {"containers": [{"name": "app", "image": "app"}]}}
    changed = await world.api.patch(world.path, {"spec": {"template": template, "replicas": 1}})
    generation = changed["metadata"]["generation"]

    async def observed() -> bool:
        status = await world.status()
        return bool(status["observedGeneration"] == generation)

    await world.soon(observed)
    assert judge(await world.api.get(world.path)) == ("InProgress", "Progressing"), "never Current in between"
    await world.soon(partial(reason_is, "RollingOut"), 60)

    monkeypatch.setattr(conditions, "STALL_SECONDS", 0.5)
    deployment = f"/apis/apps/v1/namespaces/{world.namespace}/deployments/orders"
    await world.api.patch(deployment, {"spec": {"progressDeadlineSeconds": 1}})
    assert "makes no progress" in (await world.wait_for_condition("RolloutFailed"))["message"]
    await judged(("Failed", "Degraded"))

    await world.api.patch(world.path, {"spec": {"replicas": 0}})
    await judged(("Current", "Healthy"))


@pytest.mark.usefixtures("statuses")
async def test_gitops_health_of_a_policy_that_is_rejected_and_corrected(
    world: OperatedNamespace, policies: str
) -> None:
    member = {"index": 0, "queues": [{"topic": "orders", "broker": "broker-a", "ids": "4-2"}]}
    spec = {"strategy": "ByConfig", "options": {"byConfig": {"members": [member]}}}
    created = await world.api.create(policies, made("RebalancePolicy", "rules", **spec))
    assert judge(created)[1] == "Progressing"
    await wait_for_verdicts(world, f"{policies}/rules", ("Failed", "Degraded"))
    await world.api.patch(f"{policies}/rules", {"spec": {"strategy": "Sticky", "options": None}})
    await wait_for_verdicts(world, f"{policies}/rules", ("Current", "Healthy"))
