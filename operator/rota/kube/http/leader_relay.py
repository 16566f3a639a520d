"""A replica that stands by passes requests about groups on to the leader, which alone knows lag and members.

The Lease tells where the leader's page is and which certificate it serves. The request goes on with the user's own
credentials, so the leader decides what the user may read. Where that is not possible, the replica answers by itself:
the leader cannot be reached, or the user has logged in with a client certificate, which cannot be passed on.
"""

import asyncio
import ipaddress
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple, Self

import aiohttp
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from yarl import URL

from rota.http_server import AdmissionLimit, pass_on, release_connection

PAGE_URL = "rota.dev/page-url"  # an annotation of the Lease: where its holder serves the page
PAGE_CERTIFICATE = "rota.dev/page-certificate"  # and the SHA-256 of the certificate there; none without TLS
RELAYED: Final = "Rota-Relayed"  # a header of requests that were passed on: they are not passed on again
CONNECT_SECONDS = 2.0
HEAD_SECONDS = 5.0  # for the leader to begin its answer
RETRY_SECONDS = 5.0  # after a failure, in which this replica answers by itself
SILENT_SECONDS = 35.0  # events come at least every 15 s
MAX_RELAYED = 64  # requests at once; further ones are answered here
BUFFER_BYTES = 64 * 1024  # of an answer whose client reads slowly
PATH = "/v1/"
TYPES = {"application/json", "text/event-stream"}  # of answers that are passed on

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
    if address.is_unspecified or address.is_link_local or address.is_multicast:
        return None
    has_right_scheme = url.scheme == ("https" if has_tls else "http")
    if not has_right_scheme or bool(_SHA256.fullmatch(certificate)) is not has_tls:
        return None
    return LeaderPage(url.origin(), certificate)


class LeaderRelay:
    """Passes requests on; a context manager, which closes its connections."""

    def __init__(
        self, find_leader: Callable[[], LeaderPage | None], can_be_passed_on: Callable[[web.Request], bool]
    ) -> None:
        """`find_leader` returns None while this replica leads; `can_be_passed_on`: with its user's credentials."""
        self._find_leader = find_leader
        self._can_be_passed_on = can_be_passed_on
        self._admission = AdmissionLimit(MAX_RELAYED)
        self._failed: tuple[LeaderPage | None, float] = None, 0.0  # the leader that did not answer, and until when
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS),
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=(hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT),
            read_bufsize=BUFFER_BYTES,
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
        leader = self._leader_for(request)
        with self._admission.admit() as admitted:
            answer = await self._ask(request, leader) if leader and admitted else None
            if answer is not None:
                return await self._pass_on(request, answer)
        return await handler(request)

    def _leader_for(self, request: web.Request) -> LeaderPage | None:
        """Return the leader, if a request is for it."""
        is_about_groups = request.method == hdrs.METH_GET and request.path.startswith(PATH)
        if not is_about_groups or RELAYED in request.headers or not self._can_be_passed_on(request):
            return None
        leader, (failed, until) = self._find_leader(), self._failed
        return None if leader == failed and asyncio.get_running_loop().time() < until else leader

    async def _ask(self, request: web.Request, leader: LeaderPage) -> aiohttp.ClientResponse | None:
        """Return the beginning of the leader's answer; None if it gives none that can be passed on."""
        sent = [(name, it) for name in _REQUEST_HEADERS for it in request.headers.getall(name, ())]
        sent.append((RELAYED, "1"))
        url = leader.url.join(URL(request.rel_url.raw_path_qs, encoded=True))
        trust = _pinned(leader.certificate) if leader.certificate else True
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                answer = await self._session.get(url, headers=sent, ssl=trust, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._failed = leader, asyncio.get_running_loop().time() + RETRY_SECONDS
            return None
        if answer.content_type not in TYPES:
            answer.close()
            return None
        return answer

    async def _pass_on(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        async with answer:
            release_connection(request)
            try:
                return await pass_on(request, answer, _RESPONSE_HEADERS)
            except (aiohttp.ClientError, TimeoutError, OSError):  # the client's connection was closed
                raise ConnectionResetError from None


@lru_cache(maxsize=4)
def _pinned(certificate: str) -> aiohttp.Fingerprint:
    """Return the check of a certificate: the same object each time, by which aiohttp finds an open connection."""
    return aiohttp.Fingerprint(bytes.fromhex(certificate))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
