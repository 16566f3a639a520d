"""Parts of the sentences that users read: numbers with their nouns, and lists of names."""

from collections.abc import Sequence


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 queue` or `12 queues`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join_names(names: Sequence[str], max_names: int = 3) -> str:
    """Return the first names, and how many more follow."""
    suffix = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + suffix
