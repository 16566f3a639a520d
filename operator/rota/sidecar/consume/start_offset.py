"""Start offset of a newly assigned queue: the committed one or, without one, by the settings' `startFrom`."""

import asyncio
from typing import Protocol

from rota.aio import shield_until_done
from rota.brokers.errors import UnreachableError
from rota.brokers.port import Consumer
from rota.model import Queue
from rota.spec import StartFrom

FROM_OLDEST = StartFrom(position="Earliest")  # for the group's retry topic: all its messages are this group's
COMMIT_SECONDS = 8.0  # limit for a commit; its request times out sooner, even with a new connection
_MAX_TRIES = 5


class OffsetStore(Protocol):
    """Offset store: the broker or, in Broadcasting, the member's own disk."""

    async def committed_offset(self, queue: Queue) -> int | None:
        """Return the committed offset; None if the group has never committed one."""

    async def commit(self, queue: Queue, offset: int) -> None:
        """Store the group's offset."""


async def find_start_offset(
    queue: Queue,
    consumer: Consumer,
    offset_store: OffsetStore,
    start_from: StartFrom,
    consuming_since: float | None = None,
) -> int:
    """Return the start offset; a new one is stored first.

    `consuming_since` is when the group started to consume the topic.

    A failed request raises its error: only a positive answer of the store means that no offset exists.
    """
    committed = await offset_store.committed_offset(queue)
    if committed is not None:
        return committed
    # A commit that a cancellation interrupts may reach the broker later, and then replace an offset of the next owner.
    return await shield_until_done(
        commit_and_verify(offset_store, queue, await _look_up_start(queue, consumer, start_from, consuming_since))
    )


async def _look_up_start(queue: Queue, consumer: Consumer, start_from: StartFrom, consuming_since: float | None) -> int:
    """Find the first offset; with `Latest` that of the first message since the group started to consume the topic.

    The queue's present end would be wrong for a queue that was created later: messages that it got before it was
    assigned would be skipped. So the end is used only if the time of that start is unknown.
    """
    if start_from.position == "Earliest":
        return await consumer.min_offset(queue)
    if start_from.position == "Timestamp" and start_from.timestamp:
        return await consumer.offset_at_time(queue, start_from.timestamp.timestamp())
    if consuming_since is None:
        return await consumer.max_offset(queue)
    return await consumer.offset_at_time(queue, consuming_since)


async def commit_and_verify(offset_store: OffsetStore, queue: Queue, offset: int) -> int:
    """Commit the first offset of a queue, and return the stored one.

    It is read back, because brokers may lose one of two commits that arrive at the same time. Without a stored
    offset the next member would look up `Latest` later, and skip the messages in between.
    """
    for _ in range(_MAX_TRIES):
        await commit_offset(offset_store, queue, offset)
        # Another one than `offset` if a user has just set it.
        if (committed := await offset_store.committed_offset(queue)) is not None:
            return committed
    raise UnreachableError(f"The broker confirmed the first offset of {queue}, but does not return it")


async def commit_offset(offset_store: OffsetStore, queue: Queue, offset: int) -> None:
    """Commit; TimeoutError after COMMIT_SECONDS, because a release must not wait for ever."""
    async with asyncio.timeout(COMMIT_SECONDS):
        await offset_store.commit(queue, offset)
