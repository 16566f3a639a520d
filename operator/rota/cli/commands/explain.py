"""`rota explain -f`: explains the owner of a queue, without a cluster."""

# ruff: noqa: T201 - this module prints

from collections.abc import Mapping
from functools import partial
from typing import Any

from rota.cli.console.inputs import GroupInputs
from rota.cli.console.output import describe_move
from rota.model import NO_OWNER, Queue, Roster, parse_queue
from rota.planner import StrategyInputs
from rota.planner.target import UNMANAGED_POLICY, resolve_options
from rota.spec import PolicySpec
from rota.strategies import explain_all, prepared


def explain_owners(inputs: GroupInputs, queue: str | None) -> dict[str, Any]:
    """Return the reason for one queue or, without one, for each moving queue; if none moves, an example per member."""
    policy = inputs.policy
    roster = inputs.roster
    if inputs.unmanaged:  # these compute one assignment over all consumers, so that is the one to explain
        policy = UNMANAGED_POLICY
        roster = Roster.of(roster.queues, [*roster.members, *inputs.unmanaged], inputs.current_owners)
    result = {"strategy": policy.strategy, "foreigners": inputs.unmanaged}
    return result | _collect_reasons(policy, roster, inputs, queue)


def _collect_reasons(
    policy: PolicySpec, roster: Roster, inputs: GroupInputs, queue: str | None
) -> dict[str, list[dict[str, Any]]]:
    strategy_options = resolve_options(policy, roster, StrategyInputs(inputs.rooms))
    assign = prepared(policy.strategy, strategy_options)
    owners = assign(roster)
    explain = partial(
        explain_all, policy.strategy, roster, owners, options=strategy_options, present=inputs.current_owners
    )
    planned = owners.tolist()
    queues = [parse_queue(queue)] if queue is not None else _moving_queues(roster, planned)
    if queues:
        return {"queues": _queue_rows(roster, planned, queues, explain(queues))}
    shares = roster.assignment(planned)
    first_queues: dict[str, Queue] = {}
    for member, share in shares.items():
        if share:
            first_queues[member] = share[0]
    reasons = dict(zip(first_queues, explain(first_queues.values()), strict=True))
    return {"members": _member_rows(shares, reasons, len(planned))}


def _moving_queues(roster: Roster, owners: list[int]) -> list[Queue]:
    """Return the queues whose owner changes; none if no queue had an owner before."""
    if set(roster.owners) <= {NO_OWNER}:
        return []
    changes = zip(roster.queues, roster.owners, owners, strict=True)
    return [queue for queue, previous, planned in changes if previous != planned]


def _queue_rows(roster: Roster, owners: list[int], queues: list[Queue], reasons: list[str]) -> list[dict[str, Any]]:
    previous = dict(zip(roster.queues, roster.owners, strict=True))
    planned = dict(zip(roster.queues, owners, strict=True))
    rows: list[dict[str, Any]] = []
    for queue, reason in zip(queues, reasons, strict=True):
        move = describe_move(roster, queue, previous[queue], planned[queue])
        rows.append({**move, "why": reason})
    return rows


def _member_rows(shares: Mapping[str, list[Queue]], examples: Mapping[str, str], total: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for member, share in shares.items():
        example = f"; for example, {examples[member]}" if share else ""
        why = f"{member} owns {len(share)} of {total} queues{example}"
        rows.append({"member": member, "count": len(share), "why": why})
    return rows


def print_reasons(result: Mapping[str, Any]) -> None:
    """Print the reasons as text."""
    for row in result.get("queues") or result["members"]:
        print(row["why"])
    if result["foreigners"]:
        print(f"Computed as Averagely over members and unmanaged consumers: {', '.join(result['foreigners'])}")
