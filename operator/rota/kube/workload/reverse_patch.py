"""Where two values differ, as a note by which the one becomes the other again.

What somebody has changed since the note was made stays as it is.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

_Path = Annotated[list[str | int], Meta(min_length=1)]
_Perhaps = Annotated[list[Any], Meta(max_length=1)]  # a list of one, or nothing
_Entry = tuple[_Path, _Perhaps, _Perhaps]  # where, what is there, what was there


def noted(found: Any, was: Any) -> str:
    """Return what is needed to get back from one value to the other; nothing, if they are equal."""
    entries = [*_unlike(found, was, ())]
    return msgspec.json.encode(entries).decode() if entries else ""


def undone(found: Any, note: str) -> Any:
    """Return the value that was noted; a note that cannot be decoded changes nothing."""
    try:
        entries = msgspec.json.decode(note, type=list[_Entry]) if note else []
    except (msgspec.DecodeError, RecursionError):
        return found
    for path, there, was in entries:
        found = _restored(found, path, there, was)
    return found


def _unlike(found: Any, was: Any, path: tuple[str | int, ...]) -> Iterator[_Entry]:
    """Yield where two values differ, as deep down as can be said."""
    for key in _keys(found, was):
        there, before = _at(found, key), _at(was, key)
        if there and before and _keys(there[0], before[0]):
            yield from _unlike(there[0], before[0], (*path, key))
        elif there != before:
            yield [*path, key], there, before


def _keys(found: Any, was: Any) -> list[Any]:
    """Return by which keys two values are compared: of mappings, or of lists of one length."""
    if isinstance(found, dict) and isinstance(was, dict):
        return list(dict.fromkeys([*found, *was]))
    if isinstance(found, list) and isinstance(was, list) and len(found) == len(was):
        return list(range(len(was)))
    return []


def _at(found: Any, key: Any) -> list[Any]:
    """Return what is there, as a list of one, or nothing."""
    there = key in found if isinstance(found, dict) else isinstance(found, list) and key in range(len(found))
    return [found[key]] if there else []


def _restored(found: Any, path: list[Any], there: list[Any], was: list[Any]) -> Any:
    key, *rest = path
    present = _at(found, key)
    now = was if present == there else present
    if rest:
        now = [_restored(it, rest, there, was) for it in present]
    if isinstance(found, dict):
        kept = {name: it for name, it in found.items() if now or name != key}  # in their order
        return {**kept, key: now[0]} if now else kept
    return [*found[:key], *now, *found[key + 1 :]] if present else found
