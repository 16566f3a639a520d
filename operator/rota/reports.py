"""Member reports: the state that a sidecar reports, as the operator reads it."""

from typing import Literal, get_args

import msgspec
from msgspec import Struct

from rota.documents import ASSIGNMENT_SCHEMA, Generation, NonNegativeInt
from rota.model import Queue
from rota.ranges import MAX_TOPIC_BROKER_PAIRS, check_ranges, count_topic_broker_pairs, from_ranges

MAX_UNCHECKED_BYTES = 64 * 1024  # up to this size, the parts of a report are not checked before decoding
MAX_PART_BYTES = {"held": 2 * 2**20, "releasing": 2 * 2**20, "brokers": 2**17, "troubles": 2**18, "uncommitted": 2**18}
MAX_INCARNATION_DIGITS = 12  # digits of a process's number
MAX_FIELD_BYTES = 4096  # limit of each field that MAX_PART_BYTES does not name
# Limit of entries in `uncommitted`, for the sidecar that writes them and the operator that reads them. So many entries
# take less than MAX_PART_BYTES, however long the names of topics and brokers are.
MAX_UNCOMMITTED_ENTRIES = 400


class ReportTooLargeError(ValueError):
    """A part of a report exceeds its limit; the member counts as responding all the same."""


# Why a member is not reading a queue; empty while it is reading.
# starting: the member takes the queue's lock, or looks up the start offset
# full: the member waits until the app has finished some messages
# paused: consumption is disabled at the broker
# failing: the last pull failed
# stuck: the queue could not be started, or its reader failed; the member retries
# draining: the queue is being released
QueueState = Literal["", "starting", "full", "paused", "failing", "stuck", "draining"]
_QUEUE_STATES = frozenset(get_args(QueueState))


class QueueStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    """An entry of /v1/report/queues, not of `Report`: a member's progress in a queue, and why it does not read it."""

    topic: str
    broker: str
    id: int
    committed: int | None  # the offset, or a higher one that an unanswered pull carries; None: not known
    pulled: int  # offset of the next pull
    buffered: int
    locked: bool
    state: QueueState = ""
    pull_age: float | None = None  # seconds since the broker last responded to a pull; None: it never has
    start: int | None = None  # the offset at which this member began to read the queue; None: not known yet
    given: int | None = None  # the highest offset that the app was given; None: none so far


class Uncommitted(Struct, frozen=True, omit_defaults=True):
    """A queue that a member releases, or released lately, with messages that the app got and that are not committed."""

    topic: str
    broker: str
    id: NonNegativeInt
    given: NonNegativeInt  # the highest offset that the app was given
    start: NonNegativeInt | None = None  # the offset at which the member began to read the queue

    @property
    def queue(self) -> Queue:
        """The queue that the offsets belong to."""
        return Queue(self.topic, self.broker, self.id)


class Report(Struct, frozen=True, kw_only=True, weakref=True):
    """A member's state at one moment: the member consumes no queue that the report does not name."""

    member: str
    uid: str
    generation: Generation
    revision: int = 0  # grows with each change of the report, except of `states` and `uncommitted`
    reads: int = 1  # the highest document schema that the member reads
    state: Literal["serving", "draining", "drained"] = "serving"
    final: bool = False  # the member drains for good, since its pod ends
    held: dict[str, dict[str, str]] = {}  # by topic and broker, the ids of queues that it consumes: 0-3,7
    releasing: dict[str, dict[str, str]] = {}  # likewise, of queues that it still drains
    brokers: dict[str, bool] = {}  # whether the member can reach each broker
    troubles: dict[str, str] = {}  # problems of the member: reasons, and a sentence for each
    started: float = 0.0  # start of the process, in seconds since 1970 by its node's clock; 0: not reported
    settings: str = ""  # `settings_digest` of the group.json in force; members of earlier versions may not say
    # How often brokers notified the member of joining or leaving consumers; None: not reported by earlier versions.
    consumers_changed: int | None = msgspec.field(name="consumersChanged", default=None)
    states: dict[str, int] = {}  # how many queues the member is not reading now, by QueueState
    uncommitted: list[Uncommitted] = []  # offsets of queues being released, or released lately (then they are final)
    incarnation: str = ""  # identifies the sidecar's process; see `incarnation_number`

    @property
    def active_queues(self) -> frozenset[Queue]:
        """Every queue that the member may still deliver from or commit for; each access walks over all of them."""
        return frozenset([*from_ranges(self.held), *from_ranges(self.releasing)])

    @property
    def incarnation_number(self) -> int:
        """The number of the process, 1 for its pod's first; 0: it has none. Earlier versions report a random text."""
        is_number = self.incarnation.isdecimal() and len(self.incarnation) <= MAX_INCARNATION_DIGITS
        return int(self.incarnation) if is_number and self.reads >= ASSIGNMENT_SCHEMA else 0

    @property
    def missed_brokers(self) -> list[str]:
        """The brokers that the member cannot reach."""
        return [broker for broker, reached in self.brokers.items() if not reached]

    @property
    def may_resume(self) -> bool:
        """Whether the member drains only for a while, such as for changed settings, and then serves again."""
        return self.state != "serving" and not self.final

    @property
    def is_drained(self) -> bool:
        """Whether the member has released everything for good."""
        return self.final and self.state == "drained"


