"""Which addresses an operator connects to, and its messages about addresses that are not allowed."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rota.brokers.errors import UnreachableError
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy, read_networks
from rota.brokers.rocketmq.transport.connection_pool import ConnectionPool
from rota.brokers.rocketmq.wire import requests
from rota.brokers.rocketmq.wire.frames import Frame

ALL = read_networks(["0.0.0.0/0,::/0"])
PRIVATE = read_networks(["10.0.0.0/8", "fd00::/8"])
API_SERVER = ("10.96.0.1", 443)


@pytest.mark.parametrize(
    ("networks", "address", "port", "is_allowed"),
    [
        (ALL, "10.0.0.1", 9876, True),
        (ALL, "203.0.113.7", 9876, True),
        (ALL, "2001:db8::1", 9876, True),
        (PRIVATE, "10.1.2.3", 9876, True),
        (PRIVATE, "fd00::1", 9876, True),
        (PRIVATE, "203.0.113.7", 9876, False),
        (ALL, "127.0.0.1", 9876, False),
        (ALL, "127.1.2.3", 9876, False),
        (ALL, "::1", 9876, False),
        (ALL, "::ffff:127.0.0.1", 9876, False),
        (ALL, "169.254.169.254", 80, False),
        (ALL, "::ffff:169.254.169.254", 80, False),
        (ALL, "fe80::1%eth0", 9876, False),
        (ALL, "0.0.0.0", 9876, False),
        (ALL, "::", 9876, False),
        (ALL, "224.0.0.1", 9876, False),
        (ALL, "240.0.0.1", 9876, False),
        (ALL, "fd00:ec2::254", 80, False),
        (ALL, "fd20:ce::254", 80, False),
        (ALL, "192.0.0.192", 80, False),
        (ALL, "168.63.129.16", 80, False),
        (ALL, "64:ff9b::a9fe:a9fe", 80, False),
        (ALL, "2002:7f00:1::", 9876, False),
        (ALL, "::127.0.0.1", 9876, False),
        (ALL, "64:ff9b::a00:1", 9876, True),
        (ALL, *API_SERVER, False),
        (ALL, "::ffff:10.96.0.1", 443, False),
        (ALL, "10.96.0.1", 9876, True),
        ([], "10.0.0.1", 9876, False),
    ],
)
def test_broker_address_is_checked_against_networks(
    networks: list[ipaddress.IPv4Network], address: str, port: int, *, is_allowed: bool
) -> None:
    assert AddressPolicy(networks, [API_SERVER]).allows(address, port) is is_allowed


def test_broker_networks_are_read_or_rejected_with_a_sentence() -> None:
    assert [str(network) for network in read_networks(["10.0.0.0/8, fd00::/8", "192.0.2.0/24", ""])] == [
        "10.0.0.0/8",
        "fd00::/8",
        "192.0.2.0/24",
    ]
    for text in ("10.0.0.1/8", "shop", "10.0.0.0/33"):
        with pytest.raises(
            ValueError, match=rf"^--broker-networks: '{text}' is not a network .*; use a form such as 10"
        ):
            read_networks([text])


@asynccontextmanager
async def listen() -> AsyncIterator[tuple[int, list[object]]]:
    """Listen on loopback; yield the port and the accepted connections."""
    connections: list[object] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield int(server.sockets[0].getsockname()[1]), connections
    server.close()


async def error_of_call(pool: ConnectionPool, address: str) -> str:
    with pytest.raises(UnreachableError) as raised:
        await pool.call(address, requests.cluster_info(), 1.0)
    return str(raised.value)


def ignore_request(_: Frame) -> None:
    return None


async def test_broker_at_a_forbidden_address_is_not_contacted_and_gets_the_same_message_as_one_that_does_not_exist(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The message does not distinguish loopback by number or by name, an open port, and a closed one."""
    restricted = ConnectionPool(ignore_request, address_policy=AddressPolicy(ALL))
    caplog.set_level("INFO")
    async with listen() as (port, connections):
        for address in (f"127.0.0.1:{port}", f"localhost:{port}", "127.0.0.1:1", "nowhere.invalid:9876"):
            assert await error_of_call(restricted, address) == f"{address} does not respond"
        assert connections == []
        assert f"--broker-networks does not allow 127.0.0.1, port {port}" in caplog.text
        unrestricted = ConnectionPool(ignore_request)
        assert "was closed" in await error_of_call(unrestricted, f"127.0.0.1:{port}")
        assert connections
        unrestricted.close()
    restricted.close()


async def test_broker_that_refuses_a_connection_gets_the_same_message_as_one_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AddressPolicy, "allows", lambda *_: True)
    restricted = ConnectionPool(ignore_request, address_policy=AddressPolicy(ALL))
    async with listen() as (port, connections):
        assert await error_of_call(restricted, f"127.0.0.1:{port}") == f"127.0.0.1:{port} does not respond"
        assert connections
    assert await error_of_call(restricted, "127.0.0.1:1") == "127.0.0.1:1 does not respond"
    restricted.close()
