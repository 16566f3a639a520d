"""Checks of users' input to the library; a mistake is a ValueError with a sentence."""

# ruff: noqa: TRY004 - a user's mistake is a ValueError, also for a wrong type

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

from rota.model import Queue

# `Queue._make` without its check of the length, in a third of the time.
_new_queue: Callable[[Iterable[Any]], Queue] = partial(tuple.__new__, Queue)


def check_queues(label: str, value: object) -> list[Queue]:
    """Return a list of queues from an iterable of (topic, broker, id)."""
    listed = _check_list(label, value, "queues")
    if _are_plain_queues(listed):
        return list(map(_new_queue, listed))
    return list(map(_parse_queue, listed))


def check_names(label: str, value: object) -> list[str]:
    """Return a list of names."""
    listed = _check_list(label, value, "names")
    for name in listed:
        if not isinstance(name, str):
            raise ValueError(f"{label} has {name!r}, which is not a string")
    return listed


def check_mapping(label: str, value: object) -> Mapping[Any, Any]:
    """Return a mapping; None is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{label} must be a mapping, not {value!r}")
    return value or {}


def check_texts(label: str, option: object) -> Mapping[Any, str]:
    """Return a mapping whose values are strings or None; for callers, None is the same as a missing key."""
    mapped = check_mapping(label, option)
    for key, value in mapped.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{label} has {value!r} for {_format_key(key)}, which is not a string")
    return mapped


def check_weights(label: str, option: object) -> Mapping[Any, float]:
    """Return a mapping whose values are numbers of any size or None; for callers, None is the same as a missing key."""
    mapped = check_mapping(label, option)
    for key, value in mapped.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ValueError(f"{label} has {value!r} for {_format_key(key)}, which is not a number")
    return mapped


def _check_list(label: str, value: object, noun: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{label} must be a list of {noun}, not {value!r}")
    return list(value)


def _are_plain_queues(values: list[Any]) -> bool:
    """Whether all values are valid queues of built-in types.

    They are checked column by column, in a fifth of the time of `_parse_queue`.
    """
    if (
        not values
        or not set(map(type, values)) <= {tuple, list, Queue}
        or set(map(len, values)) != {len(Queue._fields)}
    ):
        return False
    ids = [number for _, _, number in values]
    name_types = {type(topic) for topic, _, _ in values} | {type(broker) for _, broker, _ in values}
    return name_types == {str} and set(map(type, ids)) == {int} and min(ids) >= 0


def _parse_queue(value: object) -> Queue:
    if isinstance(value, tuple | list) and len(value) == len(Queue._fields):
        topic, broker, number = value
        if isinstance(topic, str) and isinstance(broker, str) and _is_queue_id(number):
            return Queue(topic, broker, int(number))
    raise ValueError(f"{value!r} is not a queue: give (topic, broker, id), with an id from 0 up")


def _is_queue_id(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def _format_key(key: object) -> str:
    return str(Queue._make(key)) if isinstance(key, tuple) and len(key) == len(Queue._fields) else str(key)
