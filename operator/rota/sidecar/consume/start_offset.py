"""Start offset of a newly assigned queue: the committed one or, without one, by the settings' `startFrom`."""

import asyncio
from typing import Protocol

from rota.aio import shield_until_done
from rota.brokers.errors import UnreachableError
from rota.brokers.port import Consumer
from rota.model import Queue
from rota.spec import StartFrom

FROM_THE_OLDEST = StartFrom(position="Earliest")  # for the group's retry topic: all its messages are this group's
COMMIT_SECONDS = 8.0  # limit for a commit; its request, with a new connection, times out sooner
_TRIES = 5


class OffsetStore(Protocol):
    """Offset store: the broker or, in Broadcasting, the member's own disk."""

    async def committed(self, queue: Queue) -> int | None:
        """Return the committed offset; None if the group has never committed one."""

    async def commit(self, queue: Queue, offset: int) -> None:
        """Store the group's offset."""


async def find_start_offset(
    queue: Queue, consumer: Consumer, store: OffsetStore, start_from: StartFrom, begun: float | None = None
) -> int:
    """Return the start offset once the store has it; `begun` is when the group started to consume the topic.

    A failed request raises its error: only a positive answer of the store means that no offset exists.
    """
    committed = await store.committed(queue)
    if committed is not None:
        return committed
    return await shield_until_done(_store_first(queue, store, await _first(queue, consumer, start_from, begun)))


async def _first(queue: Queue, consumer: Consumer, start_from: StartFrom, begun: float | None) -> int:
    """Find the first offset; with `Latest` that of the first message since the group started to consume the topic.

    The queue may be younger than that: its current end would skip messages that it got before it was assigned.
    """
    if start_from.position == "Earliest":
        return await consumer.first(queue)
    if start_from.position == "Timestamp" and start_from.timestamp:
        return await consumer.at(queue, start_from.timestamp.timestamp())
    return await (consumer.last(queue) if begun is None else consumer.at(queue, begun))


async def _store_first(queue: Queue, store: OffsetStore, start: int) -> int:
    """Store the first offset of a queue, and verify it: brokers lose one of two commits that arrive together.

    Without a stored offset the next member would look up `Latest` later, and skip the messages in between.
    """
    for _ in range(_TRIES):
        await commit_offset(store, queue, start)
        if (committed := await store.committed(queue)) is not None:  # a user may have just set it
            return committed
    raise UnreachableError(f"The broker does not keep the first offset of {queue}, though it says so")


async def commit_offset(store: OffsetStore, queue: Queue, offset: int) -> None:
    """Commit; TimeoutError after COMMIT_SECONDS, for a release must not wait for ever."""
    async with asyncio.timeout(COMMIT_SECONDS):
        await store.commit(queue, offset)
