"""The tutorial, typed line by line into a shell, on a ground of its own; the output must be that of the page.

Its section on other clusters is typed on a real node, by tests/e2e/test_tutorial.py.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ground.clusters import CLUSTER, KUBECONFIG
from ground.instance import Instance
from kube.pages import ON_A_CLUSTER, ROOT, TUTORIAL, a_shell, substituted_commands


@pytest.fixture
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep the page's ground apart from a ground that the developer runs."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("ROTA_GROUND_HOME", str(home))
    monkeypatch.setenv(CLUSTER, "own")
    for name in (KUBECONFIG, "KUBECONFIG", "ROTA_OPERATOR", "ROTA_NAME_SERVER"):
        monkeypatch.delenv(name, raising=False)
    yield home
    for path in home.glob("*/instance.json"):
        Instance(path.parent).down()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def running_grounds(home: Path) -> list[str]:
    """Return the grounds that still run."""
    return [path.parent.name for path in home.glob("*/instance.json")]


@pytest.mark.timeout(600)
@pytest.mark.slow("the commands of docs/tutorial.md")
async def test_tutorial_commands_print_the_output_that_the_page_shows(own_home: Path, tmp_path: Path) -> None:
    substitutions = {
        "8090": str(free_port()),
        "/tmp/rota.log": str(tmp_path / "log"),
        "/tmp/rota-ground-$(id -u)": str(own_home),
    }
    async with a_shell(ROOT, os.environ) as shell:
        on_a_cluster = substituted_commands(TUTORIAL, substitutions, ON_A_CLUSTER)
        on_the_ground = substituted_commands(TUTORIAL, substitutions)[: -len(on_a_cluster)]
        assert [*on_the_ground, *on_a_cluster] == substituted_commands(TUTORIAL, substitutions), (
            "the section has the page's last commands"
        )
        for command in on_the_ground:
            await shell.run_as_shown(command)
    assert running_grounds(own_home) == []
