"""What protects the page's port: TLS, and a check of each request's user."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from aiohttp.typedefs import Middleware

from rota.aio import supervise
from rota.kube.client.api import Api
from rota.kube.client.login.session import Login
from rota.kube.http.access.access import PageAccess
from rota.kube.http.access.reviews import Reviewer
from rota.kube.http.access.server_tls import ServerTls

Tls = Callable[[], ssl.SSLContext]  # returns the context for a new connection


class PageSecurity(NamedTuple):
    """How the port is served."""

    tls: Tls | None = None
    middlewares: Sequence[Middleware] = ()
    certificate_digest: Callable[[], str] = str  # the SHA-256 of the certificate, in hexadecimal; "" without TLS


OPEN = PageSecurity()  # without TLS, for everybody


@asynccontextmanager
async def cluster_users(login: Login, names: Sequence[str], folder: Path | None) -> AsyncIterator[PageSecurity]:
    """Serve users of the cluster by TLS, with a certificate for these names or the one in a folder."""
    async with Api(login) as api:
        tls = ServerTls(api, names, folder)
        await tls.refresh()
        reviewer = Reviewer(api)
        task = asyncio.create_task(supervise("page TLS", tls.run), name="page TLS")
        try:
            yield PageSecurity(tls.context, [PageAccess(reviewer).check], tls.digest)
        finally:
            await reviewer.close()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
