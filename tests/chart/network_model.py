"""A model of NetworkPolicy: which connections a set of policies admits. The test network enforces none."""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ground.api import Object

NAMESPACE_NAME = "kubernetes.io/metadata.name"


class Endpoint(NamedTuple):
    """A pod, or a host outside the cluster if it has no namespace."""

    namespace: str
    labels: Mapping[str, str] = {}
    ports: Mapping[str, int] = {}  # by name
    address: str = ""


def admits(policies: Iterable[Object], source: Endpoint, target: Endpoint, port: int, protocol: str = "TCP") -> bool:
    """Return whether ingress to a pod is allowed: by any policy that selects the pod, or because none does."""
    selecting = [policy for policy in policies if _selects(policy, target)]
    if not selecting:
        return True
    rules = [rule for policy in selecting for rule in policy["spec"].get("ingress") or []]
    return any(_has_port(rule, target, port, protocol) and _is_from(rule, source, target) for rule in rules)


def _selects(policy: Object, target: Endpoint) -> bool:
    types = policy["spec"].get("policyTypes", ["Ingress"])
    same_namespace = policy["metadata"]["namespace"] == target.namespace
    return "Ingress" in types and same_namespace and _matches(policy["spec"]["podSelector"], target.labels)


def _has_port(rule: Object, target: Endpoint, port: int, protocol: str) -> bool:
    entries: Sequence[Object] = rule.get("ports") or []
    return not entries or any(_is_port(entry, target, port, protocol) for entry in entries)


def _is_port(entry: Object, target: Endpoint, port: int, protocol: str) -> bool:
    if entry.get("protocol", "TCP") != protocol:
        return False
    named_port: Any = entry.get("port")
    if named_port is None:
        return True
    first = target.ports.get(named_port) if isinstance(named_port, str) else named_port
    return first is not None and bool(first <= port <= entry.get("endPort", first))


def _is_from(rule: Object, source: Endpoint, target: Endpoint) -> bool:
    peers: Sequence[Object] = rule.get("from") or []
    return not peers or any(_is_peer(peer, source, target) for peer in peers)


def _is_peer(peer: Object, source: Endpoint, target: Endpoint) -> bool:
    if "ipBlock" in peer:
        address = ipaddress.ip_address(source.address) if source.address else None
        networks = [ipaddress.ip_network(text) for text in peer["ipBlock"].get("except", [])]
        block = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return address is not None and address in block and not any(address in network for network in networks)
    if not source.namespace:
        return False
    if "namespaceSelector" in peer:
        in_namespace = _matches(peer["namespaceSelector"], {NAMESPACE_NAME: source.namespace})
    else:
        in_namespace = source.namespace == target.namespace
    return in_namespace and _matches(peer.get("podSelector") or {}, source.labels)


def _matches(selector: Object, labels: Mapping[str, str]) -> bool:
    match_labels = selector.get("matchLabels") or {}
    return match_labels.items() <= labels.items() and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions") or []
    )


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "In":
            return value in expression["values"]
        case operator:
            raise ValueError(f"{operator} is no operator of a label selector")
