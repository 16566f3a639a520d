"""Reads a group that Rota does not run yet from its brokers: the topics' queues and the connected consumers."""

import asyncio
import re
from typing import NamedTuple

from rota.brokers.errors import BrokerError, NotFoundError
from rota.brokers.rocketmq.brokers import RocketMQBrokers
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.wire.addresses import split_address
from rota.model import Queue


class BrokerSnapshot(NamedTuple):
    """The queues of existing topics, and the connected consumers."""

    queues: list[Queue]
    client_ids: list[str]


def read_broker_snapshot(name_server: str, group: str, topics: list[str]) -> BrokerSnapshot:
    """Read the group from its brokers; raise ValueError if they do not respond or deny access."""
    servers = list(map(str.strip, re.split("[;,]", name_server)))
    for server in servers:
        is_ambiguous = server.count(":") > 1 and not server.startswith("[")  # IPv6 without brackets
        if is_ambiguous or split_address(server) is None:
            raise ValueError(f"--name-server {server!r} cannot be read: write it as host:9876")
    try:
        return asyncio.run(_read_snapshot(RocketMQBrokers(ConnectionConfig(servers)), group, topics))
    except BrokerError as error:
        raise ValueError(f"{error} (--name-server {name_server})") from None


async def _read_snapshot(client: RocketMQBrokers, group: str, topics: list[str]) -> BrokerSnapshot:
    try:
        queues: list[Queue] = []
        for topic in topics:
            queues += await _topic_queues(client, topic)
        online: set[str] = set()
        if group:
            for broker in sorted({queue.broker for queue in queues}):
                for consumer in await client.online_consumers(group, broker):
                    online.add(consumer.client_id)
        return BrokerSnapshot(queues, sorted(online))
    finally:
        await client.close()


async def _topic_queues(client: RocketMQBrokers, topic: str) -> tuple[Queue, ...]:
    try:
        return await client.queues(topic)
    except NotFoundError:
        return ()
