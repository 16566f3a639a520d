"""Types the commands of pages for users of a fleet, with a real operator, real sidecars and a real broker."""

import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from aiohttp import ClientError, ClientSession

from ground.api import Api
from ground.fixtures import a_namespace
from ground.local import LocalNode
from ground.poll import soon
from ground.programs import program
from ground.rocketmq import RocketMQ
from kube.pages import ON_A_NODE, ROOT, Shell, TypedCommand, a_shell, substituted_commands

pytestmark = [
    pytest.mark.usefixtures("crds"),
    pytest.mark.timeout(300),
    pytest.mark.slow("each command of the pages for users"),
]

DOCS = ROOT / "docs"
QUEUES = 8


class FleetShell(NamedTuple):
    """A fleet, a shell and its folder, and replacements for names on pages."""

    namespace: str
    folder: Path
    shell: Shell
    substitutions: Mapping[str, str]

    def commands(self, page: str) -> list[TypedCommand]:
        """Return the commands of a page that can run here."""
        return [
            command
            for command in substituted_commands(DOCS / page, self.substitutions)
            if not command.command.startswith(ON_A_NODE)
        ]


def a_fleet(rocketmq: RocketMQ, node: LocalNode, **changed: object) -> str:
    """Return the examples' fleet with the ground's broker and node; None removes a field."""
    documents = [*yaml.safe_load_all((DOCS / "examples/ground/fleet.yaml").read_text())]
    spec = documents[0]["spec"]
    spec["broker"]["rocketmq"]["nameServers"] = [rocketmq.name_server]
    spec["template"]["spec"] |= {"nodeSelector": node.selector, "tolerations": node.tolerations}
    documents[0]["spec"] = {name: value for name, value in {**spec, **changed}.items() if value is not None}
    return yaml.safe_dump_all(documents)


@pytest.fixture(scope="module")
async def namespace(api: Api) -> AsyncIterator[str]:
    """Create a namespace for all pages."""
    async with a_namespace(api) as name:
        yield name


@pytest.fixture(scope="module")
async def shop(
    namespace: str,
    addresses: Callable[[], str],
    tmp_path_factory: pytest.TempPathFactory,
    rocketmq: RocketMQ,
    local_node: LocalNode,
) -> AsyncIterator[FleetShell]:
    """Start the operator of docs/journal.md, a fleet, and a shell in a folder like a checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    address = addresses()
    for name in ("docs", "crds", "charts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    shutil.copy(local_node.cluster.kubeconfig, folder / "kubeconfig")
    rocketmq.create_topic("orders", QUEUES)
    (folder / "orders.yaml").write_text(a_fleet(rocketmq, local_node, replicas=3))
    path = [folder / ".venv/bin", *(program(name).parent for name in ("kubectl", "helm")), os.environ["PATH"]]
    variables = {
        "PATH": ":".join(map(str, path)),
        "KUBECONFIG": str(folder / "kubeconfig"),
        # As in the operator's pod: other tests have groups and operators on the same cluster.
        "ROTA_NAMESPACES": namespace,
        "POD_NAMESPACE": namespace,
        "POD_IP": address,
        "ROTA_OPERATOR": f"http://{address}:8080",
    }
    substitutions = {
        "rota-system": namespace,
        "-n shop": f"-n {namespace}",
        "shop/orders": f"{namespace}/orders",
        "broker-a": "broker-0",
        "/tmp/": "./",
        "/var/lib/rota/": "./",
        "http://127.0.0.1:8080": variables["ROTA_OPERATOR"],
    }
    async with a_shell(folder, variables) as shell:
        fleet = FleetShell(namespace, folder, shell, substitutions)
        await shell.run(f"kubectl config set-context --current --namespace={namespace}")
        (journal,) = fleet.commands("journal.md")
        await shell.run(f"{journal.command.rstrip()} 2> operator.log &")
        await shell.run("kubectl apply --server-side --field-manager=git -f orders.yaml")
        await shell.run("kubectl wait cg/orders --for=condition=Ready --timeout=180s")
        yield fleet


async def test_docs_name_the_folder_of_the_journal(shop: FleetShell) -> None:
    async def journal_files() -> list[Path]:
        return [*shop.folder.glob("journal/date=*/*.jsonl.gz")]

    await soon(journal_files)


@pytest.mark.parametrize("page", ["conditions.md", "lag.md", "command-line.md"])
async def test_docs_commands_of_a_page_run(shop: FleetShell, page: str) -> None:
    for command in shop.commands(page):
        if "--watch" in command.command:
            assert "TOPIC" in await shop.shell.run_until_printed(command.command)
        else:
            await shop.shell.run_as_shown(command)


@pytest.mark.usefixtures("prometheus_kinds")
async def test_docs_commands_of_the_runbook_run(shop: FleetShell) -> None:
    for command in shop.commands("runbook.md"):
        await shop.shell.run_as_shown(command)
    rules = await shop.shell.run("kubectl get prometheusrule rota -o yaml")
    assert rules.count("> bool 300") == 1
    assert "> bool 60" not in rules


async def test_docs_commands_for_fleets_run_and_keep_scaled_replicas(
    shop: FleetShell, rocketmq: RocketMQ, local_node: LocalNode
) -> None:
    hello = yaml.safe_load((DOCS / "examples/local-app.yaml").read_text())
    hello["spec"]["replicas"] = 0  # it does not respond as an app
    (shop.folder / "shop.yaml").write_text(yaml.safe_dump(hello))
    (shop.folder / "chart/templates").mkdir(parents=True)
    (shop.folder / "chart/templates/shop.yaml").write_text(yaml.safe_dump(hello))
    (shop.folder / "chart/Chart.yaml").write_text("{apiVersion: v2, name: shop, version: 1.0.0}")
    for command in shop.commands("fleets.md"):
        if "# without replicas" in command.command:
            (shop.folder / "orders.yaml").write_text(a_fleet(rocketmq, local_node, replicas=None))
        await shop.shell.run_as_shown(command)
    await shop.shell.run("kubectl scale cg/orders --replicas=2")  # as an autoscaler does
    await shop.shell.run("kubectl apply --server-side --field-manager=git -f orders.yaml")
    assert (await shop.shell.run("kubectl get cg orders -o jsonpath='{.spec.replicas}'")).strip() == "2"
    assert "rota-sidecar" in await shop.shell.run("kubectl get deploy hello -o yaml")


async def test_docs_commands_for_recommended_policies_run(shop: FleetShell) -> None:
    (shop.folder / "advice/policies").mkdir(parents=True)
    candidates = yaml.safe_load_all((DOCS / "examples/pipeline/policies.yaml").read_text())
    (sticky,) = [policy for policy in candidates if policy["metadata"]["name"] == "sticky"]
    (shop.folder / "advice/policies/sticky.yaml").write_text(yaml.safe_dump(sticky))
    for command in [command for command in shop.commands("pipeline.md") if command.command.startswith("kubectl ")]:
        await shop.shell.run_as_shown(command)


async def test_docs_commands_start_an_operator_from_a_checkout(shop: FleetShell) -> None:
    await shop.shell.run("kill %1; wait %1 || true")  # the first operator has the port
    for command in shop.commands("operator.md"):
        await shop.shell.run_as_shown(command)

    async def leads() -> bool:
        try:
            async with (
                ClientSession() as session,
                session.get(f"{shop.substitutions['http://127.0.0.1:8080']}/healthz") as response,
            ):
                return await response.text() == "leader\n"
        except ClientError:  # it does not respond yet
            return False

    await soon(leads)
