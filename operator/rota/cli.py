"""The `rota` command line (also `kubectl rota`): each command imports the room it needs, and only that."""

# ruff: noqa: PLC0415, T201 - imports inside commands keep each one quick and small; this is where we speak

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

if TYPE_CHECKING:
    from rota.model import Queue, Roster

OUTPUT = click.option(
    "-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rota-operator", prog_name="rota")
def main() -> None:
    """Manage fleets of message-queue consumers by rebalance policy."""


def plainly(command: Callable[..., None]) -> Callable[..., None]:
    """Say a user's mistake in one sentence and end with exit code 2."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        try:
            command(**arguments)
        except BrokenPipeError:  # whoever read us has seen enough
            sys.stderr.close()
        except OSError as error:
            print(f"rota: {error.filename} cannot be read: {error.strerror}", file=sys.stderr)
            sys.exit(2)
        except ValueError as error:
            print(f"rota: {error}", file=sys.stderr)
            sys.exit(2)
        except ModuleNotFoundError as error:
            wanted = "pip install 'rota-operator[operator]'"
            print(f"rota: {error.name} is not installed, which this command needs: {wanted}", file=sys.stderr)
            sys.exit(2)

    return run


@main.command()
@click.option("-f", "--filename", required=True, help="A ConsumerGroup, and perhaps its RebalancePolicy ('-': stdin).")
@click.option(
    "--members", default="3", show_default=True, help="How many, or their names (beside --foreign: client ids)."
)
@click.option("--queues", multiple=True, required=True, help="TOPIC=BROKER:N,BROKER:N; once for each topic.")
@click.option("--rooms", default="", help="The members' rooms, where the policy asks for them: m0=east,m1=west.")
@click.option("--foreign", default="", help="Client ids of consumers in the group that are not Rota's: a,b.")
@click.option("--current", type=Path, help="Present owners: what `rota plan -o json` printed, or an assignment.json.")
@click.option("--diff", is_flag=True, help="Print what moves instead of who owns what.")
@OUTPUT
@plainly
def plan(**given: Any) -> None:
    """Show who would own which queue, without a cluster."""
    from rota import planner
    from rota.model import Roster

    group, policy = _resources(_read(given["filename"]))
    topics = [subscription.topic for subscription in group.subscriptions]
    current = _present(given["current"]) if given["current"] else {}
    roster = Roster.of(_queues(given["queues"], topics), _members(given["members"]), current)
    foreigners = [name for name in given["foreign"].split(",") if name]
    if foreigners:
        owners = planner.beside_foreigners(roster, foreigners, {})
    else:
        owners = planner.target(policy, roster, _rooms(given["rooms"]))
    outlook = {"strategy": "Averagely" if foreigners else policy.strategy, **_outlook(roster, owners.tolist())}
    _print(outlook, given["output"], lambda: _plan_tables(outlook, diff=given["diff"]))


@main.command()
@OUTPUT
@plainly
def strategies(output: str) -> None:
    """List the strategies that a policy can choose."""
    from rota.strategies import REFERENCE_NAMES, STRATEGIES

    theirs = {ours: reference for reference, ours in REFERENCE_NAMES.items()}
    known = [
        {"strategy": name, "reference": theirs.get(name, ""), "does": str(strategy.__doc__).partition("\n")[0]}
        for name, strategy in STRATEGIES.items()
    ]
    _print(known, output, lambda: _table(known))


def _read(filename: str) -> list[dict[str, Any]]:
    text = sys.stdin.read() if filename == "-" else Path(filename).read_text(encoding="utf-8")
    try:
        return [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except yaml.YAMLError as error:
        line = (
            f", line {error.problem_mark.line + 1}"
            if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark
            else ""
        )
        raise ValueError(f"{filename} is no YAML{line}; give a file with a ConsumerGroup") from None


def _resources(documents: list[dict[str, Any]]) -> Any:
    """Return the file's group and its policy; without one, the defaults."""
    from rota.spec import PolicySpec, group_spec, policy_spec

    groups = [document for document in documents if document.get("kind") == "ConsumerGroup"]
    if len(groups) != 1:
        raise ValueError(f"The file holds {len(groups)} ConsumerGroups; give it exactly one")
    group = group_spec(groups[0])
    policies = {
        (document.get("metadata") or {}).get("name"): document
        for document in documents
        if document.get("kind") == "RebalancePolicy"
    }
    if group.policy_ref is None:
        return group, PolicySpec()
    if group.policy_ref.name not in policies:
        raise ValueError(
            f"spec.policyRef names {group.policy_ref.name}, which is not in the file; put the policy there"
        )
    return group, policy_spec(policies[group.policy_ref.name])


