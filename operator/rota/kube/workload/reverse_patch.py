"""Reverse patch: the differences between a changed JSON value and its original, from which the original is restored.

`injection.py` keeps one in a template, to remove the sidecar. A part that a user has changed since then stays as it
is. An entry has a path, the changed value and the original one, both as lists: `[value]`, or `[]` if absent. The
reverse patch of `{"a": 1, "b": 3, "c": 4}`, which was `{"a": 1, "b": 2}`, is `[[["b"], [3], [2]], [["c"], [4], []]]`.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

_Path = Annotated[list[str | int], Meta(min_length=1)]
_OptionalValue = Annotated[list[Any], Meta(max_length=1)]  # [value]; [] if it is absent
_Entry = tuple[_Path, _OptionalValue, _OptionalValue]  # path, patched value, original value


def make_patch(patched: Any, original: Any) -> str:
    """Return the reverse patch that turns `patched` back into `original`; empty if they are equal."""
    entries = [*_differences(patched, original, ())]
    return msgspec.json.encode(entries).decode() if entries else ""


def apply_patch(current: Any, patch: str) -> Any:
    """Return the original value; a reverse patch that cannot be decoded changes nothing."""
    try:
        entries = msgspec.json.decode(patch, type=list[_Entry]) if patch else []
    except (msgspec.DecodeError, RecursionError):
        return current
    for path, patched, original in entries:
        current = _restore(current, path, patched, original)
    return current


def _differences(patched: Any, original: Any, path: tuple[str | int, ...]) -> Iterator[_Entry]:
    """Yield the differences of two values, at the deepest paths that both have."""
    for key in _keys(patched, original):
        new = _value_at(patched, key)
        old = _value_at(original, key)
        if new and old and _keys(new[0], old[0]):
            yield from _differences(new[0], old[0], (*path, key))
        elif new != old:
            yield [*path, key], new, old


def _keys(patched: Any, original: Any) -> list[Any]:
    """Return the keys by which two values are compared: of mappings, or of lists of the same length."""
    if isinstance(patched, dict) and isinstance(original, dict):
        return list(dict.fromkeys([*patched, *original]))
    if isinstance(patched, list) and isinstance(original, list) and len(patched) == len(original):
        return list(range(len(original)))
    return []


def _value_at(value: Any, key: Any) -> list[Any]:
    """Return the value at a key as a list of one; empty if it is absent."""
    if isinstance(value, dict):
        return [value[key]] if key in value else []
    is_present = isinstance(value, list) and key in range(len(value))
    return [value[key]] if is_present else []


def _restore(current: Any, path: list[Any], patched: list[Any], original: list[Any]) -> Any:
    """Return the current value with the original part at a path, if that part is still as patched."""
    key, *deeper = path
    present = _value_at(current, key)
    if deeper:
        restored = [_restore(value, deeper, patched, original) for value in present]
    else:
        restored = original if present == patched else present
    if isinstance(current, dict):
        items = {name: value for name, value in current.items() if restored or name != key}  # keeps the order
        return {**items, key: restored[0]} if restored else items
    return [*current[:key], *restored, *current[key + 1 :]] if present else current
