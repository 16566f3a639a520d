"""The records of the journal, one line of JSON each: writing and reading. docs/journal.md describes all fields.

New fields do not change `RECORD_SCHEMA`; a new meaning of a field does. A line that a crash cut off is never read as a
record: the brace that closes a record is its last character.
"""

from datetime import datetime
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Struct

from rota.ranges import RangesByTopic

RECORD_SCHEMA = 1

Count = Annotated[int, Meta(ge=0)]
Time = Annotated[datetime, Meta(tz=True)]
_HOLDER_FIELDS = {"holder": "from", "holder_uid": "fromUid", "to_uid": "toUid"}  # `from` is a word of Python


def journal_record(kind: str, group: str, at: str, **facts: object) -> dict[str, object]:
    """Return a record of the journal, to be written as a line of JSON that the pipeline reads back."""
    return {"schema": RECORD_SCHEMA, "kind": kind, "group": group, "at": at, **facts}


class Record(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The fields of every record, apart from its kind."""

    schema: int
    at: Time


class Fact(Record, frozen=True, kw_only=True):
    """A record about one group: all kinds except `gap`."""

    group: str  # namespace/name


class Present(Struct, frozen=True):
    """A pod that a group had when a document (an assignment) was written."""

    uid: str
    standing: str  # the member state, such as Ready


class MembershipRecord(Fact, frozen=True, kw_only=True, tag="membership"):
    """The pods of a group when a document was written; the first record about each document."""

    generation: Count
    members: dict[str, Present]


class PlanRecord(Fact, frozen=True, kw_only=True, tag="plan"):
    """The reason why a document was written."""

    generation: Count
    strategy: str
    reason: str
    message: str
    members: Count
    queues: Count
    held: str | None  # why queues do not move yet; None if nothing waits


class HandoverRecord(Fact, frozen=True, kw_only=True, tag="handover", rename=_HOLDER_FIELDS):
    """The change that a document made to some queues."""

    generation: Count
    act: str  # a value of `handover.Act`
    proof: str  # a value of `handover.Proof`
    state: str  # a value of `handover.OwnershipState`
    queues: RangesByTopic
    holder: str | None = None
    holder_uid: str | None = None
    to: str | None = None
    to_uid: str | None = None


class ObeyedRecord(Fact, frozen=True, kw_only=True, tag="obeyed"):
    """A member reported for the first time that it obeys the document that gives it some queues."""

    generation: Count
    member: str
    uid: str
    queues: RangesByTopic


class RebalanceRecord(Fact, frozen=True, kw_only=True, tag="rebalance"):
    """A rebalance ended."""

    generation: Count
    reason: str
    outcome: str
    began: Time
    moved: Count
    forced: Count
    seconds: float


class Owner(Struct, frozen=True):
    """A pod of a group, with its member state and the queues that it owns."""

    uid: str
    standing: str  # the member state, such as Ready
    queues: RangesByTopic
    room: str | None = None


class Releasing(Struct, frozen=True, rename=_HOLDER_FIELDS):
    """Queues that were revoked from their holder, and are not granted to another member yet."""

    holder: str
    holder_uid: str
    to: str | None
    queues: RangesByTopic


class OwnersRecord(Fact, frozen=True, kw_only=True, tag="owners", rename="camel"):
    """The owners of all queues, and the policy in force: a reader may start here, without earlier records."""

    generation: Count
    model: str  # the consumption model: Clustering or Broadcasting
    ordering: str
    start_from: str
    policy: str | None  # its name
    rules: dict[str, Any]
    members: dict[str, Owner]
    releasing: list[Releasing]
    unowned: RangesByTopic


class Columns(Struct, frozen=True):
    """The queues of a topic on a broker; each queue has the same index in every list."""

    ids: list[Count]
    first: list[int]  # offset of the oldest stored message
    last: list[int]  # offset that the next message will have
    committed: list[int | None]  # the group's committed offset; None: none

    def __post_init__(self) -> None:
        """Refuse lists of different lengths."""
        if len({len(self.ids), len(self.first), len(self.last), len(self.committed)}) > 1:
            raise ValueError("ids, first, last and committed differ in length")


class OffsetsRecord(Fact, frozen=True, kw_only=True, tag="offsets"):
    """The offsets of a group in its queues at one time."""

    topics: dict[str, dict[str, Columns]]
    verdicts: dict[str, Count]  # queues by lag state; has nothing to do with records of kind "verdict"


class ConditionRecord(Fact, frozen=True, kw_only=True, tag="verdict"):
    """A condition of a group changed."""

    condition: str
    status: str
    reason: str
    message: str


class RedeliveredRecord(Fact, frozen=True, kw_only=True, tag="redelivered", rename=_HOLDER_FIELDS):
    """Messages were delivered again, since another process reads their queues."""

    cause: str  # a value of `redelivery.RedeliveryCause`
    messages: Count
    estimate: bool  # whether `messages` is an estimate: the previous reader ended without a final report
    holder: str
    holder_uid: str
    to: str
    to_uid: str
    queues: RangesByTopic


class GapRecord(Record, frozen=True, kw_only=True, tag="gap"):
    """The number of one writer's records that are missing between `since` and `at`; they may be of any groups."""

    writer: str
    since: Time
    missing: Count


AnyRecord = (
    MembershipRecord
    | PlanRecord
    | HandoverRecord
    | ObeyedRecord
    | RebalanceRecord
    | OwnersRecord
    | OffsetsRecord
    | ConditionRecord
    | RedeliveredRecord
    | GapRecord
)
KINDS: tuple[type[Record], ...] = get_args(AnyRecord)

_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
_KIND_NAMES = {kind.__struct_config__.tag for kind in KINDS}


class _Head(Struct):
    schema: int
    kind: str


_head_decoder = msgspec.json.Decoder(_Head)


def decode_record(line: bytes) -> AnyRecord:
    """Read a line of the journal; raise ValueError with a sentence if it is no record, or one of a later version."""
    try:
        record = _decoder.decode(line)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ValueError(_describe_error(line, error)) from None
    if record.schema > RECORD_SCHEMA:
        raise ValueError(_describe_newer_schema(record.schema))
    return record


def _describe_error(line: bytes, error: Exception) -> str:
    """Return why a line cannot be read: it is damaged, or it is of a later version. Readers skip it either way."""
    try:
        head = _head_decoder.decode(line)
    except (ValueError, RecursionError):
        return f"The line is incomplete, or not a journal record: {error}"
    if head.schema > RECORD_SCHEMA:
        return _describe_newer_schema(head.schema)
    if head.kind not in _KIND_NAMES:
        return f"Record kind {head.kind!r} is unknown to this version; skip the record"
    return f"The {head.kind} record cannot be read: {error}"


def _describe_newer_schema(schema: int) -> str:
    return f"The record has schema {schema}; this version reads {RECORD_SCHEMA}: read it with a later one"
