"""A member's report together with all pages about its queues."""

from collections.abc import Awaitable, Callable

import msgspec

from rota.reports import FullReport, QueueStatus
from rota.sidecar.status.self_report import QueuesPage


class WholeReport(FullReport, frozen=True, kw_only=True):
    """A report, and the progress of each queue."""

    queues: list[QueueStatus] = msgspec.field(default_factory=list)


async def whole_report(get: Callable[[str], Awaitable[str]]) -> WholeReport:
    """Request the report and each page; `get` returns the response to a path."""
    report = msgspec.json.decode(await get("/v1/report"), type=WholeReport)
    queues: list[QueueStatus] = []
    start: int | None = 0
    while start is not None:
        page = msgspec.json.decode(await get(f"/v1/report/queues?from={start}"), type=QueuesPage)
        queues += page.queues
        start = page.next
    return msgspec.structs.replace(report, queues=queues)
