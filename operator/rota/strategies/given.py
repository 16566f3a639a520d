"""What people hand to the library, checked: what cannot be meant is a sentence."""

# ruff: noqa: TRY004 - a user's mistake is a ValueError, of whatever type it is

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from rota.model import Queue


def queues(what: str, given: object) -> list[Queue]:
    """Return a list of queues, each given as (topic, broker, id)."""
    return [_queue(it) for it in _listed(what, given, "queues")]


def names(what: str, given: object) -> list[str]:
    """Return a list of names."""
    listed = _listed(what, given, "names")
    for name in listed:
        if not isinstance(name, str):
            raise ValueError(f"{what} has {name!r}, which is no name; give texts")
    return listed


def mapping(what: str, given: object) -> Mapping[Any, Any]:
    """Return a mapping; nothing given is an empty one."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"{what} must be a mapping, not {given!r}")
    return given or {}


def texts(what: str, given: object) -> Mapping[Any, str]:
    """Return a mapping to texts, or to None, which is as if it were not there."""
    mapped = mapping(what, given)
    for key, value in mapped.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{what} has {value!r} for {_spelled(key)}, which is no name; give a text")
    return mapped


def weights(what: str, given: object) -> Mapping[Any, float]:
    """Return a mapping to numbers, whatever numbers; None is as if it were not there."""
    mapped = mapping(what, given)
    for key, value in mapped.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ValueError(f"{what} has {value!r} for {_spelled(key)}, which is no number")
    return mapped


def _listed(what: str, given: object, of: str) -> list[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ValueError(f"{what} must be a list of {of}, not {given!r}")
    return list(given)


def _queue(given: object) -> Queue:
    if isinstance(given, tuple | list) and len(given) == len(Queue._fields):
        topic, broker, number = given
        if isinstance(topic, str) and isinstance(broker, str) and _id(number):
            return Queue(topic, broker, int(number))
    raise ValueError(f"Queue {given!r} cannot be meant: give (topic, broker, id), with an id from 0 up")


def _id(given: object) -> bool:
    return not isinstance(given, bool) and isinstance(given, Integral) and int(given) >= 0


def _spelled(key: object) -> str:
    return str(Queue._make(key)) if isinstance(key, tuple) and len(key) == len(Queue._fields) else str(key)
