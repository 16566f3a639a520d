"""Lease of a lake's ingest: spares a second ingest the work that a running one is doing.

The lease is advisory. All commits of an ingest are conditional, so concurrent ingests are harmless: a wrong clock, or a
lost lease, only costs repeated work.

Its entries are objects with ascending numbers, of which the highest counts. A holder takes, renews and releases the
lease by creating the next number, which only one ingest can create, and then deletes the older entries. The entry of a
killed holder expires.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from os import getpid
from secrets import token_hex
from socket import gethostname
from threading import Event, Thread
from typing import Annotated

import msgspec

from rota.object_store import ObjectStore, StoreError, check_create_only
from rota.pipeline.lake.runs import CREATE_ONLY_KEY
from rota.timestamps import format_time

FOLDER = "_rota/ingest-lease"
LENGTH = timedelta(minutes=5)
RENEWAL_SECONDS = 60.0
ATTEMPTS = 10  # attempts to create the next entry, while other ingests create and delete entries
_KEY_PATTERN = re.compile(rf"{FOLDER}/([1-9]\d{{0,17}})\.json", re.ASCII)


class LeaseEntry(msgspec.Struct, frozen=True):
    """One entry of the lease; after `until`, the lease is free."""

    holder: str
    until: Annotated[datetime, msgspec.Meta(tz=True)]


class LeaseTakenError(ValueError):
    """Another ingest of the lake is running; the text is a sentence for users."""


class IngestLease:
    """The lease of one lake, as one process takes it."""

    def __init__(self, store: ObjectStore, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._store = store
        self._clock = clock
        self._holder = f"process {getpid()} of {gethostname()} ({token_hex(4)})"

    @contextmanager
    def hold(self, pause: Callable[[float], None] | None = None, renewal: float = RENEWAL_SECONDS) -> Iterator[None]:
        """Take the lease, renew it from a thread every `renewal` seconds, and release it at the end.

        Raise LeaseTakenError if another ingest has the lease. With `pause`, call it until the other's entry expires, as
        that of a killed ingest does, and raise only if the entry is renewed or replaced meanwhile.
        """
        # Raises StoreError for a bucket that overwrites existing objects: two ingests could create the same number.
        check_create_only(self._store, CREATE_ONLY_KEY)
        first_refusal = ""
        while refusal := self._try_to_take():
            if pause is None or first_refusal not in {"", refusal}:  # another end or holder: the lease is in use
                raise LeaseTakenError(refusal)
            first_refusal = refusal
            pause(RENEWAL_SECONDS)
        ended = Event()
        thread = Thread(target=self._renew, args=(ended, renewal), name="ingest-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(StoreError):  # the entry expires anyway
                self._try_to_take(timedelta(0))

    def _renew(self, ended: Event, seconds: float) -> None:
        while not ended.wait(seconds):
            with suppress(StoreError):  # the next attempt may succeed
                self._try_to_take()

    def _try_to_take(self, length: timedelta = LENGTH) -> str:
        """Take or renew the lease, or, with length 0, release it; if another ingest has it, return a sentence."""
        now = self._clock()
        own = LeaseEntry(self._holder, now + length)
        for _ in range(ATTEMPTS):
            numbers = self._numbers()
            newest = self._read(numbers[-1])
            if newest == own:  # created by the previous attempt
                for number in numbers[1:-1]:  # neither 0, which is no entry, nor the newest
                    self._store.delete(_key(number))
                return ""
            # An entry that ends after `now + 2 * LENGTH` has a wrong clock, and must not block other ingests for hours.
            if newest and newest.holder != self._holder and now < newest.until < now + 2 * LENGTH:
                until = format_time(newest.until.timestamp(), "seconds")
                remedy = f"wait for its end, or delete {self._store.uri}/{_key(numbers[-1])} if it was killed"
                return f"{self._store.uri}: another ingest, {newest.holder}, has the lease until {until}; {remedy}"
            self._store.create(_key(numbers[-1] + 1), msgspec.json.encode(own))
        raise StoreError(f"{self._store.uri}: no entry could be created in {FOLDER}; try again")

    def _numbers(self) -> list[int]:
        """Return 0 and the numbers of all entries, ascending."""
        matches = [_KEY_PATTERN.fullmatch(info.key) for info in self._store.list_objects(FOLDER)]
        return [0, *sorted(int(match[1]) for match in matches if match)]

    def _read(self, number: int) -> LeaseEntry | None:
        """Return an entry; None, so that the lease is free, if it is damaged or was deleted since it was listed."""
        try:
            return msgspec.json.decode(self._store.read(_key(number)), type=LeaseEntry)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None


def _key(number: int) -> str:
    return f"{FOLDER}/{number}.json"
