"""`rota page`: serves the operator's web page on this machine, with the user's credentials."""

import asyncio
import sys
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from aiohttp import hdrs, web

from rota.cli.client.leader_connection import check_names, find_leader, log_in
from rota.cli.client.pod_http_client import PodHttpClient
from rota.cli.client.requests import OperatorRequestError
from rota.cli.client.watch import Target
from rota.cli.console.formatting import print_line
from rota.http_server import forward_response, listen
from rota.kube.client.api import Api, NoResponseError

ADDRESS = "127.0.0.1"
FORWARDED_REQUEST_HEADERS = (hdrs.ACCEPT, hdrs.IF_NONE_MATCH)
FORWARDED_RESPONSE_HEADERS = (
    hdrs.CONTENT_TYPE,
    hdrs.CACHE_CONTROL,
    hdrs.ETAG,
    hdrs.RETRY_AFTER,
    "Content-Security-Policy",
    "X-Content-Type-Options",
    "Referrer-Policy",
)


class _Relay(NamedTuple):
    """Forwards requests of a browser to the leading operator; the browser needs no credentials."""

    api: Api
    pods: PodHttpClient
    target: Target

    async def respond(self, request: web.Request) -> web.StreamResponse:
        headers: dict[str, str] = {}
        for name in FORWARDED_REQUEST_HEADERS:
            if name in request.headers:
                headers[str(name)] = request.headers[name]
        try:
            leader = await find_leader(self.api, self.target.operator_namespace, self.target.lease)
            path = request.rel_url.raw_path_qs
            connecting = self.pods.open_response(leader.pod, path, headers, is_secure=leader.authenticates_users)
            async with connecting as response:
                return await forward_response(request, response, FORWARDED_RESPONSE_HEADERS)
        except (OperatorRequestError, NoResponseError) as error:  # of the leading pod, or of the API server
            # If a part of the response was already sent, `forward_response` has closed the connection, and no error
            # response can follow.
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError from None  # aiohttp then ends the request silently
            body = msgspec.json.encode({"error": str(error)})
            return web.Response(status=HTTPStatus.BAD_GATEWAY, body=body, content_type="application/json")


def serve(target: Target, port: int) -> None:
    """Serve the page until Ctrl-C."""
    asyncio.run(serve_until_cancelled(target, port))


async def serve_until_cancelled(target: Target, port: int) -> None:
    """Serve the page on a loopback port until the task is cancelled."""
    check_names(target.operator_namespace, target.lease)
    async with (
        await log_in(target.login) as login,
        Api(login) as api,
        PodHttpClient(api, login, target.operator_namespace) as pods,
    ):
        try:
            await find_leader(api, target.operator_namespace, target.lease)  # fail at the start, not at a request
        except NoResponseError as error:
            raise OperatorRequestError(f"{error}; check the kubeconfig and the cluster") from None
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", _Relay(api, pods, target).respond, allow_head=False)])
        runner = await listen(app, ADDRESS, port, "; give another --port")
        url = f"http://{ADDRESS}:{port}/"
        print_line(f"The page is at {url} until Ctrl-C; every process on this machine can read it there")
        sys.stdout.flush()
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
