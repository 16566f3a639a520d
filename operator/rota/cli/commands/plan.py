"""`rota plan`: who would own what, and what would move."""

# ruff: noqa: T201 - this is where we speak

from collections.abc import Mapping
from typing import Any

from rota import planner
from rota.cli.console.inputs import World
from rota.cli.console.output import move, table
from rota.ranges import from_ranges, to_ranges
from rota.sentences import count
from rota.spec import PolicySpec


def outlook(world: World) -> dict[str, Any]:
    """Say a plan in values; what is not ours beside foreigners is theirs, and otherwise nobody's."""
    roster, foreigners = world.roster, world.foreigners
    policy = PolicySpec() if foreigners else world.policy
    if foreigners:
        owners = planner.beside_foreigners(roster, foreigners, {}).tolist()
    else:
        owners = planner.target(policy, roster, planner.Measured(world.rooms)).tolist()
    shares = roster.assignment(owners)
    rest = to_ranges(queue for queue, owner in zip(roster.queues, owners, strict=True) if owner < 0)
    counts = [len(share) for share in shares.values()]
    pairs = zip(roster.queues, roster.owners, owners, strict=True)
    moves = [move(roster, queue, was, now) for queue, was, now in pairs if was not in {-1, now}]
    return {
        "strategy": policy.strategy,
        "members": {member: to_ranges(share) for member, share in shares.items()},
        "moves": moves,
        "spread": {"least": min(counts), "most": max(counts)},
        "idle": [member for member, share in shares.items() if not share],
        "foreign": rest if foreigners else {},
        "unowned": {} if foreigners else rest,
        "notes": _notes(world, len(moves)),
    }


def _notes(world: World, moves: int) -> list[str]:
    """Say what would keep a cluster from doing at once what is planned."""
    budget, roster = world.policy.budget, world.roster
    notes = []
    gone = [name for name in world.present.values() if name not in set(roster.members)]
    if gone:
        names = ", ".join(sorted(set(gone))[:3])
        belong = "queue belongs" if len(gone) == 1 else "queues belong"
        notes.append(f"gone: {len(gone)} {belong} to members that are not there, such as {names}")
    unseen = {it.topic for it in world.group.subscriptions} - {run.topic for run in roster.runs}
    if unseen:
        notes.append(f"unseen: there is no queue of {', '.join(sorted(unseen))}")
    if world.online and not world.foreigners:
        names = ", ".join(world.online[:3]) + (", …" if len(world.online) > 3 else "")  # noqa: PLR2004 - are enough
        notes.append(f"online: {count(len(world.online), 'consumer')} in the group now: {names}; see --foreign")
    if world.group.paused:
        notes.append("paused: the group is paused, so its members release everything")
    if world.policy.paused:
        notes.append("paused: the policy is paused, so no queue is taken from a member that works it")
    # Balanced plans within the budget: as many moves as it allows are hardly all that it would like.
    if budget and (moves > budget.max_moves or (world.policy.strategy, moves) == ("Balanced", budget.max_moves)):
        rest = "the rest waits its turn" if budget.max_moves else "no queue is taken from a member that works it"
        notes.append(f"budget: at most {budget.max_moves} queues move in any {budget.per:g}s; {rest}")
    return notes


def tables(outlook: dict[str, Any], *, diff: bool) -> None:
    """Print a plan for people."""
    if diff:
        others = "a foreigner" if outlook["foreign"] else "nobody"
        table([{**move, "to": move["to"] or others} for move in outlook["moves"]])
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
    spelled = (f"{topic}/{broker}/{ids}" for topic, brokers in ranged.items() for broker, ids in brokers.items())
    return {"count": len(from_ranges(ranged)), "queues": "  ".join(spelled)}
