"""Hearing members: as long as something is awaited of one, its report is read as often as it changes."""

import asyncio
from collections.abc import Callable
from functools import partial

from rota.aio import supervise
from rota.kube.members.report_client import Endpoint, Reports
from rota.kube.state.group import Group

UNHEARD_SECONDS = 1.0  # before a member that could not be heard is asked again


class Listeners:
    """Those who listen to the members of one group; `news` is told when one of them says something else."""

    def __init__(self, group: Group, reports: Reports, news: Callable[[], None]) -> None:
        """Listen to nobody yet."""
        self._group, self._reports, self._news = group, reports, news
        self._by_pod: dict[str, asyncio.Task[None]] = {}

    def listen(self) -> None:
        """Listen to everybody of whom something is awaited."""
        for name in sorted(self._group.awaited):  # a set has an order of its own in each process
            if name not in self._by_pod or self._by_pod[name].done():
                watch = supervise(f"report watcher of {name}", partial(self._listen, name))
                listener = asyncio.get_running_loop().create_task(watch, name=f"hear {name}")
                self._by_pod[name] = listener
                listener.add_done_callback(partial(self._forget, name))

    def interrupt(self, name: str) -> None:
        """End a poll that it is right to leave unanswered: it would hide that nobody answers."""
        if listener := self._by_pod.pop(name, None):
            listener.cancel()

    def rest(self) -> None:
        """Listen to nobody any more."""
        for name in list(self._by_pod):
            self.interrupt(name)

    def _forget(self, name: str, listener: "asyncio.Task[None]") -> None:
        """Forget a listener that has ended, unless another one has taken its place."""
        if self._by_pod.get(name) is listener:
            del self._by_pod[name]

    async def _listen(self, name: str) -> None:
        after: int | None = None
        loop = asyncio.get_running_loop()
        while name in self._group.awaited and (known := self._group.pods.get(name)):
            member = Endpoint.of(known.pod, self._group.uid)
            started = loop.time()
            if after is None:
                report, asked, doubt = await self._reports.read(member)
            else:
                report, asked, doubt = await self._reports.next(member, after)
            has_news = report is not None and report.revision != after
            after = report.revision if report else None
            known = self._group.pods.get(name)
            same = known is not None and known.pod.metadata.uid == member.uid
            if known and same and known.hear(report, loop.time(), asked, doubt):
                self._news()
            # A member at which too many wait already answers a long poll at once.
            if report is None or (not has_news and loop.time() - started < UNHEARD_SECONDS):
                await asyncio.sleep(UNHEARD_SECONDS)
