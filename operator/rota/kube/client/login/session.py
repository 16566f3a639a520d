"""Sessions with the API server: kopf and the operator's own requests share one login.

An aiohttp middleware adds the credentials to each request. They are renewed in the background; after a 401 they are
renewed at once, and the request is sent again.
"""

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final, Self
from weakref import WeakSet

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from yarl import URL

from rota.aio import loop_time
from rota.http_client import describe_failure, is_redirect
from rota.kube.client.login.accounts import Account, LoginCredentials
from rota.kube.client.login.kubeconfig import LoginError
from rota.model import single_line
from rota.tls import KeyPair, load_key_pair

RENEW_SECONDS = 60.0  # after which the credentials are read again
RETRY_SECONDS = 5.0  # pause after a renewal that failed, or that followed a 401
VERIFY_SECONDS = 10.0  # time limit of the request that verifies a new login
REJECTED_MESSAGE: Final = "The API server rejects the credentials"
USER_AGENT: Final = f"rota/{version('rota-operator')}"

_log = logging.getLogger(__name__)


class _Pool(RESTClientObject):  # type: ignore[misc] # its types are not read
    """The TLS context and connection settings of the Kubernetes client, for aiohttp sessions of our own."""

    def open_session(self) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = self._create_pool_manager()
        return session


