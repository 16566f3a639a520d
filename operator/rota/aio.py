"""Waiting, as it is to be done by a process that may stand still, and by tasks that may be cancelled."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import TypeVar, TypeVarTuple, Unpack

GENTLY = 16  # items that are worked on in one turn of the loop

Given = TypeVarTuple("Given")
T = TypeVar("T")


def call_after_all(when: float, do: Callable[[Unpack[Given]], object], *given: *Given) -> asyncio.TimerHandle:
    """Call at a time, once everything that has come by then was read; just after `cancel` it may be called, too.

    Who was stopped for a while wakes up to find that a time is over before it has looked at what came meanwhile: the
    answer that was in time lies unread.
    """
    loop = asyncio.get_running_loop()
    # The first turn of the loop after the timer's looks at what has come; the second one calls.
    return loop.call_at(when, loop.call_soon, loop.call_soon, do, *given)


async def to_the_end(work: Coroutine[None, None, T]) -> T:
    """Wait for what writes, also when cancelled: else it would go on unseen, past what comes after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def gently(many: Iterable[T]) -> AsyncIterator[T]:
    """Yield one after the other, and let others on now and then: work on all of them takes a while."""
    for number, it in enumerate(many):
        if not number % GENTLY:
            await asyncio.sleep(0)
        yield it
