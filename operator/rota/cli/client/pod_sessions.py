"""HTTP requests to a pod over a forwarded port, with the user's credentials."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import Self

import aiohttp
from yarl import URL

from rota.cli.client.forward import LOOPBACK, PortForward, forward_port, why_not_forwarded
from rota.cli.client.requests import MOST, InvalidResponseError
from rota.http_client import describe_failure, read_body
from rota.kube.client.api import Api
from rota.kube.client.login.session import Login

PORT = 8080
CONNECT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # the page receives events at least every 15 s
OTHERWISE = "or give --operator with its address"


class PodSessions:
    """A connection to the leading pod; it is replaced when another pod leads."""

    def __init__(self, api: Api, login: Login, namespace: str) -> None:
        self._api = api
        self._login = login
        self._namespace = namespace
        self._connection = AsyncExitStack()
        self._forward: PortForward | None = None
        self._session: aiohttp.ClientSession | None = None
        self._pod = ""
        self._connecting = asyncio.Lock()  # requests of `rota page` arrive concurrently

    async def __aenter__(self) -> Self:
        """Return without connecting; the first request connects."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        await self._connection.aclose()

    async def read(self, pod: str, path: str, params: Mapping[str, str]) -> tuple[int, bytes]:
        """Send an authenticated request, and return the status and body of the response."""
        async with self.get(pod, str(URL.build(path=path, query=params))) as response:
            return response.status, await read_body(response, MOST)

    @asynccontextmanager
    async def get(
        self,
        pod: str,
        path_and_query: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        is_secure: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; if `is_secure`, over TLS and with the user's credentials."""
        async with self._connecting:
            forward, session = await self._connect(pod)
        url = URL(f"{'https' if is_secure else 'http'}://{LOOPBACK}:{forward.local_port}{path_and_query}", encoded=True)
        sent = {**headers, **(self._login.headers if is_secure else {})}
        try:
            async with session.get(url, headers=sent, allow_redirects=False) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RuntimeError) as error:  # or it was closed
            problem = forward.problem or describe_failure(error)
            raise InvalidResponseError(f"{why_not_forwarded(problem, self._namespace, pod)}, {OTHERWISE}") from None

    async def _connect(self, pod: str) -> tuple[PortForward, aiohttp.ClientSession]:
        if self._forward is None or self._session is None or self._pod != pod:
            await self._connection.aclose()
            connection = forward_port(self._api, self._namespace, pod, PORT)
            self._forward = await self._connection.enter_async_context(connection)
            connector = aiohttp.TCPConnector(ssl=self._login.pod_context())
            timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
            self._session = await self._connection.enter_async_context(session)
            self._pod = pod
        return self._forward, self._session
