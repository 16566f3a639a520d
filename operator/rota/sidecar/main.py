"""Lifecycle of a sidecar process: creates its parts, handles signals and shuts down."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, chdir, suppress
from pathlib import Path

from rota.aio import supervise
from rota.brokers.port import Consumer, Membership
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.sidecar import prestop
from rota.sidecar.agent import Agent
from rota.sidecar.consume.broker_session import Connect
from rota.sidecar.delivery import pull
from rota.sidecar.delivery.switch import DeliverySwitch
from rota.sidecar.status.control_api import ControlApi, KeyFiles
from rota.sidecar.status.http_api import PORT, StatusApi
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.secret_files import SecretFiles
from rota.spec.resolved import GroupSettings
from rota.tls import Validity

_log = logging.getLogger(__name__)


async def serve(variables: Mapping[str, str]) -> None:
    """Run the sidecar of the pod that the environment variables describe, until SIGTERM or SIGINT."""
    pod = PodIdentity.from_environment(variables)
    stop_requested = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    secret_files = SecretFiles(pod)
    renewing = asyncio.create_task(supervise("Secrets", secret_files.renew_periodically))
    try:
        await run_member(
            pod, rocketmq_connector(secret_files), stop_requested, client_validity=secret_files.client_validity
        )
    finally:
        renewing.cancel()


async def run_member(
    pod: PodIdentity,
    connect: Connect,
    stop_requested: asyncio.Event,
    port: int = PORT,
    pull_port: int = pull.PORT,
    *,
    client_validity: Callable[[], Validity | None] = lambda: None,
) -> None:
    """Run as a member of the group until `stop_requested` is set.

    The Pull port is opened if the delivery mode is Pull, the control port if the pod mounts a key.
    """
    agent = Agent(
        pod,
        connect,
        lambda host: DeliverySwitch(host, pod.app_host, pull_port, shares_node_network=pod.shares_node_network),
        client_validity,
    )
    control = ControlApi(agent, KeyFiles(pod.key_folder) if pod.key_folder else None)
    async with AsyncExitStack() as serving:
        status_api = await StatusApi(agent, control).serve(pod.address, port)
        serving.push_async_callback(status_api.cleanup)
        if control.is_signed:
            serving.push_async_callback((await control.serve(pod.address)).cleanup)
        if pod.hook_folder:
            await serving.enter_async_context(await _listen_for_hook(agent, pod.hook_folder))
        _log.info("The sidecar of %s/%s listens on %s, port %d", pod.namespace, pod.name, pod.address, port)
        await agent.run(stop_requested)


async def _listen_for_hook(agent: Agent, folder: str) -> asyncio.Server:
    """Start a drain when the pod's preStop hook connects; answer it once the drain has started.

    The hook must not succeed before: without an answer it fails, and the kubelet reports that no drain was started.
    """

    async def start_drain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not agent.pod_drain_started.is_set():
            agent.host.start_task(agent.drain())
        with suppress(ConnectionError):
            await agent.pod_drain_started.wait()
            writer.write(b".")
            await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(start_drain, sock=_bind_hook_socket(folder))


def _bind_hook_socket(folder: str) -> socket.socket:
    """Bind the hook's socket by its relative name: the path of a Unix socket has at most 107 characters."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with chdir(folder):
            Path(prestop.SOCKET_NAME).unlink(missing_ok=True)  # left by an earlier container of this pod
            listener.bind(prestop.SOCKET_NAME)
    except OSError as error:
        listener.close()
        reason = f"The preStop hook's socket cannot be created in {folder}: {error.strerror}"
        raise ValueError(f"{reason}; mount an emptyDir there") from None
    return listener


def rocketmq_connector(secret_files: SecretFiles) -> Connect:
    """Return a function that creates consumers with the mounted credentials; ValueError if they cannot be read."""

    def connect(settings: GroupSettings, membership: Membership) -> Consumer:
        return RocketMQConsumer(secret_files.connection_config(settings.broker.rocketmq), membership)

    return connect