def _queues(given: tuple[str, ...], topics: list[str]) -> "Iterator[tuple[str, str, int]]":
    for topic_text in given:
        topic, _, brokers = topic_text.partition("=")
        if topic not in topics:
            raise ValueError(
                f"--queues names topic {topic!r}, which the group does not subscribe to: {', '.join(topics)}"
            )
        for part in brokers.split(","):
            found = re.fullmatch(r"([^:]+):(\d{1,6})", part)
            if not found:
                raise ValueError(f"--queues {topic_text!r} cannot be read: write it as {topic}=broker-a:8,broker-b:8")
            yield from ((topic, found[1], number) for number in range(int(found[2])))


def _members(given: str) -> list[str]:
    if not given.isdigit():
        return given.split(",")
    return [f"m{number:0{len(given)}d}" for number in range(int(given))]


def _rooms(given: str) -> dict[str, str]:
    pairs = [part.partition("=")[::2] for part in given.split(",") if part]
    if any(not name or not room for name, room in pairs):
        raise ValueError(f"--rooms {given!r} cannot be read: write it as m0=east,m1=west")
    return dict(pairs)


def _present(path: Path) -> dict[tuple[str, str, int], str]:
    from rota.documents import from_ranges

    try:
        members = json.loads(path.read_text(encoding="utf-8"))["members"]
        ranged = {name: share.get("queues", share) for name, share in members.items()}
        return {queue: name for name, share in ranged.items() for queue in from_ranges(share)}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise ValueError(
            f"{path} is no assignment: give what `rota plan -o json` printed, or an assignment.json"
        ) from None


def _outlook(roster: "Roster", owners: list[int]) -> dict[str, Any]:
    from rota.documents import to_ranges

    shares = roster.assignment(owners)
    counts = [len(share) for share in shares.values()]
    pairs = zip(roster.queues, roster.owners, owners, strict=True)
    return {
        "members": {member: to_ranges(share) for member, share in shares.items()},
        "moves": [
            _move(queue, _name(roster, was), _name(roster, now)) for queue, was, now in pairs if was not in {-1, now}
        ],
        "spread": {"least": min(counts), "most": max(counts)},
        "idle": [member for member, share in shares.items() if not share],
        "unowned": to_ranges(queue for queue, owner in zip(roster.queues, owners, strict=True) if owner < 0),
    }


def _name(roster: "Roster", owner: int) -> str | None:
    return roster.members[owner] if owner >= 0 else None


def _move(queue: "Queue", was: str | None, now: str | None) -> dict[str, Any]:
    return {"topic": queue.topic, "broker": queue.broker, "id": queue.id, "from": was, "to": now}


def _print(value: Any, output: str, table: Callable[[], None]) -> None:
    if output == "json":
        print(json.dumps(value, indent=2, ensure_ascii=False))
    elif output == "yaml":
        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), end="")
    else:
        table()


def _plan_tables(outlook: dict[str, Any], *, diff: bool) -> None:
    if diff:
        _table([{**move, "to": move["to"] or "nobody"} for move in outlook["moves"]])
    else:
        _table([{"member": member, **_share(ranged)} for member, ranged in outlook["members"].items()])
    spread, idle = outlook["spread"], outlook["idle"]
    print(
        f"{outlook['strategy']}: {spread['least']} to {spread['most']} queues a member, {len(outlook['moves'])} moves"
    )
    if idle:
        print(f"idle: {', '.join(idle)}")
    if outlook["unowned"]:
        print(f"nobody's: {_share(outlook['unowned'])['queues']}")


def _share(ranged: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    from rota.documents import from_ranges

    spelled = (f"{topic}/{broker}/{ids}" for topic, brokers in ranged.items() for broker, ids in brokers.items())
    return {"count": len(from_ranges(ranged)), "queues": "  ".join(spelled)}


def _table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if rows:
        table = Table(*(name.upper() for name in rows[0]), box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        Console(soft_wrap=not sys.stdout.isatty()).print(table)
