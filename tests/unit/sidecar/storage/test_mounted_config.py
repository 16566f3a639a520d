"""The mounted ConfigMap, swapped as the kubelet does it: files of one generation at a time, and no missed change."""

import asyncio
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from ground.poll import PATIENCE_SECONDS
from rota.documents import GZIP_KEY, PLAIN_KEY
from rota.sidecar.storage.mounted_config import DATA_LINK, SETTINGS_FILE, MountedConfig, MountedFiles

NEVER, AT_ONCE = 3600.0, 0.001

linux = pytest.mark.skipif(sys.platform != "linux", reason="inotify and /proc are Linux's")


def swap(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace the files in the steps of the kubelet's AtomicWriter."""
    prepare(folder, files)
    publish(folder)
    for name in files:
        if not os.path.lexists(folder / name):
            (folder / name).symlink_to(f"{DATA_LINK}/{name}")
    current = (folder / DATA_LINK).readlink()
    for path in folder.iterdir():
        if path.is_symlink() and path.name != DATA_LINK and path.name not in files:
            path.unlink()
        elif path.name.startswith("..2") and path.name != str(current):
            shutil.rmtree(path)


def prepare(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generation_folder = Path(tempfile.mkdtemp(prefix=time.strftime("..%Y_%m_%d_%H_%M_%S.", time.gmtime()), dir=folder))
    generation_folder.chmod(0o755)
    for name, content in files.items():
        (generation_folder / name).write_bytes(content)
    (folder / "..data_tmp").symlink_to(generation_folder.name)


def publish(folder: Path) -> None:
    (folder / "..data_tmp").rename(folder / DATA_LINK)


def files_of(number: int) -> dict[str, bytes]:
    """Return a generation's files; the assignments of odd ones are compressed."""
    return {SETTINGS_FILE: b"%d" % number, GZIP_KEY if number % 2 else PLAIN_KEY: b"%d" % number}


def mounted_files_of(number: int) -> MountedFiles:
    return MountedFiles(b"%d" % number, b"%d" % number)


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Reading


def test_config_map_folder_that_is_missing_reads_as_none_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert MountedConfig(tmp_path / "away").read() is None
    assert caplog.messages == []


def test_config_map_files_that_are_missing_read_as_absent(tmp_path: Path) -> None:
    config = MountedConfig(tmp_path)
    assert config.read() == MountedFiles()
    swap(tmp_path, {})
    assert config.read() == MountedFiles()
    swap(tmp_path, {SETTINGS_FILE: b"s"})
    assert config.read() == MountedFiles(b"s")
    swap(tmp_path, {GZIP_KEY: b"\x1f\x8b"})
    assert config.read() == MountedFiles(None, b"\x1f\x8b")


def test_config_map_reader_accepts_a_plain_folder_and_one_of_links(tmp_path: Path) -> None:
    for name, content in files_of(2).items():
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (tmp_path / "elsewhere" / name).write_bytes(content)
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in files_of(2):
        (linked / name).symlink_to(tmp_path / "elsewhere" / name)
    assert MountedConfig(tmp_path / "elsewhere").read() == MountedConfig(linked).read() == mounted_files_of(2)


def test_config_map_with_both_assignments_yields_the_uncompressed_one(tmp_path: Path) -> None:
    swap(tmp_path, {PLAIN_KEY: b"plain", GZIP_KEY: b"packed"})
    assert MountedConfig(tmp_path).read() == MountedFiles(None, b"plain")


def test_config_map_data_link_takes_precedence_over_files_next_to_it(tmp_path: Path) -> None:
    swap(tmp_path, files_of(2))
    for name in files_of(2):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(b"old")
    assert MountedConfig(tmp_path).read() == mounted_files_of(2)


def test_config_map_with_a_dangling_data_link_reads_as_none_and_logs_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DATA_LINK).symlink_to("..2026")
    (tmp_path / SETTINGS_FILE).write_bytes(b"outside")
    config = MountedConfig(tmp_path)
    assert config.read() is None
    assert config.read() is None
    assert caplog.messages == [
        f"The configuration in {tmp_path} cannot be read: ..data points to a missing folder, or changes too often"
    ]


@pytest.mark.parametrize("name", ["", SETTINGS_FILE, DATA_LINK])
def test_config_map_that_is_unreadable_reads_as_none_and_logs_once_until_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = tmp_path / "documents"
    invalid_path = folder / name
    invalid_path.parent.mkdir(exist_ok=True)
    config = MountedConfig(folder)
    for _ in range(2):
        if name == SETTINGS_FILE:
            invalid_path.mkdir()
        else:
            invalid_path.write_bytes(b"")
        assert config.read() is None
        assert config.read() is None
        if name == SETTINGS_FILE:
            invalid_path.rmdir()
        else:
            invalid_path.unlink()
        folder.mkdir(exist_ok=True)
        assert config.read() == MountedFiles()
        if not name:
            folder.rmdir()
    assert len(caplog.messages) == 2
    assert all("a directory" in message and str(folder) in message for message in caplog.messages)


def test_config_map_files_are_of_one_generation_however_often_they_are_swapped(tmp_path: Path) -> None:
    swap(tmp_path, files_of(0))
    numbers = range(1, 301)

    def swap_all() -> None:
        for number in numbers:
            swap(tmp_path, files_of(number))

    swapper = threading.Thread(target=swap_all)
    config, read_files = MountedConfig(tmp_path), set()
    swapper.start()
    while swapper.is_alive():
        files = config.read()
        if files is not None:  # None only if each of its attempts met a swap
            read_files.add(files)
    swapper.join()
    assert read_files <= {mounted_files_of(number) for number in (0, *numbers)}
    assert len(read_files) > 1
    assert config.read() == mounted_files_of(300)


def test_config_map_folder_that_comes_and_goes_is_read_completely_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "documents"

    def mount_and_remove() -> None:
        for number in range(300):
            swap(folder, files_of(number))
            folder.rename(tmp_path / "away")
            shutil.rmtree(tmp_path / "away")

    mover = threading.Thread(target=mount_and_remove)
    config, read_files = MountedConfig(folder), set()
    mover.start()
    while mover.is_alive():
        read_files.add(config.read())
    mover.join()
    # MountedFiles() is the folder before the kubelet's first swap.
    assert read_files <= {None, MountedFiles(), *(mounted_files_of(number) for number in range(300))}


@linux
def test_config_map_reader_leaves_no_file_open(tmp_path: Path) -> None:
    swap(tmp_path, files_of(2))
    (tmp_path / "wrong" / SETTINGS_FILE).mkdir(parents=True)
    open_before = count_open_files()
    for _ in range(3):
        for folder in (tmp_path, tmp_path / "away", tmp_path / "wrong"):
            MountedConfig(folder).read()
    assert count_open_files() == open_before


# Changes


class CountingConfig(MountedConfig):
    def __init__(self, folder: Path, *, poll_seconds: float = NEVER, backup_poll_seconds: float = NEVER) -> None:
        super().__init__(folder, poll_seconds=poll_seconds, backup_poll_seconds=backup_poll_seconds)
        self._checks: asyncio.Queue[None] = asyncio.Queue()

    def _fingerprint(self) -> tuple[object, ...]:
        self._checks.put_nowait(None)
        return super()._fingerprint()

    async def wait_for_checks(self) -> None:
        """Wait for ten further checks: all changes found by earlier checks have been reported."""
        for _ in range(self._checks.qsize() + 10):
            await self._checks.get()


def count_watches() -> int:
    return sum(path.read_text().count("inotify wd:") for path in Path("/proc/self/fdinfo").iterdir() if path.exists())


@asynccontextmanager
async def follow_changes(config: MountedConfig) -> AsyncGenerator[asyncio.Queue[MountedFiles | None], None]:
    """Yield a queue of the files read after each reported change; the start is reported as one."""
    results: asyncio.Queue[MountedFiles | None] = asyncio.Queue()

    async def follow() -> None:
        async with aclosing(config.changes()) as changes:
            async for _ in changes:
                results.put_nowait(config.read())

    follower = asyncio.create_task(follow())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield results
    finally:
        follower.cancel()
        await asyncio.wait([follower])
        assert follower.cancelled()


async def test_config_map_watch_reports_the_start_as_a_change(tmp_path: Path) -> None:
    swap(tmp_path, files_of(2))
    for folder, files in ((tmp_path / "away", None), (tmp_path, mounted_files_of(2))):
        async with follow_changes(MountedConfig(folder, poll_seconds=NEVER, backup_poll_seconds=NEVER)) as results:
            assert await results.get() == files


@linux
@pytest.mark.parametrize("backup_poll_seconds", [NEVER, AT_ONCE])
async def test_config_map_watch_reports_each_swap_as_one_change(tmp_path: Path, backup_poll_seconds: float) -> None:
    swap(tmp_path, files_of(0))
    async with follow_changes(
        MountedConfig(tmp_path, poll_seconds=NEVER, backup_poll_seconds=backup_poll_seconds)
    ) as results:
        for number in range(0, 20, 2):
            assert await results.get() == mounted_files_of(number)
            swap(tmp_path, files_of(number + 2))


@linux
@pytest.mark.parametrize("backup_poll_seconds", [NEVER, AT_ONCE])
async def test_config_map_watch_reports_a_burst_of_swaps_as_one_change(
    tmp_path: Path, backup_poll_seconds: float
) -> None:
    swap(tmp_path, files_of(0))
    async with follow_changes(
        MountedConfig(tmp_path, poll_seconds=NEVER, backup_poll_seconds=backup_poll_seconds)
    ) as results:
        assert await results.get() == mounted_files_of(0)
        for number in range(100):
            swap(tmp_path, files_of(number))
        assert await results.get() == mounted_files_of(99)
        swap(tmp_path, files_of(101))
        assert await results.get() == mounted_files_of(101)


@linux
async def test_config_map_watch_misses_no_swap_between_iterations(tmp_path: Path) -> None:
    swap(tmp_path, files_of(0))
    config = MountedConfig(tmp_path, poll_seconds=NEVER, backup_poll_seconds=NEVER)
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(config.changes()) as changes:
        await anext(changes)
        swap(tmp_path, files_of(1))  # after an iteration, before the next one
        await anext(changes)
        assert config.read() == mounted_files_of(1)


def max_queued_events() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


@linux
async def test_config_map_watch_reports_a_change_that_inotify_lost(tmp_path: Path) -> None:
    swap(tmp_path, files_of(0))
    (tmp_path / "this").touch()
    async with follow_changes(MountedConfig(tmp_path, poll_seconds=NEVER, backup_poll_seconds=NEVER)) as results:
        assert await results.get() == mounted_files_of(0)
        for _ in range(max_queued_events() // 4 + 1):
            (tmp_path / "this").rename(tmp_path / "that")
            (tmp_path / "that").rename(tmp_path / "this")
        swap(tmp_path, files_of(1))
        assert await results.get() == mounted_files_of(1)


@linux
async def test_config_map_watch_of_a_plain_folder_reports_complete_files_and_deletions(tmp_path: Path) -> None:
    async with follow_changes(MountedConfig(tmp_path, poll_seconds=NEVER, backup_poll_seconds=NEVER)) as results:
        assert await results.get() == MountedFiles()
        (tmp_path / SETTINGS_FILE).write_bytes(b"s")
        assert await results.get() == MountedFiles(b"s")
        (tmp_path / "new").write_bytes(b"a")
        (tmp_path / "new").rename(tmp_path / PLAIN_KEY)
        assert await results.get() == MountedFiles(b"s", b"a")
        (tmp_path / SETTINGS_FILE).unlink()
        assert await results.get() == MountedFiles(None, b"a")


@linux
async def test_config_map_watch_ignores_other_files(tmp_path: Path) -> None:
    config = CountingConfig(tmp_path, backup_poll_seconds=AT_ONCE)
    async with follow_changes(config) as results:
        assert await results.get() == MountedFiles()
        (tmp_path / "notes.txt").write_bytes(b"mine")
        await config.wait_for_checks()
        assert results.empty()


@linux
async def test_config_map_watch_reports_a_rewrite_with_equal_content(tmp_path: Path) -> None:
    # On an older kernel two writes within 4 ms have the same time.
    (tmp_path / SETTINGS_FILE).write_bytes(b"s")
    async with follow_changes(MountedConfig(tmp_path, poll_seconds=NEVER, backup_poll_seconds=NEVER)) as results:
        assert await results.get() == MountedFiles(b"s")
        (tmp_path / SETTINGS_FILE).open("ab").close()
        assert await results.get() == MountedFiles(b"s")


@linux
async def test_config_map_watch_reports_creation_and_deletion_of_an_empty_folder(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    async with follow_changes(MountedConfig(folder, poll_seconds=AT_ONCE, backup_poll_seconds=NEVER)) as results:
        assert await results.get() is None
        folder.mkdir()
        assert await results.get() == MountedFiles()
        folder.rmdir()
        assert await results.get() is None


async def test_config_map_watch_reports_nothing_when_polling_finds_no_change(tmp_path: Path) -> None:
    swap(tmp_path / "there", files_of(0))
    for folder in (tmp_path / "there", tmp_path / "away"):
        config = CountingConfig(folder, poll_seconds=AT_ONCE, backup_poll_seconds=AT_ONCE)
        async with follow_changes(config) as results:
            await results.get()
            await config.wait_for_checks()
            assert results.empty()


@linux
@pytest.mark.parametrize("is_renamed", [False, True])
async def test_config_map_watch_follows_a_folder_that_is_removed_and_recreated(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_renamed: bool,  # noqa: FBT001 - a case
) -> None:
    folder = tmp_path / "documents"
    async with follow_changes(MountedConfig(folder, poll_seconds=AT_ONCE, backup_poll_seconds=NEVER)) as results:
        assert await results.get() is None
        for number in range(0, 6, 2):
            swap(tmp_path / "made", files_of(number))
            (tmp_path / "made").rename(folder)
            assert await results.get() == mounted_files_of(number)
            swap(folder, files_of(number + 1))  # reported by inotify, which watches the new folder
            assert await results.get() == mounted_files_of(number + 1)
            if is_renamed:
                folder.rename(tmp_path / "away")
                assert await results.get() is None
                shutil.rmtree(tmp_path / "away")
            else:
                shutil.rmtree(folder)
                assert await results.get() is None
    assert caplog.messages == []


@linux
async def test_config_map_watch_detects_by_polling_changes_that_inotify_cannot_report(tmp_path: Path) -> None:
    folder = tmp_path / "pod" / "documents"
    swap(folder, files_of(0))
    async with follow_changes(MountedConfig(folder, poll_seconds=NEVER, backup_poll_seconds=AT_ONCE)) as results:
        assert await results.get() == mounted_files_of(0)
        (folder / DATA_LINK / SETTINGS_FILE).write_bytes(b"by hand")  # inside the generation's folder
        while await results.get() != MountedFiles(b"by hand", b"0"):
            pass
        swap(tmp_path / "other" / "documents", files_of(2))
        (tmp_path / "pod").rename(tmp_path / "away")
        (tmp_path / "other").rename(tmp_path / "pod")
        while await results.get() != mounted_files_of(2):
            pass
        swap(folder, files_of(4))
        assert await results.get() == mounted_files_of(4)
        assert count_watches() == 1  # not of the folder that was moved away


@contextmanager
def no_more_open_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@linux
async def test_config_map_watch_without_inotify_polls_until_it_is_available(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swap(tmp_path, files_of(0))
    prepare(tmp_path, files_of(2))
    config = MountedConfig(tmp_path, poll_seconds=AT_ONCE, backup_poll_seconds=NEVER)
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(config.changes()) as changes:
        with no_more_open_files():
            await anext(changes)
            publish(tmp_path)
            await anext(changes)
            assert config.read() is None
        for number in (4, 6):  # detected by polling, then by inotify
            swap(tmp_path, files_of(number))
            await anext(changes)
            assert config.read() == mounted_files_of(number)
    watch_failure, read_failure = caplog.messages
    assert watch_failure.startswith(f"inotify is not available for {tmp_path} ([Errno 24] Too many open files)")
    assert "Too many open files" in read_failure


async def test_config_map_watch_tolerates_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.touch()
    async with follow_changes(MountedConfig(folder, poll_seconds=AT_ONCE, backup_poll_seconds=NEVER)) as results:
        assert await results.get() is None
        folder.unlink()
        swap(tmp_path / "made", files_of(0))
        (tmp_path / "made").rename(folder)
        while await results.get() != mounted_files_of(0):
            pass


@linux
async def test_config_map_watch_supports_two_followers_and_leaves_no_file_open(tmp_path: Path) -> None:
    swap(tmp_path, files_of(0))
    config = MountedConfig(tmp_path, poll_seconds=NEVER, backup_poll_seconds=NEVER)
    open_before = count_open_files()
    async with follow_changes(config) as first, follow_changes(config) as second:
        assert await first.get() == await second.get() == mounted_files_of(0)
        swap(tmp_path, files_of(2))
        assert await first.get() == await second.get() == mounted_files_of(2)
    assert count_open_files() == open_before
