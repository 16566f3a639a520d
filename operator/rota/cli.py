"""The `rota` command line (also `kubectl rota`): each command imports the room it needs, and only that."""

# ruff: noqa: PLC0415, T201 - imports inside commands keep each one quick and small; this is where we speak

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

if TYPE_CHECKING:
    from rota.model import Queue, Roster
    from rota.spec import GroupSpec, PolicySpec

MOST_MEMBERS = 99_999  # more is a slip of the pen

OUTPUT = click.option(
    "-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rota-operator", prog_name="rota")
def main() -> None:
    """Manage fleets of message-queue consumers by rebalance policy."""


def on_files(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that describe a group without a cluster; `_world` reads them."""
    options = [
        click.option(
            "-f", "--filename", required=True, help="A ConsumerGroup, and perhaps its RebalancePolicy ('-': stdin)."
        ),
        click.option("--policy", help="A policy in the file, instead of the one that the group names."),
        click.option(
            "--members",
            default="3",
            show_default=True,
            help="How many, or their names (beside --foreign: client ids).",
        ),
        click.option("--queues", multiple=True, required=True, help="TOPIC=BROKER:N,BROKER:N; once for each topic."),
        click.option(
            "--rooms", default="", help="The members' rooms, where the policy asks for them: m0=east,m1=west."
        ),
        click.option("--foreign", default="", help="Client ids of consumers in the group that are not Rota's: a,b."),
        click.option(
            "--current", type=Path, help="Present owners: what `rota plan -o json` printed, or an assignment.json."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


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
            print(f"rota: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(2)
        except ModuleNotFoundError as error:
            wanted = "pip install 'rota-operator[operator]'"
            print(f"rota: {error.name} is not installed, which this command needs: {wanted}", file=sys.stderr)
            sys.exit(2)

    return run


@main.command()
@on_files
@click.option("--diff", is_flag=True, help="Print what moves instead of who owns what.")
@OUTPUT
@plainly
def plan(*, diff: bool, output: str, **given: Any) -> None:
    """Show who would own which queue, without a cluster."""
    from rota import planner

    policy, roster, foreigners = _world(given)
    if foreigners:
        owners = planner.beside_foreigners(roster, foreigners, {})
    else:
        owners = planner.target(policy, roster, planner.Measured(_rooms(given["rooms"])))
    outlook = {"strategy": policy.strategy, **_outlook(roster, owners.tolist(), foreigners)}
    _print(outlook, output, lambda: _plan_tables(outlook, diff=diff))


@main.command()
@on_files
@click.argument("queue", required=False)
@OUTPUT
@plainly
def explain(*, queue: str | None, output: str, **given: Any) -> None:
    """Say why QUEUE (TOPIC/BROKER/ID) has its owner; without one, why each queue moves that does.

    Where nothing moves, as without --current, there is a line for each member.
    """
    from rota.model import Roster
    from rota.planner import Measured
    from rota.planner.target import options

    policy, roster, foreigners = _world(given)
    if foreigners:  # each of them computes one assignment over all of them: that is what there is to explain
        roster = Roster.of(roster.queues, [*roster.members, *foreigners], _present(given["current"]))
    chosen = options(policy, roster, Measured(_rooms(given["rooms"])))
    told = {"strategy": policy.strategy, "foreigners": foreigners, **_explained(policy.strategy, roster, chosen, queue)}
    _print(told, output, lambda: _sentences(told))


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


def _world(given: Mapping[str, Any]) -> "tuple[PolicySpec, Roster, list[str]]":
    """Read what `on_files` asks for: the policy that applies, the roster of our members, and who else is there."""
    from rota.model import Roster
    from rota.spec import PolicySpec

    group, policy = _resources(_read(given["filename"]), given["policy"])
    if group.message_model == "Broadcasting":
        raise ValueError("The group is Broadcasting: every member reads every queue, so nobody owns one")
    topics = [subscription.topic for subscription in group.subscriptions]
    foreigners = [name for name in given["foreign"].split(",") if name]
    roster = Roster.of(_queues(given["queues"], topics), _members(given["members"]), _present(given["current"]))
    return PolicySpec() if foreigners else policy, roster, foreigners


def _read(filename: str) -> list[dict[str, Any]]:
    text = _text(filename)
    try:
        return [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except yaml.YAMLError as error:
        line = (
            f", line {error.problem_mark.line + 1}"
            if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark
            else ""
        )
        raise ValueError(f"{filename} is no YAML{line}; give a file with a ConsumerGroup") from None


def _text(filename: str) -> str:
    try:
        return sys.stdin.read() if filename == "-" else Path(filename).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{filename} is no text in UTF-8; give YAML or JSON") from None


def _resources(documents: list[dict[str, Any]], chosen: str | None) -> "tuple[GroupSpec, PolicySpec]":
    """Return the file's group and the chosen policy, or else the group's; without one, the defaults."""
    from rota.spec import PolicySpec, group_spec, policy_spec

    groups = [document for document in documents if document.get("kind") == "ConsumerGroup"]
    if len(groups) != 1:
        raise ValueError(f"The file holds {len(groups)} ConsumerGroups; give it exactly one")
    group = group_spec(groups[0])
    wanted = chosen or (group.policy_ref and group.policy_ref.name)
    if not wanted:
        return group, PolicySpec()
    policies = [body for body in documents if body.get("kind") == "RebalancePolicy" and _name_of(body) == wanted]
    if len(policies) != 1:
        asks = "--policy" if chosen else "spec.policyRef"
        raise ValueError(
            f"The file holds {len(policies)} RebalancePolicies named {wanted}, which {asks} asks for; give it one"
        )
    return group, policy_spec(policies[0])


def _name_of(body: dict[str, Any]) -> Any:
    metadata = body.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None


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


def _queue(given: str) -> "Queue":
    from rota.model import Queue

    found = re.fullmatch(r"([^/]+)/(.+)/(\d{1,6})", given)
    if not found:
        raise ValueError(f"QUEUE {given!r} cannot be read: write it as TOPIC/BROKER/ID, orders/broker-a/3")
    return Queue(found[1], found[2], int(found[3]))


def _members(given: str) -> list[str]:
    if not re.fullmatch(r"[0-9]+", given):
        return given.split(",")
    if len(given) > len(str(MOST_MEMBERS)):
        raise ValueError(f"--members {given} is more than {MOST_MEMBERS}")
    return [f"m{number:0{len(given)}d}" for number in range(int(given))]


def _rooms(given: str) -> dict[str, str]:
    pairs = [part.partition("=")[::2] for part in given.split(",") if part]
    if any(not name or not room for name, room in pairs):
        raise ValueError(f"--rooms {given!r} cannot be read: write it as m0=east,m1=west")
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"--rooms {given!r} names a member twice; give each member one room")
    return dict(pairs)


def _present(path: Path | None) -> "dict[Queue, str]":
    """Read the present owners; a share is either plain ranges, or in a document beside the pod's uid."""
    from rota.documents import from_ranges

    owners: dict[Queue, str] = {}
    if path is None:
        return owners
    try:
        members = json.loads(_text(str(path)))["members"]
        shares = {name: from_ranges(it["queues"] if "uid" in it else it) for name, it in members.items()}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise ValueError(
            f"{path} is no assignment: give what `rota plan -o json` printed, or an assignment.json"
        ) from None
    for name, share in shares.items():
        for queue in share:
            if owners.setdefault(queue, name) != name:
                raise ValueError(f"{path} gives queue {queue} to {owners[queue]} and to {name}; leave it to one")
    return owners


def _moving(roster: "Roster", owners: list[int]) -> "list[Queue]":
    """Return the queues whose owner changes; where nobody owned anything, all begins and nothing moves."""
    if max(roster.owners) < 0:
        return []
    changes = zip(roster.queues, roster.owners, owners, strict=True)
    return [queue for queue, was, now in changes if was != now]


def _explained(
    strategy: str, roster: "Roster", options: Mapping[str, Any], queue: str | None
) -> dict[str, list[dict[str, Any]]]:
    """Return the reason for one queue, or for each that moves, or if none does an example for each member."""
    from rota.strategies import explain_all, prepared

    owners = prepared(strategy, options)(roster)
    why = partial(explain_all, strategy, roster, owners, options=options)
    asked = [_queue(queue)] if queue else _moving(roster, owners.tolist())
    if asked:
        return {"queues": _queue_rows(roster, owners.tolist(), asked, why(asked))}
    shares = roster.assignment(owners.tolist())
    firsts = {member: share[0] for member, share in shares.items() if share}
    return {"members": _member_rows(shares, dict(zip(firsts, why(firsts.values()), strict=True)), len(owners))}


def _queue_rows(roster: "Roster", owners: list[int], asked: "list[Queue]", reasons: list[str]) -> list[dict[str, Any]]:
    was = dict(zip(roster.queues, roster.owners, strict=True))
    now = dict(zip(roster.queues, owners, strict=True))
    return [
        {**_move(queue, _name(roster, was[queue]), _name(roster, now[queue])), "why": reason}
        for queue, reason in zip(asked, reasons, strict=True)
    ]


def _member_rows(shares: "Mapping[str, list[Queue]]", examples: Mapping[str, str], total: int) -> list[dict[str, Any]]:
    return [
        {
            "member": member,
            "count": len(share),
            "why": f"{member} owns {len(share)} of {total} queues"
            + (f"; for example, {examples[member]}" if share else ""),
        }
        for member, share in shares.items()
    ]


def _sentences(told: Mapping[str, Any]) -> None:
    for row in told.get("queues") or told["members"]:
        print(row["why"])
    if told["foreigners"]:
        print(f"Averagely over all of them, as consumers that are not Rota's do: {', '.join(told['foreigners'])}")


def _outlook(roster: "Roster", owners: list[int], foreigners: list[str]) -> dict[str, Any]:
    """Say a plan in values; what is not ours beside foreigners is theirs, and otherwise nobody's."""
    from rota.documents import to_ranges

    shares = roster.assignment(owners)
    rest = to_ranges(queue for queue, owner in zip(roster.queues, owners, strict=True) if owner < 0)
    counts = [len(share) for share in shares.values()]
    pairs = zip(roster.queues, roster.owners, owners, strict=True)
    return {
        "members": {member: to_ranges(share) for member, share in shares.items()},
        "moves": [
            _move(queue, _name(roster, was), _name(roster, now)) for queue, was, now in pairs if was not in {-1, now}
        ],
        "spread": {"least": min(counts), "most": max(counts)},
        "idle": [member for member, share in shares.items() if not share],
        "foreign": rest if foreigners else {},
        "unowned": {} if foreigners else rest,
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
        others = "a foreigner" if outlook["foreign"] else "nobody"
        _table([{**move, "to": move["to"] or others} for move in outlook["moves"]])
    else:
        _table([{"member": member, **_share(ranged)} for member, ranged in outlook["members"].items()])
    spread, idle = outlook["spread"], outlook["idle"]
    print(
        f"{outlook['strategy']}: {spread['least']} to {spread['most']} queues a member, {len(outlook['moves'])} moves"
    )
    if idle:
        print(f"idle: {', '.join(idle)}")
    for whose in ("foreign", "unowned"):
        if outlook[whose]:
            print(f"{whose}: {_share(outlook[whose])['queues']}")


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
