"""Security of the page's port: TLS, and access control of each request.

`operator.py` chooses one of the two: `UNRESTRICTED_PAGE`, or `cluster_page_security` with --page-auth Kubernetes.
"""

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

TlsContextSource = Callable[[], ssl.SSLContext]  # returns the present context, for each new connection


class PageSecurity(NamedTuple):
    """TLS context (None: no TLS), middlewares and certificate digest of a port."""

    tls: TlsContextSource | None = None
    middlewares: Sequence[Middleware] = ()
    certificate_digest: Callable[[], str] = lambda: ""  # SHA-256 in hexadecimal; empty without TLS


UNRESTRICTED_PAGE = PageSecurity()  # no TLS and no access control


@asynccontextmanager
async def cluster_page_security(login: Login, names: Sequence[str], folder: Path | None) -> AsyncIterator[PageSecurity]:
    """Provide TLS (with the certificate in `folder`, or self-signed for `names`), and check rights of cluster users."""
    async with Api(login) as api:
        tls = ServerTls(api, names, folder)
        await tls.refresh()
        reviewer = Reviewer(api)
        task = asyncio.create_task(supervise("page TLS", tls.run), name="page TLS")
        # A connection may outlive the CA that signed its client's certificate: a user's rights must not.
        access = PageAccess(reviewer, has_current_authority=tls.has_current_authority)
        try:
            yield PageSecurity(tls.context, [access.check], tls.digest)
        finally:
            await reviewer.close()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
