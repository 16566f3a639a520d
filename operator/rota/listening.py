"""Listening at an address over HTTP, for operator and sidecar."""

import os

from aiohttp import web

PATIENCE = 1.0  # seconds for answers that are under way at the end


async def listen(app: web.Application, address: str, port: int, hint: str = "") -> web.AppRunner:
    """Answer from now on, until the runner is cleaned up; what is wrong with the address is a sentence."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=PATIENCE)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
    except OSError as error:
        await runner.cleanup()
        why = os.strerror(error.errno) if error.errno else error
        raise ValueError(f"Nothing can be answered at {address}, port {port}: {why}{hint}") from None
    return runner
