"""The state on the emptyDir: complete at any time, never older than the reports, and bound to one pod."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from rota.model import Queue
from rota.sidecar.storage.offset_files import OffsetFiles
from rota.sidecar.storage.state_store import SavedState, StateStore

A, B = Queue("orders", "broker-a", 0), Queue("orders", "broker-b", 11)
C = Queue("returns", "broker-a", 0)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Fail writes beyond this file size: the kernel rejects them, as it does when the disk is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def load_state(folder: Path, uid: str = "u1") -> SavedState:
    return StateStore(folder).load(uid)


def stored_state(folder: Path, obeyed: int, *, final: bool = False) -> StateStore:
    store = StateStore(folder)
    store.load("u1")
    store.store_state(obeyed_generation=obeyed, final=final)
    return store


def store(files: OffsetFiles, offsets: Mapping[Queue, int]) -> None:
    for queue, offset in offsets.items():
        files.store_offset(queue, offset)


# Obeyed generation


def test_sidecar_state_of_a_new_pod_is_empty_and_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_state(tmp_path) == load_state(tmp_path / "away") == SavedState(0, final=False)
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == []


def test_sidecar_state_is_not_written_beyond_the_quota_of_its_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stored_state(tmp_path, 1)
    size = (tmp_path / "obeyed.json").stat().st_size
    offsets = OffsetFiles(tmp_path, "shop")
    monkeypatch.setattr("rota.sidecar.storage.limited_files.QUOTA_BYTES", 2 * size - 1)
    with pytest.raises(OSError, match="The state would take more than"):
        store.store_state(obeyed_generation=2)
    with pytest.raises(OSError, match="The state would take more than"):
        store.check_space()
    with pytest.raises(OSError, match="The state would take more than"):
        offsets.store_offset(A, 1)
    assert load_state(tmp_path) == SavedState(1, final=False)
    (tmp_path / "of-the-app.db").write_bytes(bytes(10 * size))
    monkeypatch.setattr("rota.sidecar.storage.limited_files.QUOTA_BYTES", 3 * size)
    store.store_state(obeyed_generation=2)
    assert load_state(tmp_path) == SavedState(2, final=False), "files of the app do not count"


def test_sidecar_state_is_read_back_after_a_write(tmp_path: Path) -> None:
    store = stored_state(tmp_path / "made" / "at once", 42)
    assert load_state(tmp_path / "made" / "at once") == SavedState(42, final=False)
    store.store_state(final=True)
    assert load_state(tmp_path / "made" / "at once") == SavedState(42, final=True)
    store.store_state(obeyed_generation=2**63 - 1)
    assert load_state(tmp_path / "made" / "at once") == SavedState(2**63 - 1, final=True)


def test_sidecar_state_never_goes_back(tmp_path: Path) -> None:
    stored_state(tmp_path, 42, final=True)
    store = StateStore(tmp_path)
    store.load("u1")
    store.store_state(obeyed_generation=41, final=False)
    store.store_state()
    assert load_state(tmp_path) == SavedState(42, final=True)


def test_sidecar_state_that_is_stored_already_is_not_written_again(tmp_path: Path) -> None:
    store = stored_state(tmp_path, 42)
    with file_size_limit(0):
        store.store_state(obeyed_generation=42)
        store.store_state(obeyed_generation=7)


def test_sidecar_state_of_another_pod_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored_state(tmp_path, 42, final=True)
    assert load_state(tmp_path, "u2") == SavedState()
    assert caplog.messages == [
        f"{tmp_path / 'obeyed.json'} belongs to pod u1, not to u2; the member starts without stored state"
    ]
    second_store = StateStore(tmp_path)
    second_store.load("u2")
    second_store.store_state(obeyed_generation=3)
    assert load_state(tmp_path, "u2") == SavedState(3)


def test_sidecar_state_must_be_loaded_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^Call load\(\) first$"):
        StateStore(tmp_path).store_state(obeyed_generation=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0" * 40,
        "[" * 100_000,
        "[]",
        '{"uid":"u1","obeyed":42,"final":fal',
        '{"uid":"u1","obeyed":42}',
        '{"uid":"u1","obeyed":-1,"final":false}',
        '{"uid":"u1","obeyed":"42","final":false}',
        '{"uid":"u1","obeyed":true,"final":false}',
        '{"uid":"u1","obeyed":42,"final":0}',
        '{"uid":"\ud800","obeyed":42,"final":false}',
    ],
)
def test_sidecar_state_that_is_torn_counts_as_empty_and_is_logged_and_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / "obeyed.json").write_bytes(text.encode(errors="surrogatepass"))
    started_at = int(time.time())
    state = load_state(tmp_path)
    assert (state.obeyed_generation, state.final) == (0, False)
    assert state.incarnation >= started_at, "higher than any incarnation that the file may have had"
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'obeyed.json'} cannot be read; the member starts without stored state: ")
    stored_state(tmp_path, 43)
    assert load_state(tmp_path).obeyed_generation == 43


def test_restart_has_a_higher_incarnation_than_each_earlier_process(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        store = StateStore(tmp_path)
        store.load("u1")
        assert store.store_incarnation() == number
        store.store_state(obeyed_generation=40 + number)
    assert load_state(tmp_path) == SavedState(43, incarnation=3)
    assert load_state(tmp_path, "u2") == SavedState()


def test_restart_with_the_state_of_an_earlier_version_has_incarnation_1(tmp_path: Path) -> None:
    (tmp_path / "obeyed.json").write_text('{"uid":"u1","obeyed":42,"final":false}')
    store = StateStore(tmp_path)
    store.load("u1")
    assert store.store_incarnation() == 1
    assert load_state(tmp_path) == SavedState(42, incarnation=1)


def test_restart_has_no_incarnation_while_it_cannot_be_stored(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    with pytest.raises(RuntimeError, match=r"^Call load\(\) first$"):
        store.store_incarnation()
    store.load("u1")
    with file_size_limit(0), pytest.raises(OSError, match=r"more than|large|space"):
        store.store_incarnation()
    assert load_state(tmp_path) == SavedState()
    assert store.store_incarnation() == 1


def test_sidecar_state_fields_of_later_versions_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "obeyed.json").write_text('{"uid":"u1","obeyed":42,"final":true,"more":[1]}')
    assert load_state(tmp_path) == SavedState(42, final=True)


def test_sidecar_state_that_is_unreadable_counts_as_empty_and_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "obeyed.json").mkdir()
    assert load_state(tmp_path)[:2] == SavedState()[:2]
    assert "Is a directory" in caplog.messages[0]
    with pytest.raises(IsADirectoryError):
        stored_state(tmp_path, 42)
    assert [path.name for path in tmp_path.iterdir()] == ["obeyed.json"]


def test_sidecar_state_survives_a_full_disk_and_can_be_written_later(tmp_path: Path) -> None:
    store = stored_state(tmp_path, 42)
    size = (tmp_path / "obeyed.json").stat().st_size
    for limit_bytes in range(size):
        with file_size_limit(limit_bytes), pytest.raises(OSError, match="File too large"):
            store.store_state(obeyed_generation=43)  # as many bytes as the stored state
        assert load_state(tmp_path) == SavedState(42)
        assert [path.name for path in tmp_path.iterdir()] == ["obeyed.json"]
    store.store_state(obeyed_generation=43)
    assert load_state(tmp_path) == SavedState(43)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_sidecar_state_survives_an_error_of_no_space_left_on_the_disk(tmp_path: Path) -> None:
    store = stored_state(tmp_path, 42)
    (tmp_path / "obeyed.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        store.store_state(obeyed_generation=43)
    assert load_state(tmp_path) == SavedState(42)
    store.store_state(obeyed_generation=43)
    assert load_state(tmp_path) == SavedState(43)


def test_sidecar_state_write_replaces_the_temporary_file_of_an_interrupted_one(tmp_path: Path) -> None:
    stored_state(tmp_path, 42)
    (tmp_path / "obeyed.json.new").write_text('{"uid":"u1","obeyed":43,"fin' + " " * 1000)
    stored_state(tmp_path, 44)
    assert load_state(tmp_path) == SavedState(44)
    assert [path.name for path in tmp_path.iterdir()] == ["obeyed.json"]


STORE_GENERATIONS = """
import itertools, sys
from pathlib import Path
from rota.sidecar.storage.state_store import StateStore
notes = StateStore(Path(sys.argv[1]))
for generation in itertools.count(notes.load("u1").obeyed_generation + 1):
    notes.store_state(obeyed_generation=generation)
    print(generation, flush=True)
