"""The agent itself: it crashes, restarts, loses the API server, and refreshes volumes without an annotation."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from ground.api import Api, Object
from ground.cluster import Cluster
from ground.controlplane import ControlPlane
from ground.instance import Instance
from ground.local import LocalNode
from ground.space import Space, container, is_ready, space

BUSY = ["sh", "-c", "echo began; sleep 600 & wait"]


@pytest.fixture(scope="module")
def second_node(instance: Instance, control_plane: Cluster) -> Iterator[LocalNode]:
    """Start a second local node that refreshes and restarts sooner than the kubelet, and maps an image to a command."""
    images = {"thing": ["sh", "-c", 'echo "$0 $*"; exec sleep 600']}
    options = ["--sync-seconds=0.3", "--backoff-seconds=0.2"]
    node = LocalNode(instance, control_plane, "second", images=images, options=options)
    node.up()
    yield node
    node.down()


@pytest.fixture
async def second_space(api: Api, second_node: LocalNode) -> AsyncIterator[Space]:
    async with space(api, second_node) as opened:
        yield opened
        second_node.up()  # for tests that stopped the agent


def app(*command: str, **fields: object) -> Object:
    return {"name": "app", "image": "none", "command": list(command), **fields}


def processes(node: LocalNode) -> list[int]:
    return [process.pid for process in node.instance.processes() if process.program == f"{node.program}-pods"]


def signal_agent(node: LocalNode, number: int) -> None:
    agent = node.instance.process(node.program)
    assert agent
    agent.signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_local_node_containers_end_with_the_agent_and_restart_with_the_next(
    second_space: Space, number: int
) -> None:
    await second_space.pod("busy", app(*BUSY))
    await second_space.pod("once", app(*BUSY), restartPolicy="Never")
    for name in ("busy", "once"):
        await second_space.until(is_ready, name)
        await second_space.wait_for_line("began", name)
    signal_agent(second_space.node, number)
    await second_space.eventually(lambda: not processes(second_space.node))
    await second_space.eventually(lambda: not second_space.node.instance.process(second_space.node.program))
    pod = await second_space.api.get(second_space.path("Pod", "busy"))
    assert is_ready(pod)  # no agent runs that could report otherwise
    second_space.node.up()
    pod = await second_space.until(lambda pod: container(pod)["restartCount"] == 1 and is_ready(pod), "busy")
    assert container(pod)["lastState"]["terminated"]["reason"] == "ContainerStatusUnknown"
    await second_space.eventually(lambda: second_space.log("busy") == ["began", "began"])
    pod = await second_space.until(lambda pod: pod["status"]["phase"] == "Failed", "once")
    assert container(pod)["restartCount"] == 0


async def test_local_node_down_leaves_no_process_and_no_node_object(api: Api, second_space: Space) -> None:
    await second_space.pod("busy", app(*BUSY))
    await second_space.until(is_ready, "busy")
    second_space.node.down()
    assert not processes(second_space.node)
    assert second_space.node.name not in [node["metadata"]["name"] for node in await api.list("/api/v1/nodes")]


async def test_local_node_config_map_change_reaches_the_file_without_an_annotation(second_space: Space) -> None:
    await second_space.make("ConfigMap", "settings", data={"text": "old"})
    mount = [{"name": "etc", "mountPath": "/etc/x"}]
    volumes = [{"name": "etc", "configMap": {"name": "settings"}}]
    await second_space.pod("calm", app(*BUSY, volumeMounts=mount), volumes=volumes)
    file = second_space.volume(await second_space.until(is_ready, "calm"), "etc") / "text"
    await second_space.api.patch(second_space.path("ConfigMap", "settings"), {"data": {"text": "new"}})
    await second_space.eventually(lambda: file.read_text() == "new")
    await second_space.api.delete(second_space.path("ConfigMap", "settings"))
    await second_space.make("ConfigMap", "settings", data={"text": "again"})
    await second_space.eventually(lambda: file.read_text() == "again")


async def test_local_node_crash_loop_back_off_ends_and_the_container_restarts(second_space: Space) -> None:
    await second_space.pod("crash", app("sh", "-c", "exit 3"))
    await second_space.until(lambda pod: container(pod)["restartCount"] >= 3, "crash")


async def test_local_node_image_maps_to_a_command(second_space: Space) -> None:
    await second_space.pod(
        "image", {"name": "app", "image": "registry.example:5000/team/thing:1.2", "args": ["a", "b"]}
    )
    await second_space.wait_for_line("a b", "image")


async def test_local_node_pods_keep_running_while_the_api_server_is_down(
    second_space: Space, control_plane: Cluster
) -> None:
    if not isinstance(control_plane, ControlPlane):
        pytest.skip("This cluster is not ours to stop")
    await second_space.pod("steady", app("sh", "-c", "echo $$$$; exec sleep 600"))
    await second_space.eventually(lambda: bool(second_space.log("steady")))
    instance = second_space.node.instance
    await asyncio.to_thread(instance.stop, "kube-apiserver", grace=1)
    os.kill(int(second_space.log("steady")[0]), signal.SIGKILL)
    await second_space.eventually(lambda: len(second_space.log("steady")) == 2)
    await asyncio.to_thread(control_plane.up)
    pod = await second_space.until(lambda pod: container(pod)["restartCount"] == 1 and is_ready(pod), "steady")
    assert container(pod)["lastState"]["terminated"]["signal"] == 9
