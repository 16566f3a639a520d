"""Decodes responses (codes to errors of the broker port, bodies to values), and gathers those of concurrent calls."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from rota.brokers.errors import (
    BrokerError,
    ConsumptionDisabledError,
    MalformedResponseError,
    NotFoundError,
    RejectedError,
    UnreachableError,
)
from rota.brokers.rocketmq.wire import fastjson
from rota.brokers.rocketmq.wire.codes import ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame, MalformedFrameError
from rota.model import Queue

MAX_REASON_CHARACTERS = 1000  # characters of a remark in an error message; a remark may be as long as a frame

T = TypeVar("T")
R = TypeVar("R")

_UNAVAILABLE_CODES = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.FLOW_CONTROL, ResponseCode.GO_AWAY}
)
_NOT_FOUND_CODES = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST})


def remark_of(response: Frame) -> str:
    """Return a response's remark as one limited line, for error messages in logs and conditions."""
    return " ".join(response.remark[:MAX_REASON_CHARACTERS].split()) or "no reason given"


def error_of(request: str, response: Frame) -> BrokerError:
    """Return the error for a response other than SUCCESS; `request` describes the request for users."""
    message = f"{request}: {remark_of(response)} (code {response.code})"
    if response.code in _UNAVAILABLE_CODES:
        return UnreachableError(message)
    if response.code in _NOT_FOUND_CODES:
        return NotFoundError(message)
    if "forbiddenType" in response.fields:  # set if a group or a topic may not be read
        return ConsumptionDisabledError(message, response.code)
    return RejectedError(message, response.code)


def require_success(request: str, response: Frame) -> Frame:
    """Return a response if it is SUCCESS; else raise the error for it."""
    if response.code != ResponseCode.SUCCESS:
        raise error_of(request, response)
    return response


def decode_body(response: Frame, payload_type: type[T]) -> T:
    """Parse a response's body; raise MalformedResponseError if it is not of this type."""
    try:
        return fastjson.decode_json(response.body, payload_type)
    except MalformedFrameError as error:
        raise MalformedResponseError(f"The broker's response cannot be decoded: {error}") from None


def parse_queue_table(table: Mapping[str, T], convert: Callable[[T], R]) -> dict[Queue, R]:
    """Parse a table in a response's body: the keys are queues, the values are converted."""
    try:
        return fastjson.parse_queue_table(table, convert)
    except MalformedFrameError as error:
        raise MalformedResponseError(f"The broker's response cannot be decoded: {error}") from None


def int_field(response: Frame, field: str) -> int:
    """Return an integer field of a response; raise MalformedResponseError if it is missing or no number."""
    try:
        return int(response.fields[field])
    except (KeyError, ValueError):
        fields = str(dict(response.fields))[:MAX_REASON_CHARACTERS]
        raise MalformedResponseError(f"The broker's response has no integer in field {field!r}: {fields}") from None


async def gather_results(calls: Iterable[Awaitable[T]]) -> tuple[list[T], list[BrokerError]]:
    """Await all calls concurrently; return the results and the broker errors, `UnreachableError` ones last."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    succeeded: list[T] = []
    failed: list[BrokerError] = []
    for result in results:
        if isinstance(result, BrokerError):
            failed.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            succeeded.append(result)
    failed.sort(key=lambda error: isinstance(error, UnreachableError))  # callers raise the first: a rejection says more
    return succeeded, failed
