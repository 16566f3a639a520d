"""A replica that stands by passes requests about groups on to the leader, which alone knows lag and members.

The Lease tells where the leader's page is and which certificate it serves. The request goes on with the user's own
credentials, so the leader decides what the user may read. Where that is not possible, the replica answers by itself:
the leader cannot be reached, or the user has logged in with a client certificate, which cannot be passed on.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Self

import aiohttp
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from yarl import URL

from rota.http_server import pass_on, release_connection

PAGE_URL = "rota.dev/page-url"  # an annotation of the Lease: where its holder serves the page
PAGE_CERTIFICATE = "rota.dev/page-certificate"  # and the SHA-256 of the certificate there; none without TLS
RELAYED: Final = "Rota-Relayed"  # a header of requests that were passed on: they are not passed on again
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 60.0  # events come at least every 15 s
PATH = "/v1/"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_REQUEST_HEADERS = (
    hdrs.ACCEPT,
    hdrs.ACCEPT_ENCODING,
    hdrs.AUTHORIZATION,
    "Impersonate-User",
    "Impersonate-Group",
    "Impersonate-Uid",
)
_RESPONSE_HEADERS = (
    hdrs.ALLOW,
    hdrs.CACHE_CONTROL,
    hdrs.CONTENT_ENCODING,
    hdrs.CONTENT_TYPE,
    "Content-Security-Policy",
    "Referrer-Policy",
    hdrs.VARY,
    hdrs.WWW_AUTHENTICATE,
    "X-Content-Type-Options",
)


class LeaderPage(NamedTuple):
    """Where the leader's page is."""

    url: URL
    certificate: str  # its SHA-256 in hexadecimal; empty without TLS


def announce(address: str, port: int, certificate: str) -> dict[str, str]:
    """Return the annotations that tell where this process serves the page; none if that is no single address."""
    found = _address(address)
    if found is None or found.is_unspecified:
        return {}
    url = URL.build(scheme="https" if certificate else "http", host=address, port=port)
    return {PAGE_URL: str(url)} | ({PAGE_CERTIFICATE: certificate} if certificate else {})


def leader_page(annotations: Mapping[str, str], own_address: str, *, has_tls: bool) -> LeaderPage | None:
    """Return where the page of the Lease's holder is; None if the Lease does not tell, or it is no page like ours.

    A page like ours has TLS if ours has it, so tokens are sent nowhere else. Its address is a loopback address only if
    ours is: of another machine's loopback address nothing can be said.
    """
    certificate = annotations.get(PAGE_CERTIFICATE, "")
    try:
        url = URL(annotations.get(PAGE_URL, ""))
    except ValueError:
        return None
    address, own = _address(url.host or ""), _address(own_address)
    if address is None or own is None or address.is_loopback is not own.is_loopback:
        return None
    has_right_scheme = url.scheme == ("https" if has_tls else "http")
    if not has_right_scheme or bool(_SHA256.fullmatch(certificate)) is not has_tls:
        return None
    return LeaderPage(url.origin(), certificate)


class LeaderRelay:
    """Passes requests on; a context manager, which closes its connections."""

    def __init__(self, find_leader: Callable[[], LeaderPage | None], *, needs_token: bool) -> None:
        """`find_leader` returns None while this replica leads; `needs_token`: the leader authenticates users."""
        self._find_leader = find_leader
        self._needs_token = needs_token
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
        self._session = aiohttp.ClientSession(
            timeout=timeout, trust_env=False, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def __aenter__(self) -> Self:
        """Connect when there is a request."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._session.close()

    @web.middleware
    async def pass_on(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Have the leader answer a request about groups; answer it here if that is not possible."""
        if self._may_be_passed_on(request) and (leader := self._find_leader()):
            try:
                return await self._relay(request, leader)
            except (aiohttp.ClientError, TimeoutError, OSError):
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError from None  # the head of the leader's answer was sent already
        return await handler(request)

    def _may_be_passed_on(self, request: web.Request) -> bool:
        is_about_groups = request.method == hdrs.METH_GET and request.path.startswith(PATH)
        has_token = hdrs.AUTHORIZATION in request.headers
        return is_about_groups and RELAYED not in request.headers and (has_token or not self._needs_token)

    async def _relay(self, request: web.Request, leader: LeaderPage) -> web.StreamResponse:
        sent = [(name, it) for name in _REQUEST_HEADERS for it in request.headers.getall(name, ())]
        sent.append((RELAYED, "1"))
        url = leader.url.join(URL(request.rel_url.raw_path_qs, encoded=True))
        trust = aiohttp.Fingerprint(bytes.fromhex(leader.certificate)) if leader.certificate else True
        async with self._session.get(url, headers=sent, ssl=trust, allow_redirects=False) as answer:
            release_connection(request)
            return await pass_on(request, answer, _RESPONSE_HEADERS)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
