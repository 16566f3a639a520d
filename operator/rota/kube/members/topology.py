"""Rooms: where pods are, by a label of their own or of their node; nodes are read one by one, when a policy asks."""

import asyncio
import logging

from rota.kube.client.api import Api, ApiError, Unanswered
from rota.kube.client.objects import Object
from rota.kube.client.paths import object_path
from rota.kube.state.group import Group

NODE_SECONDS = 300.0  # for which a node's labels are believed

_log = logging.getLogger(__name__)


class Rooms:
    """The nodes' labels, as far as somebody asks for them."""

    def __init__(self, api: Api) -> None:
        """Know no node yet."""
        self._api = api
        self._nodes: dict[str, tuple[float, dict[str, str]]] = {}  # since when, and the labels

    async def learn(self, group: Group) -> None:
        """Read the nodes of a group's pods, if its policy asks for their rooms and they are not known."""
        label, now = _label(group), asyncio.get_running_loop().time()
        if label:
            self._nodes = {name: it for name, it in self._nodes.items() if now < it[0] + NODE_SECONDS}
            pods = [known.pod for known in group.pods.values() if label not in known.pod.metadata.labels]
            unknown = {pod.spec.node_name for pod in pods} - self._nodes.keys() - {""}
            await asyncio.gather(*(self._ask(name, now) for name in sorted(unknown)))

    async def _ask(self, name: str, now: float) -> None:
        try:
            self._nodes[name] = now, (await self._api.get(object_path("nodes", "", name), Object)).metadata.labels
        except (ApiError, Unanswered) as error:
            _log.warning("The rooms of pods on node %s are not known: %s", name, error)

    def of(self, group: Group) -> dict[str, str]:
        """Return each pod's room: its own label's value, or else its node's."""
        label = _label(group)
        found: dict[str, str] = {}
        for name, known in group.pods.items() if label else ():
            _, node = self._nodes.get(known.pod.spec.node_name, (0.0, {}))
            if room := known.pod.metadata.labels.get(label) or node.get(label):
                found[name] = room
        return found


def _label(group: Group) -> str:
    policy = group.wish.policy
    options = policy.options if policy else None
    block = options and (options.machine_room_nearby or options.balanced)
    return (block.room_label if block else None) or ""
