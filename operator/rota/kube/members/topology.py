"""Machine rooms of pods, from a label of the pod or of its node; nodes are read when a group's policy needs them."""

import asyncio
import logging

from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.objects import PartialObjectMetadata
from rota.kube.client.paths import object_path
from rota.kube.state.group import Group

NODE_CACHE_SECONDS = 300.0  # for which a node's labels are cached

_log = logging.getLogger(__name__)


class Topology:
    """Caches the labels of nodes, and finds the machine rooms of pods by them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._nodes: dict[str, tuple[float, dict[str, str]]] = {}  # time of the read, and the labels

    async def load_nodes(self, group: Group) -> None:
        """If the group's policy uses machine rooms, read the nodes of its pods that are not cached."""
        label = _room_label(group)
        now = asyncio.get_running_loop().time()
        if label:
            self._nodes = {name: node for name, node in self._nodes.items() if now < node[0] + NODE_CACHE_SECONDS}
            pods = [state.pod for state in group.pods.values() if label not in state.pod.metadata.labels]
            unknown = {pod.spec.node_name for pod in pods} - self._nodes.keys() - {""}
            await asyncio.gather(*(self._read_node(name, now) for name in sorted(unknown)))

    async def _read_node(self, name: str, now: float) -> None:
        try:
            node = await self._api.get(object_path("nodes", "", name), PartialObjectMetadata)
            self._nodes[name] = (now, node.metadata.labels)
        except (ApiError, NoResponseError) as error:
            text = "The labels of node %s could not be read, so the machine rooms of its pods are unknown: %s"
            _log.warning(text, name, error)

    def rooms_of(self, group: Group) -> dict[str, str]:
        """Return each pod's machine room: the value of its own label, otherwise its node's; omit pods without one."""
        label = _room_label(group)
        rooms: dict[str, str] = {}
        for name, state in group.pods.items() if label else ():
            _, node = self._nodes.get(state.pod.spec.node_name, (0.0, {}))
            if room := state.pod.metadata.labels.get(label) or node.get(label):
                rooms[name] = room
        return rooms


def _room_label(group: Group) -> str:
    policy = group.resolved_spec.policy
    options = policy.options if policy else None
    block = options and (options.machine_room_nearby or options.balanced)
    return (block.room_label if block else None) or ""
