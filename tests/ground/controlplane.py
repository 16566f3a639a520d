"""A real control plane: etcd, API server, controller-manager and scheduler of one Kubernetes version.

It needs no root: it listens on the instance's loopback address. The real node gives it an address inside its network
namespace and a prefix that enters there, because pods must reach it and endpoints refuse loopback.
"""

import base64
import json
import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ground import programs
from ground.cluster import Cluster
from ground.instance import Instance
from ground.keys import Authority, Pair, signing_key
from ground.poll import answers

SERVICES = "10.96"  # the first two numbers of every Service's address
_FIRST_SERVICE = f"{SERVICES}.0.1"
_PARTS = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")
_SECURE_PORTS = {"kube-controller-manager": 10257, "kube-scheduler": 10259}

Flags = dict[str, object]


class ControlPlane(Cluster):
    """etcd, kube-apiserver, kube-controller-manager and kube-scheduler of one instance."""

    def __init__(self, instance: Instance, *, address: str | None = None, prefix: Sequence[str] = ()) -> None:
        """Describe the control plane; `up` starts it. `prefix` is put before every command, to start it elsewhere."""
        self.instance = instance
        self.address = address or instance.address()
        self.kubeconfig = instance.folder / "admin.kubeconfig"
        self._prefix = prefix

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://{self.address}:{self._port('kube-apiserver', 6443)}"

    def up(self) -> None:
        """Start the programs that do not run, and wait until the API server accepts pods."""
        programs.ensure(*programs.CONTROL_PLANE)
        self.authority = Authority(self.instance.folder / "keys", "ca")
        self._etcd()
        health = f"http://{self.address}:{self._port('etcd', 2379)}/health"
        self.instance.wait(
            "etcd", partial(answers, health), 60, "etcd"
        )  # else an error of etcd would look like one of the API server
        self._api_server()
        # The other two end at once while the roles that they need are missing.
        self.instance.wait("kube-apiserver", self._ready, 60, "The API server")
        self._controllers()
        # A pod is rejected until the controller-manager has created its namespace's service account.
        path = "/api/v1/namespaces/default/serviceaccounts/default"
        self.instance.wait("kube-controller-manager", lambda: self._answers(path), 60, "The controller-manager")
        self.instance.wait("kube-scheduler", self._scheduler_ready, 60, "The scheduler")

    def down(self) -> None:
        """End the control plane; its keys and data stay with the instance."""
        for part in _PARTS:  # the API server waits long for open watches; a quick end loses nothing
            self.instance.stop(part, grace=2)

    def user(self, name: str, common: str, organisation: str = "") -> Path:
        """Return a kubeconfig for another user than the admin, with a certificate."""
        return self._kubeconfig(name, self.authority.issue(name, common, organisation))

    def _etcd(self) -> None:
        client = f"http://{self.address}:{self._port('etcd', 2379)}"
        peer = f"http://{self.address}:{self._port('etcd-peer', 2380)}"
        self._run(
            "etcd",
            {
                "name": "ground",
                "data-dir": self.instance.folder / "etcd",
                "listen-client-urls": client,
                "advertise-client-urls": client,
                "listen-peer-urls": peer,
                "initial-advertise-peer-urls": peer,
                "initial-cluster": f"ground={peer}",
                "unsafe-no-fsync": "true",
                "quota-backend-bytes": 8 * 2**30,
                "auto-compaction-retention": "5m",
                "log-level": "warn",
            },
        )

    def _api_server(self) -> None:
        issue, folder = self.authority.issue, self.instance.folder / "keys"
        names = [
            "kubernetes",
            *(f"kubernetes.default{suffix}" for suffix in ("", ".svc", ".svc.cluster.local")),
            "localhost",
        ]
        serving = issue("apiserver", "kube-apiserver", dns=names, ips=[_FIRST_SERVICE, "127.0.0.1", self.address])
        kubelet = issue("apiserver-kubelet", "apiserver", "system:masters")
        front = Authority(folder / "front", "front-proxy-ca")
        proxy, tokens = front.issue("front-proxy", "front-proxy-client"), signing_key(folder / "tokens")
        self.kubeconfig = self._kubeconfig("admin", issue("admin", "admin", "system:masters"))
        self._run(
            "kube-apiserver",
            {
                "min-request-timeout": 6 * 3600,  # seconds that a watch lasts; kubectl ends with its watch
                "etcd-servers": f"http://{self.address}:{self._port('etcd', 2379)}",
                "advertise-address": self.address,
                "bind-address": self.address,
                "secure-port": self._port("kube-apiserver", 6443),
                "tls-cert-file": serving.certificate,
                "tls-private-key-file": serving.key,
                "client-ca-file": self.authority.own.certificate,
                "kubelet-client-certificate": kubelet.certificate,
                "kubelet-client-key": kubelet.key,
                "kubelet-certificate-authority": self.authority.own.certificate,
                "kubelet-preferred-address-types": "InternalIP,Hostname",
                "requestheader-client-ca-file": front.own.certificate,
                "requestheader-allowed-names": "front-proxy-client",
                "requestheader-username-headers": "X-Remote-User",
                "requestheader-group-headers": "X-Remote-Group",
                "requestheader-extra-headers-prefix": "X-Remote-Extra-",
                "proxy-client-cert-file": proxy.certificate,
                "proxy-client-key-file": proxy.key,
                "service-account-issuer": "https://kubernetes.default.svc",
                "service-account-key-file": tokens.certificate,
                "service-account-signing-key-file": tokens.key,
                "service-cluster-ip-range": f"{SERVICES}.0.0/16",
                "authorization-mode": "Node,RBAC",
                "enable-admission-plugins": "NodeRestriction",
                "allow-privileged": "true",
                "endpoint-reconciler-type": "none" if self.address.startswith("127.") else "lease",
            },
        )

    def _controllers(self) -> None:
        """Start the other two; their client limits are raised for thousands of pods."""
        authority, tokens = self.authority.own, signing_key(self.instance.folder / "keys" / "tokens")
        for part, own in (
            (
                "kube-controller-manager",
                {
                    "service-account-private-key-file": tokens.key,
                    "root-ca-file": authority.certificate,
                    "use-service-account-credentials": "true",
                    "cluster-signing-cert-file": authority.certificate,
                    "cluster-signing-key-file": authority.key,
                    "concurrent-replicaset-syncs": 20,
                    "concurrent-gc-syncs": 50,
                },
            ),
            ("kube-scheduler", {}),
        ):
            config = self.user(part, f"system:{part}")
            limits: Flags = {"kube-api-qps": 2000, "kube-api-burst": 4000, "leader-elect": "false"}
            configs: Flags = dict.fromkeys(
                ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"), config
            )
            serving: Flags = {"bind-address": self.address, "secure-port": self._port(part, _SECURE_PORTS[part])}
            self._run(part, {**configs, **limits, **serving, **own})

    def _run(self, part: str, flags: Flags) -> None:
        argv = [*self._prefix, str(programs.program(part)), *(f"--{name}={value}" for name, value in flags.items())]
        self.instance.start(part, argv)

    def _port(self, what: str, preferred: int) -> int:
        return self.instance.port(what, preferred, self.address) if not self._prefix else preferred

    def _kubeconfig(self, name: str, pair: Pair) -> Path:
        def inline(path: Path) -> str:
            return base64.b64encode(path.read_bytes()).decode()

        cluster = {"server": self.server, "certificate-authority-data": inline(self.authority.own.certificate)}
        user = {"client-certificate-data": inline(pair.certificate), "client-key-data": inline(pair.key)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "ground", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "ground", "context": {"cluster": "ground", "user": name}}],
            "current-context": "ground",
        }
        return self.instance.write(f"{name}.kubeconfig", json.dumps(config))  # JSON is YAML

    def _ready(self) -> bool:
        return self._answers("/readyz")

    def _answers(self, path: str) -> bool:
        admin = self.authority.issue("admin", "admin", "system:masters")
        trust = ssl.create_default_context(cafile=str(self.authority.own.certificate))
        trust.load_cert_chain(admin.certificate, admin.key)
        return answers(f"{self.server}{path}", trust)

    def _scheduler_ready(self) -> bool:
        trust = ssl.create_default_context()
        trust.check_hostname = False
        trust.verify_mode = ssl.CERT_NONE  # the scheduler signs its own certificate
        port = self._port("kube-scheduler", _SECURE_PORTS["kube-scheduler"])
        return answers(f"https://{self.address}:{port}/readyz", trust)
