"""Custom: a strategy of the user's own, found by entry point in an installed package; its answer is checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from rota.model import NOBODY, Roster
from rota.strategies.arrays import Owners

ENTRY_POINTS = "rota.strategies"

Strategy = Callable[..., Owners]


def custom(roster: Roster, *, name: str, options: Mapping[str, Any] | None = None) -> Owners:
    """Call the strategy registered under `name` and take its answer if it is one."""
    found = load(name)
    try:
        answer = found(roster, **(options or {}))
    except Exception as error:  # whatever a stranger's code throws, the assignment stays and the user hears why
        raise ValueError(f"Custom strategy {name} failed: {type(error).__name__}: {error}") from error
    return checked(name, answer, roster)


def why_custom(_roster: Roster, _owners: Owners, queues: Sequence[int], *, name: str, **_options: Any) -> Iterator[str]:
    """Say who knows why."""
    for _ in queues:
        yield f"the custom strategy {name} answers so and gives no reason"


def load(name: str) -> Strategy:
    """Find a strategy by its entry point."""
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ValueError(f"There is no custom strategy {name}: no installed package offers it (offered: {known})")
    try:
        loaded: Strategy = found[name].load()
    except Exception as error:
        raise ValueError(f"Custom strategy {name} cannot be loaded: {type(error).__name__}: {error}") from error
    return loaded


def checked(name: str, answer: object, roster: Roster) -> Owners:
    """Refuse what is no owners array over the roster: two owners cannot be written in one, but strangers can."""
    try:
        owners = np.asarray(answer)
    except ValueError:
        owners = np.empty(0)
    if owners.shape != (len(roster.queues),) or owners.dtype.kind not in "iu":
        raise ValueError(f"Custom strategy {name} must answer one member index for each of {len(roster.queues)} queues")
    wrong = (owners < NOBODY) | (owners >= len(roster.members))
    if wrong.any():
        queue = int(np.flatnonzero(wrong)[0])
        told = f"member number {owners[queue]}, but members are numbered 0 to {len(roster.members) - 1}"
        raise ValueError(f"Custom strategy {name} gives queue {roster.queues[queue]} to {told} (nobody is -1)")
    return owners.astype(np.int32)
