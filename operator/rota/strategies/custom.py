"""Custom: runs a user's own strategy from an installed package (entry point group `rota.strategies`).

The package is not part of Rota, so its result is checked, and each of its exceptions becomes a ValueError.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import repeat
from typing import Any

import numpy as np

from rota.model import NO_OWNER, Roster, single_line
from rota.strategies.arrays import Owners

ENTRY_POINT_GROUP = "rota.strategies"

Strategy = Callable[..., Owners]


def custom(roster: Roster, *, name: str, options: Mapping[str, Any] | None = None) -> Owners:
    """Call the strategy registered under `name` and return its result if that is valid."""
    strategy = load_strategy(name)
    copied_roster = replace(roster, owners=array("i", roster.owners))  # user code may write into the array
    result = _call_user_code(f"Custom strategy {name}", "failed", lambda: strategy(copied_roster, **(options or {})))
    return check_owners(f"Custom strategy {name}", result, roster)


def why_custom(_roster: Roster, _owners: Owners, queues: Sequence[int], *, name: str, **_options: Any) -> Iterator[str]:
    """Return the same sentence for every queue: a custom strategy gives no reasons."""
    return repeat(f"the custom strategy {name} chose it and gives no reason", len(queues))


def load_strategy(name: object) -> Strategy:
    """Load a strategy by its entry point; raise ValueError if no package offers it.

    The name is a user's option, so it may be of any type.
    """
    offered = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if not isinstance(name, str) or name not in offered:
        known_names = ", ".join(sorted(offered)) or "none"
        raise ValueError(f"There is no custom strategy {name}: no installed package offers it (offered: {known_names})")
    loaded: Strategy = _call_user_code(f"Custom strategy {name}", "cannot be loaded", offered[name].load)
    return loaded


def check_owners(subject: str, result: object, roster: Roster) -> Owners:
    """Return a strategy's result as owners; raise ValueError for a wrong shape, type or member index."""
    requirement = f"must return one member index for each of {len(roster.queues)} queues"
    # The result may be an object of the user's whose `__array__` numpy calls.
    owners = _call_user_code(subject, requirement, lambda: np.asarray(result))
    if owners.shape != (len(roster.queues),) or owners.dtype.kind not in "iu":
        raise ValueError(f"{subject} {requirement}")
    wrong = (owners < NO_OWNER) | (owners >= len(roster.members))
    if wrong.any():
        queue = int(np.flatnonzero(wrong)[0])
        problem = f"member number {owners[queue]}, but members are numbered 0 to {len(roster.members) - 1}"
        raise ValueError(f"{subject} gives queue {roster.queues[queue]} to {problem} (-1: no owner)")
    checked: Owners = owners.astype(np.int32)
    return checked


def _call_user_code(subject: str, problem: str, call: Callable[[], Any]) -> Any:
    """Call user code: any exception becomes a ValueError, so that the assignment stays and the user sees the cause.

    The error's sentence begins with `subject` and `problem`.
    """
    try:
        return call()
    except KeyboardInterrupt:  # Ctrl-C ends this process, also during user code
        raise
    except BaseException as error:  # sys.exit() in user code must not end this process
        raise ValueError(f"{subject} {problem}: {_error_text(error)}") from error


def _error_text(error: BaseException) -> str:
    try:
        return single_line(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - the exception's own text may raise, too
        return type(error).__name__
