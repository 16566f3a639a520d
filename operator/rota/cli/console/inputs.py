"""Inputs of commands that need no cluster: manifests, queues, members, machine rooms, and present owners."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml
from msgspec import Struct

from rota.kubectl_yaml import KubectlLoader
from rota.model import Queue, Roster, single_line
from rota.ranges import MAX_QUEUES_PER_DOCUMENT, RangesByTopic, from_ranges, iterate_entries
from rota.spec import GroupSpec, InvalidSpecError, PolicySpec, parse_group, parse_policy

T = TypeVar("T")

MAX_MEMBERS = 99_999  # a larger number is taken for a mistyped one
# PyYAML's constructors raise any Python error for an invalid date or tag.
_YAML_ERRORS = (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError)


class GroupInputs(NamedTuple):
    """What `rota plan` and `rota explain` read about a group from their options."""

    group: GroupSpec
    policy: PolicySpec
    roster: Roster
    unmanaged: list[str]  # names of unmanaged consumers; if there are any, their strategy replaces the policy's
    rooms: dict[str, str]
    current_owners: dict[Queue, str]
    client_ids: list[str]  # client ids of connected consumers; known only with --name-server


def read_group_inputs(options: Mapping[str, Any]) -> GroupInputs:
    """Read the options that `rota.cli.options.group_file_options` adds."""
    name, group, policy = load_group_and_policy(options["filename"], options["policy"])
    if group.message_model == "Broadcasting":
        raise ValueError("The group is Broadcasting: every member reads every queue, so no queue has an owner")
    topics = group.topics
    members = _parse_members(options["members"])
    present = _read_current_owners(options["current"], members)
    queues, online = _read_queues_and_clients(options["queues"], options["name_server"], group.group or name, topics)
    roster = Roster.of(queues, members, present)
    unmanaged = split_list(options["foreign"])
    if duplicates := [name for name, times in Counter(unmanaged).items() if times > 1]:
        raise ValueError(f"--foreign lists {duplicates[0]} twice; list each consumer once")
    return GroupInputs(group, policy, roster, unmanaged, _parse_rooms(options["rooms"], roster), present, online)


def _read_queues_and_clients(
    queues: tuple[str, ...], name_server: str | None, group: str, topics: list[str]
) -> tuple[Iterable[tuple[str, str, int]], list[str]]:
    """Return the queues from --queues or the brokers and, from the brokers, the client ids of consumers."""
    if bool(queues) == bool(name_server):
        raise ValueError("Give either --queues, such as orders=broker-a:8, or --name-server")
    if name_server is None:
        return _parse_queues(queues, topics), []
    from rota.cli.console import broker_snapshot  # noqa: PLC0415 - --queues needs no broker client

    return broker_snapshot.read_broker_snapshot(name_server, group, topics)


def display_name(filename: str) -> str:
    """Return the name of an input file for messages."""
    return "Standard input" if filename == "-" else filename


def split_list(text: str) -> list[str]:
    """Return the parts of a text with commas; empty parts are left out."""
    return list(filter(None, map(str.strip, text.split(","))))


class YamlDocument(NamedTuple):
    """One YAML document that is a mapping, with the positions of its fields."""

    filename: str
    body: dict[Any, Any]
    node: yaml.Node

    @property
    def name(self) -> str:
        """The name in the manifest; empty if it has none."""
        return str(manifest_name(self.body) or "")

    def position_of(self, field: str) -> str:
        """Return the place of a field such as spec.options.byConfig, or of its nearest existing parent."""
        node = self.node
        line = node.start_mark.line
        for name in re.findall(r"\w+", field):
            child = _find_child(node, name)
            if child is None:
                break
            line, node = child
        return f"{display_name(self.filename)}, line {line + 1}"

    def parse(self, parser: Callable[[Mapping[str, Any]], T]) -> T:
        """Parse the document; raise ValueError with the place of the mistake."""
        try:
            return parser(self.body)
        except InvalidSpecError as mistake:
            message = str(mistake)
        # A message starts with a field's path or is a sentence, whose first word `position_of` does not find.
        path_match = re.match(r"[\w.\[\]]*", message)
        path = path_match[0] if path_match else ""
        unknown = re.search(r"unknown field (\w+)$", message)
        if unknown:
            path += f".{unknown[1]}"
        manifest = f"{self.body['kind']} {self.name}".rstrip()
        raise ValueError(f"{self.position_of(path)}: {manifest}: {message}")


def _find_child(parent: yaml.Node, name: str) -> tuple[int, yaml.Node] | None:
    """Return the line and the value of a field of a mapping, or of an item of a list by its number."""
    if isinstance(parent, yaml.SequenceNode) and name.isdigit() and int(name) < len(parent.value):
        item = parent.value[int(name)]
        return item.start_mark.line, item
    if not isinstance(parent, yaml.MappingNode):
        return None
    for key, value in reversed(parent.value):
        if key.value == name:  # of duplicate keys, the last one counts
            return key.start_mark.line, value
    return None


@contextmanager
def translate_yaml_errors(source_name: str, remedy: str) -> Iterator[None]:
    """Turn errors of the YAML parser into a ValueError with one sentence."""
    try:
        yield
    except RecursionError:  # valid YAML: Kubernetes stores objects with thousands of levels, and kubectl prints them
        raise ValueError(f"{source_name} is nested too deeply") from None
    except _YAML_ERRORS as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{source_name} is not valid YAML{line}; give {remedy}") from None


def load_documents(filename: str, expected_content: str) -> list[YamlDocument]:
    """Return the mappings among the documents of a file; errors name `expected_content`."""
    mappings: list[YamlDocument] = []
    text = read_text(filename)
    with translate_yaml_errors(display_name(filename), f"a file with {expected_content}"):
        loader = KubectlLoader(text)
        while loader.check_node():
            node = loader.get_node()
            body = loader.construct_document(node) if node else None
            if node and isinstance(body, dict):
                mappings.append(YamlDocument(filename, body, node))
    return mappings


def read_text(filename: str) -> str:
    """Return the text of a file or of standard input; raise ValueError if it cannot be read."""
    if not filename:
        raise ValueError("The file name is empty; give a file, or - for standard input")
    if filename == "-" and sys.stdin is None:  # Python sets None if it was closed at the start
        raise ValueError("Standard input cannot be read: it is closed")
    try:
        return sys.stdin.read() if filename == "-" else Path(filename).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{display_name(filename)} is not UTF-8 text; give YAML or JSON") from None
    except OSError as error:
        raise ValueError(f"{display_name(filename)} cannot be read: {error.strerror}") from None


def load_group_and_policy(filename: str, policy_name: str | None) -> tuple[str, GroupSpec, PolicySpec]:
    """Return the group's name, the group, and the chosen or referenced policy; without one, the default policy."""
    documents = load_documents(filename, "a ConsumerGroup")
    where = display_name(filename)
    groups = of_kind("ConsumerGroup", documents)
    if len(groups) != 1:
        raise ValueError(f"{where} contains {len(groups)} ConsumerGroups; exactly one is needed")
    group = groups[0].parse(parse_group)
    name = groups[0].name
    if policy_name is not None:
        chosen_name = policy_name
        origin = "--policy"
    elif group.policy_ref:
        chosen_name = group.policy_ref.name
        origin = "spec.policyRef"
    else:
        return name, group, PolicySpec()
    policies = [policy for policy in of_kind("RebalancePolicy", documents) if manifest_name(policy.body) == chosen_name]
    if len(policies) != 1:
        problem = f"{where} contains {len(policies)} RebalancePolicies named {chosen_name} (from {origin})"
        raise ValueError(f"{problem}; exactly one is needed")
    return name, group, policies[0].parse(parse_policy)


