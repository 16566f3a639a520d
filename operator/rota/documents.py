"""The assignment document: who owns which queue, as the operator writes it and members read it."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from rota.model import Holder, Queue
from rota.ranges import MOST_IDS, Ranged, from_ranges, to_ranges, unnested

T = TypeVar("T")

SCHEMA = 2  # the highest that is read; written where shares name incarnations, else schema 1 is
PLAIN, PACKED = "assignment.json", "assignment.json.gz"
PLAIN_BYTES = 256 * 1024
MOST_BYTES = 1000 * 1000  # a ConfigMap holds 1 MiB with everything in it; group.json stands beside us
LARGEST = 48 * 2**20  # bytes unpacked: as many queues as can be take 32 MiB while all are under way between long names
MOST_PARTS = 10 * MOST_IDS  # objects, lists, fields: a queue under way has 9, and each takes memory
MOST_SPENT, MOST_MEMBERS = 50_000, 20_000  # entries of an assignment
MOST_EXTRA = 64 * 1024  # bytes of fields that we do not know: they are carried along, whatever they are
LATEST = 2**53  # the highest generation that is read: so far JSON's numbers are whole
DEEPEST = 50  # fields of later versions nest no deeper, so that what was read can be written again


@dataclass(frozen=True, slots=True)
class Share:
    """What a document gives one member: whose pod it is, which process of it, and its queues."""

    uid: str
    queues: tuple[Queue, ...] = ()
    incarnation: int = 0  # of the sidecar that may consume them; 0: whichever runs


@dataclass(frozen=True, slots=True)
class Release:
    """A queue that was taken from its holder and is granted to nobody yet."""

    holder: Holder
    to: str | None
    since: int
    at: str
    incarnation: int = 0  # of the holder; 0: whichever runs


@dataclass(frozen=True, kw_only=True)
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
    begun: Mapping[str, str] = field(default_factory=dict)  # by topic: when somebody was first given a queue of it
    incarnations_since: int = 0  # the generation from which on each share with queues names an incarnation; 0: none
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of later versions, kept as they came

    @property
    def schema(self) -> int:
        """The schema that it is written in: only schema 2 has incarnations."""
        return 2 if self.incarnations_since else 1

    @cached_property
    def releases_by_holder(self) -> Mapping[Holder, Sequence[Queue]]:
        """The queues that each member gives up."""
        found: dict[Holder, list[Queue]] = {}
        for queue, release in self.releasing.items():
            found.setdefault(release.holder, []).append(queue)
        return found

    @property
    def begun_at(self) -> dict[str, float]:
        """Since when each topic is worked, in seconds since 1970."""
        return {topic: msgspec.convert(at, datetime).timestamp() for topic, at in self.begun.items()}


def write_assignment(assignment: Assignment, room: int = MOST_BYTES) -> dict[str, str | bytes]:
    """Return the ConfigMap entry for it: plain JSON, or gzip where that is long; equal values give equal texts."""
    body = _body(assignment)
    text = _canonical(body | {"sum": _sum(body)})
    many = sum(len(share.queues) for share in assignment.members.values())
    many += len(assignment.releasing) + len(assignment.everyone or ())
    if len(text) <= PLAIN_BYTES and many <= MOST_IDS:
        return {PLAIN: text.decode()}
    packed = gzip.compress(text, mtime=0)
    for has, most, what in (
        (len(packed), room, "takes {} bytes, but a ConfigMap has room for {}"),
        (len(text), LARGEST, "takes {} bytes unpacked, but nobody unpacks more than {}"),
        (many, MOST_IDS, "names {} queues, but nobody reads more than {}"),
    ):
        if has > most:
            told = f"The assignment of {assignment.group} {what.format(has, most)}"
            raise TooLarge(f"{told}; split the group or give its topics fewer queues")
    return {PACKED: packed}


class TooLarge(ValueError):  # noqa: N818 - it says what the document is
    """A document does not fit into a ConfigMap."""


class TooNew(ValueError):  # noqa: N818 - it says what the document is
    """A document is of a later schema than we know: it is whole, and not ours to touch."""


def read_assignment(text: str | bytes) -> Assignment:
    """Read what `write_assignment` wrote; what is torn, changed or of another schema is refused whole."""
    try:
        plain = _plain(text)
        fields = msgspec.json.decode(plain, type=dict[str, msgspec.Raw])
        matches = _matches(plain, fields)
    except (ValueError, TypeError, AttributeError, OSError, EOFError, RecursionError, zlib.error):
        raise ValueError("The assignment is torn: it is no JSON object") from None
    if not matches:
        raise ValueError("The assignment was changed or torn: its sum does not match")
    if type(schema := msgspec.json.decode(fields.get("schema", b"null"))) is not int or not 1 <= schema <= SCHEMA:
        raise TooNew(f"The assignment has schema {schema!r}; this version reads schemas 1 and {SCHEMA}")
    extra = {name: value for name, value in fields.items() if name not in _KNOWN}
    if (size := sum(len(bytes(value)) for value in extra.values())) > MOST_EXTRA:
        raise TooNew(f"The assignment has {size} bytes of fields that this version does not know")
    try:
        return _assignment(msgspec.json.decode(plain, type=_Document), extra, schema)
    except (ValueError, RecursionError) as error:  # msgspec's errors are the former, too
        raise ValueError(f"The assignment cannot be read: {error}") from None


def _plain(text: str | bytes) -> bytes:
    """Return the text itself, unpacked if it is gzip; more than a document can be is not unpacked to the end."""
    if isinstance(text, str):
        return text.encode()
    if text[:2] != b"\x1f\x8b":
        return text
    stream = zlib.decompressobj(wbits=31)
    plain = stream.decompress(text, LARGEST)
    if not stream.eof or sum(plain.count(it) for it in b"{[:") > MOST_PARTS:
        raise ValueError
    return plain


def _matches(plain: bytes, fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the sum is that of the rest, however that is spelled; a long one must be spelled as we do.

    For who takes it apart without knowing what it is pays 30 times its text: so much do empty lists take.
    """
    if len(plain) <= PLAIN_BYTES:
        body = json.loads(plain)
        told = body.pop("sum", None)
        return bool(told == _sum(body))
    told = msgspec.json.decode(fields["sum"], type=str) if "sum" in fields else ""
    here = f'"sum":"{told}"'.encode()
    rest = plain.replace(here + b",", b"", 1) if here + b"," in plain else plain.replace(b"," + here, b"", 1)
    return told == hashlib.sha256(rest).hexdigest()


