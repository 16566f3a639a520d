"""What pages tell somebody who has a fleet to type is typed, at a real operator, real sidecars and a real broker."""

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
from kube.pages import ON_A_NODE, ROOT, Shell, Typed, a_shell, put

pytestmark = [
    pytest.mark.usefixtures("crds"),
    pytest.mark.timeout(300),
    pytest.mark.slow("each command line of the pages for users, typed"),
]

DOCS = ROOT / "docs"
QUEUES = 8


class TypedShop(NamedTuple):
    """Somebody's fleet, his shell and the folder where he types, and what there is in the place of what pages name."""

    namespace: str
    folder: Path
    shell: Shell
    here: Mapping[str, str]

    def told(self, page: str) -> list[Typed]:
        """Return what a page tells to type that can be typed here."""
        return [it for it in put(DOCS / page, self.here) if not it.command.startswith(ON_A_NODE)]


def a_fleet(rocketmq: RocketMQ, node: LocalNode, **changed: object) -> str:
    """Return the examples' fleet with the ground's broker and node; None takes a field away."""
    policy_too = [*yaml.safe_load_all((DOCS / "examples/ground/fleet.yaml").read_text())]
    spec = policy_too[0]["spec"]
    spec["broker"]["rocketmq"]["nameServers"] = [rocketmq.name_server]
    spec["template"]["spec"] |= {"nodeSelector": node.selector, "tolerations": node.tolerations}
    policy_too[0]["spec"] = {name: it for name, it in {**spec, **changed}.items() if it is not None}
    return yaml.safe_dump_all(policy_too)


@pytest.fixture(scope="module")
async def namespace(api: Api) -> AsyncIterator[str]:
    """Make a namespace for all pages."""
    async with a_namespace(api) as name:
        yield name


@pytest.fixture(scope="module")
async def shop(
    namespace: str,
    addresses: Callable[[], str],
    tmp_path_factory: pytest.TempPathFactory,
    rocketmq: RocketMQ,
    local_node: LocalNode,
) -> AsyncIterator[TypedShop]:
    """Have the operator of docs/journal.md look after a fleet, and a shell in what looks like a checkout."""
    folder, address = tmp_path_factory.mktemp("checkout"), addresses()
    for name in ("docs", "crds", "charts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    shutil.copy(local_node.cluster.kubeconfig, folder / "kubeconfig")
    rocketmq.create_topic("orders", QUEUES)
    (folder / "orders.yaml").write_text(a_fleet(rocketmq, local_node, replicas=3))
    path = [folder / ".venv/bin", *(program(it).parent for it in ("kubectl", "helm")), os.environ["PATH"]]
    variables = {
        "PATH": ":".join(map(str, path)),
        "KUBECONFIG": str(folder / "kubeconfig"),
        # As in the operator's pod: beside it there are other tests' groups, and their operators' addresses.
        "ROTA_NAMESPACES": namespace,
        "POD_NAMESPACE": namespace,
        "POD_IP": address,
        "ROTA_OPERATOR": f"http://{address}:8080",
    }
    here = {
        "rota-system": namespace,
        "-n shop": f"-n {namespace}",
        "shop/orders": f"{namespace}/orders",
        "broker-a": "broker-0",
        "/tmp/": "./",
        "/var/lib/rota/": "./",
        "http://127.0.0.1:8080": variables["ROTA_OPERATOR"],
    }
    async with a_shell(folder, variables) as shell:
        found = TypedShop(namespace, folder, shell, here)
        await shell.run(f"kubectl config set-context --current --namespace={namespace}")
        (journal,) = found.told("journal.md")
        await shell.run(f"{journal.command.rstrip()} 2> operator.log &")
        await shell.run("kubectl apply --server-side --field-manager=git -f orders.yaml")
        await shell.run("kubectl wait cg/orders --for=condition=Ready --timeout=180s")
        yield found


async def test_docs_name_the_folder_of_the_journal(shop: TypedShop) -> None:
    async def told() -> list[Path]:
        return [*shop.folder.glob("journal/date=*/*.jsonl")]

    await soon(told)


@pytest.mark.parametrize("page", ["conditions.md", "lag.md", "command-line.md"])
async def test_docs_commands_of_a_page_run(shop: TypedShop, page: str) -> None:
    for it in shop.told(page):
        if "--watch" in it.command:
            assert "TOPIC" in await shop.shell.begin(it.command)
        else:
            await shop.shell.follow(it)


@pytest.mark.usefixtures("prometheus_kinds")
async def test_docs_commands_of_the_runbook_run(shop: TypedShop) -> None:
    for it in shop.told("runbook.md"):
        await shop.shell.follow(it)
    rules = await shop.shell.run("kubectl get prometheusrule rota -o yaml")
    assert rules.count("> bool 300") == 1
    assert "> bool 60" not in rules


async def test_docs_commands_for_fleets_run_and_keep_scaled_replicas(
    shop: TypedShop, rocketmq: RocketMQ, local_node: LocalNode
) -> None:
    hello = yaml.safe_load((DOCS / "examples/local-app.yaml").read_text())
    hello["spec"]["replicas"] = 0  # it does not answer as an app of a fleet does
    (shop.folder / "shop.yaml").write_text(yaml.safe_dump(hello))
    (shop.folder / "chart/templates").mkdir(parents=True)
    (shop.folder / "chart/templates/shop.yaml").write_text(yaml.safe_dump(hello))
    (shop.folder / "chart/Chart.yaml").write_text("{apiVersion: v2, name: shop, version: 1.0.0}")
    for it in shop.told("fleets.md"):
        if "# without replicas" in it.command:
            (shop.folder / "orders.yaml").write_text(a_fleet(rocketmq, local_node, replicas=None))
        await shop.shell.follow(it)
    await shop.shell.run("kubectl scale cg/orders --replicas=2")  # an autoscaler's work
    await shop.shell.run("kubectl apply --server-side --field-manager=git -f orders.yaml")
    assert (await shop.shell.run("kubectl get cg orders -o jsonpath='{.spec.replicas}'")).strip() == "2"
    assert "rota-sidecar" in await shop.shell.run("kubectl get deploy hello -o yaml")


async def test_docs_commands_for_recommended_policies_run(shop: TypedShop) -> None:
    (shop.folder / "advice/policies").mkdir(parents=True)
    tried = yaml.safe_load_all((DOCS / "examples/pipeline/policies.yaml").read_text())
    (sticky,) = [it for it in tried if it["metadata"]["name"] == "sticky"]
    (shop.folder / "advice/policies/sticky.yaml").write_text(yaml.safe_dump(sticky))
    for it in [it for it in shop.told("pipeline.md") if it.command.startswith("kubectl ")]:
        await shop.shell.follow(it)


async def test_docs_commands_start_an_operator_from_a_checkout(shop: TypedShop) -> None:
    await shop.shell.run("kill %1; wait %1 || true")  # the one before has the port
    for it in shop.told("operator.md"):
        await shop.shell.follow(it)

    async def leads() -> bool:
        try:
            async with ClientSession() as session, session.get(f"{shop.here['http://127.0.0.1:8080']}/healthz") as said:
                return await said.text() == "leader\n"
        except ClientError:  # it does not answer yet
            return False

    await soon(leads)
