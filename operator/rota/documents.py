"""What crosses a process boundary: assignment document, member report, journal record.

Queues are written as ranges, by topic and broker: `{"orders": {"broker-a": "0-3,7"}}`.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeVar

import msgspec

from rota.model import Holder, Queue

T = TypeVar("T")

Ranged = dict[str, dict[str, str]]

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
SCHEMA = 1
PLAIN, PACKED = "assignment.json", "assignment.json.gz"
PLAIN_BYTES = 256 * 1024
MOST_BYTES = 1000 * 1000  # a ConfigMap holds 1 MiB with everything in it; group.json stands beside us
MOST_IDS = 1_000_000  # what one document can name; a wider range is a slip of the pen


def to_ranges(queues: Iterable[Queue]) -> Ranged:
    """Write queues as ranges; `from_ranges` reads them back."""
    ranged: Ranged = {}
    for (topic, broker), run in groupby(sorted(queues), key=lambda queue: (queue.topic, queue.broker)):
        ranged.setdefault(topic, {})[broker] = ",".join(_ranges([queue.id for queue in run]))
    return ranged


def _ranges(ids: list[int]) -> Iterable[str]:
    start = before = ids[0]
    for number in [*ids[1:], None]:
        if number is not None and number == before + 1:
            before = number
            continue
        yield str(start) if start == before else f"{start}-{before}"
        if number is not None:
            start = before = number


def from_ranges(ranged: Mapping[str, Mapping[str, str]]) -> list[Queue]:
    """Read queues that are written as ranges; what cannot be read is a sentence."""
    return [
        Queue(topic, broker, number)
        for topic, brokers in ranged.items()
        for broker, ids in brokers.items()
        for number in ids_of(ids)
    ]


def ids_of(ranges: str) -> list[int]:
    """Read `0-3,7` as 0, 1, 2, 3, 7."""
    ids: list[int] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first or last - first + len(ids) >= MOST_IDS:
            raise ValueError(f"Queue ids {ranges!r} cannot be read: write them as 0-3,7")
        ids += range(first, last + 1)
    if len(set(ids)) != len(ids):
        raise ValueError(f"Queue ids {ranges!r} name one id twice")
    return ids


@dataclass(frozen=True, slots=True)
class Share:
    """What a document gives one member: whose pod it is, and its queues."""

    uid: str
    queues: tuple[Queue, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """A queue that was taken from its holder and is granted to nobody yet."""

    holder: Holder
    to: str | None
    since: int
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The record of who owns what: one atomic statement for a whole group."""

    group: str
    generation: int
    issued_at: str
    strategy: str = ""
    members: Mapping[str, Share] = field(default_factory=dict)
    everyone: tuple[Queue, ...] | None = None
    releasing: Mapping[Queue, Release] = field(default_factory=dict)
    forced: Mapping[Queue, int] = field(default_factory=dict)
    spent: tuple[tuple[str, int], ...] = ()
    barrier: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of later versions, kept as they came


def write_assignment(assignment: Assignment, room: int = MOST_BYTES) -> dict[str, str | bytes]:
    """Return the ConfigMap entry for it: plain JSON, or gzip where that is long; equal values give equal texts."""
    body = _body(assignment)
    text = _canonical(body | {"sum": _sum(body)})
    if len(text) <= PLAIN_BYTES:
        return {PLAIN: text.decode()}
    packed = gzip.compress(text, mtime=0)
    if len(packed) > room:
        told = f"The assignment of {assignment.group} takes {len(packed)} bytes, but a ConfigMap has room for {room}"
        raise ValueError(f"{told}; split the group or give its topics fewer queues")
    return {PACKED: packed}


class TooNew(ValueError):  # noqa: N818 - it says what the document is
    """A document is of a later schema than we know: it is whole, and not ours to touch."""


def read_assignment(text: str | bytes) -> Assignment:
    """Read what `write_assignment` wrote; what is torn, changed or of another schema is refused whole."""
    try:
        plain = gzip.decompress(text) if isinstance(text, bytes) and text[:2] == b"\x1f\x8b" else text
        body = json.loads(plain)
        told = body.pop("sum", None)
    except (ValueError, TypeError, AttributeError, OSError, EOFError, zlib.error):
        raise ValueError("The assignment is torn: it is no JSON object") from None
    if told != _sum(body):
        raise ValueError("The assignment was changed or torn: its sum does not match")
    if body.get("schema") != SCHEMA:
        raise TooNew(f"The assignment has schema {body.get('schema')!r}; this version reads schema {SCHEMA}")
    try:
        return _assignment(body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"The assignment cannot be read: {type(error).__name__}: {error}") from None


