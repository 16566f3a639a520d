"""Settings of a sidecar from the environment variables of its container."""

from collections.abc import Mapping
from typing import NamedTuple, Self

_REQUIRED_VARIABLES = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}


class PodIdentity(NamedTuple):
    """Identity of the member, its addresses, and its folders."""

    name: str
    namespace: str
    uid: str
    address: str = "127.0.0.1"  # the pod's address, for reports, probes and drains
    node_address: str = ""  # the address of the pod's node; empty: unknown
    app_host: str = "127.0.0.1"  # the app's address: pushes go to it, and the pull port listens on it
    config_folder: str = "/etc/rota"
    state_folder: str = "/var/lib/rota"
    # Folders of mounted Secrets and volumes; empty: not mounted.
    credentials_folder: str = ""  # credentials for the brokers
    ca_folder: str = ""  # the CA of the brokers' certificates
    client_folder: str = ""  # the certificate that the sidecar presents to brokers
    key_folder: str = ""  # the key with which the operator signs; without it, requests are unsigned
    hook_folder: str = ""  # the socket for the preStop hook; without it, there is no hook

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables; raise ValueError if a required one is missing."""
        for name, field in _REQUIRED_VARIABLES.items():
            if not environment.get(name):
                raise ValueError(
                    f"The environment variable {name} is not set; set it from the pod's field {field} (downward API)"
                )
        default = cls(name="", namespace="", uid="")
        return cls(
            name=environment["POD_NAME"],
            namespace=environment["POD_NAMESPACE"],
            uid=environment["POD_UID"],
            address=environment.get("POD_IP") or default.address,
            node_address=environment.get("HOST_IP", ""),
            app_host=environment.get("ROTA_LOCAL") or default.app_host,
            config_folder=environment.get("ROTA_DOCUMENTS") or default.config_folder,
            state_folder=environment.get("ROTA_STATE") or default.state_folder,
            credentials_folder=environment.get("ROTA_CREDENTIALS", ""),
            ca_folder=environment.get("ROTA_CA", ""),
            client_folder=environment.get("ROTA_CLIENT", ""),
            key_folder=environment.get("ROTA_KEY", ""),
            hook_folder=environment.get("ROTA_RUN", ""),
        )

    @property
    def shares_node_network(self) -> bool:
        """Whether the pod has `hostNetwork`, so that every process of the node reaches its loopback address."""
        return bool(self.node_address) and self.node_address == self.address

    @property
    def client_id(self) -> str:
        """The client id of the member at the brokers."""
        return f"{self.address}@{self.name}#{self.uid[:8]}"
