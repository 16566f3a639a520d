"""Opens connections: looks up host names, applies the address policy, and describes failures."""

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Callable
from functools import partial

from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.connection import Connection, NotSentError, RequestHandler
from rota.brokers.rocketmq.transport.frame_budget import FrameAccount
from rota.brokers.rocketmq.wire.addresses import split_address

CONNECT_SECONDS = 3.0
NEXT_ADDRESS_SECONDS = 0.25  # until the next address of a host name is tried: the first one may be dead


async def open_connection(
    address: str,
    handle_request: RequestHandler,
    tls: ssl.SSLContext | None = None,
    policy: AddressPolicy | None = None,
    *,
    frame_account: FrameAccount | None = None,
) -> Connection:
    """Connect; raise `NotSentError` if that fails or the policy forbids the address.

    With `frame_account`, a large frame is read only once the memory budget for frames has room.
    """
    endpoint = split_address(address)
    if endpoint is None:
        raise NotSentError(f"{address!r} is not a valid address; write it as host:port")
    create = partial(Connection, address, handle_request, frame_account)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            if policy:
                return await _connect_to_allowed(*endpoint, create, tls, policy)
            return await _connect(*endpoint, create, tls)
    except TimeoutError:
        raise NotSentError(f"{address} did not accept a connection within {CONNECT_SECONDS:g} s") from None
    except OSError as error:
        raise NotSentError(f"{address} cannot be reached: {error.strerror or error}") from None
    except ValueError:  # the host name is invalid
        raise NotSentError(f"{address!r} is not a valid address; write it as host:port") from None


async def _connect(host: str, port: int, create: Callable[[], Connection], tls: ssl.SSLContext | None) -> Connection:
    # A cancelled happy-eyeballs race leaks a socket, so a single address does not start one.
    delay = None if _is_ip_address(host) else NEXT_ADDRESS_SECONDS
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(create, host, port, ssl=tls, happy_eyeballs_delay=delay)
    return connection


async def _connect_to_allowed(
    host: str, port: int, create: Callable[[], Connection], tls: ssl.SSLContext | None, policy: AddressPolicy
) -> Connection:
    """Connect to the first allowed address that answers; the timeout is divided among the addresses."""
    loop = asyncio.get_running_loop()
    addresses = await _resolve_allowed_addresses(host, port, policy)
    last_error: OSError = TimeoutError()
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_SECONDS / len(addresses)):
                server_name = host if tls else None
                _, connection = await loop.create_connection(
                    create, address, port, ssl=tls, server_hostname=server_name
                )
                return connection
        except OSError as error:  # includes TimeoutError
            last_error = error
    raise last_error


async def _resolve_allowed_addresses(host: str, port: int, policy: AddressPolicy) -> list[str]:
    """Return the IP addresses of a host that the policy allows; raise an OSError if it allows none."""
    resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(socket_address[0]) for *_, socket_address in resolved))
    allowed = [address for address in addresses if policy.allows(address, port)]
    if not allowed:
        raise OSError(errno.EACCES, f"--broker-networks does not allow {', '.join(addresses)}, port {port}")
    return allowed


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
