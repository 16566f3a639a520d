"""Simulated nodes and pods."""

import pytest

from ground.api import Api
from ground.cluster import Cluster
from ground.instance import Instance
from ground.kwok import Kwok
from ground.poll import soon

PODS = 100


@pytest.mark.slow("simulated pods by kwok")
async def test_ground_kwok_deployment_pods_become_ready(instance: Instance, control_plane: Cluster, api: Api) -> None:
    kwok = Kwok(instance, control_plane)
    try:
        kwok.up()
        assert kwok.nodes(2) == ["kwok-0", "kwok-1"]
        labels = {"app": "many"}
        pod = {
            "nodeSelector": kwok.selector,
            "tolerations": kwok.tolerations,
            "containers": [{"name": "a", "image": "a"}],
        }
        spec = {
            "replicas": PODS,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        path = "/apis/apps/v1/namespaces/default/deployments"
        await api.create(path, {"metadata": {"name": "many"}, "spec": spec})

        async def all_ready() -> bool:
            status = (await api.get(f"{path}/many")).get("status", {})
            return bool(status.get("readyReplicas") == PODS)

        await soon(all_ready)
        await api.delete(f"{path}/many")
    finally:
        kwok.down()
