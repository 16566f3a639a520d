"""Port forwarding to a pod through the API server, as `kubectl port-forward` does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import aiohttp

from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.paths import port_forward_path
from rota.model import single_line

LOOPBACK_ADDRESS = "127.0.0.1"
# Each message starts with the number of its channel; the first message on each channel has the port after that.
SUBPROTOCOL = "v4.channel.k8s.io"
DATA_CHANNEL = 0
ERROR_CHANNEL = 1
PORT_BYTES = 2  # length of the port
CHUNK_BYTES = 32 * 1024


class PortForward:
    """Forwards connections from a port of this machine to a port of a pod."""

    def __init__(self, api: Api, namespace: str, pod: str, port: int) -> None:
        self.problem: Exception | str = ""  # the reason why the last connection could not be forwarded
        self.local_port = 0
        self._api = api
        self._path = port_forward_path(namespace, pod)
        self._port = port

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until one side closes it; a failure is stored in `problem`."""
        self.problem = ""
        try:
            async with self._api.websocket(self._path, {"ports": str(self._port)}, SUBPROTOCOL) as websocket:
                sending = asyncio.create_task(_forward_to_pod(reader, websocket), name="port-forward")
                try:
                    await self._forward_from_pod(websocket, writer)
                finally:
                    sending.cancel()
                    await asyncio.wait([sending])
        except (ApiError, NoResponseError) as error:
            self.problem = error
        except ConnectionError:  # the client has disconnected
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _forward_from_pod(self, websocket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
        started_channels: set[int] = set()
        async for message in websocket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                break
            channel = message.data[0]
            content = message.data[1:]
            if channel not in started_channels:  # its first message
                started_channels.add(channel)
                content = content[PORT_BYTES:]
            if channel == DATA_CHANNEL:
                writer.write(content)
                await writer.drain()
            elif channel == ERROR_CHANNEL and content:
                self.problem = single_line(content.decode(errors="replace"), 300)


async def _forward_to_pod(reader: asyncio.StreamReader, websocket: aiohttp.ClientWebSocketResponse) -> None:
    with suppress(ConnectionError, aiohttp.ClientError):
        while content := await reader.read(CHUNK_BYTES):
            await websocket.send_bytes(bytes([DATA_CHANNEL]) + content)
        await websocket.close()


@asynccontextmanager
async def forward_port(api: Api, namespace: str, pod: str, port: int) -> AsyncIterator[PortForward]:
    """Forward connections from a free port on loopback."""
    forward = PortForward(api, namespace, pod, port)
    connections: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(forward.forward(reader, writer), name="port-forward")
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, LOOPBACK_ADDRESS, 0)
    _, forward.local_port = server.sockets[0].getsockname()
    try:
        yield forward
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def describe_forward_failure(problem: Exception | str, namespace: str, pod: str) -> str:
    """Return the sentence for a connection that could not be forwarded."""
    if isinstance(problem, ApiError) and problem.status == HTTPStatus.FORBIDDEN:
        permission = f"ask for get and create on pods/portforward in namespace {namespace}"
        return f"You have no permission to connect to the leading pod {pod}; {permission}"
    if isinstance(problem, ApiError) and problem.is_not_found:
        return f"Pod {pod} does not exist in namespace {namespace}; wait until another pod becomes leader"
    return f"Pod {pod} in namespace {namespace} cannot be reached: {problem or 'it closed the connection'}; try again"
