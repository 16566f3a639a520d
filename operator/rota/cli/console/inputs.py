"""What commands on files are given: manifests, queues, members, rooms, present owners."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml
from msgspec import Struct

from rota.model import Queue, Roster, plain
from rota.ranges import MOST_IDS, Ranged, from_ranges, unnested
from rota.spec import GroupSpec, Mistake, PolicySpec, group_spec, policy_spec

T = TypeVar("T")

MOST_MEMBERS = 99_999  # more is a slip of the pen
UNREADABLE = (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError)


class World(NamedTuple):
    """A group without a cluster; beside foreigners its policy's strategy does not count."""

    group: GroupSpec
    policy: PolicySpec
    roster: Roster
    foreigners: list[str]
    rooms: dict[str, str]
    present: dict[Queue, str]
    online: list[str]  # client ids that brokers tell of, if they were asked


def world(given: Mapping[str, Any]) -> World:
    """Read the options that `rota.cli.on_files` adds."""
    name, group, policy = resources(given["filename"], given["policy"])
    if group.message_model == "Broadcasting":
        raise ValueError("The group is Broadcasting: every member reads every queue, so nobody owns one")
    topics = [subscription.topic for subscription in group.subscriptions]
    members = _members(given["members"])
    present = _present(given["current"], members)
    queues, online = _there(given["queues"], given["name_server"], group.group or name, topics)
    roster = Roster.of(queues, members, present)
    foreigners = [name.strip() for name in given["foreign"].split(",") if name.strip()]
    if twice := [name for name, times in Counter(foreigners).items() if times > 1]:
        raise ValueError(f"--foreign lists {twice[0]} twice; list each consumer once")
    return World(group, policy, roster, foreigners, _rooms(given["rooms"], roster), present, online)


def _there(
    queues: tuple[str, ...], name_server: str | None, group: str, topics: list[str]
) -> tuple[Iterable[tuple[str, str, int]], list[str]]:
    """Return which queues there are, as they are given or as brokers tell, and who works them by the latter."""
    if bool(queues) == bool(name_server):
        raise ValueError("Give either --queues, such as orders=broker-a:8, or --name-server, which knows them")
    if name_server is None:
        return _queues(queues, topics), []
    from rota.cli.console import broker_snapshot  # noqa: PLC0415 - who gives queues needs no client

    return broker_snapshot.ask(name_server, group, topics)


def spelled(filename: str) -> str:
    """Name what was read in a sentence."""
    return "Standard input" if filename == "-" else filename


class Document(NamedTuple):
    """One of a file's documents that is a mapping, and where its parts stand."""

    filename: str
    body: dict[Any, Any]
    node: yaml.Node

    def at(self, field: str = "") -> str:
        """Say where a field such as spec.options.byConfig stands, or as much of it as is there."""
        node, line = self.node, self.node.start_mark.line
        for name in re.findall(r"\w+", field):
            parts = node.value if isinstance(node, yaml.MappingNode) else []
            if isinstance(node, yaml.SequenceNode) and name.isdigit() and int(name) < len(node.value):
                parts = [(yaml.ScalarNode("", name, node.value[int(name)].start_mark), node.value[int(name)])]
            named = [(key, value) for key, value in parts if key.value == name]
            if not named:
                break
            key, node = named[-1]  # of one that is given twice, the last counts
            line = key.start_mark.line
        return f"{spelled(self.filename)}, line {line + 1}"

    def parsed(self, parse: Callable[[Mapping[str, Any]], T]) -> T:
        """Parse it; a mistake in it is a sentence that says where."""
        try:
            return parse(self.body)
        except Mistake as mistake:
            told, name = str(mistake), name_of(self.body)
        unknown = re.search(r"unknown field (\w+)$", told)
        field = re.match(r"[\w.\[\]]*", told)
        path = (field[0] if field else "") + (f".{unknown[1]}" if unknown else "")
        raise ValueError(f"{self.at(path)}: {self.body['kind']}{f' {name}' if name else ''}: {told}")


def documents(filename: str, wanted: str) -> list[Document]:
    """Read the mappings of a file with some documents."""
    found: list[Document] = []
    text = text_of(filename)
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            node = loader.get_node()
            body = loader.construct_document(node) if node else None
            if node and isinstance(body, dict):
                found.append(Document(filename, body, node))
    except RecursionError:  # kubectl prints such objects: Kubernetes stores thousands of levels
        raise ValueError(f"{spelled(filename)} is nested too deeply to be read; remove levels from it") from None
    except UNREADABLE as error:  # its constructors throw whatever Python does at a date or a tag that cannot be
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{spelled(filename)} is no YAML{line}; give a file with {wanted}") from None
    return found


def text_of(filename: str) -> str:
    """Read a file, or standard input; what cannot be read is a sentence."""
    if not filename:
        raise ValueError("The name of a file is empty; give one, or - for standard input")
    if filename == "-" and sys.stdin is None:  # Python's way to say that it was closed before we began
        raise ValueError("Standard input cannot be read: it is closed")
    try:
        return sys.stdin.read() if filename == "-" else Path(filename).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{spelled(filename)} is no text in UTF-8; give YAML or JSON") from None
    except OSError as error:
        raise ValueError(f"{spelled(filename)} cannot be read: {error.strerror}") from None