def _body(it: Assignment) -> dict[str, Any]:
    shares = {name: {"uid": share.uid, "queues": to_ranges(share.queues)} for name, share in it.members.items()}
    everyone = {} if it.everyone is None else {"everyone": to_ranges(it.everyone)}
    return {
        **it.extra,
        **everyone,
        "schema": SCHEMA,
        "group": it.group,
        "generation": it.generation,
        "issuedAt": it.issued_at,
        "strategy": it.strategy,
        "members": shares,
        "releasing": _by_queue(it.releasing, _release_body),
        "forced": _by_queue(it.forced, int),
        "spent": [list(entry) for entry in it.spent],
        "barrier": it.barrier,
    }


def _release_body(it: Release) -> dict[str, Any]:
    to = {} if it.to is None else {"to": it.to}
    return {"from": it.holder.name, "uid": it.holder.uid, **to, "since": it.since, "at": it.at}


def _assignment(body: dict[str, Any]) -> Assignment:
    everyone = body.get("everyone")
    return Assignment(
        group=body["group"],
        generation=int(body["generation"]),
        issued_at=body["issuedAt"],
        strategy=body["strategy"],
        members={
            name: Share(share["uid"], tuple(sorted(from_ranges(share["queues"]))))
            for name, share in body["members"].items()
        },
        everyone=None if everyone is None else tuple(sorted(from_ranges(everyone))),
        releasing={
            queue: Release(Holder(it["from"], it["uid"]), it.get("to"), int(it["since"]), it["at"])
            for queue, it in _queues_of(body["releasing"])
        },
        forced={queue: int(generation) for queue, generation in _queues_of(body["forced"])},
        spent=tuple((at, int(count)) for at, count in body["spent"]),
        barrier=int(body["barrier"]),
        extra={name: value for name, value in body.items() if name not in _KNOWN},
    )


_KNOWN = {"schema", "group", "generation", "issuedAt", "strategy", "members"}
_KNOWN |= {"everyone", "releasing", "forced", "spent", "barrier"}


def _by_queue(entries: Mapping[Queue, T], body: Callable[[T], Any]) -> dict[str, dict[str, dict[str, Any]]]:
    nested: dict[str, dict[str, dict[str, Any]]] = {}
    for queue, entry in entries.items():
        nested.setdefault(queue.topic, {}).setdefault(queue.broker, {})[str(queue.id)] = body(entry)
    return nested


def _queues_of(nested: Mapping[str, Any]) -> Iterator[tuple[Queue, Any]]:
    for topic, brokers in nested.items():
        for broker, ids in brokers.items():
            for number, entry in ids.items():
                yield Queue(topic, broker, int(number)), entry


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a member says of itself: one consistent cut, so that what it does not name it does not work."""

    member: str
    uid: str
    generation: int
    revision: int = 0
    reads: int = 1
    state: Literal["serving", "draining", "drained"] = "serving"
    final: bool = False
    held: dict[str, dict[str, str]] = {}
    releasing: dict[str, dict[str, str]] = {}
    inflight: int = 0
    brokers: dict[str, bool] = {}  # which it can reach

    @property
    def working(self) -> frozenset[Queue]:
        """Every queue that it may still deliver from or commit for; costs a walk over all of them, so ask once."""
        return frozenset([*from_ranges(self.held), *from_ranges(self.releasing)])

    @property
    def drained(self) -> bool:
        """Whether it has given up everything for good."""
        return self.final and self.state == "drained"


def read_report(text: bytes | str) -> Report:
    """Read a report; what is none is a sentence, and fields of later versions are passed over."""
    try:
        report = msgspec.json.decode(text, type=Report)
        report.working  # noqa: B018 - its ranges must be readable
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"The report cannot be read: {error}") from None
    return report


def journal_record(kind: str, group: str, at: str, **facts: object) -> dict[str, object]:
    """Return one fact for the journal: a line of JSON that the pipeline reads back."""
    return {"schema": SCHEMA, "kind": kind, "group": group, "at": at, **facts}
