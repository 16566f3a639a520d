"""Which proxy the environment names for a server, as kubectl reads it: HTTPS_PROXY, HTTP_PROXY and NO_PROXY."""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit


def proxy_for(server: str, environment: Mapping[str, str]) -> str | None:
    """Return the proxy for a server's URL; none for this machine and for what NO_PROXY names."""
    parts = urlsplit(server)
    host = parts.hostname or ""
    names = (f"{parts.scheme.upper()}_PROXY", f"{parts.scheme}_proxy")
    proxy = next((value for name in names if (value := environment.get(name))), None)
    excluded = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    if proxy is None or _is_this_machine(host) or any(_matches(entry.strip(), host) for entry in excluded.split(",")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _matches(entry: str, host: str) -> bool:
    """Whether an entry of NO_PROXY names a host: itself, its domain, an address or a network, or all with *."""
    if not entry:
        return False
    if entry == "*":
        return True
    try:
        return ip_address(host) in ip_network(entry, strict=False)
    except ValueError:  # one of them is a name
        domain = entry.removeprefix("*").removeprefix(".").lower()
        return host == domain or host.endswith(f".{domain}")
