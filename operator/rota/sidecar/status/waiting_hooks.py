"""Limits how many waiting preStop hooks of app containers keep their connection while other clients need one.

App containers' preStop hooks wait at the sidecar for the drain. The server does not close a connection with a request
for the sake of another client: the connection is protected until `release_connection`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from rota.http_server import release_connection

MAX_PROTECTED_HOOKS = 64  # of 128 connections; the remaining ones are for probes, metrics and requests that do not wait


class WaitingHooks:
    """Divides protected connections among the addresses that requests come from.

    The kubelet sends the hooks of all containers of a pod from one address, which a sidecar cannot know: it depends on
    the cluster's network. An attacker needs 64 addresses, or the kubelet's own one, to leave all hooks without
    protection. Even at the kubelet's address an attacker must come before the hooks: a later request never displaces an
    earlier one of its address, so once the hooks wait it is too late. An unprotected request goes on waiting, until
    another client needs its connection.
    """

    def __init__(self, limit: int = MAX_PROTECTED_HOOKS) -> None:
        self._limit = limit
        self._protected: list[web.Request] = []  # the oldest first

    @contextmanager
    def protect(self, request: web.Request) -> Iterator[None]:
        """Protect the connection of a waiting request; beyond the limit, one request loses its protection."""
        self._protected.append(request)
        if len(self._protected) > self._limit:
            excess = self._newest_of_busiest_address(request)
            self._protected.remove(excess)
            release_connection(excess)
        try:
            yield
        finally:
            with suppress(ValueError):  # it lost its protection
                self._protected.remove(request)

    def _newest_of_busiest_address(self, newcomer: web.Request) -> web.Request:
        """Return the newest request of the address with most requests; the newcomer if its address has as many."""
        requests = Counter(request.remote for request in self._protected)
        busiest, count = requests.most_common(1)[0]
        if count <= requests[newcomer.remote]:
            return newcomer
        return next(request for request in reversed(self._protected) if request.remote == busiest)
