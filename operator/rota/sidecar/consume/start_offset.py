"""Where a queue begins that was just taken up: where the group is, and where it never was, as its settings say."""

import asyncio
from typing import Protocol

from rota.aio import to_the_end
from rota.brokers.errors import Unreachable
from rota.brokers.port import Consumer
from rota.model import Queue
from rota.spec import StartFrom

FROM_THE_OLDEST = StartFrom(position="Earliest")  # of the group's retry topic: what lies there was given to this group
COMMIT_SECONDS = 8.0  # that a commit is waited for; its call and a connection for it end sooner
_TRIES = 5


class Store(Protocol):
    """Where offsets are kept: at the broker, or, in Broadcasting, on a disk of the member's own."""

    async def committed(self, queue: Queue) -> int | None:
        """Return where the group is, or None where it never was."""

    async def commit(self, queue: Queue, offset: int) -> None:
        """Say where the group is."""


async def beginning(
    queue: Queue, consumer: Consumer, store: Store, wanted: StartFrom, begun: float | None = None
) -> int:
    """Return where to begin, and be sure that the store has it; `begun`: since when the topic is worked.

    What cannot be asked is an error, never an answer: "no offset" must be said by who keeps them.
    """
    found = await store.committed(queue)
    if found is not None:
        return found
    return await to_the_end(_noted(queue, store, await _first(queue, consumer, wanted, begun)))


async def _first(queue: Queue, consumer: Consumer, wanted: StartFrom, begun: float | None) -> int:
    """Look where to begin; with `Latest` at what came since the topic is worked, for a queue may be younger than that.

    The end, as it is now, would leave out what a new queue got before somebody was given it.
    """
    if wanted.position == "Earliest":
        return await consumer.first(queue)
    if wanted.position == "Timestamp" and wanted.timestamp:
        return await consumer.at(queue, wanted.timestamp.timestamp())
    return await (consumer.last(queue) if begun is None else consumer.at(queue, begun))


async def _noted(queue: Queue, store: Store, start: int) -> int:
    """Put the first offset of a queue into the store, and look: brokers lose one of two that come at once.

    It must be there: `Latest`, looked up by the next member, would be later, and what came between would be lost.
    """
    for _ in range(_TRIES):
        await commit_offset(store, queue, start)
        if (found := await store.committed(queue)) is not None:  # not ours, if somebody has just set it
            return found
    raise Unreachable(f"The broker does not keep the first offset of {queue}, though it says so")


async def commit_offset(store: Store, queue: Queue, offset: int) -> None:
    """Commit, and wait no longer than COMMIT_SECONDS: a release must not wait for ever."""
    async with asyncio.timeout(COMMIT_SECONDS):
        await store.commit(queue, offset)
