"""Keeps the sidecar's HTTP server from closing the connections of waiting preStop hooks at its limit.

App containers' preStop hooks wait at the sidecar for the drain. At its limit of connections, the server closes an idle
connection if another client needs one. A connection whose request is still being answered is *protected* from that,
until `release_connection` is called for it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from rota.http_server import release_connection

MAX_PROTECTED_HOOKS = 64  # of 128 connections; the remaining ones are for probes, metrics and requests that do not wait


class WaitingHooks:
    """Divides protected connections among client addresses, so that one client's requests cannot displace the hooks.

    If a new request exceeds the limit, the address with most protected requests loses the protection of its newest
    one; if no address has more than the new request's, the new request itself loses it. A request without protection
    goes on waiting, until another client needs its connection.

    So each address that has a protected request keeps its oldest one. The kubelet sends the hooks of all containers of
    a pod from one address. The sidecar cannot know that address, which depends on the cluster's network. At least
    one hook stays protected, except in two cases:

    - as many other addresses as the limit have waiting requests before the hooks connect;
    - an attacker at the kubelet's own address has filled the limit before the hooks connect. Later requests from there
      have no effect, because the newest ones lose their protection first.
    """

    def __init__(self, limit: int = MAX_PROTECTED_HOOKS) -> None:
        self._limit = limit
        self._protected: list[web.Request] = []  # the oldest first

    @contextmanager
    def protect(self, request: web.Request) -> Iterator[None]:
        """Protect the connection of a waiting request; beyond the limit, one request loses its protection."""
        self._protected.append(request)
        if len(self._protected) > self._limit:
            excess = self._choose_unprotected(request)
            self._protected.remove(excess)
            release_connection(excess)
        try:
            yield
        finally:
            with suppress(ValueError):  # the request lost its protection
                self._protected.remove(request)

    def _choose_unprotected(self, newcomer: web.Request) -> web.Request:
        """Return the newest request of the address with most requests; the newcomer if its address has as many."""
        requests = Counter(request.remote for request in self._protected)
        busiest, count = requests.most_common(1)[0]
        if count <= requests[newcomer.remote]:
            return newcomer
        return next(request for request in reversed(self._protected) if request.remote == busiest)
