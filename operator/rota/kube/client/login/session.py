"""Sessions with the API server: one login for kopf and for the operator's own requests.

Requests carry credentials that are renewed in the background, and once more if the server rejects them.
"""

import asyncio
import logging
import math
import ssl
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from rota.http_client import describe_failure
from rota.kube.client.login.accounts import Account
from rota.kube.client.login.kubeconfig import LoginError

RENEW_SECONDS = 60.0  # after which the account is read again
RETRY_SECONDS = 5.0  # between two logins because the server rejected the credentials
VERIFY_SECONDS = 10.0
USER_AGENT: Final = f"rota/{version('rota-operator')}"
Headers = Sequence[tuple[str, str]]

_log = logging.getLogger(__name__)


class _Pool(RESTClientObject):  # type: ignore[misc] # its types are not read
    """The Kubernetes client's connections, for requests of our own."""

    def open_session(self) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = self._create_pool_manager()
        return session


class Login:
    """A login to one API server, with credentials that stay valid."""

    def __init__(self, account: Account, configuration: Configuration) -> None:
        self.server = configuration.host.rstrip("/")
        self.problem = ""  # why the credentials could not be renewed
        self._account, self._configuration = account, configuration
        self._pool = _make_pool(configuration)
        self._headers = _headers(account, configuration)
        self._origin = _origin(self.server)
        self._renewed_at = asyncio.get_running_loop().time()
        self._retried_at = -math.inf
        self._renewal: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, account: Account) -> Self:
        """Log in. Raise LoginError if the account cannot be used."""
        return cls(account, await account.configure())

    async def __aenter__(self) -> Self:
        """Do nothing yet: `begin` has logged in."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End a renewal that is under way."""
        if self._renewal:
            self._renewal.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewal

    def open_session(self, **settings: Any) -> aiohttp.ClientSession:
        """Return a session for requests to the API server. The caller closes it."""
        self._configuration.client_session_kwargs = {
            "trust_env": False,  # aiohttp would read .netrc and the environment before each request, in threads
            "proxy": self._configuration.proxy,
            "headers": {"User-Agent": USER_AGENT},
            "middlewares": (self._authorize,),
            **settings,
        }
        return self._pool.open_session()

    async def verify(self) -> None:
        """Make one request. Raise LoginError if it fails for a reason that a user has to remove.

        A server that does not respond is no such reason: it may come up later.
        """
        timeout = aiohttp.ClientTimeout(total=VERIFY_SECONDS)
        try:
            async with (
                self.open_session(timeout=timeout) as session,
                session.get(f"{self.server}/version", allow_redirects=False) as response,
            ):
                status = response.status
        except (aiohttp.ClientSSLError, aiohttp.ClientHttpProxyError, aiohttp.ClientProxyConnectionError) as error:
            raise LoginError(f"The API server {self.server} cannot be reached: {describe_failure(error)}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.warning("The API server %s does not respond: %s", self.server, describe_failure(error))
            return
        if status == HTTPStatus.UNAUTHORIZED:
            reason = f" ({self.problem})" if self.problem else ""
            raise LoginError(f"The API server {self.server} rejects the credentials{reason}; log in again")

    async def _authorize(self, request: aiohttp.ClientRequest, send: ClientHandlerType) -> aiohttp.ClientResponse:
        """Add the credentials to a request; if the server rejects them, renew them and send it once more."""
        url = request.url
        if (url.scheme, url.host, url.port) != self._origin:  # a redirect: another server must not get the token
            return await send(request)
        self._renew_in_background()
        headers = self._headers
        self._sign(request)
        response = await send(request)
        if response.status == HTTPStatus.UNAUTHORIZED and await self._renew_rejected(headers):
            response.release()
            self._sign(request)
            response = await send(request)
        return response

    def _sign(self, request: aiohttp.ClientRequest) -> None:
        for name in {name for name, _ in self._headers}:
            request.headers.popall(name, None)
        request.headers.extend(self._headers)
        if self._configuration.tls_server_name:
            request.server_hostname = self._configuration.tls_server_name

    def _renew_in_background(self) -> None:
        now = asyncio.get_running_loop().time()
        is_idle = self._renewal is None or self._renewal.done()
        if is_idle and now > self._renewed_at + RENEW_SECONDS:
            self._renewal = asyncio.create_task(self._renew(is_forced=False), name="login")

    async def _renew_rejected(self, rejected: Headers) -> bool:
        """Renew credentials that the server rejected; return whether there are others now."""
        now = asyncio.get_running_loop().time()
        if self._renewal:
            await asyncio.wait([self._renewal])
        if self._headers == rejected and now > self._retried_at + RETRY_SECONDS:
            self._retried_at = now
            self._renewal = asyncio.create_task(self._renew(is_forced=True), name="login")
            await asyncio.wait([self._renewal])
        return self._headers != rejected

    async def _renew(self, *, is_forced: bool) -> None:
        self._renewed_at = asyncio.get_running_loop().time()
        try:
            configuration = await self._account.configure(is_forced=is_forced)
            _load_certificate(self._pool.ssl_context, configuration)
        except LoginError as error:
            if self.problem != str(error):
                _log.warning("The credentials for the API server cannot be renewed: %s", error)
            self.problem = str(error)
            return
        self._headers = _headers(self._account, configuration)
        self.problem = ""


def _origin(server: str) -> tuple[str, str | None, int]:
    parts = urlsplit(server)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]


def _headers(account: Account, configuration: Configuration) -> Headers:
    token = configuration.api_key.get("BearerToken")
    return (*([("Authorization", token)] if token else []), *account.headers)


def _make_pool(configuration: Configuration) -> _Pool:
    configuration.disable_strict_ssl_verification = True  # as kubectl: many clusters' certificates lack an extension
    certificate, configuration.cert_file = configuration.cert_file, None
    try:
        pool = _Pool(configuration)
    except (OSError, ValueError) as error:
        authority = configuration.ssl_ca_cert
        raise LoginError(f"The cluster's certificate authority {authority} is no certificate: {error}") from error
    configuration.cert_file = certificate
    _load_certificate(pool.ssl_context, configuration)
    return pool


def _load_certificate(context: ssl.SSLContext, configuration: Configuration) -> None:
    """Use a client certificate from now on; connections that are open keep the one they have."""
    if not configuration.cert_file:
        return
    try:
        context.load_cert_chain(configuration.cert_file, configuration.key_file, password=lambda: "")
    except ssl.SSLError as error:
        said = error.reason or "they are not in PEM form"
        raise LoginError(f"The client certificate or its key cannot be used: {said}; correct the kubeconfig") from error
    except (OSError, ValueError, TypeError) as error:
        raise LoginError(
            f"The client certificate or its key cannot be read: {error}; correct the kubeconfig"
        ) from error
