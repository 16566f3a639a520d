"""A sidecar from its start to its end: what it is made of, the signals it heeds, and how it leaves."""

import asyncio
import logging
import signal
from collections.abc import Mapping

from rota.brokers import Consumer, Membership
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.sidecar import pull
from rota.sidecar.access import Access
from rota.sidecar.environment import Who
from rota.sidecar.modes import Modes
from rota.sidecar.page import PORT, Page
from rota.sidecar.shell import Sidecar
from rota.sidecar.sources import Connect
from rota.spec.resolved import Settings

_log = logging.getLogger(__name__)


async def serve(variables: Mapping[str, str]) -> None:
    """Be the sidecar of the pod that the variables tell of, until SIGTERM."""
    who = Who.read(variables)
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    access = Access(who)
    renewing = asyncio.create_task(access.renew())
    try:
        await work(who, to_rocketmq(access), ending)
    finally:
        renewing.cancel()


async def work(who: Who, connect: Connect, ending: asyncio.Event, port: int = PORT, pull_port: int = pull.PORT) -> None:
    """Work as a member until told to end; the second port is opened where the app asks for messages."""
    sidecar = Sidecar(
        who, connect, lambda shell: Modes(shell, who.local, pull_port, shares_node_network=who.shares_node_network)
    )
    page = await Page(sidecar).serve(who.address, port)
    _log.info("The sidecar of %s/%s answers at %s, port %d", who.namespace, who.pod, who.address, port)
    try:
        await sidecar.run(ending)
    finally:
        await page.cleanup()


def to_rocketmq(access: Access) -> Connect:
    """Return what makes a consumer, let in by what is mounted; what cannot be read there is a sentence."""

    def connect(settings: Settings, membership: Membership) -> Consumer:
        return RocketMQConsumer(access.site(settings.broker.rocketmq), membership)

    return connect
