"""Why each queue of a living group has the owner that it has."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rota.model import NOBODY, Holder, Queue, Roster
from rota.planner.moves import aim_of, measured
from rota.planner.situation import Situation
from rota.planner.target import options
from rota.spec import PolicySpec
from rota.strategies import explain_all


class Why(NamedTuple):
    """Who owns a queue, and why; None: nobody."""

    queue: Queue
    owner: str | None
    told: str


def whys(it: Situation, asked: Sequence[Queue]) -> list[Why]:
    """Say it of these queues; of none: of one queue of each member."""
    if it.document.everyone is not None:
        return [Why(queue, None, f"{queue} is read by every member: the group is Broadcasting") for queue in asked]
    queues = list(asked) or _examples(it)
    unknown = next((queue for queue in queues if queue not in it.queues), None)
    if unknown:
        raise ValueError(f"There is no queue {unknown} among the group's {len(it.queues)}")
    reasons = _reasons(it, [queue for queue in queues if queue in it.owned])
    return [_why(it, queue, reasons.get(queue, "")) for queue in queues]


def _why(it: Situation, queue: Queue, reason: str) -> Why:
    owner, release = it.owned.get(queue), it.document.releasing.get(queue)
    if release:
        to = f"{release.to} is to have it next" if release.to else "nobody is to have it"
        return Why(queue, None, f"{queue} is on its way: {release.holder.name} releases it, {to}")
    if owner is None:
        return Why(queue, None, f"{queue} has no owner")
    return Why(queue, owner.name, reason or f"{queue} stays with {owner.name}: nobody is there to take it over")


def _examples(it: Situation) -> list[Queue]:
    """Return the first queue of each member."""
    found: dict[Holder, Queue] = {}
    for queue, holder in sorted(it.owned.items()):
        if queue in it.queues:
            found.setdefault(holder, queue)
    return list(found.values())


def _reasons(it: Situation, queues: Sequence[Queue]) -> dict[Queue, str]:
    """Let the strategy say it, beside what it answers now."""
    aim = aim_of(it)
    if aim.roster is None or not queues:
        return {}
    names = [*aim.roster.members]
    roster, policy = aim.roster, it.policy
    foreigners = it.snapshot.foreigners or ()
    if foreigners:
        ids = {name: it.pods[name].client_id or name for name in it.counted}
        known = {client: name for name, client in ids.items()}
        roster, policy = Roster.of(it.queues, [*known, *foreigners]), PolicySpec()
        names = [known.get(client, client) for client in roster.members]
    places = {name: place for place, name in enumerate(names)}
    owned = [it.owned.get(queue) for queue in roster.queues]
    owners = np.array([places.get(holder.name, NOBODY) if holder else NOBODY for holder in owned], np.int32)
    present = {queue: holder.name for queue, holder in it.owned.items()}
    asked = [queue for queue in queues if it.owned[queue].name in places]
    chosen = options(policy, roster, measured(it))
    told = explain_all(policy.strategy, roster, owners, asked, chosen, present=present)
    return dict(zip(asked, told, strict=True))
