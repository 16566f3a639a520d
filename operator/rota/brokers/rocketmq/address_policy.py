"""Which addresses an operator may connect to where tenants name the servers: else they could scan its network."""

import ipaddress
from collections.abc import Collection, Iterable
from typing import NamedTuple

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AddressPolicy(NamedTuple):
    """Networks that may be connected to, and single endpoints in them that may not, such as the API server."""

    networks: Collection[Network]
    forbidden: Collection[tuple[str, int]] = ()

    def allows(self, host: str, port: int) -> bool:
        """Whether an IP address and port may be connected to. Addresses of the host itself never are."""
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        address = mapped or address
        if address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast:
            return False
        if any(ipaddress.ip_address(other) == address and port == other_port for other, other_port in self.forbidden):
            return False
        return any(address in network for network in self.networks)


def read_networks(texts: Iterable[str]) -> list[Network]:
    """Read networks, each alone or several with commas between them; raise ValueError with a sentence."""
    networks: list[Network] = []
    for text in (part.strip() for entry in texts for part in entry.split(",") if part.strip()):
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ValueError(
                f"--broker-networks {text!r} is no network ({error}); write one such as 10.0.0.0/8"
            ) from None
    return networks
