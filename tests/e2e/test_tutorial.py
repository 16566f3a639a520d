"""The section of docs/tutorial.md for any cluster, run line by line, on a real node."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.release import OPERATOR_NAMESPACE, Installation
from ground.programs import program
from ground.rocketmq import RocketMQ
from kube.pages import ON_A_CLUSTER, ROOT, TUTORIAL, a_shell, substituted_commands

pytestmark = pytest.mark.node

PUSHED = "registry.example/rota-{}:0.1.0"
APP = "docker.io/library/python:3.13-slim"


@pytest.fixture
def pulled(release: Installation, tmp_path: Path) -> Iterator[Path]:
    """Tag the images with the names of the page, and uninstall the release; yield a kubeconfig."""
    for target in ("operator", "sidecar"):
        release.node.tag(release.node.build(target), PUSHED.format(target))
    release.node.tag(release.node.build("sidecar"), APP)  # contains Python
    release.helm_release("uninstall", "--ignore-not-found", "--wait")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_bytes(release.node.kubeconfig.read_bytes())
    yield kubeconfig
    release.node.kubectl("delete", "cg", "orders", "--ignore-not-found", check=False)
    release.helm_release("uninstall", "--ignore-not-found")
    release.ensure_namespace(OPERATOR_NAMESPACE)


@pytest.mark.slow("the commands of docs/tutorial.md for any cluster, on a node")
async def test_tutorial_section_on_other_clusters_prints_the_output_of_the_page(
    pulled: Path, broker: RocketMQ, tmp_path: Path
) -> None:
    broker.delete_topic("orders")  # it has messages of other tests
    commands = substituted_commands(TUTORIAL, {"namesrv.example:9876": broker.name_server}, ON_A_CLUSTER)
    variables = {
        "KUBECONFIG": str(pulled),
        "PATH": os.pathsep.join([*(str(program(tool).parent) for tool in ("kubectl", "helm")), os.environ["PATH"]]),
        **{f"HELM_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")},
    }
    admin = shlex.join(map(str, broker.java("org.apache.rocketmq.tools.command.MQAdminStartup", level="OFF")))
    async with a_shell(ROOT, variables) as shell:
        await shell.run("docker() { test -f Dockerfile; }")  # the ground has built these images
        await shell.run(f'mqadmin() {{ (cd {shlex.quote(str(broker.folder))} && {admin} "$@"); }}')
        for command in commands:
            await shell.run_as_shown(command)