def resources(filename: str, chosen: str | None) -> tuple[str, GroupSpec, PolicySpec]:
    """Return the group, its name first, and the chosen policy, or else the group's; without one, the defaults."""
    read, where = documents(filename, "a ConsumerGroup"), spelled(filename)
    groups = [it for it in read if it.body.get("kind") == "ConsumerGroup"]
    if len(groups) != 1:
        raise ValueError(f"{where} holds {len(groups)} ConsumerGroups; give it exactly one")
    group, name = groups[0].parsed(group_spec), str(name_of(groups[0].body) or "")
    wanted = chosen if chosen is not None else (group.policy_ref and group.policy_ref.name)
    if wanted is None:
        return name, group, PolicySpec()
    policies = [it for it in read if it.body.get("kind") == "RebalancePolicy" and name_of(it.body) == wanted]
    if len(policies) != 1:
        asks = "--policy" if chosen is not None else "spec.policyRef"
        raise ValueError(
            f"{where} holds {len(policies)} RebalancePolicies named {wanted}, which {asks} asks for; give it one"
        )
    return name, group, policies[0].parsed(policy_spec)


def name_of(body: Mapping[Any, Any]) -> Any:
    """Return the name in a manifest, if it has one."""
    metadata = body.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None


def _queues(given: tuple[str, ...], topics: list[str]) -> Iterator[tuple[str, str, int]]:
    for topic_text in given:
        topic, _, brokers = topic_text.partition("=")
        if topic not in topics:
            raise ValueError(
                f"--queues names topic {topic!r}, which the group does not subscribe to: {', '.join(topics)}"
            )
        for part in brokers.split(","):
            found = re.fullmatch(r"([^:]+):0*(\d+)", part.strip(), re.ASCII)
            if not found:
                raise ValueError(f"--queues {topic_text!r} cannot be read: write it as {topic}=broker-a:8,broker-b:8")
            if len(found[2]) > len(str(MOST_IDS)) or int(found[2]) > MOST_IDS:
                told = f"--queues gives {topic} {plain(found[2], 30)} queues on {plain(found[1], 100)}"
                raise ValueError(f"{told}; a group can have {MOST_IDS} at most")
            yield from ((topic, found[1], number) for number in range(int(found[2])))


def _members(given: str) -> list[str]:
    given = given.strip()
    if not re.fullmatch(r"[-+]?[0-9]*[.]?[0-9]+", given):
        return [name.strip() for name in given.split(",")]
    if not re.fullmatch(r"0*[1-9][0-9]*", given):
        raise ValueError(f"--members {given} cannot be meant: give a whole number from 1 up, or names: a,b")
    number = given.lstrip("0")
    if len(number) > len(str(MOST_MEMBERS)):
        raise ValueError(f"--members {given} is more than {MOST_MEMBERS}")
    return [f"m{index}" for index in range(int(number))]  # the same names however many there are


def _rooms(given: str, roster: Roster) -> dict[str, str]:
    parts = [part.partition("=") for part in given.split(",") if part.strip()]
    pairs = [(name.strip(), room.strip()) for name, _, room in parts]
    if any(not name or not room for name, room in pairs):
        raise ValueError(f"--rooms {given!r} cannot be read: write it as m0=east,m1=west")
    rooms = dict(pairs)
    if len(rooms) < len(pairs):
        raise ValueError(f"--rooms {given!r} names a member twice; give each member one room")
    for name in sorted(rooms.keys() - set(roster.members)):
        raise ValueError(f"--rooms names {name}, which is none of the {len(roster.members)} members; remove it")
    return rooms


class _Share(Struct):
    uid: str
    queues: Ranged


class _Release(Struct, rename={"holder": "from"}):
    holder: str
    to: str | None = None


class _Present(Struct):
    """What is asked of a document, or of what we print: a share there is either plain ranges, or beside a pod's uid."""

    members: dict[str, dict[str, Any]]
    releasing: dict[str, dict[str, dict[str, _Release]]] | None = None

    @property
    def shares(self) -> dict[str, list[Queue]]:
        """The queues of each member."""
        return {name: from_ranges(_ranged(share)) for name, share in self.members.items()}


def _ranged(share: dict[str, Any]) -> Ranged:
    if isinstance(share.get("uid"), str):  # else it is a topic of that name
        return msgspec.convert(share, _Share).queues
    return msgspec.convert(share, Ranged)


def _present(path: Path | None, members: Collection[str]) -> dict[Queue, str]:
    """Read the present owners; what a document lists as under way counts where it goes, as it does for the operator."""
    owners: dict[Queue, str] = {}
    if path is None:
        return owners
    text = text_of(str(path))
    try:
        told = msgspec.json.decode(text, type=_Present)
        shares = told.shares
        for queue, release in unnested(told.releasing or {}):
            owner = release.to if release.to and release.to in members else release.holder
            shares.setdefault(owner, []).append(queue)
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError(
            f"{path} is no assignment: give what `rota plan -o json` printed, or an assignment.json"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, share in shares.items():
        for queue in share:
            if owners.setdefault(queue, name) != name:
                raise ValueError(f"{path} gives queue {queue} to {owners[queue]} and to {name}; leave it to one")
    return owners
