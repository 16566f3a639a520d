"""A broker that is polled for the lag of groups: its requests, limited in number and time, and whether it is away.

A broker is *away* for the rest of a poll once it did not respond: it gets no more requests, and lag there is unknown.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, NamedTuple, TypeVar

from rota.brokers.errors import BrokerError, MalformedResponseError, UnreachableError
from rota.kube.brokers.lag.lag_merge import BrokerLag
from rota.model import Queue

KEEP_BROKER_SECONDS = 600.0  # how long a broker is kept, with its samples, after a group needed it last
MAX_KEPT_BROKERS = 1000  # kept brokers that no route lists: a malicious name server may list new brokers each time
# For one request: its own timeout of 10 s, and the time to look up the broker again.
REQUEST_TIMEOUT_SECONDS = 15.0
POLL_DEADLINE_SECONDS = 60.0  # after which a poll sends no more requests; groups left out are first in the next poll
MAX_CONCURRENT_REQUESTS = 8  # requests under way to one broker

T = TypeVar("T")


class OffsetQuestion(NamedTuple):
    """What `queue_resolver` asks a broker: the offset of a group on a queue that it may never have consumed."""

    consumer_group: str  # at the broker
    queue: Queue
    # If the group starts at Latest: since when it consumes the topic, in seconds since 1970; otherwise None.
    starts_at: float | None


class ResolvedOffset(NamedTuple):
    """The answer to an OffsetQuestion."""

    poll: int  # `PolledBroker.polls` at the request
    was_empty: bool  # whether the queue was empty at the request; once that changes, the offset is requested again
    offset: int | None  # the committed offset, or where the group will start; None: neither is known


_log = logging.getLogger(__name__)


@dataclass
class PolledBroker(BrokerLag):
    """The lag of groups at one broker, and the state of its polls."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_REQUESTS))
    resolved: dict[OffsetQuestion, ResolvedOffset] = field(default_factory=dict)  # offsets that may be used again
    polls: int = 0  # completed polls
    poll_started_at: float = 0.0  # loop's time at the start of the current poll
    last_response_at: float = 0.0  # loop's time of the last response to any request
    is_away: bool = False  # whether it was found silent in the current poll
    on_away: Callable[[], None] = lambda: None  # called when `is_away` becomes True
    last_needed_at: float = 0.0  # loop's time at which a topic of a group was last on this broker
    poll_task: asyncio.Task[None] | None = None  # the last poll; None before the first one


def brokers_to_keep(
    brokers: Mapping[str, PolledBroker], needed: Collection[str], now: float
) -> dict[str, PolledBroker]:
    """Return the brokers to remember: all that groups need now or needed recently."""
    unused = [broker for broker in brokers.values() if broker.name not in needed]
    unused.sort(key=lambda broker: broker.last_needed_at)
    kept = {*needed}
    for broker in unused[-MAX_KEPT_BROKERS:]:
        if now < broker.last_needed_at + KEEP_BROKER_SECONDS:
            kept.add(broker.name)
    return {name: broker for name, broker in brokers.items() if name in kept}


async def send_all(broker: PolledBroker, requests: Mapping[Any, Callable[[], Awaitable[T]]]) -> dict[Any, T]:
    """Send several requests to a broker; return the responses, leaving out failed requests.

    If a request gets no response, and none arrived since it was sent, the broker is away and gets no more requests.
    """
    responses: dict[Any, T] = {}
    now = asyncio.get_running_loop().time

    async def send(key: Any, request: Callable[[], Awaitable[T]]) -> None:
        async with broker.slots:
            started_at = now()
            if broker.is_away or started_at >= broker.poll_started_at + POLL_DEADLINE_SECONDS:
                return
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS):
                    responses[key] = await request()
                broker.last_response_at = now()
            except (BrokerError, TimeoutError) as error:
                _log.debug("No lag for %s: %s", key, error)
                if _is_response(error):
                    broker.last_response_at = now()
                elif broker.last_response_at <= started_at and not broker.is_away:
                    broker.is_away = True
                    broker.on_away()

    await asyncio.gather(*starmap(send, requests.items()))
    return responses


def _is_response(error: Exception) -> bool:
    """Whether the broker responded: with a rejection, or with bytes that cannot be parsed."""
    return isinstance(error, MalformedResponseError) or not isinstance(error, UnreachableError | TimeoutError)
