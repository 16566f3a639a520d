"""Relays requests about groups from a standby replica to the leader, which alone has lag and members' reports.

The Lease has the address of the leader's page and the digest of its certificate. The request is forwarded with the
user's own credentials, so the leader checks the user's rights. The replica responds by itself if the leader is
unreachable, or if the user has logged in with a client certificate, which cannot be forwarded.
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

from rota.aio import loop_time
from rota.http_server import AdmissionLimit, forward_response, release_connection

PAGE_URL_ANNOTATION = "rota.dev/page-url"  # annotation of the Lease: the URL of its holder's page
# Annotation of the Lease: SHA-256 of that page's certificate; absent without TLS.
PAGE_CERTIFICATE_ANNOTATION = "rota.dev/page-certificate"
RELAYED_HEADER: Final = "Rota-Relayed"  # header of relayed requests, which are not relayed again
CONNECT_SECONDS = 2.0
HEAD_SECONDS = 5.0  # deadline for the head of the leader's response
RETRY_SECONDS = 5.0  # for this time after a failed request to the leader, this replica responds by itself
MAX_SILENCE_SECONDS = 35.0  # between two parts of a response; event streams have a part at least every 15 s
MAX_RELAYED_REQUESTS = 64  # concurrent requests; this replica responds to further ones
BUFFER_BYTES = 64 * 1024  # read ahead from the leader while the client reads slowly
RELAYED_PATH_PREFIX = "/v1/"
RELAYED_CONTENT_TYPES = {"application/json", "text/event-stream"}  # of responses that are relayed

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
    hdrs.RETRY_AFTER,
    hdrs.VARY,
    hdrs.WWW_AUTHENTICATE,
    "X-Content-Type-Options",
)


class LeaderPage(NamedTuple):
    """The address of the leader's page, and how to recognise it."""

    url: URL
    certificate_digest: str  # its SHA-256 in hexadecimal; empty without TLS


def page_annotations(address: str, port: int, certificate_digest: str) -> dict[str, str]:
    """Return the Lease's annotations for this process's page; empty if `address` is not one specific IP address."""
    ip_address = _parse_address(address)
    if ip_address is None or ip_address.is_unspecified:
        return {}
    url = URL.build(scheme="https" if certificate_digest else "http", host=address, port=port)
    annotations = {PAGE_URL_ANNOTATION: str(url)}
    if certificate_digest:
        annotations[PAGE_CERTIFICATE_ANNOTATION] = certificate_digest
    return annotations


def parse_leader_page(annotations: Mapping[str, str], own_address: str, *, has_tls: bool) -> LeaderPage | None:
    """Return the address of the page of the Lease's holder; None if it is missing, invalid, or not to be trusted.

    The leader's page must use TLS exactly if this replica's page does, so that tokens are never sent without it. It may
    have a loopback address only if this replica's page has one: the leader may run on another machine.
    """
    certificate_digest = annotations.get(PAGE_CERTIFICATE_ANNOTATION, "")
    try:
        url = URL(annotations.get(PAGE_URL_ANNOTATION, ""))
    except ValueError:
        return None
    leader_has_tls = bool(_SHA256.fullmatch(certificate_digest))
    if url.scheme != ("https" if has_tls else "http") or leader_has_tls is not has_tls:
        return None
    address = _parse_address(url.host or "")
    own = _parse_address(own_address)
    if address is None or own is None or address.is_loopback is not own.is_loopback:
        return None
    names_one_machine = not (address.is_unspecified or address.is_link_local or address.is_multicast)
    return LeaderPage(url.origin(), certificate_digest) if names_one_machine else None


class LeaderRelay:
    """Relays requests to the leader; a context manager, which closes its connections."""

    def __init__(self, find_leader: Callable[[], LeaderPage | None], may_relay: Callable[[web.Request], bool]) -> None:
        """`find_leader` returns None while this replica leads; `may_relay` checks a request's credentials."""
        self._find_leader = find_leader
        self._may_relay = may_relay
        self._admission = AdmissionLimit(MAX_RELAYED_REQUESTS)
        # The leader that did not respond, and when to ask it again, on the event loop's clock.
        self._failed_leader: tuple[LeaderPage | None, float] = (None, 0.0)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=MAX_SILENCE_SECONDS),
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=(hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT),
            read_bufsize=BUFFER_BYTES,
        )

    async def __aenter__(self) -> Self:
        """Return itself; connections are opened on demand."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._session.close()

    @web.middleware
    async def relay(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Relay a request about groups to the leader; handle it here if that is not possible."""
        leader = self._leader_for(request)
        with self._admission.admit() as admitted:
            response = await self._request_leader(request, leader) if leader and admitted else None
            if response is not None:
                return await self._relay_response(request, response)
        return await handler(request)

    def _leader_for(self, request: web.Request) -> LeaderPage | None:
        """Return the leader if a request is to be relayed; None otherwise, and for RETRY_SECONDS after it failed."""
        is_about_groups = request.method == hdrs.METH_GET and request.path.startswith(RELAYED_PATH_PREFIX)
        if not is_about_groups or RELAYED_HEADER in request.headers or not self._may_relay(request):
            return None
        leader = self._find_leader()
        failed, retry_at = self._failed_leader
        return None if leader == failed and loop_time() < retry_at else leader

    async def _request_leader(self, request: web.Request, leader: LeaderPage) -> aiohttp.ClientResponse | None:
        """Return the head of the leader's response; None if the leader fails, or its response cannot be relayed."""
        headers: list[tuple[str, str]] = []
        for name in _REQUEST_HEADERS:
            headers.extend((name, value) for value in request.headers.getall(name, ()))
        headers.append((RELAYED_HEADER, "1"))
        url = leader.url.join(URL(request.rel_url.raw_path_qs, encoded=True))
        trust = _fingerprint_of(leader.certificate_digest) if leader.certificate_digest else True
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                response = await self._session.get(url, headers=headers, ssl=trust, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._failed_leader = leader, loop_time() + RETRY_SECONDS
            return None
        if response.content_type not in RELAYED_CONTENT_TYPES:
            response.close()
            return None
        return response

    async def _relay_response(self, request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
        async with response:
            # The response may be a long stream: let the server close it if another client needs the connection.
            release_connection(request)
            try:
                return await forward_response(request, response, _RESPONSE_HEADERS)
            except (aiohttp.ClientError, TimeoutError, OSError):
                # `forward_response` has closed the client's connection. aiohttp does not log a ConnectionResetError.
                raise ConnectionResetError from None


@lru_cache(maxsize=4)
def _fingerprint_of(certificate_digest: str) -> aiohttp.Fingerprint:
    """Return the pin of a certificate. It is cached: aiohttp reuses a connection only for the same object."""
    return aiohttp.Fingerprint(bytes.fromhex(certificate_digest))


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip_address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(ip_address, "ipv4_mapped", None) or ip_address
