"""What answers mean: codes as errors of the port, bodies as values."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar

from rota.brokers.errors import BrokerError, Garbled, Refused, SwitchedOff, Unknown, Unreachable
from rota.brokers.rocketmq.wire import fastjson
from rota.brokers.rocketmq.wire.codes import Answer
from rota.brokers.rocketmq.wire.frames import Frame, Malformed
from rota.model import Queue

LONGEST_REASON = 1000  # characters; the remark of a frame may be as long as the frame

T = TypeVar("T")

_NOTHING_KNOWN = frozenset({Answer.SYSTEM_BUSY, Answer.SERVICE_NOT_AVAILABLE, Answer.FLOW_CONTROL, Answer.GO_AWAY})
_NOT_THERE = frozenset({Answer.TOPIC_NOT_EXIST, Answer.SUBSCRIPTION_GROUP_NOT_EXIST})


def reason(answer: Frame) -> str:
    """Return what an answer says of itself, in one line: it goes into sentences, and these into logs and conditions."""
    return " ".join(answer.remark[:LONGEST_REASON].split()) or "no reason given"


def refusal(asked: str, answer: Frame) -> BrokerError:
    """Return what an answer other than SUCCESS means."""
    said = f"{asked}: {reason(answer)} (code {answer.code})"
    if answer.code in _NOTHING_KNOWN:
        return Unreachable(said)
    if answer.code in _NOT_THERE:
        return Unknown(said)
    return SwitchedOff(said, answer.code) if "forbiddenType" in answer.fields else Refused(said, answer.code)


def good(asked: str, answer: Frame) -> Frame:
    """Return an answer if it is SUCCESS."""
    if answer.code != Answer.SUCCESS:
        raise refusal(asked, answer)
    return answer


def body(answer: Frame, kind: type[T]) -> T:
    """Read an answer's body."""
    try:
        return fastjson.read(answer.body, kind)
    except Malformed as error:
        raise Garbled(f"An answer cannot be read: {error}") from None


def by_queue(table: Mapping[str, T]) -> dict[Queue, T]:
    """Read the keys of a table in an answer's body."""
    try:
        return {fastjson.queue(key): value for key, value in table.items()}
    except Malformed as error:
        raise Garbled(f"An answer cannot be read: {error}") from None


def number(answer: Frame, field: str) -> int:
    """Read a number from an answer."""
    try:
        return int(answer.fields[field])
    except (KeyError, ValueError):
        raise Garbled(f"An answer has no number in {field!r}: {dict(answer.fields)!s:.{LONGEST_REASON}}") from None


async def side_by_side(asked: Iterable[Awaitable[T]]) -> tuple[list[T], list[BrokerError]]:
    """Await all; return what came, and what failed: what was said first, and then what is not known."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    failed: list[BrokerError] = []
    for it in found:
        if isinstance(it, BrokerError):
            failed.append(it)
        elif isinstance(it, BaseException):
            raise it
    failed.sort(key=lambda error: isinstance(error, Unreachable))
    return [it for it in found if not isinstance(it, BaseException)], failed
