"""A broker that is polled for the lag of groups: its requests, limited in number and time, and whether it is away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rota.brokers.errors import BrokerError, MalformedResponseError, UnreachableError
from rota.kube.brokers.lag.lag_merge import BrokerLag
from rota.model import Queue

KEEP_BROKER_SECONDS = 600.0  # for which the samples of a broker are kept that no route lists
# Such brokers: as many as one group may have, as a name server may list different ones each time.
MAX_KEPT_BROKERS = 1000
# Limit of one request: its own timeout of 10 s, and the time to look up the broker again.
REQUEST_TIMEOUT_SECONDS = 15.0
POLL_DEADLINE_SECONDS = 60.0  # after which a poll sends no more requests; groups left out are first in the next poll
MAX_CONCURRENT_REQUESTS = 8  # requests under way to one broker

GroupQueue = tuple[str, Queue]  # a queue that a group, by its name at the broker, may never have consumed
ResolvedOffset = tuple[int, bool, int | None]  # number of the poll, whether the queue was empty, the offset
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass
class PolledBroker(BrokerLag):
    """The lag of groups at one broker, and the state of its polls."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_REQUESTS))
    resolved: dict[GroupQueue, ResolvedOffset] = field(default_factory=dict)
    polls: int = 0
    poll_started_at: float = 0.0  # start of the current poll
    last_answer_at: float = 0.0  # last answer
    is_away: bool = False  # whether it does not answer in this poll
    on_away: Callable[[], None] = lambda: None  # called when it is away
    last_needed_at: float = 0.0  # last time at which a group needed it
    poll_task: asyncio.Task[None] | None = None


def brokers_to_keep(
    brokers: Mapping[str, PolledBroker], needed: Collection[str], now: float
) -> dict[str, PolledBroker]:
    """Return the brokers to remember: all that groups need now or needed recently."""
    unused = sorted((it for it in brokers.values() if it.name not in needed), key=lambda it: it.last_needed_at)
    forgotten = {it.name for it in unused[:-MAX_KEPT_BROKERS]} | {
        it.name for it in unused if now >= it.last_needed_at + KEEP_BROKER_SECONDS
    }
    return {name: it for name, it in brokers.items() if name not in forgotten}


async def send_all(broker: PolledBroker, requests: Mapping[Any, Callable[[], Awaitable[T]]]) -> dict[Any, T]:
    """Send several requests to a broker; return the answers, leaving out failed requests.

    If a request gets no answer, and none arrived since it began, the broker is away and gets no more requests.
    """
    answers: dict[Any, T] = {}
    now = asyncio.get_running_loop().time

    async def one(key: Any, ask: Callable[[], Awaitable[T]]) -> None:
        async with broker.slots:
            started_at = now()
            if broker.is_away or started_at >= broker.poll_started_at + POLL_DEADLINE_SECONDS:
                return
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS):
                    answers[key] = await ask()
                broker.last_answer_at = now()
            except (BrokerError, TimeoutError) as error:
                _log.debug("No lag for %s: %s", key, error)
                if _is_answer(error):
                    broker.last_answer_at = now()
                elif broker.last_answer_at <= started_at and not broker.is_away:
                    broker.is_away = True
                    broker.on_away()

    await asyncio.gather(*(one(key, ask) for key, ask in requests.items()))
    return answers


def _is_answer(error: Exception) -> bool:
    return isinstance(error, MalformedResponseError) or not isinstance(error, UnreachableError | TimeoutError)
