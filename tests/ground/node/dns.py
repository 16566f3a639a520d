"""The cluster's DNS: CoreDNS as an ordinary Deployment, behind the address in the kubelet's configuration."""

import contextlib
import json
import secrets
import socket
import struct
from typing import Any

from ground.controlplane import SERVICES
from ground.node.images import COREDNS

ADDRESS = f"{SERVICES}.0.10"
DOMAIN = "cluster.local"
PORT = 30053  # on the node's address, for clients outside the cluster

_LABELS = {"k8s-app": "kube-dns"}
_METADATA = {"name": "coredns", "namespace": "kube-system"}
_COREFILE = f"""{DOMAIN} in-addr.arpa {{
    errors
    ready
    kubernetes {DOMAIN} in-addr.arpa {{
        ttl 5
    }}
}}
. {{
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""

Object = dict[str, Any]


def manifests() -> str:
    """Return all objects as one list for kubectl."""
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "coredns"}
    version = "rbac.authorization.k8s.io/v1"
    items = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _METADATA},
        {"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": "coredns"}, "rules": rules},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "coredns"},
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", **_METADATA}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _METADATA, "data": {"Corefile": _COREFILE}},
        _deployment(),
        _service(),
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _deployment() -> Object:
    container = {
        "name": "coredns",
        "image": COREDNS,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        # The taint of a new node is removed a second or two after the node is Ready.
        "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    template = {"metadata": {"labels": _LABELS}, "spec": pod}
    spec = {"selector": {"matchLabels": _LABELS}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _METADATA, "spec": spec}


def _service() -> Object:
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP", "nodePort": PORT},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP", "nodePort": PORT},
    ]
    spec = {"type": "NodePort", "clusterIP": ADDRESS, "selector": _LABELS, "ports": ports}
    metadata = {"name": "kube-dns", "namespace": "kube-system"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def answers(address: str) -> bool:
    """Whether DNS resolves the API server's name, asked from this machine through the node's port."""
    number = secrets.randbits(16)
    question = b"".join(bytes([len(part)]) + part.encode() for part in f"kubernetes.default.svc.{DOMAIN}".split("."))
    query = struct.pack(">6H", number, 0x0100, 1, 0, 0, 0) + question + struct.pack(">BHH", 0, 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client, contextlib.suppress(OSError):
        client.settimeout(0.3)
        client.sendto(query, (address, PORT))
        header: tuple[int, ...] = struct.unpack(">4H", client.recv(512)[:8])
        return header[0] == number and header[1] & 0x000F == 0 and header[3] > 0
    return False
