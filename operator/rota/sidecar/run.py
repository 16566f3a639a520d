"""A sidecar from its start to its end: what it is made of, the signals it heeds, and how it leaves."""

import asyncio
import logging
import signal
import ssl
from collections.abc import Mapping
from pathlib import Path

from rota.brokers import Consumer, Membership
from rota.brokers.rocketmq.acl import Credentials
from rota.brokers.rocketmq.client import Site
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.sidecar import pull
from rota.sidecar.environment import Who
from rota.sidecar.modes import Modes
from rota.sidecar.page import PORT, Page
from rota.sidecar.shell import Sidecar
from rota.sidecar.sources import Connect
from rota.spec import RocketMQ
from rota.spec.resolved import Settings

_log = logging.getLogger(__name__)


async def serve(variables: Mapping[str, str]) -> None:
    """Be the sidecar of the pod that the variables tell of, until SIGTERM."""
    who = Who.read(variables)
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    await work(who, to_rocketmq(who), ending)


async def work(who: Who, connect: Connect, ending: asyncio.Event, port: int = PORT, pull_port: int = pull.PORT) -> None:
    """Work as a member until told to end; the second port is opened where the app asks for messages."""
    sidecar = Sidecar(who, connect, lambda shell: Modes(shell, who.local, pull_port))
    page = await Page(sidecar).serve(who.address, port)
    _log.info("The sidecar of %s/%s answers at %s, port %d", who.namespace, who.pod, who.address, port)
    try:
        await sidecar.run(ending)
    finally:
        await page.cleanup()


def to_rocketmq(who: Who) -> Connect:
    """Return what makes a consumer, let in by what is mounted; what cannot be read there is a sentence."""

    def connect(settings: Settings, membership: Membership) -> Consumer:
        return RocketMQConsumer(site(who, settings.broker.rocketmq), membership)

    return connect


def site(who: Who, rocketmq: RocketMQ) -> Site:
    """Return where brokers are, and what lets one in there."""
    tls = _tls(who.authorities) if rocketmq.tls.enabled else None
    return Site(rocketmq.name_servers, tls, _credentials(who.credentials))


def _credentials(folder: str) -> Credentials | None:
    if not folder:
        return None
    try:
        return Credentials(*(Path(folder, name).read_text().strip() for name in ("accessKey", "secretKey")))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The credentials in {folder} cannot be read: {error}; mend the Secret") from None


def _tls(folder: str) -> ssl.SSLContext:
    """Return how to be sure who answers: by the group's own authority, or else by those that the image knows."""
    try:
        return ssl.create_default_context(cafile=str(Path(folder, "ca.crt")) if folder else None)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ValueError(f"There is no certificate in {folder}/ca.crt: {error}; put one there in PEM") from None