class FullReport(Report, frozen=True, kw_only=True):
    """A report with fields that the operator does not need for its plans; `revision` does not grow with them."""

    inflight: int = 0
    stuck: dict[str, dict[str, str]] = {}  # queues that the member holds and could not start yet


# A report with its fields as raw JSON; other fields are not read.
_ReportParts = msgspec.defstruct(
    "_ReportParts",
    [(name, msgspec.Raw, msgspec.Raw(b"")) for name in Report.__struct_fields__],
    omit_defaults=True,
    rename=dict(zip(Report.__struct_fields__, Report.__struct_encode_fields__, strict=True)),
)


def _check_part_sizes(text: bytes | str) -> bytes | str:
    """Return the report if each part is within its limit, else raise ValueError: decoding takes 20 times a part's size.

    A large report is encoded again, with each key once: of duplicate keys, only the last one was checked.
    """
    if len(text) <= MAX_UNCHECKED_BYTES:
        return text
    parts = msgspec.json.decode(text, type=_ReportParts)
    for name in parts.__struct_fields__:
        limit = MAX_PART_BYTES.get(name, MAX_FIELD_BYTES)
        size = len(bytes(getattr(parts, name)))
        if size > limit:
            raise ReportTooLargeError(f"{name} takes {size:,} bytes; the limit is {limit:,}")
    return msgspec.json.encode(parts)


def _drop_unknown_states(report: Report) -> Report:
    """Return the report without unknown states of queues: a hostile pod may send thousands of them."""
    if report.states.keys() <= _QUEUE_STATES:
        return report
    states = {state: number for state, number in report.states.items() if state in _QUEUE_STATES}
    return msgspec.structs.replace(report, states=states)


def decode_report(text: bytes | str) -> Report:
    """Read a report; raise ValueError with a sentence if it is invalid. Fields of later versions are ignored."""
    try:
        report = _drop_unknown_states(msgspec.json.decode(_check_part_sizes(text), type=Report))
        check_ranges(report.held, report.releasing)
    except ReportTooLargeError as error:
        raise ReportTooLargeError(f"The report cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ValueError(f"The report cannot be read: {error}") from None
    pairs = count_topic_broker_pairs(report.held, report.releasing)
    if pairs > MAX_TOPIC_BROKER_PAIRS:
        problem = f"The report names {pairs:,} pairs of topic and broker"
        raise ReportTooLargeError(f"{problem}; the limit is {MAX_TOPIC_BROKER_PAIRS:,}")
    return report


def leads_to_same_plan(previous: Report | None, report: Report) -> bool:
    """Whether two reports lead to the same plan.

    They do if they differ at most in queue states, uncommitted offsets, and brokers' notices of consumers.
    """
    if previous is None:
        return False
    report = msgspec.structs.replace(report, states=previous.states, uncommitted=previous.uncommitted)
    # A notice raises `revision`, too, so ignore that: any other change shows in another field.
    if previous.consumers_changed != report.consumers_changed:
        unchanged = previous.consumers_changed
        report = msgspec.structs.replace(report, consumers_changed=unchanged, revision=previous.revision)
    return report == previous


def is_later_process(previous: Report | None, report: Report) -> bool:
    """Whether `report` is of a later process; False for earlier sidecar versions, which send no process number."""
    return previous is not None and 0 < previous.incarnation_number < report.incarnation_number


def is_outdated(report: Report, previous: Report) -> bool:
    """Whether a report is older than the previous one: of an earlier process, or of the same one at a lower generation.

    Recorded, such a report would hide that the member obeys a later generation than the stored assignment has.
    """
    is_same_process = 0 < previous.incarnation_number == report.incarnation_number
    return is_later_process(report, previous) or (is_same_process and report.generation < previous.generation)
