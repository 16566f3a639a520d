"""Custom: a strategy of the user's own, found by entry point in an installed package; its answer is checked."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from rota.model import NOBODY, Roster, plain
from rota.strategies.arrays import Owners

ENTRY_POINTS = "rota.strategies"

Strategy = Callable[..., Owners]


def custom(roster: Roster, *, name: str, options: Mapping[str, Any] | None = None) -> Owners:
    """Call the strategy registered under `name` and take its answer if it is one."""
    found = load(name)
    answer = _guarded(f"Custom strategy {name}", "failed", lambda: found(lent(roster), **(options or {})))
    return checked(name, answer, roster)


def lent(roster: Roster) -> Roster:
    """Return a roster for a stranger: what it writes into the present owners is not ours."""
    return replace(roster, owners=array("i", roster.owners))


def why_custom(_roster: Roster, _owners: Owners, queues: Sequence[int], *, name: str, **_options: Any) -> Iterator[str]:
    """Say who knows why."""
    for _ in queues:
        yield f"the custom strategy {name} answers so and gives no reason"


def load(name: object) -> Strategy:
    """Find a strategy by its entry point."""
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if not isinstance(name, str) or name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ValueError(f"There is no custom strategy {name}: no installed package offers it (offered: {known})")
    loaded: Strategy = _guarded(f"Custom strategy {name}", "cannot be loaded", found[name].load)
    return loaded


def checked(name: str, answer: object, roster: Roster) -> Owners:
    """Refuse what is no owners array over the roster."""
    return owners_array(f"Custom strategy {name}", answer, roster)


def owners_array(whose: str, answer: object, roster: Roster) -> Owners:
    """Return an answer as owners: two owners cannot be written in one, but strangers can."""
    wanted = f"must answer one member index for each of {len(roster.queues)} queues"
    owners = _guarded(whose, wanted, lambda: np.asarray(answer))
    if owners.shape != (len(roster.queues),) or owners.dtype.kind not in "iu":
        raise ValueError(f"{whose} {wanted}")
    wrong = (owners < NOBODY) | (owners >= len(roster.members))
    if wrong.any():
        queue = int(np.flatnonzero(wrong)[0])
        told = f"member number {owners[queue]}, but members are numbered 0 to {len(roster.members) - 1}"
        raise ValueError(f"{whose} gives queue {roster.queues[queue]} to {told} (nobody is -1)")
    found: Owners = owners.astype(np.int32)
    return found


def _guarded(whose: str, what: str, call: Callable[[], Any]) -> Any:
    """Call a stranger's code: whatever it throws, the assignment stays and the user hears why."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() in it must not end us
        raise ValueError(f"{whose} {what}: {_told(error)}") from error


def _told(error: BaseException) -> str:
    try:
        return plain(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - its own text may throw too
        return type(error).__name__
