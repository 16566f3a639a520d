"""`rota plan`: shows the planned owners and the moves."""

# ruff: noqa: T201 - this module prints

from collections.abc import Mapping
from typing import Any

from rota import planner
from rota.cli.console.inputs import GroupInputs
from rota.cli.console.output import move, table
from rota.ranges import from_ranges, to_ranges
from rota.sentences import count
from rota.spec import PolicySpec


def outlook(world: GroupInputs) -> dict[str, Any]:
    """Return a plan as plain values; with unmanaged consumers, they own all queues that no member owns."""
    roster, foreigners = world.roster, world.foreigners
    policy = PolicySpec() if foreigners else world.policy
    if foreigners:
        owners = planner.share_with_unmanaged(roster, foreigners, {}).tolist()
    else:
        owners = planner.target(policy, roster, planner.Measured(world.rooms)).tolist()
    shares = roster.assignment(owners)
    unassigned = to_ranges(queue for queue, owner in zip(roster.queues, owners, strict=True) if owner < 0)
    counts = [len(share) for share in shares.values()]
    pairs = zip(roster.queues, roster.owners, owners, strict=True)
    moves = [move(roster, queue, was, now) for queue, was, now in pairs if was not in {-1, now}]
    return {
        "strategy": policy.strategy,
        "members": {member: to_ranges(share) for member, share in shares.items()},
        "moves": moves,
        "spread": {"least": min(counts), "most": max(counts)},
        "idle": [member for member, share in shares.items() if not share],
        "foreign": unassigned if foreigners else {},
        "unowned": {} if foreigners else unassigned,
        "notes": _notes(world, len(moves)),
    }


def _notes(world: GroupInputs, moves: int) -> list[str]:
    """Return notes on what would delay the plan in a cluster, or differ there."""
    budget, roster = world.policy.budget, world.roster
    notes = []
    missing_owners = [name for name in world.present.values() if name not in set(roster.members)]
    if missing_owners:
        names = ", ".join(sorted(set(missing_owners))[:3])
        belong = "queue belongs" if len(missing_owners) == 1 else "queues belong"
        notes.append(f"gone: {len(missing_owners)} {belong} to members that are not there, such as {names}")
    unseen = {subscription.topic for subscription in world.group.subscriptions} - {run.topic for run in roster.runs}
    if unseen:
        notes.append(f"unseen: there is no queue of {', '.join(sorted(unseen))}")
    if world.online and not world.foreigners:
        names = ", ".join(world.online[:3]) + (", …" if len(world.online) > 3 else "")  # noqa: PLR2004 - are enough
        notes.append(f"online: {count(len(world.online), 'consumer')} in the group now: {names}; see --foreign")
    if world.group.paused:
        notes.append("paused: the group is paused, so its members release everything")
    if world.policy.paused:
        notes.append("paused: the policy is paused, so no queue is taken from a member that works it")
    # Balanced plans within the budget: if it uses all allowed moves, it would probably move more queues.
    if budget and (moves > budget.max_moves or (world.policy.strategy, moves) == ("Balanced", budget.max_moves)):
        effect = "the rest waits its turn" if budget.max_moves else "no queue is taken from a member that works it"
        notes.append(f"budget: at most {budget.max_moves} queues move in any {budget.per:g}s; {effect}")
    return notes


def tables(outlook: dict[str, Any], *, diff: bool) -> None:
    """Print a plan as tables."""
    if diff:
        other_owner = "a foreigner" if outlook["foreign"] else "nobody"
        table([{**move, "to": move["to"] or other_owner} for move in outlook["moves"]])
    else:
        table([{"member": member, **_share(ranged)} for member, ranged in outlook["members"].items()])
    spread, idle = outlook["spread"], outlook["idle"]
    moves = count(len(outlook["moves"]), "move")
    print(f"{outlook['strategy']}: {spread['least']} to {spread['most']} queues a member, {moves}")
    if idle:
        print(f"idle: {', '.join(idle)}")
    for whose in ("foreign", "unowned"):
        if outlook[whose]:
            print(f"{whose}: {_share(outlook[whose])['queues']}")
    for note in outlook["notes"]:
        print(note)


def _share(ranged: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    ranges = (f"{topic}/{broker}/{ids}" for topic, brokers in ranged.items() for broker, ids in brokers.items())
    return {"count": len(from_ranges(ranged)), "queues": "  ".join(ranges)}
