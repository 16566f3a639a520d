"""HTTP requests to the operator's leading pod over a forwarded port, with the user's credentials.

The API server's proxy would remove the credentials, and the operator shows users only what they have permission to see.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import NamedTuple, Self

import aiohttp
from yarl import URL

from rota.cli.client.forward import LOOPBACK_ADDRESS, PortForward, describe_forward_failure, forward_port
from rota.cli.client.requests import MAX_RESPONSE_BYTES, NoConnectionError
from rota.http_client import describe_failure, read_body
from rota.kube.client.api import Api
from rota.kube.client.login.session import Login, RenewedSession

OPERATOR_PORT = 8080
CONNECT_TIMEOUT_SECONDS = 10.0
READ_TIMEOUT_SECONDS = 60.0  # longer than 15 s, the interval at which the page's event stream keeps alive


class PodConnection(NamedTuple):
    """A forwarded port of a pod, and the session for requests through it."""

    pod: str
    forward: PortForward
    session: RenewedSession


class PodHttpClient:
    """Sends requests to the leading pod over one forwarded port, which is replaced when another pod leads.

    `RenewedSession` opens a new session after a renewal of the user's client certificate; requests on the old one are
    completed.
    """

    def __init__(self, api: Api, login: Login, namespace: str) -> None:
        self._api = api
        self._login = login
        self._namespace = namespace
        self._exit_stack = AsyncExitStack()
        self._connection: PodConnection | None = None
        self._connect_lock = asyncio.Lock()  # requests of `rota page` arrive concurrently

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit_stack.aclose()

    async def fetch_body(self, pod: str, path: str, params: Mapping[str, str]) -> tuple[int, bytes]:
        """Send an authenticated request, and return the status and the whole body of the response."""
        async with self.open_response(pod, str(URL.build(path=path, query=params))) as response:
            return response.status, await read_body(response, MAX_RESPONSE_BYTES)

    @asynccontextmanager
    async def open_response(
        self,
        pod: str,
        path_and_query: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        is_secure: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield the response, whose body is not read yet.

        `is_secure`: over TLS and with the user's credentials; False for an operator that does not authenticate users.
        """
        async with self._connect_lock:
            connection = await self._connect(pod)
        forward = connection.forward
        origin = f"{'https' if is_secure else 'http'}://{LOOPBACK_ADDRESS}:{forward.local_port}"
        url = URL(f"{origin}{path_and_query}", encoded=True)
        all_headers = {**headers, **(self._login.headers if is_secure else {})}
        try:
            request = connection.session.request("GET", url, headers=all_headers, allow_redirects=False)
            async with request as (_session, response):
                yield response
        # Also errors while the caller reads the body. RuntimeError: the session was closed, because another request
        # connected to the next leader.
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RuntimeError) as error:
            problem = forward.problem or describe_failure(error)
            raise NoConnectionError(describe_forward_failure(problem, self._namespace, pod)) from None

    async def _connect(self, pod: str) -> PodConnection:
        """Return the connection to a pod; if it is a new one, close the connection to the previous pod first.

        Raise NoConnectionError if no port of this machine can be forwarded.
        """
        if self._connection and self._connection.pod == pod:
            return self._connection
        self._connection = None  # set first, so that the next request connects again if one of the next steps fails
        await self._exit_stack.aclose()
        try:
            forwarding = forward_port(self._api, self._namespace, pod, OPERATOR_PORT)
            forward = await self._exit_stack.enter_async_context(forwarding)
        except OSError as error:
            problem = f"No port of this machine can be forwarded to pod {pod}: {error.strerror or error}; try again"
            raise NoConnectionError(problem) from None
        session = RenewedSession(self._login, self._open_session)
        self._exit_stack.push_async_callback(session.close)
        self._connection = PodConnection(pod, forward, session)
        return self._connection

    def _open_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self._login.pod_context())
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_SECONDS, sock_read=READ_TIMEOUT_SECONDS)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
