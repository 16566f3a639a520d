"""Settings of a sidecar from the environment variables of its container."""

from collections.abc import Mapping
from typing import NamedTuple, Self

_NEEDED = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}


class PodIdentity(NamedTuple):
    """Identity of the member, its addresses, and its folders."""

    pod: str
    namespace: str
    uid: str
    address: str = "127.0.0.1"  # of the pod, for reports, probes and drains
    node_address: str = ""  # of the pod's node, if it is known
    local: str = "127.0.0.1"  # of the app, for pushes and for the pull port
    documents: str = "/etc/rota"
    state: str = "/var/lib/rota"
    credentials: str = ""
    authorities: str = ""
    client: str = ""  # folder of the certificate that brokers require
    key: str = ""  # folder of the key with which the operator signs; empty: requests are unsigned
    run: str = ""  # folder of the socket for the preStop hook; empty: no hook

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables; raise ValueError if a required one is missing."""
        for name, field in _NEEDED.items():
            if not environment.get(name):
                raise ValueError(f"The variable {name} is not set; give the container the pod's {field} in it")
        default = cls("", "", "")
        return cls(
            pod=environment["POD_NAME"],
            namespace=environment["POD_NAMESPACE"],
            uid=environment["POD_UID"],
            address=environment.get("POD_IP") or default.address,
            node_address=environment.get("HOST_IP", ""),
            local=environment.get("ROTA_LOCAL") or default.local,
            documents=environment.get("ROTA_DOCUMENTS") or default.documents,
            state=environment.get("ROTA_STATE") or default.state,
            credentials=environment.get("ROTA_CREDENTIALS", ""),
            authorities=environment.get("ROTA_CA", ""),
            client=environment.get("ROTA_CLIENT", ""),
            key=environment.get("ROTA_KEY", ""),
            run=environment.get("ROTA_RUN", ""),
        )

    @property
    def shares_node_network(self) -> bool:
        """Whether the pod has `hostNetwork`, so that every process of the node reaches its loopback address."""
        return bool(self.node_address) and self.node_address == self.address

    @property
    def client_id(self) -> str:
        """The client id of the member at the brokers."""
        return f"{self.address}@{self.pod}#{self.uid[:8]}"