"""


def test_sidecar_state_that_was_written_survives_a_kill(tmp_path: Path) -> None:
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", STORE_GENERATIONS, tmp_path], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            lines = [process.stdout.readline() for _ in range(20)]
            process.kill()
            last = int([*lines, *process.stdout][-1])
        assert load_state(tmp_path).obeyed_generation in {last, last + 1}


# Local offsets


def test_offset_files_are_kept_by_group_and_topic(tmp_path: Path) -> None:
    store(OffsetFiles(tmp_path, "shop"), {A: 7, B: 8, C: 9})
    OffsetFiles(tmp_path, "other").store_offset(A, 1)
    reopened = OffsetFiles(tmp_path, "shop")
    assert reopened.load("orders") == {A: 7, B: 8}
    assert reopened.load("returns") == {C: 9}
    assert reopened.load("unheard-of") == {}
    assert OffsetFiles(tmp_path, "other").load("orders") == {A: 1}
    stored = json.loads((tmp_path / "shop" / "orders.json").read_text())
    offsets = {"broker-a": {"0": 7}, "broker-b": {"11": 8}}
    assert stored == {
        "group": "shop",
        "topic": "orders",
        "begun": reopened.consuming_since("orders"),
        "offsets": offsets,
    }


def test_offset_file_keeps_the_time_when_consumption_of_its_topic_started(tmp_path: Path) -> None:
    first = OffsetFiles(tmp_path, "shop")
    before_load = time.time()
    first.load("orders")
    started_at = first.consuming_since("orders")
    assert before_load <= started_at <= time.time()
    first.store_offset(A, 7)
    reopened = OffsetFiles(tmp_path, "shop")
    reopened.store_offset(B, 8)
    assert reopened.consuming_since("orders") == started_at


def test_offset_files_support_the_longest_names_and_special_characters(tmp_path: Path) -> None:
    group, topic = "g" * 255, "%RETRY%|" + "t" * 119
    OffsetFiles(tmp_path, group).store_offset(Queue(topic, "b", 0), 5)
    assert OffsetFiles(tmp_path, group).load(topic) == {Queue(topic, "b", 0): 5}


def test_offset_file_keeps_queues_that_are_not_named_and_lets_offsets_go_back(tmp_path: Path) -> None:
    store(OffsetFiles(tmp_path, "shop"), {A: 7, B: 8})
    OffsetFiles(tmp_path, "shop").store_offset(A, 2)  # without loading them before
    assert OffsetFiles(tmp_path, "shop").load("orders") == {A: 2, B: 8}


def test_offset_file_is_returned_as_a_copy(tmp_path: Path) -> None:
    offsets = OffsetFiles(tmp_path, "shop")
    offsets.store_offset(A, 7)
    offsets.load("orders")[A] = 100
    offsets.store_offset(A, 100)
    assert OffsetFiles(tmp_path, "shop").load("orders") == {A: 100}


def test_offset_file_is_not_written_again_for_equal_offsets(tmp_path: Path) -> None:
    offsets = OffsetFiles(tmp_path, "shop")
    offsets.store_offset(A, 7)
    with file_size_limit(0):
        offsets.store_offset(A, 7)


WHOLE = '{"group":"shop","topic":"orders","begun":5.5,"offsets":{"broker-a":{"0":7}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        WHOLE[:-1],
        WHOLE.replace("shop", "other"),
        WHOLE.replace("orders", "returns"),
        WHOLE.replace("7", "-7"),
        WHOLE.replace("5.5", "-5.5"),
        WHOLE.replace("5.5", "1e99"),
        WHOLE.replace('"0"', '"zero"'),
        WHOLE.replace('{"0":7}', "7"),
    ],
)
def test_offset_file_that_is_torn_is_set_aside_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "shop" / "orders.json"
    path.parent.mkdir()
    path.write_text(text)
    offsets = OffsetFiles(tmp_path, "shop")
    assert offsets.load("orders") == {}
    (message,) = caplog.messages
    assert message.startswith(f"The stored offsets of orders cannot be read; the file was renamed to {path}.torn: ")
    assert [file.name for file in path.parent.iterdir()] == ["orders.json.torn"]
    assert Path(f"{path}.torn").read_text() == text
    offsets.store_offset(B, 8)
    assert OffsetFiles(tmp_path, "shop").load("orders") == {B: 8}


def test_offset_file_that_is_intact_is_read(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "orders.json").write_text(WHOLE)
    assert OffsetFiles(tmp_path, "shop").load("orders") == {A: 7}


def test_offset_file_that_is_unreadable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "shop" / "orders.json").mkdir(parents=True)
    offsets = OffsetFiles(tmp_path, "shop")
    with pytest.raises(IsADirectoryError):
        offsets.load("orders")
    with pytest.raises(IsADirectoryError):
        offsets.store_offset(A, 7)
    offsets.store_offset(C, 9)
    assert OffsetFiles(tmp_path, "shop").load("returns") == {C: 9}


def test_offset_files_survive_a_full_disk(tmp_path: Path) -> None:
    offsets = OffsetFiles(tmp_path, "shop")
    store(offsets, {A: 7, C: 9})
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        offsets.store_offset(A, 8)
    assert OffsetFiles(tmp_path, "shop").load("orders") == {A: 7}
    assert sorted(file.name for file in (tmp_path / "shop").iterdir()) == ["orders.json", "returns.json"]
    store(offsets, {A: 8, C: 10})
    assert OffsetFiles(tmp_path, "shop").load("returns") == {C: 10}


def test_offset_file_is_written_again_after_a_write_of_which_only_the_last_step_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = OffsetFiles(tmp_path, "shop")
    offsets.store_offset(A, 7)
    flush = os.fsync

    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        offsets.store_offset(A, 9)
    monkeypatch.setattr(os, "fsync", flush)
    offsets.store_offset(A, 7)  # such as after a reset of the group's offset
    assert OffsetFiles(tmp_path, "shop").load("orders") == {A: 7}
