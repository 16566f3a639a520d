"""The assignment document: which member owns which queue. The operator writes it to a ConfigMap, members read it.

Any user with access to ConfigMaps can write one, so a reader checks size, nesting and numbers.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from rota.model import Holder, Queue
from rota.ranges import MAX_QUEUES_PER_DOCUMENT, RangesByTopic, from_ranges, iterate_entries, to_ranges

T = TypeVar("T")

ASSIGNMENT_SCHEMA = 2  # the highest that is read; written only if shares name incarnations, otherwise schema 1 is
PLAIN_KEY = "assignment.json"
GZIP_KEY = "assignment.json.gz"
MAX_PLAIN_BYTES = 256 * 1024
MAX_COMPRESSED_BYTES = 1000 * 1000  # a ConfigMap holds 1 MiB, and has group.json as well
# The largest document takes 32 MiB: all possible queues are being released, and names are long.
MAX_DECOMPRESSED_BYTES = 48 * 2**20
# Objects, lists and fields, each of which takes memory; a queue being released has 9.
MAX_JSON_NODES = 10 * MAX_QUEUES_PER_DOCUMENT
MAX_SPENT_ENTRIES = 50_000
MAX_MEMBER_ENTRIES = 20_000
MAX_UNKNOWN_FIELD_BYTES = 64 * 1024  # bytes of unknown fields, which are written back unchanged
MAX_GENERATION = 2**53  # the highest generation that is read: up to here JSON numbers are exact integers
MAX_NESTING = 50  # nesting limit of fields of later versions, so that they can be written again


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a document for one member: its pod's uid, its queues, and the process that may consume them."""

    uid: str
    queues: tuple[Queue, ...] = ()
    incarnation: int = 0  # the number of the sidecar process that may consume the queues; 0: any process


@dataclass(frozen=True, slots=True)
class Release:
    """A queue that was revoked from its holder and is not granted to another member yet."""

    holder: Holder
    to: str | None  # the member that is to get the queue; None: no member is
    since: int  # the generation that revoked the queue
    at: str  # when that generation was written
    incarnation: int = 0  # the number of the holder's process that consumed the queue; 0: any process


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The owners of all queues of a group; it is replaced only as a whole."""

    group: str
    generation: int
    issued_at: str
    strategy: str = ""
    members: Mapping[str, Share] = field(default_factory=dict)
    everyone: tuple[Queue, ...] | None = None  # Broadcasting: the queues that every member consumes
    releasing: Mapping[Queue, Release] = field(default_factory=dict)
    forced: Mapping[Queue, int] = field(default_factory=dict)  # by queue: the generation that granted it by force
    spent: tuple[tuple[str, int], ...] = ()  # times and numbers of moves that count in the policy's budget
    barrier: int = 0  # while above 0, queues without an owner wait until all pods have obeyed this generation
    begun: Mapping[str, str] = field(default_factory=dict)  # by topic: when a member was first given a queue of it
    incarnations_since: int = 0  # since which generation each share with queues names an incarnation; 0: none does
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of later versions, unchanged

    @property
    def is_broadcasting(self) -> bool:
        """Whether it was written for a Broadcasting group: every member consumes all queues in `everyone`."""
        return self.everyone is not None

    @property
    def schema(self) -> int:
        """The schema that the document is written in: only schema 2 has incarnations."""
        return 2 if self.incarnations_since else 1

    @cached_property
    def releases_by_holder(self) -> Mapping[Holder, Sequence[Queue]]:
        """The queues that each member has to release."""
        releases: dict[Holder, list[Queue]] = {}
        for queue, release in self.releasing.items():
            releases.setdefault(release.holder, []).append(queue)
        return releases

    @property
    def entry_holders(self) -> set[Holder]:
        """The pods with an entry, also those without queues."""
        return {Holder(name, share.uid) for name, share in self.members.items()}

    @property
    def queue_holders(self) -> set[Holder]:
        """The pods that may consume queues: owners, and holders that have to release some."""
        owners = {Holder(name, share.uid) for name, share in self.members.items() if share.queues}
        return owners | self.releases_by_holder.keys()

    def share_of(self, holder: Holder) -> Share | None:
        """Return the share of this pod; None if it has none, or if its name's share belongs to another pod."""
        share = self.members.get(holder.name)
        return share if share is not None and share.uid == holder.uid else None

    @property
    def topic_start_seconds(self) -> dict[str, float]:
        """When a queue of each topic was first assigned, in seconds since 1970."""
        return {topic: msgspec.convert(at, datetime).timestamp() for topic, at in self.begun.items()}


