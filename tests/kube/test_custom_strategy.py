"""A user's custom strategy, from an installed package, in the operator."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

from ground.poll import soon
from kube.world import OperatedNamespace

pytestmark = pytest.mark.usefixtures("crds", "node")

POLICIES_PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Install the package of docs/policies.md as pip does, and return the policy's spec of that page."""
    section = POLICIES_PAGE.read_text().partition("### Custom\n")[2]
    code, spec = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[0] for kind in ("python", "yaml"))
    (tmp_path / "my_strategies.py").write_text(code)
    installed = tmp_path / "my_strategies-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[rota.strategies]\nstandby = my_strategies:standby\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    policy: dict[str, object] = yaml.safe_load(spec)
    return policy


async def test_custom_strategy_of_an_installed_package_shares_the_queues(
    world: OperatedNamespace, documented: dict[str, object]
) -> None:
    policies = f"/apis/rota.dev/v1alpha1/namespaces/{world.namespace}/rebalancepolicies"
    policy = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "ours"}}
    await world.api.create(policies, policy | {"spec": documented})
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "ours"}}})
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.wait_for_shares(4, 4, 0)  # `active: 2`
    await soon(world.settled)
    assert (await world.status())["strategy"] == "Custom"
