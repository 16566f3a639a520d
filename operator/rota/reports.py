"""Member reports: what a sidecar says of itself, as the operator reads it."""

from typing import Literal, get_args

import msgspec
from msgspec import Struct

from rota.documents import SCHEMA, Generation, Whole
from rota.model import Queue
from rota.ranges import MOST_PLACES, check, from_ranges, places_in

UNCHECKED_BYTES = 64 * 1024  # up to this size, the parts of a report are not checked before decoding
MOST_PART_BYTES = {
    "held": 2 * 2**20,
    "releasing": 2 * 2**20,
    "brokers": 2**17,
    "troubles": 2**18,
    "uncommitted": 2**18,
}
LONGEST_NUMBER = 12  # digits of a process's number
MOST_FIELD_BYTES = 4096  # of each other field of a report
MOST_UNCOMMITTED = 400  # entries in a report: less than their limit, however long the names of topics and brokers are


class ReportTooLargeError(ValueError):
    """A part of a report exceeds its limit; the member that says it is not silent, though."""


# Why a member is not reading a queue; empty while it is reading.
# starting: the member takes the queue's lock, or looks up the start offset
# full: the member waits until the app has finished some messages
# paused: consumption is disabled at the broker
# failing: the last pull failed
# stuck: the queue could not be started, or its reader failed; the member retries
# draining: the queue is being released
QueueState = Literal["", "starting", "full", "paused", "failing", "stuck", "draining"]
_QUEUE_STATES = frozenset(get_args(QueueState))


class Worked(Struct, frozen=True, rename="camel", omit_defaults=True):
    """How far a member is with a queue, and what keeps it from reading."""

    topic: str
    broker: str
    id: int
    committed: int | None  # None: it is not known yet
    pulled: int  # where it asks next
    buffered: int
    locked: bool
    state: QueueState = ""
    pull_age: float | None = None  # seconds since the broker last answered a pull; None: it has answered none
    start: int | None = None  # the offset at which this member began to read the queue; None: not known yet
    given: int | None = None  # the highest offset that the app was given; None: none so far


class Uncommitted(Struct, frozen=True, omit_defaults=True):
    """A queue that a member gives up, or gave up lately, and whose last messages at the app are not committed."""

    topic: str
    broker: str
    id: Whole
    given: Whole  # the highest offset that the app was given
    start: Whole | None = None  # the offset at which the member began to read the queue


class Report(Struct, frozen=True, kw_only=True, weakref=True):
    """What a member says of itself: one consistent cut, so that what it does not name it does not work."""

    member: str
    uid: str
    generation: Generation
    revision: int = 0
    reads: int = 1
    state: Literal["serving", "draining", "drained"] = "serving"
    final: bool = False
    held: dict[str, dict[str, str]] = {}
    releasing: dict[str, dict[str, str]] = {}
    brokers: dict[str, bool] = {}  # which it can reach
    troubles: dict[str, str] = {}  # what keeps it from working: reasons, and a sentence for each
    started: float = 0.0  # when its process started, in seconds since 1970 by its node's clock; 0: it does not say
    settings: str = ""  # `settings_digest` of the group.json in force; members of earlier versions may not say
    # How often brokers said that consumers of the group came or went; None: members of earlier versions do not say.
    consumers_changed: int | None = msgspec.field(name="consumersChanged", default=None)
    states: dict[str, int] = {}  # how many of its queues it is not reading now, by state; `revision` ignores them
    uncommitted: list[Uncommitted] = []  # `revision` ignores them; final for a queue that the member has released
    incarnation: str = ""  # of the sidecar's process: another one after a restart, and a number; see `process`

    @property
    def working(self) -> frozenset[Queue]:
        """Every queue that it may still deliver from or commit for; costs a walk over all of them, so ask once."""
        return frozenset([*from_ranges(self.held), *from_ranges(self.releasing)])

    @property
    def process(self) -> int:
        """The number of its process, 1 for its pod's first; 0: it has none. Earlier versions report a random text."""
        is_number = self.reads >= SCHEMA and self.incarnation.isdecimal() and len(self.incarnation) <= LONGEST_NUMBER
        return int(self.incarnation) if is_number else 0

    @property
    def drained(self) -> bool:
        """Whether it has given up everything for good."""
        return self.final and self.state == "drained"


class FullReport(Report, frozen=True, kw_only=True):
    """A report with what the operator does not need for its plans; `revision` does not grow with that."""

    inflight: int = 0
    stuck: dict[str, dict[str, str]] = {}  # queues that it holds and could not take up yet


class _ReportParts(Struct, omit_defaults=True):
    """A report with its parts as they stand in the text; the rest is small, or not read."""

    member: msgspec.Raw = msgspec.Raw(b"")
    uid: msgspec.Raw = msgspec.Raw(b"")
    generation: msgspec.Raw = msgspec.Raw(b"")
    revision: msgspec.Raw = msgspec.Raw(b"")
    reads: msgspec.Raw = msgspec.Raw(b"")
    state: msgspec.Raw = msgspec.Raw(b"")
    final: msgspec.Raw = msgspec.Raw(b"")
    held: msgspec.Raw = msgspec.Raw(b"")
    releasing: msgspec.Raw = msgspec.Raw(b"")
    brokers: msgspec.Raw = msgspec.Raw(b"")
    troubles: msgspec.Raw = msgspec.Raw(b"")
    started: msgspec.Raw = msgspec.Raw(b"")
    settings: msgspec.Raw = msgspec.Raw(b"")
    consumers_changed: msgspec.Raw = msgspec.field(name="consumersChanged", default=msgspec.Raw(b""))
    states: msgspec.Raw = msgspec.Raw(b"")
    uncommitted: msgspec.Raw = msgspec.Raw(b"")
    incarnation: msgspec.Raw = msgspec.Raw(b"")


def _with_checked_parts(text: bytes | str) -> bytes | str:
    """Return a report whose parts are within their limits, or raise ValueError; decoding takes 20 times their memory.

    A large report is returned with each key once: of keys that stand in the text twice, only the last was checked.
    """
    if len(text) <= UNCHECKED_BYTES:
        return text
    parts = msgspec.json.decode(text, type=_ReportParts)
    for name in parts.__struct_fields__:
        limit = MOST_PART_BYTES.get(name, MOST_FIELD_BYTES)
        if (size := len(bytes(getattr(parts, name)))) > limit:
            raise ReportTooLargeError(f"{name} takes {size:,} bytes, and {limit:,} are the most")
    return msgspec.json.encode(parts)


def _with_known_states(report: Report) -> Report:
    """Return the report with states of queues that there are: a pod may send thousands of others."""
    if report.states.keys() <= _QUEUE_STATES:
        return report
    known = {state: number for state, number in report.states.items() if state in _QUEUE_STATES}
    return msgspec.structs.replace(report, states=known)


def read_report(text: bytes | str) -> Report:
    """Read a report; what is none is a sentence, and fields of later versions are passed over."""
    try:
        report = _with_known_states(msgspec.json.decode(_with_checked_parts(text), type=Report))
        check(report.held, report.releasing)
    except ReportTooLargeError as error:
        raise ReportTooLargeError(f"The report cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # msgspec's errors are such too
        raise ValueError(f"The report cannot be read: {error}") from None
    if (places := places_in(report.held, report.releasing)) > MOST_PLACES:
        told = f"The report names {places:,} pairs of topic and broker"
        raise ReportTooLargeError(f"{told}; {MOST_PLACES:,} are the most")
    return report