def encode_assignment(
    assignment: Assignment, max_compressed_bytes: int = MAX_COMPRESSED_BYTES
) -> dict[str, str | bytes]:
    """Return the assignment's ConfigMap entry: plain JSON, or gzip if that is long; equal values give equal texts."""
    body = _assignment_body(assignment)
    checksum = hashlib.sha256(_encode_sorted(body)).hexdigest()
    text = _encode_sorted(body | {"sum": checksum})
    queues = sum(len(share.queues) for share in assignment.members.values())
    queues += len(assignment.releasing) + len(assignment.everyone or ())
    if len(text) <= MAX_PLAIN_BYTES and queues <= MAX_QUEUES_PER_DOCUMENT:
        return {PLAIN_KEY: text.decode()}
    packed = gzip.compress(text, mtime=0)
    for size, limit, template in (
        (len(packed), max_compressed_bytes, "takes {} bytes compressed, but a ConfigMap holds at most {}"),
        (len(text), MAX_DECOMPRESSED_BYTES, "takes {} bytes uncompressed, but the limit is {}"),
        (queues, MAX_QUEUES_PER_DOCUMENT, "names {} queues, but the limit is {}"),
    ):
        if size > limit:
            subject = f"The assignment of {assignment.group} {template.format(size, limit)}"
            raise AssignmentTooLargeError(f"{subject}; split the group or give its topics fewer queues")
    return {GZIP_KEY: packed}


class AssignmentTooLargeError(ValueError):
    """The assignment does not fit into a ConfigMap, or exceeds a limit of its readers."""


class UnsupportedSchemaError(ValueError):
    """The document has a later schema: it is intact, and this version must not change it."""


def decode_assignment(text: str | bytes) -> Assignment:
    """Read what `encode_assignment` wrote; raise ValueError if damaged, UnsupportedSchemaError for a later schema."""
    try:
        plain = _decompress(text)
        fields = msgspec.json.decode(plain, type=dict[str, msgspec.Raw])
        matches = _checksum_matches(plain, fields)
    except (ValueError, TypeError, AttributeError, OSError, EOFError, RecursionError, zlib.error):
        raise ValueError("The assignment is not a complete JSON object") from None
    if not matches:
        raise ValueError("The assignment was modified or truncated: its checksum does not match")
    schema = msgspec.json.decode(fields.get("schema", b"null"))
    if type(schema) is not int or not 1 <= schema <= ASSIGNMENT_SCHEMA:  # `type`: isinstance would accept a bool
        problem = f"The assignment has schema {schema!r}; this version reads schemas 1 and {ASSIGNMENT_SCHEMA}"
        raise UnsupportedSchemaError(problem)
    extra = {name: value for name, value in fields.items() if name not in _KNOWN_FIELDS}
    size = sum(len(bytes(value)) for value in extra.values())
    if size > MAX_UNKNOWN_FIELD_BYTES:
        raise UnsupportedSchemaError(f"The assignment has {size} bytes of fields that this version does not know")
    try:
        return _to_assignment(msgspec.json.decode(plain, type=_Document), extra, schema)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ValueError(f"The assignment cannot be read: {error}") from None


