"""Address policy: limits where the operator may connect, so that tenants who name servers cannot scan its network."""

import ipaddress
from collections.abc import Collection, Iterable
from typing import NamedTuple

# Metadata servers of clouds whose addresses are not link-local.
METADATA_SERVERS = {"fd00:ec2::254", "fd20:ce::254", "168.63.129.16", "100.100.100.200", "192.0.0.192"}
EMBEDDING_NETWORKS = [*map(ipaddress.IPv6Network, ("64:ff9b::/96", "::/96"))]  # IPv4 in the last 32 bits

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AddressPolicy(NamedTuple):
    """Allowed networks, and forbidden endpoints within them, such as the API server."""

    networks: Collection[Network]
    forbidden: Collection[tuple[str, int]] = ()

    def allows(self, host: str, port: int) -> bool:
        """Return whether the policy allows an address and port.

        Loopback, link-local and other special addresses are forbidden in every network.
        """
        address = _unwrap_ipv4(ipaddress.ip_address(host.partition("%")[0]))  # without a zone such as %eth0
        if address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast:
            return False
        if address.is_reserved or str(address) in METADATA_SERVERS:
            return False
        for ip, forbidden_port in self.forbidden:
            if ipaddress.ip_address(ip) == address and forbidden_port == port:
                return False
        return any(address in network for network in self.networks)


def _unwrap_ipv4(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds; any other address unchanged."""
    if isinstance(address, ipaddress.IPv6Address):
        if embedded := address.ipv4_mapped or address.sixtofour:
            return embedded
        last_bits = int(address) & 0xFFFFFFFF
        is_plain_ipv6 = last_bits <= 1  # :: and ::1 are in ::/96, but embed no IPv4 address
        if not is_plain_ipv6 and any(address in network for network in EMBEDDING_NETWORKS):
            return ipaddress.IPv4Address(last_bits)
    return address


def read_networks(texts: Iterable[str]) -> list[Network]:
    """Parse networks, also comma-separated ones; raise ValueError with a sentence for users."""
    networks: list[Network] = []
    parts = map(str.strip, ",".join(texts).split(","))
    for text in filter(None, parts):
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            problem = f"--broker-networks: {text!r} is not a network ({error}); use a form such as 10.0.0.0/8"
            raise ValueError(problem) from None
    return networks
