"""Listening at an address over HTTP, for operator and sidecar."""

import logging
import os

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

PATIENCE = 1.0  # seconds for answers that are under way at the end


async def listen(app: web.Application, address: str, port: int, hint: str = "") -> web.AppRunner:
    """Answer from now on, until the runner is cleaned up; what is wrong with the address is a sentence."""
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    app.middlewares.append(_refuse_what_cannot_be_read)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=PATIENCE)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
    except OSError as error:
        await runner.cleanup()
        why = os.strerror(error.errno) if error.errno else error
        raise ValueError(f"Nothing can be answered at {address}, port {port}: {why}{hint}") from None
    return runner


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether what went wrong is our mistake: who sends nonsense shall not fill the log with it."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


@web.middleware
async def _refuse_what_cannot_be_read(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.RequestPayloadError as error:
        return web.Response(status=400, text=f"The body cannot be read: {error}\n")
    except ConnectionError:  # whoever asked has gone
        return web.Response(status=400)
