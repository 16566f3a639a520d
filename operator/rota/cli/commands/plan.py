"""`rota plan`: shows the planned owners and the moves."""

# ruff: noqa: T201 - this module prints

from collections.abc import Mapping
from typing import Any

from rota import planner
from rota.cli.console.inputs import GroupInputs
from rota.cli.console.output import describe_move, print_table
from rota.model import NO_OWNER, Queue
from rota.planner.target import UNMANAGED_POLICY
from rota.ranges import from_ranges, to_ranges
from rota.sentences import pluralize


def preview_plan(inputs: GroupInputs) -> dict[str, Any]:
    """Return a plan as plain values; if there are unmanaged consumers, they own all queues that no member owns."""
    roster = inputs.roster
    unmanaged = inputs.unmanaged
    policy = UNMANAGED_POLICY if unmanaged else inputs.policy
    if unmanaged:
        # No ids by name: with --foreign, the names in --members are client ids already.
        owners = planner.share_with_unmanaged(roster, unmanaged, client_ids={}).tolist()
    else:
        owners = planner.compute_owners(policy, roster, planner.StrategyInputs(inputs.rooms)).tolist()
    shares = roster.assignment(owners)
    unassigned: list[Queue] = []
    moves: list[dict[str, Any]] = []
    for queue, previous, planned in zip(roster.queues, roster.owners, owners, strict=True):
        if planned == NO_OWNER:
            unassigned.append(queue)
        if previous not in {NO_OWNER, planned}:
            moves.append(describe_move(roster, queue, previous, planned))
    counts = list(map(len, shares.values()))
    return {
        "strategy": policy.strategy,
        "members": {member: to_ranges(share) for member, share in shares.items()},
        "moves": moves,
        "spread": {"least": min(counts), "most": max(counts)},
        "idle": [member for member, share in shares.items() if not share],
        "foreign": to_ranges(unassigned) if unmanaged else {},
        "unowned": {} if unmanaged else to_ranges(unassigned),
        "notes": _notes(inputs, len(moves)),
    }


def _notes(inputs: GroupInputs, move_count: int) -> list[str]:
    """Return notes on what would delay the plan in a cluster, or differ there."""
    budget = inputs.policy.budget
    roster = inputs.roster
    notes = []
    members = set(roster.members)
    # The present owners that are not members, once for each queue.
    if missing_owners := [name for name in inputs.current_owners.values() if name not in members]:
        names = ", ".join(sorted(set(missing_owners))[:3])
        belong = "queue belongs" if len(missing_owners) == 1 else "queues belong"
        notes.append(f"missing: {len(missing_owners)} {belong} to members that do not exist, such as {names}")
    topics = set(inputs.group.topics)
    if unknown_topics := topics.difference(run.topic for run in roster.runs):
        notes.append(f"unknown: topics without queues: {', '.join(sorted(unknown_topics))}")
    if inputs.client_ids and not inputs.unmanaged:
        names = ", ".join(inputs.client_ids[:3]) + (", …" if len(inputs.client_ids) > 3 else "")  # noqa: PLR2004 - as examples
        consumers = pluralize(len(inputs.client_ids), "consumer")
        notes.append(f"connected: {consumers} in the group now: {names}; see --foreign")
    if inputs.group.paused:
        notes.append("paused: the group is paused, so its members release everything")
    if inputs.policy.paused:
        notes.append("paused: the policy is paused, so no queue is revoked from a member that consumes it")
    # Balanced plans no more moves than the budget allows: a plan with exactly as many probably leaves some for later.
    uses_whole_budget = budget is not None and move_count == budget.max_moves and inputs.policy.strategy == "Balanced"
    if budget and (move_count > budget.max_moves or uses_whole_budget):
        effect = "the others move later" if budget.max_moves else "no queue is revoked from a member that consumes it"
        notes.append(f"budget: at most {budget.max_moves} queues move in any {budget.per:g}s; {effect}")
    return notes


def print_preview(preview: dict[str, Any], *, diff: bool) -> None:
    """Print a plan as tables."""
    if diff:
        other_owner = "unmanaged consumer" if preview["foreign"] else "none"
        rows = [{**move, "to": move["to"] or other_owner} for move in preview["moves"]]
    else:
        rows = [{"member": member, **_share_columns(ranged)} for member, ranged in preview["members"].items()]
    print_table(rows)
    spread = preview["spread"]
    moves = pluralize(len(preview["moves"]), "move")
    print(f"{preview['strategy']}: {spread['least']} to {spread['most']} queues per member, {moves}")
    if preview["idle"]:
        print(f"idle: {', '.join(preview['idle'])}")
    for key in ("foreign", "unowned"):
        if preview[key]:
            print(f"{key}: {_share_columns(preview[key])['queues']}")
    for note in preview["notes"]:
        print(note)


def _share_columns(ranged: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    ranges: list[str] = []
    for topic, brokers in ranged.items():
        ranges += [f"{topic}/{broker}/{ids}" for broker, ids in brokers.items()]
    return {"count": len(from_ranges(ranged)), "queues": "  ".join(ranges)}
