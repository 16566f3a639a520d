"""Machine rooms of pods, from a label of the pod or of its node; nodes are read when a group's policy needs them."""

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

from rota.aio import loop_time
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.objects import PartialObjectMetadata
from rota.kube.client.paths import object_path
from rota.kube.state.group import Group

NODE_CACHE_SECONDS = 300.0  # for which a node's labels are cached

_log = logging.getLogger(__name__)


class _NodeLabels(NamedTuple):
    read_at: float
    labels: Mapping[str, str]


class Topology:
    """Caches the labels of nodes, and finds the machine rooms of pods by them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._nodes: dict[str, _NodeLabels] = {}

    async def load_nodes(self, group: Group) -> None:
        """If the group's policy uses machine rooms, read the nodes of its pods that are not cached."""
        label = _room_label(group)
        if not label:
            return
        now = loop_time()
        self._nodes = {name: node for name, node in self._nodes.items() if now < node.read_at + NODE_CACHE_SECONDS}
        uncached: set[str] = set()
        for state in group.pods.values():
            node_name = state.pod.spec.node_name  # empty until the pod is scheduled
            if node_name and node_name not in self._nodes and label not in state.pod.metadata.labels:
                uncached.add(node_name)
        await asyncio.gather(*(self._read_node(name, now) for name in sorted(uncached)))

    async def _read_node(self, name: str, now: float) -> None:
        try:
            node = await self._api.get(object_path("nodes", "", name), PartialObjectMetadata)
            self._nodes[name] = _NodeLabels(now, node.metadata.labels)
        except (ApiError, NoResponseError) as error:
            text = "The labels of node %s could not be read, so the machine rooms of its pods are unknown: %s"
            _log.warning(text, name, error)

    def rooms_of(self, group: Group) -> dict[str, str]:
        """Return each pod's machine room: the value of its own label, otherwise its node's; omit pods without one."""
        label = _room_label(group)
        rooms: dict[str, str] = {}
        if not label:
            return rooms
        for name, state in group.pods.items():
            node = self._nodes.get(state.pod.spec.node_name)
            node_room = node.labels.get(label) if node else None
            if room := state.pod.metadata.labels.get(label) or node_room:
                rooms[name] = room
        return rooms


def _room_label(group: Group) -> str:
    """Return the label that names machine rooms, by the group's policy; empty if the policy uses none."""
    policy = group.resolved_spec.policy
    if policy is None:
        return ""
    options = policy.options.machine_room_nearby or policy.options.balanced  # only one of both can be set
    return (options.room_label if options else None) or ""