def of_kind(kind: str, documents: Iterable[YamlDocument]) -> list[YamlDocument]:
    """Return the documents of a kind."""
    return [document for document in documents if document.body.get("kind") == kind]


def manifest_name(body: Mapping[Any, Any]) -> Any:
    """Return the name in a manifest; None if it has none."""
    metadata = body.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None


def _parse_queues(options: tuple[str, ...], topics: list[str]) -> Iterator[tuple[str, str, int]]:
    for topic_text in options:
        topic, _, brokers = topic_text.partition("=")
        if topic not in topics:
            problem = f"--queues names topic {topic!r}, which the group does not subscribe to: {', '.join(topics)}"
            raise ValueError(problem)
        for part in brokers.split(","):
            match = re.fullmatch(r"([^:]+):0*(\d+)", part.strip(), re.ASCII)
            if not match:
                raise ValueError(f"--queues {topic_text!r} cannot be read: write it as {topic}=broker-a:8,broker-b:8")
            broker, count = match.groups()
            is_too_long = len(count) > len(str(MAX_QUEUES_PER_DOCUMENT))  # `int` refuses numbers of thousands of digits
            if is_too_long or int(count) > MAX_QUEUES_PER_DOCUMENT:
                problem = f"--queues gives {topic} {single_line(count, 30)} queues on {single_line(broker, 100)}"
                raise ValueError(f"{problem}; a group can have at most {MAX_QUEUES_PER_DOCUMENT}")
            for number in range(int(count)):
                yield topic, broker, number


