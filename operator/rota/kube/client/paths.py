"""Paths of the Kubernetes API. No other module builds one.

Names come from objects that tenants write. A name such as `../../other/secrets/admin` must not lead to another object,
so each segment is checked, as a namespace, name or port, before it becomes part of a path.
"""

import re
from typing import Final
from urllib.parse import quote

from rota.model import single_line
from rota.spec.names import is_dns_label, is_dns_subdomain

GROUPS: Final = "consumergroups"
POLICIES: Final = "rebalancepolicies"

_CORE = "/api/v1"
_ROTA = "/apis/rota.dev/v1alpha1"
_API_OF_RESOURCE = {
    "configmaps": _CORE,
    "events": _CORE,
    "nodes": _CORE,
    "pods": _CORE,
    "secrets": _CORE,
    "deployments": "/apis/apps/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "subjectaccessreviews": "/apis/authorization.k8s.io/v1",
    "tokenreviews": "/apis/authentication.k8s.io/v1",
    GROUPS: _ROTA,
    POLICIES: _ROTA,
}
_MAX_PORT = 65535
_PROXIED_PATH = re.compile(r"(/[A-Za-z0-9][-A-Za-z0-9_.]*)+")


def collection_path(resource: str, namespace: str = "") -> str:
    """Return the path of a resource's collection, in one namespace or in all of them."""
    return _join_segments(_collection_segments(resource, namespace))


def object_path(resource: str, namespace: str, name: str, subresource: str = "") -> str:
    """Return the path of an object, or of its status; a cluster-wide object has an empty namespace.

    Raise ValueError if Kubernetes would not accept the name.
    """
    if subresource not in {"", "status"}:
        raise ValueError(f"{single_line(subresource, 100)!r} is not a subresource that Rota uses")
    segments = [*_collection_segments(resource, namespace), _checked_name(name)]
    return _join_segments([*segments, subresource] if subresource else segments)


def proxy_path(namespace: str, pod: str, port: int, path: str) -> str:
    """Return the path by which the API server passes a request on to a port of a pod."""
    if not 0 < port <= _MAX_PORT:
        raise ValueError(f"{port} is not a port")
    if not _PROXIED_PATH.fullmatch(path):
        raise ValueError(f"{single_line(path, 100)!r} is not a path that a pod can be asked for")
    return _join_segments([*_collection_segments("pods", namespace), f"{_checked_name(pod)}:{port}", "proxy"]) + path


def port_forward_path(namespace: str, pod: str) -> str:
    """Return the path at which the API server forwards connections to ports of a pod."""
    return _join_segments([*_collection_segments("pods", namespace), _checked_name(pod), "portforward"])


def _collection_segments(resource: str, namespace: str) -> list[str]:
    if resource not in _API_OF_RESOURCE:
        raise ValueError(f"{single_line(resource, 100)!r} is not a resource that Rota uses")
    if namespace and not is_dns_label(namespace):
        raise ValueError(f"{single_line(namespace, 100)!r} is not the name of a namespace")
    within = ["namespaces", namespace] if namespace else []
    return [_API_OF_RESOURCE[resource], *within, resource]


def _checked_name(name: str) -> str:
    if not is_dns_subdomain(name):
        raise ValueError(f"{single_line(name, 100)!r} is not the name of a Kubernetes object")
    return name


def _join_segments(segments: list[str]) -> str:
    api, *below = segments
    quoted = [quote(segment, safe=":") for segment in below]
    return "/".join([api, *quoted])  # `api` is a constant, whose slashes stay
