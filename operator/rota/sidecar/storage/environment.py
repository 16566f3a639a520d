"""What a sidecar is told by its pod's variables."""

from collections.abc import Mapping
from typing import NamedTuple, Self

_NEEDED = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}


class Who(NamedTuple):
    """Who the member is, and where things lie."""

    pod: str
    namespace: str
    uid: str
    address: str = "127.0.0.1"  # of the pod: reports, probes, drains
    node_address: str = ""  # of the pod's node, if it is known
    local: str = "127.0.0.1"  # where the app is: it is posted to here, and asks here
    documents: str = "/etc/rota"
    state: str = "/var/lib/rota"
    credentials: str = ""
    authorities: str = ""
    client: str = ""  # the folder of the certificate that brokers ask for
    key: str = ""  # the folder of the key that the operator signs with; none: it need not sign
    run: str = ""  # the folder of the socket for the preStop hook; none: there is no hook

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Self:
        """Read the variables; what is missing is a sentence."""
        for name, field in _NEEDED.items():
            if not given.get(name):
                raise ValueError(f"The variable {name} is not set; give the container the pod's {field} in it")
        default = cls("", "", "")
        return cls(
            pod=given["POD_NAME"],
            namespace=given["POD_NAMESPACE"],
            uid=given["POD_UID"],
            address=given.get("POD_IP") or default.address,
            node_address=given.get("HOST_IP", ""),
            local=given.get("ROTA_LOCAL") or default.local,
            documents=given.get("ROTA_DOCUMENTS") or default.documents,
            state=given.get("ROTA_STATE") or default.state,
            credentials=given.get("ROTA_CREDENTIALS", ""),
            authorities=given.get("ROTA_CA", ""),
            client=given.get("ROTA_CLIENT", ""),
            key=given.get("ROTA_KEY", ""),
            run=given.get("ROTA_RUN", ""),
        )

    @property
    def shares_node_network(self) -> bool:
        """Whether the pod has `hostNetwork`, so that every process of the node reaches its loopback address."""
        return bool(self.node_address) and self.node_address == self.address

    @property
    def client_id(self) -> str:
        """By which brokers know the member."""
        return f"{self.address}@{self.pod}#{self.uid[:8]}"