def _body(it: Assignment) -> dict[str, Any]:
    shares = {name: _share_body(share) for name, share in it.members.items()}
    everyone = {} if it.everyone is None else {"everyone": to_ranges(it.everyone)}
    begun = {"begun": dict(it.begun)} if it.begun else {}
    since = {"incarnationsSince": it.incarnations_since} if it.incarnations_since else {}
    return {
        **it.extra,
        **everyone,
        **begun,
        **since,
        "schema": it.schema,
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


def _share_body(it: Share) -> dict[str, Any]:
    return {"uid": it.uid, "queues": to_ranges(it.queues), **_incarnation_body(it)}


def _release_body(it: Release) -> dict[str, Any]:
    to = {} if it.to is None else {"to": it.to}
    holder = {"from": it.holder.name, "uid": it.holder.uid, **_incarnation_body(it)}
    return {**holder, **to, "since": it.since, "at": it.at}


def _incarnation_body(it: Share | Release) -> dict[str, int]:
    return {"incarnation": it.incarnation} if it.incarnation else {}


Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Generation = Annotated[int, Meta(ge=0, le=LATEST)]
Nested = dict[str, dict[str, dict[str, T]]]


class _Share(Struct):
    uid: str
    queues: Ranged
    incarnation: Whole = 0


class _Release(Struct, rename={"holder": "from"}):
    holder: str
    uid: str
    since: Whole
    at: str
    to: str | None = None
    incarnation: Whole = 0


class _Document(Struct, rename="camel"):
    """The shape of a body; only what has it is taken apart."""

    group: str
    generation: Generation
    issued_at: str
    strategy: str
    members: Annotated[dict[str, _Share], Meta(max_length=MOST_MEMBERS)]
    releasing: Nested[_Release]
    forced: Nested[Whole]
    spent: Annotated[list[tuple[str, Whole]], Meta(max_length=MOST_SPENT)]
    barrier: Whole
    begun: dict[str, str] = {}
    everyone: Ranged | None = None
    incarnations_since: Generation = 0


def _assignment(shape: _Document, extra: Mapping[str, msgspec.Raw], schema: int) -> Assignment:
    if (schema == 1) != (shape.incarnations_since == 0):
        raise ValueError(f"its schema is {schema}, but incarnationsSince is {shape.incarnations_since}")
    releasing = {
        queue: Release(Holder(it.holder, it.uid), it.to, it.since, it.at, it.incarnation)
        for queue, it in unnested(shape.releasing)
    }
    for at in {shape.issued_at, *(it.at for it in releasing.values()), *(at for at, _ in shape.spent)}:
        msgspec.convert(at, datetime)  # times stay as they were written
    for at in shape.begun.values():
        msgspec.convert(at, Annotated[datetime, Meta(tz=True)])
    return Assignment(
        group=shape.group,
        generation=shape.generation,
        issued_at=shape.issued_at,
        strategy=shape.strategy,
        members=_shares(shape.members, set(releasing)),
        everyone=None if shape.everyone is None else tuple(sorted(from_ranges(shape.everyone))),
        releasing=releasing,
        forced=dict(unnested(shape.forced)),
        spent=tuple(shape.spent),
        barrier=shape.barrier,
        begun=shape.begun,
        incarnations_since=shape.incarnations_since,
        extra={name: _shallow(msgspec.json.decode(value), DEEPEST) for name, value in extra.items()},
    )


def _shares(members: Mapping[str, _Share], taken: set[Queue]) -> dict[str, Share]:
    """Read who owns what; two owners cannot be written down."""
    shares: dict[str, Share] = {}
    for name, share in members.items():
        queues = from_ranges(share.queues)
        if not taken.isdisjoint(queues):
            twice = next(queue for queue in queues if queue in taken)
            raise ValueError(f"queue {twice} is given to {name} and to somebody else, or is still being released")
        taken.update(queues)
        if len(taken) > MOST_IDS:
            raise ValueError(f"it names more than {MOST_IDS} queues")
        shares[name] = Share(share.uid, tuple(sorted(queues)), share.incarnation)
    return shares


def _shallow(value: Any, deepest: int) -> Any:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not deepest:
        raise ValueError(f"a field of it is nested more than {DEEPEST} deep")
    for it in inner:
        _shallow(it, deepest - 1)
    return value


_KNOWN = {"schema", "group", "generation", "issuedAt", "strategy", "members"}
_KNOWN |= {"everyone", "releasing", "forced", "spent", "barrier", "begun", "incarnationsSince", "sum"}


def _by_queue(entries: Mapping[Queue, T], body: Callable[[T], Any]) -> dict[str, dict[str, dict[str, Any]]]:
    nested: dict[str, dict[str, dict[str, Any]]] = {}
    for queue, entry in entries.items():
        nested.setdefault(queue.topic, {}).setdefault(queue.broker, {})[str(queue.id)] = body(entry)
    return nested


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
