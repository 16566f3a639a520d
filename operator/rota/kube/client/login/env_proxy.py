"""Proxy settings of the environment, as Go interprets them: HTTPS_PROXY, HTTP_PROXY and NO_PROXY."""

from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from rota.kube.client.login.kubeconfig import check_proxy


def proxy_for(server: str, environment: Mapping[str, str]) -> str | None:
    """Return the proxy for a server's URL; None if no proxy is set, the address is a loopback, or NO_PROXY names it."""
    parts = urlsplit(server)
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    names = (f"{parts.scheme.upper()}_PROXY", f"{parts.scheme}_proxy")
    variable = next(filter(environment.get, names), "")
    excluded = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    if not variable or _is_loopback(host):
        return None
    if any(_matches(entry, host, port) for entry in excluded.split(",")):
        return None
    proxy = environment[variable].strip()
    url = proxy if "://" in proxy else f"http://{proxy}"
    check_proxy(url, f"proxy in {variable}")
    return url


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _matches(entry: str, host: str, port: int) -> bool:
    """Whether an entry of NO_PROXY names a server: by host, domain, address or network, with or without a port."""
    entry = entry.strip().lower()
    if entry in {"", "*"}:
        return entry == "*"
    with suppress(ValueError):  # the host is a name, or the entry is a name or has a port
        return ip_address(host) in ip_network(entry, strict=False)
    name, _, suffix = entry.rpartition(":")
    if name and suffix.isdecimal() and "]" not in suffix:  # `[::1]:443` has a port, `[::1]` has none
        if int(suffix) != port:
            return False
        entry = name.strip("[]")
    if entry.startswith((".", "*.")):  # names only hosts below the domain, any other entry also the domain itself
        return host.endswith(entry.removeprefix("*"))
    return bool(entry) and (host == entry or host.endswith(f".{entry}"))
