"""A member's report with all pages about its queues, as tests look at it."""

from collections.abc import Awaitable, Callable

import msgspec

from rota.reports import FullReport, QueueStatus
from rota.sidecar.status.self_report import QueuesPage


class WholeReport(FullReport, frozen=True, kw_only=True):
    """A report, and how far the member is with each queue."""

    queues: list[QueueStatus] = msgspec.field(default_factory=list)


async def whole_report(ask: Callable[[str], Awaitable[str]]) -> WholeReport:
    """Ask for the report and for each page; `ask` returns what is answered to a path."""
    report = msgspec.json.decode(await ask("/v1/report"), type=WholeReport)
    queues: list[QueueStatus] = []
    start: int | None = 0
    while start is not None:
        page = msgspec.json.decode(await ask(f"/v1/report/queues?from={start}"), type=QueuesPage)
        queues += page.queues
        start = page.next
    return msgspec.structs.replace(report, queues=queues)
