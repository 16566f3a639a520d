"""`rota explain -f`: why a queue has its owner, without a cluster."""

# ruff: noqa: T201 - this is where we speak

from collections.abc import Mapping
from functools import partial
from typing import Any

from rota.cli.console.inputs import World
from rota.cli.console.output import move
from rota.model import Queue, Roster, queue_of
from rota.planner import Measured
from rota.planner.target import options
from rota.spec import PolicySpec
from rota.strategies import explain_all, prepared


def reasons(world: World, queue: str | None) -> dict[str, Any]:
    """Return the reason for one queue, or for each that moves, or if none does an example for each member."""
    policy, roster = world.policy, world.roster
    if world.foreigners:  # each of them computes one assignment over all of them: that is what there is to explain
        policy = PolicySpec()
        roster = Roster.of(roster.queues, [*roster.members, *world.foreigners], world.present)
    told = {"strategy": policy.strategy, "foreigners": world.foreigners}
    return told | _explained(policy, roster, world, queue)


def _explained(policy: PolicySpec, roster: Roster, world: World, queue: str | None) -> dict[str, list[dict[str, Any]]]:
    chosen = options(policy, roster, Measured(world.rooms))
    owners = prepared(policy.strategy, chosen)(roster)
    why = partial(explain_all, policy.strategy, roster, owners, options=chosen, present=world.present)
    asked = [queue_of(queue)] if queue is not None else _moving(roster, owners.tolist())
    if asked:
        return {"queues": _queue_rows(roster, owners.tolist(), asked, why(asked))}
    shares = roster.assignment(owners.tolist())
    firsts = {member: share[0] for member, share in shares.items() if share}
    return {"members": _member_rows(shares, dict(zip(firsts, why(firsts.values()), strict=True)), len(owners))}


def _moving(roster: Roster, owners: list[int]) -> list[Queue]:
    """Return the queues whose owner changes; where nobody owned anything, all begins and nothing moves."""
    if max(roster.owners) < 0:
        return []
    changes = zip(roster.queues, roster.owners, owners, strict=True)
    return [queue for queue, was, now in changes if was != now]


def _queue_rows(roster: Roster, owners: list[int], asked: list[Queue], reasons: list[str]) -> list[dict[str, Any]]:
    was = dict(zip(roster.queues, roster.owners, strict=True))
    now = dict(zip(roster.queues, owners, strict=True))
    return [
        {**move(roster, queue, was[queue], now[queue]), "why": reason}
        for queue, reason in zip(asked, reasons, strict=True)
    ]


def _member_rows(shares: Mapping[str, list[Queue]], examples: Mapping[str, str], total: int) -> list[dict[str, Any]]:
    return [
        {
            "member": member,
            "count": len(share),
            "why": f"{member} owns {len(share)} of {total} queues"
            + (f"; for example, {examples[member]}" if share else ""),
        }
        for member, share in shares.items()
    ]


def sentences(told: Mapping[str, Any]) -> None:
    """Print the reasons for people."""
    for row in told.get("queues") or told["members"]:
        print(row["why"])
    if told["foreigners"]:
        print(f"Averagely over all of them, as consumers that are not Rota's do: {', '.join(told['foreigners'])}")
