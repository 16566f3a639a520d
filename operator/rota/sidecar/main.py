"""A sidecar from its start to its end: what it is made of, the signals it heeds, and how it leaves."""

import asyncio
import logging
import signal
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack, chdir, suppress
from pathlib import Path

from rota.aio import supervise
from rota.brokers.port import Consumer, Membership
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.sidecar import prestop
from rota.sidecar.agent import Sidecar
from rota.sidecar.consume.broker_session import Connect
from rota.sidecar.delivery import pull
from rota.sidecar.delivery.switch import Modes
from rota.sidecar.status.control_api import Control, KeyFiles
from rota.sidecar.status.http_api import PORT, Page
from rota.sidecar.storage.environment import Who
from rota.sidecar.storage.secret_files import Access
from rota.spec.resolved import Settings

_log = logging.getLogger(__name__)


async def serve(variables: Mapping[str, str]) -> None:
    """Be the sidecar of the pod that the variables tell of, until SIGTERM."""
    who = Who.read(variables)
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    access = Access(who)
    renewing = asyncio.create_task(supervise("Secrets", access.renew))
    try:
        await work(who, to_rocketmq(access), ending)
    finally:
        renewing.cancel()


async def work(who: Who, connect: Connect, ending: asyncio.Event, port: int = PORT, pull_port: int = pull.PORT) -> None:
    """Work as a member until told to end.

    The Pull port is opened where the app asks for messages, the control port where the pod mounts a key.
    """
    sidecar = Sidecar(
        who, connect, lambda shell: Modes(shell, who.local, pull_port, shares_node_network=who.shares_node_network)
    )
    control = Control(sidecar, KeyFiles(who.key) if who.key else None)
    async with AsyncExitStack() as serving:
        page = await Page(sidecar, control).serve(who.address, port)
        serving.push_async_callback(page.cleanup)
        if control.is_signed:
            serving.push_async_callback((await control.serve(who.address)).cleanup)
        if who.run:
            await serving.enter_async_context(await _listen_for_hook(sidecar, who.run))
        _log.info("The sidecar of %s/%s answers at %s, port %d", who.namespace, who.pod, who.address, port)
        await sidecar.run(ending)


async def _listen_for_hook(sidecar: Sidecar, folder: str) -> asyncio.Server:
    """Drain when the pod's preStop hook connects."""

    async def begin(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not sidecar.ends.is_set():
            sidecar.start(sidecar.drain())
        with suppress(ConnectionError):
            await sidecar.ends.wait()
            writer.write(b".")
            await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(begin, sock=_bound_in(folder))


def _bound_in(folder: str) -> socket.socket:
    """Bind the hook's socket, by its relative name: a socket's path has at most 107 characters."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        with chdir(folder):
            Path(prestop.SOCKET).unlink(missing_ok=True)  # of a container that was started before in this pod
            bound.bind(prestop.SOCKET)
    except OSError as error:
        bound.close()
        raise ValueError(f"No socket can be bound in {folder}: {error.strerror}; mount an emptyDir there") from None
    return bound


def to_rocketmq(access: Access) -> Connect:
    """Return what makes a consumer, let in by what is mounted; what cannot be read there is a sentence."""

    def connect(settings: Settings, membership: Membership) -> Consumer:
        return RocketMQConsumer(access.site(settings.broker.rocketmq), membership)

    return connect
