"""The agent itself: it dies, comes back, loses the API server, refreshes without being told."""

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
    """Start a local node of its own that is quicker than the kubelet and knows an image."""
    images = {"thing": ["sh", "-c", 'echo "$0 $*"; exec sleep 600']}
    options = ["--sync-seconds=0.3", "--backoff-seconds=0.2"]
    node = LocalNode(instance, control_plane, "second", images=images, options=options)
    node.up()
    yield node
    node.down()


@pytest.fixture
async def there(api: Api, second_node: LocalNode) -> AsyncIterator[Space]:
    async with space(api, second_node) as made:
        yield made
        second_node.up()  # where the test took it down


def app(*command: str, **rest: object) -> Object:
    return {"name": "app", "image": "none", "command": list(command), **rest}


def processes(node: LocalNode) -> list[int]:
    return [process.pid for process in node.instance.processes() if process.program == f"{node.program}-pods"]


def end(node: LocalNode, number: int) -> None:
    agent = node.instance.process(node.program)
    assert agent
    agent.signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_local_node_containers_end_with_the_agent_and_restart_with_the_next(there: Space, number: int) -> None:
    await there.pod("busy", app(*BUSY))
    await there.pod("once", app(*BUSY), restartPolicy="Never")
    for name in ("busy", "once"):
        await there.until(is_ready, name)
        await there.logged("began", name)
    end(there.node, number)
    await there.eventually(lambda: not processes(there.node))
    await there.eventually(lambda: not there.node.instance.process(there.node.program))
    left = await there.api.get(there.path("Pod", "busy"))
    assert is_ready(left)  # nobody is there to say otherwise
    there.node.up()
    pod = await there.until(lambda it: container(it)["restartCount"] == 1 and is_ready(it), "busy")
    assert container(pod)["lastState"]["terminated"]["reason"] == "ContainerStatusUnknown"
    await there.eventually(lambda: there.log("busy") == ["began", "began"])
    pod = await there.until(lambda it: it["status"]["phase"] == "Failed", "once")
    assert container(pod)["restartCount"] == 0


async def test_local_node_down_leaves_no_process_and_no_node_object(api: Api, there: Space) -> None:
    await there.pod("busy", app(*BUSY))
    await there.until(is_ready, "busy")
    there.node.down()
    assert not processes(there.node)
    assert there.node.name not in [node["metadata"]["name"] for node in await api.list("/api/v1/nodes")]


async def test_local_node_config_map_change_reaches_the_file_without_an_annotation(there: Space) -> None:
    await there.make("ConfigMap", "settings", data={"text": "old"})
    mount = [{"name": "etc", "mountPath": "/etc/x"}]
    volumes = [{"name": "etc", "configMap": {"name": "settings"}}]
    await there.pod("calm", app(*BUSY, volumeMounts=mount), volumes=volumes)
    file = there.volume(await there.until(is_ready, "calm"), "etc") / "text"
    await there.api.patch(there.path("ConfigMap", "settings"), {"data": {"text": "new"}})
    await there.eventually(lambda: file.read_text() == "new")
    await there.api.delete(there.path("ConfigMap", "settings"))
    await there.make("ConfigMap", "settings", data={"text": "again"})
    await there.eventually(lambda: file.read_text() == "again")


async def test_local_node_crash_loop_back_off_ends_and_the_container_restarts(there: Space) -> None:
    await there.pod("crash", app("sh", "-c", "exit 3"))
    await there.until(lambda it: container(it)["restartCount"] >= 3, "crash")


async def test_local_node_image_maps_to_a_command(there: Space) -> None:
    await there.pod("image", {"name": "app", "image": "registry.example:5000/team/thing:1.2", "args": ["a", "b"]})
    await there.logged("a b", "image")


async def test_local_node_pods_keep_running_while_the_api_server_is_down(there: Space, control_plane: Cluster) -> None:
    if not isinstance(control_plane, ControlPlane):
        pytest.skip("This cluster is not ours to stop")
    await there.pod("steady", app("sh", "-c", "echo $$$$; exec sleep 600"))
    await there.eventually(lambda: bool(there.log("steady")))
    instance = there.node.instance
    await asyncio.to_thread(instance.stop, "kube-apiserver", grace=1)
    os.kill(int(there.log("steady")[0]), signal.SIGKILL)
    await there.eventually(lambda: len(there.log("steady")) == 2)
    await asyncio.to_thread(control_plane.up)
    pod = await there.until(lambda it: container(it)["restartCount"] == 1 and is_ready(it), "steady")
    assert container(pod)["lastState"]["terminated"]["signal"] == 9
