"""Authenticates each request of the page's port by a token or a client certificate, and checks its user's rights.

A user reads a group on the page, or the metrics, exactly if the user may `get` them at the API server. The middleware
`PageAccess` stores the user in the request; the handlers in `site.py` check the right for the requested group.
"""

import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import chain
from typing import Any, Final, Protocol

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from rota.kube.http.access.reviews import ReviewError
from rota.kube.http.access.rights import (
    AUTHENTICATED,
    READ_ALL_GROUPS,
    READ_METRICS,
    Right,
    User,
    impersonated_user,
    right_to_read_groups,
    rights_to_impersonate,
)
from rota.model import single_line
from rota.spec.names import is_dns_label

UNAUTHENTICATED_PATHS = frozenset({"/healthz", "/readyz"})  # for load balancers; they contain nothing about groups
METRICS_PATH = "/metrics"
MAX_TOKEN_CHARACTERS = 8_000
MAX_IMPERSONATED_GROUPS = 32
MAX_NAME_CHARACTERS = 256
RETRY_AFTER_SECONDS = 5  # in responses with status 503 because a user could not be checked
_IMPERSONATE_PREFIX = "Impersonate-"
_SUPPORTED_HEADERS = {"Impersonate-User", "Impersonate-Group"}


class Reviews(Protocol):
    """Authenticates users and checks their rights."""

    async def user_of(self, token: str) -> User | None:
        """Return the user of a token; None if it is not valid."""

    async def allows(self, user: User, right: Right) -> bool:
        """Whether a user has a right."""


class UnrestrictedViewer:
    """The viewer of each request on a server without access control: may read every group."""

    async def may_read_all(self) -> bool:
        """Return True."""
        return True

    async def may_read(self, _: str) -> bool:
        """Return True."""
        return True


class ClusterUser:
    """A user of the cluster, with the rights that the API server grants."""

    def __init__(self, user: User, reviews: Reviews) -> None:
        self._user = user
        self._reviews = reviews

    async def may_read_all(self) -> bool:
        """Whether the user may read the groups of all namespaces."""
        return await self._reviews.allows(self._user, READ_ALL_GROUPS)

    async def may_read(self, namespace: str) -> bool:
        """Whether the user may read the groups of a namespace."""
        if not is_dns_label(namespace):  # no namespace has such a name
            return False
        return await self.may_read_all() or await self._reviews.allows(self._user, right_to_read_groups(namespace))


GroupViewer = UnrestrictedViewer | ClusterUser  # the rights of a request's user to read groups
MayRead = Callable[[str], Awaitable[bool]]  # whether a user may read the groups of a namespace

_VIEWER: Final = web.RequestKey("viewer", ClusterUser)
_BY_TOKEN: Final = web.RequestKey("by_token", bool)


def viewer_of(request: web.Request) -> GroupViewer:
    """Return the rights of the user of a request."""
    viewer: ClusterUser | None = request.get(_VIEWER)
    return viewer or UnrestrictedViewer()


def is_by_token(request: web.Request) -> bool:
    """Whether the user of a request has logged in by a token, not by a client certificate."""
    by_token: bool = request.get(_BY_TOKEN, False)
    return by_token


async def check_may_read(request: web.Request, namespace: str) -> None:
    """Raise HTTPForbidden if the user of a request may not read the groups of a namespace."""
    if not await viewer_of(request).may_read(namespace):
        sentence = f"You may not {single_line(str(right_to_read_groups(namespace)), 200)}; ask for that right"
        raise http_error(web.HTTPForbidden, sentence)


