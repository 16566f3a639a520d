"""kubelet and kube-proxy of the node."""

import json

from ground.controlplane import ControlPlane
from ground.instance import Instance
from ground.node import dns
from ground.node.runtime import SOCKET
from ground.node.sandbox import Sandbox
from ground.programs import program

NAME = "node"


def start_kubelet(instance: Instance, sandbox: Sandbox, control_plane: ControlPlane) -> None:
    """Start the kubelet; its pods run in the sandbox's cgroup and network."""
    authority, address = control_plane.authority, sandbox.network.inside
    serving = authority.issue("kubelet-serving", f"system:node:{NAME}", "system:nodes", dns=[NAME], ips=[address])
    folder = instance.folder / "kubelet"
    config = {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "address": address,
        "authentication": {
            "x509": {"clientCAFile": str(authority.own.certificate)},
            "webhook": {"enabled": True},
            "anonymous": {"enabled": False},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": sandbox.cgroup,
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "clusterDNS": [dns.ADDRESS],
        "clusterDomain": dns.DOMAIN,
        "resolvConf": str(instance.write("resolv.conf", "")),  # the machine's file may name a server on loopback
        "podLogsDir": str(instance.folder / "log" / "pods"),
        "volumePluginDir": str(folder / "plugins"),
        "imageGCHighThresholdPercent": 100,  # a collected image could not be pulled again
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
    }
    flags = {
        "kubeconfig": control_plane.user("kubelet", f"system:node:{NAME}", "system:nodes"),
        "config": instance.write("kubelet.json", json.dumps(config)),
        "root-dir": folder,
        "hostname-override": NAME,
        "node-ip": address,
    }
    argv = [str(program("kubelet")), *(f"--{name}={value}" for name, value in flags.items())]
    instance.start("kubelet", [*sandbox.prefix, *argv])


def start_proxy(instance: Instance, sandbox: Sandbox, control_plane: ControlPlane) -> None:
    """Start kube-proxy, which makes Services' addresses work inside the sandbox."""
    kubeconfig = control_plane.user("kube-proxy", "system:kube-proxy")
    config = {
        "kind": "KubeProxyConfiguration",
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": sandbox.network.pods,
        "hostnameOverride": NAME,
        # The machine's connection tracking is not ours to change.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    path = instance.write("kube-proxy.json", json.dumps(config))
    instance.start("kube-proxy", [*sandbox.prefix, program("kube-proxy"), f"--config={path}"])
