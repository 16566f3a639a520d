"""The journal's records, one line of JSON each: how they are made, and how they are read; docs/journal.md has it all.

Fields are added without a new `SCHEMA`; where one changes its meaning, it grows. A line that a crash cut off is never
read as a record: the brace that closes it is its last character.
"""

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

SCHEMA = 1

Count = Annotated[int, Meta(ge=0)]
Time = Annotated[datetime, Meta(tz=True)]
Ranges = dict[str, dict[str, str]]  # ids such as 0-3,7 by topic and broker


def journal_record(kind: str, group: str, at: str, **facts: object) -> dict[str, object]:
    """Return one fact for the journal: a line of JSON that the pipeline reads back."""
    return {"schema": SCHEMA, "kind": kind, "group": group, "at": at, **facts}


class Record(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every record has, besides its kind."""

    schema: int
    at: Time


class Fact(Record, frozen=True, kw_only=True):
    """A record about a group, `namespace/name`."""

    group: str


class Present(Struct, frozen=True):
    """A pod of a group, and how it stands."""

    uid: str
    standing: str


class Membership(Fact, frozen=True, kw_only=True, tag="membership"):
    """Who was there when a document was written."""

    generation: Count
    members: dict[str, Present]


class Plan(Fact, frozen=True, kw_only=True, tag="plan"):
    """Why a document was written."""

    generation: Count
    strategy: str
    reason: str
    message: str
    members: Count
    queues: Count
    held: str | None


class Handover(
    Fact,
    frozen=True,
    kw_only=True,
    tag="handover",
    rename={"holder": "from", "holder_uid": "fromUid", "to_uid": "toUid"},
):
    """What a document did to some queues."""

    generation: Count
    act: str
    proof: str
    state: str
    queues: Ranges
    holder: str | None = None
    holder_uid: str | None = None
    to: str | None = None
    to_uid: str | None = None


class Obeyed(Fact, frozen=True, kw_only=True, tag="obeyed"):
    """A member was first heard to obey the document that gives it some queues."""

    generation: Count
    member: str
    uid: str
    queues: Ranges


class Rebalance(Fact, frozen=True, kw_only=True, tag="rebalance"):
    """A rebalance is over."""

    generation: Count
    reason: str
    outcome: str
    began: Time
    moved: Count
    forced: Count
    seconds: float


class Owner(Struct, frozen=True):
    """A pod of a group, how it stands, and what it owns."""

    uid: str
    standing: str
    queues: Ranges
    room: str | None = None


class Releasing(Struct, frozen=True, rename={"holder": "from", "holder_uid": "fromUid"}):
    """Queues that were taken from their holder, and given to nobody yet."""

    holder: str
    holder_uid: str
    to: str | None
    queues: Ranges


class Owners(Fact, frozen=True, kw_only=True, tag="owners", rename="camel"):
    """Who owns what, and by which rules: where reading can begin."""

    generation: Count
    model: str
    ordering: str
    start_from: str
    policy: str | None
    rules: dict[str, Any]
    members: dict[str, Owner]
    releasing: list[Releasing]
    unowned: Ranges


class Columns(Struct, frozen=True):
    """The queues of a topic on a broker, each at the same place in every list."""

    ids: list[Count]
    first: list[int]
    last: list[int]
    committed: list[int | None]

    def __post_init__(self) -> None:
        """Refuse lists that cannot be laid side by side."""
        if len({len(self.ids), len(self.first), len(self.last), len(self.committed)}) > 1:
            raise ValueError("ids, first, last and committed are not of one length")


class Offsets(Fact, frozen=True, kw_only=True, tag="offsets"):
    """How far a group was with its queues."""

    topics: dict[str, dict[str, Columns]]
    verdicts: dict[str, Count]


class Verdict(Fact, frozen=True, kw_only=True, tag="verdict"):
    """A condition of a group turned."""

    condition: str
    status: str
    reason: str
    message: str


class Redelivered(
    Fact,
    frozen=True,
    kw_only=True,
    tag="redelivered",
    rename={"holder": "from", "holder_uid": "fromUid", "to_uid": "toUid"},
):
    """Messages came again, for another process reads their queues."""

    cause: str
    messages: Count
    estimate: bool
    holder: str
    holder_uid: str
    to: str
    to_uid: str
    queues: Ranges


class Gap(Record, frozen=True, kw_only=True, tag="gap"):
    """So many records of one writer are missing, between two times."""

    writer: str
    since: Time
    missing: Count


KINDS: tuple[type[Record], ...] = (
    Membership,
    Plan,
    Handover,
    Obeyed,
    Rebalance,
    Owners,
    Offsets,
    Verdict,
    Redelivered,
    Gap,
)

AnyRecord = Membership | Plan | Handover | Obeyed | Rebalance | Owners | Offsets | Verdict | Redelivered | Gap

_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
_NAMES = {kind.__struct_config__.tag for kind in KINDS}


class _Head(Struct):
    schema: int
    kind: str


_head = msgspec.json.Decoder(_Head)


def read(line: bytes) -> AnyRecord:
    """Read a line of the journal; what is no record, or one of a later version, is a sentence."""
    try:
        record = _decoder.decode(line)
    except (ValueError, RecursionError) as error:  # msgspec's errors are such too
        raise ValueError(_why(line, error)) from None
    if record.schema > SCHEMA:
        raise ValueError(_too_new(record.schema))
    return record


def _why(line: bytes, error: Exception) -> str:
    """Say why a line cannot be read: who reads a journal goes on after each of these, but not for the same reason."""
    try:
        head = _head.decode(line)
    except (ValueError, RecursionError):
        return f"The line is torn, or no record of the journal: {error}"
    if head.schema > SCHEMA:
        return _too_new(head.schema)
    if head.kind not in _NAMES:
        return f"The record is of the kind {head.kind!r}, which this version does not know; pass over it"
    return f"The {head.kind} record cannot be read: {error}"


def _too_new(schema: int) -> str:
    return f"The record has schema {schema}; this version reads {SCHEMA}: read it with a later one"