class PageAccess:
    """Middleware that authenticates each request, and refuses requests without a valid user."""

    def __init__(
        self, reviews: Reviews, has_current_authority: Callable[[ssl.SSLContext], bool] = lambda _: True
    ) -> None:
        """`has_current_authority` returns whether a connection's TLS context verifies clients with the present CA.

        It is called for connections whose client presented a certificate.
        """
        self._reviews = reviews
        self._has_current_authority = has_current_authority

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request with the rights of its user."""
        if request.path in UNAUTHENTICATED_PATHS:
            return await handler(request)
        try:
            user = await self._effective_user(request)
            if request.path == METRICS_PATH and not await self._reviews.allows(user, READ_METRICS):
                raise _forbidden(user, READ_METRICS)
            request[_VIEWER] = ClusterUser(user, self._reviews)
            return await handler(request)
        except ReviewError as error:
            headers = {str(hdrs.RETRY_AFTER): str(RETRY_AFTER_SECONDS)}
            raise http_error(web.HTTPServiceUnavailable, str(error), headers) from error

    async def _effective_user(self, request: web.Request) -> User:
        """Return the user whose rights apply: the authenticated user, or the impersonated user if that is allowed."""
        user = await self._authenticated_user(request)
        headers = {name for name in map(str.title, request.headers) if name.startswith(_IMPERSONATE_PREFIX)}
        if not headers:
            return user
        name = request.headers.get("Impersonate-User", "")
        groups = request.headers.getall("Impersonate-Group", [])
        are_names_valid = name and all(map(_may_be_impersonated, (name, *groups)))
        if headers - _SUPPORTED_HEADERS or not are_names_valid or len(groups) > MAX_IMPERSONATED_GROUPS:
            sentence = "Impersonation takes one Impersonate-User and up to 32 Impersonate-Group headers, no others"
            raise http_error(web.HTTPBadRequest, sentence)
        for right in rights_to_impersonate(name, groups):
            if not await self._reviews.allows(user, right):
                raise _forbidden(user, right)
        return impersonated_user(name, groups)

    async def _authenticated_user(self, request: web.Request) -> User:
        """Return the user of the request's token or client certificate; refuse the request without a valid one."""
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        token = token.strip()
        if scheme.lower() == "bearer" and 0 < len(token) <= MAX_TOKEN_CHARACTERS and token.isascii():
            user = await self._reviews.user_of(token)
            request[_BY_TOKEN] = True
        else:
            certificate = request.get_extra_info("peercert")
            if certificate and not self._has_current_authority(request.get_extra_info("sslcontext")):
                # TLS verified this certificate with a CA that was replaced since. Without a response, the client
                # connects again, and its certificate is verified with the current CA.
                if request.transport:
                    request.transport.abort()
                raise ConnectionResetError
            user = user_of_certificate(certificate, time.time())
        if user is None:
            sentence = "Log in: send a bearer token or a client certificate of the cluster, as `rota status` does"
            raise http_error(web.HTTPUnauthorized, sentence, {hdrs.WWW_AUTHENTICATE: "Bearer"})
        return user


def _may_be_impersonated(name: str) -> bool:
    return name.isascii() and len(name) <= MAX_NAME_CHARACTERS


def user_of_certificate(certificate: Mapping[str, Any] | None, now: float) -> User | None:
    """Return the user that a verified client certificate names: its common name, with its organizations as groups.

    None without a certificate, or if it has expired since TLS verified it when the connection was opened.
    """
    if not certificate or ssl.cert_time_to_seconds(certificate["notAfter"]) < now:
        return None
    fields: dict[str, list[str]] = {}
    for name, value in chain.from_iterable(certificate.get("subject", ())):
        fields.setdefault(name, []).append(value)
    if "commonName" not in fields:
        return None
    return User(fields["commonName"][-1], (*fields.get("organizationName", ()), AUTHENTICATED))


def _forbidden(user: User, right: Right) -> web.HTTPException:
    sentence = f"User {single_line(user.name, 100)} may not {single_line(str(right), 200)}; ask for that right"
    return http_error(web.HTTPForbidden, sentence)


def http_error(
    kind: type[web.HTTPException], sentence: str, headers: Mapping[str, str] | None = None
) -> web.HTTPException:
    """Return an HTTP error with a sentence as JSON."""
    body = msgspec.json.encode({"error": sentence}).decode()
    return kind(text=body, content_type="application/json", headers={"cache-control": "no-store", **(headers or {})})
