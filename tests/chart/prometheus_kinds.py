"""The Prometheus operator's kinds, without the Prometheus operator."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ground.api import Api, ApiError, Object
from ground.controlplane import Cluster
from ground.poll import soon

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def a_definition(kind: str) -> Object:
    """Return a definition of one of the Prometheus operator's kinds, of which only the names are its own."""
    names = {"kind": kind, "listKind": f"{kind}List", "plural": f"{kind.lower()}s", "singular": kind.lower()}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.monitoring.coreos.com"},
        "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]},
    }


@asynccontextmanager
async def prometheus_kinds(api: Api, control_plane: Cluster) -> AsyncIterator[None]:
    """Let the API server take the Prometheus operator's kinds, unless it does already."""
    made = []
    for kind in ("ServiceMonitor", "PrometheusRule"):
        body = a_definition(kind)
        try:
            await api.create(DEFINITIONS, body)
        except ApiError as error:
            if error.status != 409:
                raise
            continue
        made.append(body["metadata"]["name"])

        async def known(name: str = body["metadata"]["name"]) -> bool:  # to kubectl: it is told last
            told = control_plane.kubectl(
                "api-resources", "--api-group=monitoring.coreos.com", "-o", "name", check=False
            )
            return name in told.split()

        await soon(known)
    yield
    for name in made:
        await api.delete(f"{DEFINITIONS}/{name}")
