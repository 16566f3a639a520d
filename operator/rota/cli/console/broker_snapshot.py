"""What brokers tell of a group that Rota does not run yet: its topics' queues, and who works them now."""

import asyncio
import re
from typing import NamedTuple

from rota.brokers.errors import BrokerError, Unknown
from rota.brokers.rocketmq.admin import Cluster
from rota.brokers.rocketmq.routing import Site
from rota.brokers.rocketmq.wire.addresses import split_address
from rota.model import Queue


class Told(NamedTuple):
    """What there is; topics that are not are left out."""

    queues: list[Queue]
    online: list[str]  # client ids


def ask(name_server: str, group: str, topics: list[str]) -> Told:
    """Ask; what does not answer, or lets nobody in, is a sentence."""
    servers = [it.strip() for it in re.split("[;,]", name_server)]
    for server in servers:
        is_ambiguous = server.count(":") > 1 and not server.startswith("[")  # IPv6 without brackets
        if is_ambiguous or split_address(server) is None:
            raise ValueError(f"--name-server {server!r} cannot be read: write it as host:9876")
    try:
        return asyncio.run(_ask(Cluster(Site(servers)), group, topics))
    except BrokerError as error:
        raise ValueError(f"{error} (--name-server {name_server})") from None


async def _ask(cluster: Cluster, group: str, topics: list[str]) -> Told:
    try:
        queues = [queue for topic in topics for queue in await _queues(cluster, topic)]
        brokers = sorted({queue.broker for queue in queues})
        online = {it.id for broker in brokers for it in await cluster.clients(group, broker)} if group else set()
        return Told(queues, sorted(online))
    finally:
        await cluster.close()


async def _queues(cluster: Cluster, topic: str) -> tuple[Queue, ...]:
    try:
        return await cluster.queues(topic)
    except Unknown:
        return ()
