"""The tutorial, typed line by line into a shell, on a ground of its own; it must be answered as the page shows.

Its section on other clusters is typed on a real node, by tests/e2e/test_tutorial.py.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ground.clusters import CLUSTER, KUBECONFIG
from ground.instance import Instance
from kube.pages import ON_A_CLUSTER, ROOT, TUTORIAL, a_shell, put


@pytest.fixture
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep the page's ground apart from the one that whoever runs the tests may have."""
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


def left(home: Path) -> list[str]:
    """Return the grounds that still stand."""
    return [path.parent.name for path in home.glob("*/instance.json")]


@pytest.mark.timeout(600)
@pytest.mark.slow("docs/tutorial.md, typed")
async def test_tutorial_commands_print_what_the_page_shows(own_home: Path, tmp_path: Path) -> None:
    here = {
        "8090": str(free_port()),
        "/tmp/rota.log": str(tmp_path / "log"),
        "/tmp/rota-ground-$(id -u)": str(own_home),
    }
    async with a_shell(ROOT, os.environ) as shell:
        on_a_cluster = put(TUTORIAL, here, ON_A_CLUSTER)
        on_the_ground = put(TUTORIAL, here)[: -len(on_a_cluster)]
        assert [*on_the_ground, *on_a_cluster] == put(TUTORIAL, here), "the section has the page's last commands"
        for it in on_the_ground:
            await shell.follow(it)
    assert left(own_home) == []
