"""The lease that keeps a second ingest of a lake from repeating the work of a running one."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier

import msgspec
import pytest
from click.testing import CliRunner, Result

from ground.poll import eventually
from pipeline.lake_folders import verdict_line, write_segment
from rota.cli import main
from rota.cli.commands.pipeline import ingest as ingest_command
from rota.object_store import FolderStore, ObjectStore, StoreError, open_store
from rota.pipeline.ingest.lease import FOLDER, LENGTH, RENEWAL_SECONDS, IngestLease, LeaseEntry, LeaseTakenError
from rota.pipeline.lake.tables import Lake

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
OTHER = "process 7 of pod-a (1f2e3d4c)"
MINUTE = timedelta(minutes=1)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def store(lake_uri: str) -> ObjectStore:
    return open_store(lake_uri)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def add_entry(store: ObjectStore, number: int, until: datetime) -> None:
    """Create an entry of another process."""
    assert store.create(f"{FOLDER}/{number}.json", msgspec.json.encode(LeaseEntry(OTHER, until)))


def entries(store: ObjectStore) -> dict[str, LeaseEntry]:
    """Return the entries by file name; a renewal may delete older ones after they were listed."""
    result: dict[str, LeaseEntry] = {}
    for key in sorted(info.key for info in store.list_objects(FOLDER)):
        with suppress(FileNotFoundError):
            result[key.removeprefix(f"{FOLDER}/")] = msgspec.json.decode(store.read(key), type=LeaseEntry)
    return result


def test_ingest_lease_is_taken_by_one_of_several_racing_processes(store: ObjectStore, clock: Clock) -> None:
    all_start = Barrier(4)
    all_tried = Barrier(4)

    def try_to_hold(_: int) -> str:
        with ExitStack() as held:
            all_start.wait(60)
            try:
                held.enter_context(IngestLease(store, clock).hold())
            except LeaseTakenError as error:
                return str(error)
            finally:
                all_tried.wait(60)
        return ""

    for _ in range(3):  # with no entry, then with the released one of the round before
        with ThreadPoolExecutor(4) as pool:
            refusals = sorted(pool.map(try_to_hold, range(4)))
        assert refusals[0] == ""
        assert all(refusal.startswith(f"{store.uri}: another ingest, process ") for refusal in refusals[1:])
        assert [entry.until for entry in entries(store).values()] == [NOON]


def test_ingest_lease_of_a_killed_process_expires(store: ObjectStore, clock: Clock) -> None:
    add_entry(store, 6, NOON)
    add_entry(store, 7, NOON + LENGTH)
    clock.now = NOON + LENGTH - timedelta(microseconds=1)
    with pytest.raises(LeaseTakenError) as refused, IngestLease(store, clock).hold():
        pytest.fail("the lease is taken")
    assert str(refused.value) == (
        f"{store.uri}: another ingest, {OTHER}, has the lease until 2026-11-21T12:05:00Z; "
        f"wait for its end, or delete {store.uri}/{FOLDER}/7.json if it was killed"
    )
    assert list(entries(store)) == ["6.json", "7.json"]
    clock.now = NOON + LENGTH
    with IngestLease(store, clock).hold():
        assert [(key, entry.until) for key, entry in entries(store).items()] == [("8.json", clock.now + LENGTH)]
    assert [(key, entry.until) for key, entry in entries(store).items()] == [("9.json", clock.now)]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"holder":"a","until":"2026-11-21T12:05:00"}',
        msgspec.json.encode(LeaseEntry(OTHER, NOON + 2 * LENGTH)),  # of a clock that is five minutes fast
    ],
)
def test_ingest_lease_that_is_damaged_or_of_a_wrong_clock_counts_as_free(
    store: ObjectStore, clock: Clock, content: bytes
) -> None:
    store.create(f"{FOLDER}/1.json", content)
    with IngestLease(store, clock).hold():
        assert list(entries(store)) == ["2.json"]


def test_ingest_lease_is_renewed_while_an_ingest_runs(store: ObjectStore, clock: Clock) -> None:
    with IngestLease(store, clock).hold(renewal=0.01):
        for _ in range(3):
            clock.now += LENGTH - MINUTE
            eventually(lambda: clock.now + LENGTH in [entry.until for entry in entries(store).values()])
            with pytest.raises(LeaseTakenError), IngestLease(store, clock).hold():
                pytest.fail("the lease is taken")
    with IngestLease(store, clock).hold():
        assert len(entries(store)) == 1


def test_ingest_lease_is_released_after_an_error(store: ObjectStore, clock: Clock) -> None:
    with pytest.raises(KeyboardInterrupt), IngestLease(store, clock).hold():
        raise KeyboardInterrupt
    with IngestLease(store, clock).hold():
        assert [entry.until for entry in entries(store).values()] == [NOON + LENGTH]


def test_ingest_lease_that_was_lost_to_another_process_stays_its_own(store: ObjectStore, clock: Clock) -> None:
    with IngestLease(store, clock).hold(renewal=0.01):
        store.delete(f"{FOLDER}/1.json")
        add_entry(store, 90, NOON + LENGTH)
    assert entries(store)["90.json"] == LeaseEntry(OTHER, NOON + LENGTH)
    with pytest.raises(LeaseTakenError), IngestLease(store, clock).hold():
        pytest.fail("the lease is taken")


def test_ingest_lease_that_is_not_renewed_is_waited_for(store: ObjectStore, clock: Clock) -> None:
    def pause(seconds: float) -> None:
        assert seconds == RENEWAL_SECONDS
        clock.now += MINUTE

    add_entry(store, 1, NOON + LENGTH)
    with IngestLease(store, clock).hold(pause):
        assert clock.now == NOON + LENGTH
        assert list(entries(store)) == ["2.json"]


def test_ingest_lease_that_is_renewed_or_released_is_not_waited_for(store: ObjectStore, clock: Clock) -> None:
    def renew(_: float) -> None:
        add_entry(store, 2, NOON + MINUTE + LENGTH)

    def release(_: float) -> None:
        add_entry(store, 3, NOON)

    add_entry(store, 1, NOON + LENGTH)
    with pytest.raises(LeaseTakenError, match="until 2026-11-21T12:06:00Z"), IngestLease(store, clock).hold(renew):
        pytest.fail("the lease is taken")
    with IngestLease(store, clock).hold(release):
        assert list(entries(store)) == ["4.json"]


def test_ingest_lease_that_cannot_be_created_is_refused_in_a_sentence(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / FOLDER / "1.json").mkdir(parents=True)
    with (
        pytest.raises(StoreError, match="no entry could be created in _rota/ingest-lease"),
        IngestLease(FolderStore(tmp_path), clock).hold(),
    ):
        pytest.fail("there is no lease")


# The commands, without Spark: with this JAVA_HOME, it cannot start.


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    write_segment(tmp_path / "lake", "08-a.jsonl.gz", verdict_line(1))
    return tmp_path / "lake"


def rota(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["pipeline", *map(str, arguments)])


@pytest.mark.parametrize("command", ["ingest", "run"])
def test_ingest_command_names_the_ingest_that_is_running(lake: Path, command: str) -> None:
    with IngestLease(open_store(str(lake))).hold():
        result = rota(command, lake)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"rota: {lake}: another ingest, process ")
    assert f"delete {lake}/{FOLDER}/1.json if it was killed" in result.stderr
    assert Lake(str(lake)).snapshots.numbers() == []
    assert rota("ingest", lake).exit_code == 0
    assert Lake(str(lake)).snapshots.numbers() == [1]


@pytest.mark.parametrize("command", ["ingest", "run"])
def test_ingest_command_with_if_any_succeeds_while_another_one_is_running(
    lake: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    store = open_store(str(lake))
    add_entry(store, 1, datetime.now(UTC) + LENGTH)
    monkeypatch.setattr(ingest_command, "sleep", lambda _: add_entry(store, 2, datetime.now(UTC) + LENGTH))
    result = rota(command, lake, "--if-any")
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1), result.stderr
    assert result.stdout.startswith(f"{lake}: another ingest, {OTHER}, has the lease until ")
    assert Lake(str(lake)).snapshots.numbers() == []


def test_ingest_command_releases_its_lease_though_it_fails(lake: Path) -> None:
    result = rota("run", lake)
    assert "Spark needs Java" in result.stderr
    assert rota("ingest", lake).exit_code == 0
