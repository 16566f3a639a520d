"""The Prometheus operator's kinds, without the Prometheus operator."""

from ground.api import Api, Object
from ground.cluster import Cluster
from ground.poll import soon

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def a_definition(kind: str) -> Object:
    """Return a definition with the names of one of the Prometheus operator's kinds, and any schema."""
    names = {"kind": kind, "listKind": f"{kind}List", "plural": f"{kind.lower()}s", "singular": kind.lower()}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.monitoring.coreos.com"},
        "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]},
    }


async def install_prometheus_kinds(api: Api, control_plane: Cluster) -> None:
    """Let the API server accept the Prometheus operator's kinds, and wait until kubectl finds them.

    They stay until the control plane ends: a deleted definition stays in deletion for a while, and the next test could
    not use its name.
    """
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
        definition = a_definition(kind)
        await api.create(DEFINITIONS, definition)

        async def is_known(
            name: str = definition["metadata"]["name"],
        ) -> bool:  # to kubectl, which learns of new kinds last
            output = control_plane.kubectl(
                "api-resources", "--api-group=monitoring.coreos.com", "-o", "name", check=False
            )
            return name in output.split()

        await soon(is_known)