def _decompress(text: str | bytes) -> bytes:
    """Return the text, decompressed if it is gzip; raise ValueError as soon as it exceeds the limits of a document."""
    if isinstance(text, str):
        return text.encode()
    if text[:2] != b"\x1f\x8b":
        return text
    stream = zlib.decompressobj(wbits=31)
    plain = stream.decompress(text, MAX_DECOMPRESSED_BYTES)
    nodes = plain.count(b"{") + plain.count(b"[") + plain.count(b":")  # a colon for each field
    if not stream.eof or nodes > MAX_JSON_NODES:
        raise ValueError
    return plain


def _checksum_matches(plain: bytes, fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the checksum matches the other fields.

    A short text may have any spelling. A long one must have the canonical spelling, so that it need not be parsed: JSON
    of unknown structure can take 30 times the size of its text, as with empty lists.
    """
    if len(plain) <= MAX_PLAIN_BYTES:
        body = json.loads(plain)
        checksum = body.pop("sum", None)
        return bool(checksum == _checksum(body))
    checksum = msgspec.json.decode(fields["sum"], type=str) if "sum" in fields else ""
    # The text ends as …,"strategy":"Sticky","sum":"9f…"} or, with fields of later versions, …,"sum":"9f…","tags":[]}.
    entry = f'"sum":"{checksum}"'.encode()
    is_last = entry + b"," not in plain  # then the comma to remove is the one before it
    body_text = plain.replace(b"," + entry if is_last else entry + b",", b"", 1)
    return checksum == hashlib.sha256(body_text).hexdigest()


def _assignment_body(assignment: Assignment) -> dict[str, Any]:
    shares = {name: _share_body(share) for name, share in assignment.members.items()}
    everyone = {} if assignment.everyone is None else {"everyone": to_ranges(assignment.everyone)}
    begun = {"begun": dict(assignment.begun)} if assignment.begun else {}
    extra = {name: msgspec.Raw(_canonical_json(value)) for name, value in assignment.extra.items()}
    since = {"incarnationsSince": assignment.incarnations_since} if assignment.incarnations_since else {}
    return {
        **extra,
        **everyone,
        **begun,
        **since,
        "schema": assignment.schema,
        "group": assignment.group,
        "generation": assignment.generation,
        "issuedAt": assignment.issued_at,
        "strategy": assignment.strategy,
        "members": shares,
        "releasing": _nest_by_queue(assignment.releasing, _release_body),
        "forced": _nest_by_queue(assignment.forced, int),
        "spent": list(map(list, assignment.spent)),
        "barrier": assignment.barrier,
    }


def _share_body(share: Share) -> dict[str, Any]:
    return {"uid": share.uid, "queues": to_ranges(share.queues), **_incarnation_body(share)}


def _release_body(release: Release) -> dict[str, Any]:
    to = {} if release.to is None else {"to": release.to}
    holder = {"from": release.holder.name, "uid": release.holder.uid, **_incarnation_body(release)}
    return {**holder, **to, "since": release.since, "at": release.at}


def _incarnation_body(entry: Share | Release) -> dict[str, int]:
    return {"incarnation": entry.incarnation} if entry.incarnation else {}


NonNegativeInt = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Generation = Annotated[int, Meta(ge=0, le=MAX_GENERATION)]
ByTopicBrokerId = dict[str, dict[str, dict[str, T]]]


class _Share(Struct):
    uid: str
    queues: RangesByTopic
    incarnation: NonNegativeInt = 0


class _Release(Struct, rename={"holder": "from"}):
    holder: str
    uid: str
    since: NonNegativeInt
    at: str
    to: str | None = None
    incarnation: NonNegativeInt = 0

    def to_release(self) -> Release:
        return Release(Holder(self.holder, self.uid), self.to, self.since, self.at, self.incarnation)


class _Document(Struct, rename="camel"):
    """The fields of a document and their limits; only a text of this shape is decoded further."""

    group: str
    generation: Generation
    issued_at: str
    strategy: str
    members: Annotated[dict[str, _Share], Meta(max_length=MAX_MEMBER_ENTRIES)]
    releasing: ByTopicBrokerId[_Release]
    forced: ByTopicBrokerId[NonNegativeInt]
    spent: Annotated[list[tuple[str, NonNegativeInt]], Meta(max_length=MAX_SPENT_ENTRIES)]
    barrier: NonNegativeInt
    begun: dict[str, str] = {}
    everyone: RangesByTopic | None = None
    incarnations_since: Generation = 0


def _to_assignment(document: _Document, extra: Mapping[str, msgspec.Raw], schema: int) -> Assignment:
    if (schema == 1) != (document.incarnations_since == 0):  # schema 2 exactly if shares name incarnations
        raise ValueError(f"its schema is {schema}, but incarnationsSince is {document.incarnations_since}")
    releasing = {queue: release.to_release() for queue, release in iterate_entries(document.releasing)}
    times = {document.issued_at}.union(at for at, _ in document.spent)
    for at in times.union(release.at for release in releasing.values()):
        msgspec.convert(at, datetime)  # only checked: times stay as they were written
    # Times in `begun` must have a zone: members convert them to seconds (`topic_start_seconds`), and each would assume
    # its own zone. The other times are read by the operator with `parse_time`; there, a time without a zone counts as
    # now.
    for at in document.begun.values():
        msgspec.convert(at, Annotated[datetime, Meta(tz=True)])
    return Assignment(
        group=document.group,
        generation=document.generation,
        issued_at=document.issued_at,
        strategy=document.strategy,
        members=_decode_shares(document.members, set(releasing)),
        everyone=None if document.everyone is None else tuple(sorted(from_ranges(document.everyone))),
        releasing=releasing,
        forced=dict(iterate_entries(document.forced)),
        spent=tuple(document.spent),
        barrier=document.barrier,
        begun=document.begun,
        incarnations_since=document.incarnations_since,
        extra={name: _check_nesting(msgspec.json.decode(value), MAX_NESTING) for name, value in extra.items()},
    )


def _decode_shares(members: Mapping[str, _Share], claimed: set[Queue]) -> dict[str, Share]:
    """Read the members' shares; raise ValueError if a queue has two owners, or an owner while it is being released.

    `claimed`: the queues being released; owned queues are added.
    """
    shares: dict[str, Share] = {}
    for name, share in members.items():
        queues = from_ranges(share.queues)
        if not claimed.isdisjoint(queues):
            duplicate = next(queue for queue in queues if queue in claimed)
            problem = f"queue {duplicate} is assigned to {name}, but has another owner or is still being released"
            raise ValueError(problem)
        claimed.update(queues)
        if len(claimed) > MAX_QUEUES_PER_DOCUMENT:
            raise ValueError(f"more than {MAX_QUEUES_PER_DOCUMENT} queues are named")
        shares[name] = Share(share.uid, tuple(sorted(queues)), share.incarnation)
    return shares


def _check_nesting(value: Any, levels_left: int) -> Any:
    """Return the value; raise ValueError if it is nested deeper than `levels_left`."""
    items: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        items = value.values()
    if not levels_left:
        raise ValueError(f"one of its fields is nested more than {MAX_NESTING} deep")
    for item in items:
        _check_nesting(item, levels_left - 1)
    return value


_KNOWN_FIELDS = {field.encode_name for field in msgspec.structs.fields(_Document)} | {"schema", "sum"}


def _nest_by_queue(entries: Mapping[Queue, T], encode: Callable[[T], Any]) -> dict[str, dict[str, dict[str, Any]]]:
    nested: dict[str, dict[str, dict[str, Any]]] = {}
    for queue, entry in entries.items():
        nested.setdefault(queue.topic, {}).setdefault(queue.broker, {})[str(queue.id)] = encode(entry)
    return nested


# Same text as `_canonical_json`, in an eighth of its time, for values without floats or integers beyond 64 bits.
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def _canonical_json(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical_json(body)).hexdigest()
