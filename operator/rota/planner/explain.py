"""Why each queue of a living group has the owner that it has."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rota.model import NOBODY, Holder, Queue, Roster
from rota.planner.moves import aim_of, measured
from rota.planner.situation import Situation
from rota.planner.status.problems import describe_unmanaged
from rota.planner.target import options, told_apart
from rota.spec import PolicySpec
from rota.strategies import explain_all


class Why(NamedTuple):
    """Who owns a queue, and why; None: nobody."""

    queue: Queue
    owner: str | None
    told: str


def whys(it: Situation, asked: Sequence[Queue]) -> list[Why]:
    """Say it of these queues; of none: of one queue of each member."""
    everyone = it.document.everyone
    queues, there = list(asked) or _examples(it), _there(it)
    unknown = next((queue for queue in queues if queue not in there), None)
    if unknown:
        raise ValueError(f"There is no queue {unknown} among the group's {len(there)}")
    if everyone is not None:
        return [Why(queue, None, f"{queue} is read by every member: the group is Broadcasting") for queue in queues]
    wanted = set(it.queues)
    reasons = _reasons(it, [queue for queue in queues if queue in it.owned and queue in wanted])
    return [_why(it, queue, reasons.get(queue, "")) for queue in queues]


def _there(it: Situation) -> set[Queue]:
    """Return the queues that can be asked for: those to be worked, and those on record that are not any more."""
    views = it.snapshot.views.values() if it.snapshot.must_release_all else ()
    seen = {queue for view in views if view for queue in view.queues}
    return {*it.queues, *it.owned, *it.document.releasing, *(it.document.everyone or ())} | seen


def _why(it: Situation, queue: Queue, reason: str) -> Why:
    owner, release = it.owned.get(queue), it.document.releasing.get(queue)
    if release:
        to = f"{release.to} is to have it next" if release.to else "nobody is to have it"
        return Why(queue, None, f"{queue} is on its way: {release.holder.name} releases it, {to}")
    if owner is None:
        return Why(queue, None, f"{queue} has no owner{_without(it)}")
    return Why(queue, owner.name, reason or f"{queue} is still with {owner.name}: {_still(it, queue, owner)}")


def _without(it: Situation) -> str:
    if it.snapshot.must_release_all:
        return f": {_why_nothing(it)}"
    return f" of ours: {describe_unmanaged(it.snapshot.foreigners)}" if it.snapshot.foreigners else ""


def _why_nothing(it: Situation) -> str:
    return "an older ConsumerGroup has the same consumer group" if it.snapshot.is_duplicate else "the group is paused"


def _still(it: Situation, queue: Queue, owner: Holder) -> str:
    """Say what keeps a queue where it is, if no strategy does."""
    if it.snapshot.spec is None:
        return "the group cannot be understood, so what is assigned stays"
    if it.snapshot.must_release_all:
        return f"{_why_nothing(it)}, and it is to be given up"
    if queue not in it.queues:
        return "it is not the group's any more, and is to be given up"
    if not it.counted:
        return "nobody is there to take it over"
    pod = it.pods.get(owner.name)
    mine = pod is not None and pod.holder == owner
    return f"that member is {it.standings[owner.name] if mine else 'not there'}, and has not given it up yet"


def _examples(it: Situation) -> list[Queue]:
    """Return the first queue of each member; where every member has all of them, the first."""
    if it.document.everyone is not None:
        return [*it.document.everyone[:1]]
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
    unled = "the policy cannot be followed, so what is assigned stays" if it.snapshot.policy is None else ""
    kept = aim.problem.message if aim.problem else unled if not it.snapshot.foreigners else ""
    if kept:
        return {queue: f"{queue} stays with {it.owned[queue].name}: {kept}" for queue in queues}
    names, known = [*aim.roster.members], dict[str, str]()
    roster, policy = aim.roster, it.policy
    foreigners = it.snapshot.foreigners or ()
    if foreigners:
        ids = {name: it.pods[name].client_id or name for name in it.counted}
        known = {client: name for name, client in ids.items()}
        current = {queue: ids[holder.name] for queue, holder in it.owned.items() if holder.name in ids}
        roster, policy = Roster.of(it.queues, [*known, *told_apart(foreigners)], current), PolicySpec()
        names = [known.get(client, client) for client in roster.members]
    places = {name: place for place, name in enumerate(names)}
    owned = [it.owned.get(queue) for queue in roster.queues]
    owners = np.array([places.get(holder.name, NOBODY) if holder else NOBODY for holder in owned], np.int32)
    present = {queue: holder.name for queue, holder in it.owned.items()}
    asked = [queue for queue in queues if it.owned[queue].name in places]
    chosen = options(policy, roster, measured(it))
    told = explain_all(policy.strategy, roster, owners, asked, chosen, present=present)
    return dict(zip(asked, [_by_name(it, known) for it in told], strict=True))


def _by_name(told: str, known: Mapping[str, str]) -> str:
    """Name members as people know them where a sentence has their client ids; one may begin as another one does."""
    for client in sorted(known, key=len, reverse=True):
        told = told.replace(client, known[client])
    return told