def _parse_members(text: str) -> list[str]:
    """Return the members' names: m0, m1, … if the text has the form of a number, otherwise the names in it."""
    text = text.strip()
    if not re.fullmatch(r"[-+]?[0-9]*[.]?[0-9]+", text):
        return list(map(str.strip, text.split(",")))
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ValueError(f"--members {text} is invalid: give a whole number of at least 1, or names: a,b")
    number = text.lstrip("0")
    if len(number) > len(str(MAX_MEMBERS)):
        raise ValueError(f"--members {text} is more than {MAX_MEMBERS}")
    return [f"m{index}" for index in range(int(number))]  # the names do not depend on the number of members


def _parse_rooms(text: str, roster: Roster) -> dict[str, str]:
    rooms: dict[str, str] = {}
    parts = split_list(text)
    for part in parts:
        name, _, room = part.partition("=")
        if not name.strip() or not room.strip():
            raise ValueError(f"--rooms {text!r} cannot be read: write it as m0=east,m1=west")
        rooms[name.strip()] = room.strip()
    if len(rooms) < len(parts):
        raise ValueError(f"--rooms {text!r} names a member twice; give each member one room")
    for name in sorted(rooms.keys() - set(roster.members)):
        raise ValueError(f"--rooms names {name}, which is not one of the {len(roster.members)} members; remove it")
    return rooms


class _ShareInput(Struct):
    uid: str
    queues: RangesByTopic


class _ReleaseInput(Struct, rename={"holder": "from"}):
    holder: str
    to: str | None = None


class _CurrentAssignment(Struct):
    """Fields that are read from an assignment or a printed plan: a share is ranges, perhaps with a pod's uid."""

    members: dict[str, dict[str, Any]]
    releasing: dict[str, dict[str, dict[str, _ReleaseInput]]] | None = None


def _parse_share(share: dict[str, Any]) -> list[Queue]:
    if isinstance(share.get("uid"), str):  # otherwise a topic has the name `uid`
        return from_ranges(msgspec.convert(share, _ShareInput).queues)
    return from_ranges(msgspec.convert(share, RangesByTopic))


def _read_current_owners(path: Path | None, members: Collection[str]) -> dict[Queue, str]:
    """Return the present owners: of a queue in transition the next owner if that is a member, otherwise the holder."""
    owners: dict[Queue, str] = {}
    if path is None:
        return owners
    text = read_text(str(path))
    try:
        document = msgspec.json.decode(text, type=_CurrentAssignment)
        shares = {name: _parse_share(share) for name, share in document.members.items()}
        for queue, release in iterate_entries(document.releasing or {}):
            owner = release.to if release.to and release.to in members else release.holder
            shares.setdefault(owner, []).append(queue)
    except (msgspec.MsgspecError, RecursionError):
        problem = f"{path} is not an assignment: give the output of `rota plan -o json`, or an assignment.json"
        raise ValueError(problem) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, share in shares.items():
        for queue in share:
            if owners.setdefault(queue, name) != name:
                raise ValueError(f"{path} gives queue {queue} to {owners[queue]} and to {name}; a queue has one owner")
    return owners