class Login:
    """A login to one API server, with credentials that stay valid."""

    def __init__(self, account: Account, credentials: LoginCredentials) -> None:
        self.server = credentials.server
        self.problem = ""  # set while the API server rejects the latest credentials
        self._account = account
        self._credentials = credentials
        self._pool = _make_pool(credentials)
        self._origin = URL(self.server).origin()
        self._sessions: WeakSet[aiohttp.ClientSession] = WeakSet()
        self._lock = asyncio.Lock()
        self._renewal: asyncio.Task[None] | None = None  # the last renewal in the background
        self._forced_renewal: asyncio.Task[None] | None = None  # the last renewal after a 401
        # On the event loop's clock: before these times, a request starts no background renewal, a 401 no forced one.
        self._renew_after = loop_time() + RENEW_SECONDS
        self._force_after = loop_time()  # RETRY_SECONDS after the last renewal that a 401 caused
        self._failure = ""  # why the last renewal failed; empty if it succeeded

    @classmethod
    async def create(cls, account: Account, *, may_use_terminal: bool = False) -> Self:
        """Log in. Raise LoginError if the account cannot be used."""
        credentials = await account.log_in(may_use_terminal=may_use_terminal)
        return cls(account, credentials)

    async def __aenter__(self) -> Self:
        """Return self; `create` has already logged in."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel renewals, and close sessions that were not closed."""
        tasks = [*filter(None, (self._renewal, self._forced_renewal))]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for session in list(self._sessions):
            await session.close()

    def connect(self, **settings: Any) -> "Connections":
        """Return connections for requests to the API server. The caller closes them."""
        return Connections(self, settings)

    def open_session(self, **settings: Any) -> aiohttp.ClientSession:
        """Return a session for requests to the API server. The caller closes it."""
        configuration: Configuration = self._pool.configuration
        configuration.client_session_kwargs = {
            "trust_env": False,  # aiohttp would read .netrc and the environment before each request, in threads
            "proxy": configuration.proxy,
            "headers": {"User-Agent": USER_AGENT},
            "middlewares": (partial(self._authorize, self._pool),),
            **settings,
        }
        session: aiohttp.ClientSession = self._pool.open_session()
        self._sessions.add(session)
        return session

    @property
    def headers(self) -> Mapping[str, str]:
        """The user's credentials as headers, for requests to a pod over a forwarded port."""
        return dict(self._credentials.headers)

    def pod_context(self) -> ssl.SSLContext:
        """Return TLS settings for connections to a pod over a forwarded port, with the user's client certificate.

        The pod's certificate is not verified: the API server forwards the port to this pod, and to no other server.
        """
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if self._credentials.certificate:
            _load_certificate(context, self._credentials.certificate)
        return context

    @property
    def pool(self) -> object:
        """The TLS context and connection settings; another object means that sessions must be replaced."""
        return self._pool

    async def verify(self) -> None:
        """Make one request. Raise LoginError for errors that only a user can correct; log an unreachable server."""
        timeout = aiohttp.ClientTimeout(total=None, connect=VERIFY_SECONDS, sock_read=VERIFY_SECONDS)
        connections = self.connect(timeout=timeout)
        try:
            async with connections.request("GET", f"{self.server}/version", allow_redirects=False) as response:
                status = response.status
                location = response.headers.get("Location", "")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = f"The API server {self.server} cannot be reached: {describe_failure(error)}"
            if _needs_correction(error):
                raise LoginError(reason) from error
            _log.warning("%s", reason)
            return
        finally:
            await connections.close()
        if status == HTTPStatus.UNAUTHORIZED:
            reason = f": {self._failure}" if self._failure else ""
            raise LoginError(f"The API server {self.server} rejects the credentials{reason}; log in again")
        if is_redirect(status):
            message = f"The API server {self.server} redirects to {single_line(location, 200)}"
            raise LoginError(f"{message}; configure that address instead")

    async def _authorize(
        self, pool: _Pool, request: aiohttp.ClientRequest, send: ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Add the credentials to a request of a session of `pool`; after a 401, renew them and send it once more.

        If the renewed login has another certificate, the pool is outdated, and the request is not sent again here:
        `Connections` sends it again by a session of the new pool.
        """
        if request.url.origin() != self._origin:  # kopf follows redirects: no other server may get the credentials
            raise aiohttp.ClientConnectionError(f"A redirect to {request.url.origin()} is not followed")
        self._renew_in_background()
        sent = self._credentials
        _add_credentials(request, sent)
        response = await send(request)
        try:
            if response.status == HTTPStatus.UNAUTHORIZED and await self._try_renewal(pool, sent):
                response.close()
                _add_credentials(request, self._credentials)
                response = await send(request)
        except BaseException:
            response.close()
            raise
        if response.status != HTTPStatus.UNAUTHORIZED:
            self.problem = ""
        elif self._pool is pool:
            self.problem = self._failure or REJECTED_MESSAGE
        return response

    async def _try_renewal(self, pool: _Pool, rejected: LoginCredentials) -> bool:
        """Renew the rejected credentials; return whether the login has others now that work with `pool`."""
        # The pool is compared twice: the renewal may replace it.
        return self._pool is pool and await self._renew_rejected(rejected) and self._pool is pool

    def _renew_in_background(self) -> None:
        is_idle = self._renewal is None or self._renewal.done()
        if is_idle and loop_time() > self._renew_after:
            self._renewal = asyncio.create_task(self._renew(is_forced=False), name="login")

    async def _renew_rejected(self, rejected: LoginCredentials) -> bool:
        """Renew rejected credentials, once for all requests that used them; return whether they are replaced now.

        - They are replaced already: return True at once.
        - A renewal after a 401 is under way: wait for it.
        - Otherwise, start one and wait for it, unless the last one ended within RETRY_SECONDS (`_force_after`).

        `_renew` keeps the object if the new credentials equal it: then the rejected ones are not replaced.
        """
        if self._credentials is rejected and (self._forced_renewal is None or self._forced_renewal.done()):
            if loop_time() < self._force_after:
                return False
            self._forced_renewal = asyncio.create_task(self._renew(is_forced=True), name="login after a 401")
        if self._forced_renewal and self._credentials is rejected:
            await asyncio.wait([self._forced_renewal])
        return self._credentials is not rejected

    async def _renew(self, *, is_forced: bool) -> None:
        """Log in again. If that fails, the old credentials stay."""
        async with self._lock:
            try:
                credentials = await self._account.log_in(is_forced=is_forced)
                if credentials.connection_settings != self._credentials.connection_settings:
                    self._pool = _make_pool(credentials)
                if credentials != self._credentials:  # if equal, keep the object: `_renew_rejected` compares identity
                    self._credentials = credentials
                self._failure = ""
            except LoginError as error:
                if self._failure != str(error):
                    _log.warning("The credentials for the API server cannot be renewed: %s", error)
                self._failure = str(error)
            except Exception:  # noqa: BLE001 - after any error the operator continues with the old credentials
                _log.exception("The credentials for the API server cannot be renewed")
                self._failure = "An unexpected error; see the log"
            self._renew_after = loop_time() + (RETRY_SECONDS if self._failure else RENEW_SECONDS)
            if is_forced:
                self._force_after = loop_time() + RETRY_SECONDS


class RenewedSession:
    """A session that is replaced when the login gets a new certificate; requests on the old session are completed.

    `close` closes open responses first: when only the session is closed, aiohttp does not wake the tasks that read a
    response, and they would wait for ever.
    """

    def __init__(self, login: Login, open_session: Callable[[], aiohttp.ClientSession]) -> None:
        self._login = login
        self._open_session = open_session
        self._pool = login.pool
        self._session = open_session()
        self._open_requests: Counter[aiohttp.ClientSession] = Counter()
        self._open_responses: set[aiohttp.ClientResponse] = set()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield the session for the next request; an outdated one is closed after its last request."""
        if self._login.pool is not self._pool:
            outdated = self._session
            self._session = self._open_session()
            self._pool = self._login.pool
            await self._close_unused(outdated)
        session = self._session
        self._open_requests[session] += 1
        try:
            yield session
        finally:
            self._open_requests[session] -= 1
            await self._close_unused(session)

    @asynccontextmanager
    async def request(
        self, method: str, url: str | URL, **options: Any
    ) -> AsyncIterator[tuple[aiohttp.ClientSession, aiohttp.ClientResponse]]:
        """Send a request; yield the session that sent it, and the response."""
        async with self.use() as session, session.request(method, url, **options) as response:
            self._open_responses.add(response)
            try:
                yield session, response
            finally:
                self._open_responses.discard(response)

    def is_outdated(self, session: aiohttp.ClientSession) -> bool:
        """Whether the next request will use another session."""
        return session is not self._session or self._login.pool is not self._pool

    async def _close_unused(self, session: aiohttp.ClientSession) -> None:
        if session is not self._session and self._open_requests[session] <= 0:
            del self._open_requests[session]
            await session.close()

    async def close(self) -> None:
        """Close all sessions and open responses."""
        for response in self._open_responses:
            response.close()
        for session in {*self._open_requests, self._session}:
            await session.close()


class Connections:
    """Sends requests; a request that gets a 401 is sent once more if the login has a new certificate by then."""

    def __init__(self, login: Login, settings: dict[str, Any]) -> None:
        self._session = RenewedSession(login, partial(login.open_session, **settings))

    @asynccontextmanager
    async def request(self, method: str, url: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield the response."""
        async with self._session.request(method, url, **options) as (session, response):
            if response.status != HTTPStatus.UNAUTHORIZED or not self._session.is_outdated(session):
                yield response
                return
        async with self._session.request(method, url, **options) as (_, response):
            yield response

    @asynccontextmanager
    async def websocket(self, url: str, **options: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket."""
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(self._session.use())
            try:
                websocket = await stack.enter_async_context(session.ws_connect(url, **options))
            except aiohttp.WSServerHandshakeError as error:
                if error.status != HTTPStatus.UNAUTHORIZED or not self._session.is_outdated(session):
                    raise
                session = await stack.enter_async_context(self._session.use())
                websocket = await stack.enter_async_context(session.ws_connect(url, **options))
            yield websocket

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _add_credentials(request: aiohttp.ClientRequest, credentials: LoginCredentials) -> None:
    for name in [*request.headers]:
        if name == "Authorization" or name.startswith("Impersonate-"):
            request.headers.popall(name, None)
    request.headers.extend(credentials.headers)
    if server_name := credentials.configuration.tls_server_name:
        request.server_hostname = server_name


def _needs_correction(error: Exception) -> bool:
    """Whether a request failed because of TLS, the URL or the proxy, and not because a server is down."""
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, aiohttp.ClientSSLError | aiohttp.ClientProxyConnectionError | ValueError)


def _make_pool(credentials: LoginCredentials) -> _Pool:
    configuration = credentials.configuration
    configuration.disable_strict_ssl_verification = True  # as kubectl: many clusters' certificates lack an extension
    try:
        pool = _Pool(configuration)
    except (OSError, ValueError) as error:
        raise LoginError("The cluster's certificate authority is not a PEM certificate; correct it") from error
    if credentials.certificate:
        _load_certificate(pool.ssl_context, credentials.certificate)
    return pool


def _load_certificate(context: ssl.SSLContext, certificate: KeyPair) -> None:
    try:
        load_key_pair(context, certificate)
    except ValueError as error:
        raise LoginError(f"The client certificate or its key cannot be used: {error}; correct it") from error
