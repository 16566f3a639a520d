"""A receiver of traces, which decodes requests with OpenTelemetry's own protobuf classes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


@dataclass
class Receiver:
    """Sends the given responses, then 200, and keeps the requests."""

    url: str = ""
    answers: list[web.Response] = field(default_factory=list)
    got: "asyncio.Queue[tuple[web.Request, bytes]]" = field(default_factory=asyncio.Queue)
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # requests wait until it is set

    async def handle(self, request: web.Request) -> web.Response:
        """Handle a request."""
        await self.opened.wait()
        self.got.put_nowait((request, await request.read()))
        return self.answers.pop(0) if self.answers else web.Response()

    async def spans(self) -> list[Span]:
        """Return the spans of the next request."""
        _, body = await self.got.get()
        return decoded(body)


def resource_spans(body: bytes) -> list[ResourceSpans]:
    """Return the resources' spans of a request."""
    return [*ExportTraceServiceRequest.FromString(body).resource_spans]


def decoded(body: bytes) -> list[Span]:
    """Return the spans of a request."""
    return [span for resource in resource_spans(body) for scope in resource.scope_spans for span in scope.spans]


@asynccontextmanager
async def a_receiver() -> AsyncIterator[Receiver]:
    """Run a receiver; its `url` has a path prefix."""
    receiver = Receiver()
    receiver.opened.set()
    app = web.Application()
    app.router.add_post("/otlp/v1/traces", receiver.handle)
    async with TestServer(app) as server:
        receiver.url = f"http://127.0.0.1:{server.port}/otlp"
        yield receiver
