"""Files that outlive a run are complete or absent, whatever happens while they are built."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ground import cache
from ground.instance import Process
from ground.poll import eventually
from ground.report import Missing


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROTA_GROUND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_file(text: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / "it").write_text(text)

    return build


def test_cache_entry_is_built_once_for_each_recipe() -> None:
    first = cache.entry("thing", "recipe 1", write_file("1"))
    assert cache.entry("thing", "recipe 1", write_file("never")) == first
    assert cache.entry("thing", "recipe 2", write_file("2")) != first
    assert (first / "it").read_text() == "1"


def test_cache_entry_that_is_incomplete_is_never_used_and_cleared_by_the_next_build(own_cache: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "part").write_text("")
        raise Missing("no more")

    with pytest.raises(Missing, match="no more"):
        cache.entry("thing", "recipe", half)
    (own_cache / "thing-0123456789ab.making").mkdir()  # as a power cut would leave it
    whole = cache.entry("thing", "recipe", write_file("whole"))
    assert [path.name for path in own_cache.glob("thing-*")] == [whole.name]
    assert [path.name for path in whole.iterdir()] == ["it"]


def test_cache_cleanup_leaves_a_build_of_a_longer_name_alone(own_cache: Path) -> None:
    longer_name = own_cache / "thing-else-0123456789ab.making"
    longer_name.mkdir(parents=True)
    cache.entry("thing", "recipe", write_file("whole"))
    assert longer_name.exists()


def test_cache_entry_requested_by_two_processes_is_built_once(tmp_path: Path) -> None:
    build = f"""
import pathlib, time
from ground import cache
def build(folder):
    with open({str(tmp_path / "builds")!r}, "a") as file: file.write("x")
    time.sleep(0.3)
cache.entry("thing", "recipe", build)
"""
    processes = [subprocess.Popen([sys.executable, "-c", build]) for _ in range(2)]
    assert [process.wait(30) for process in processes] == [0, 0]
    assert (tmp_path / "builds").read_text() == "x"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_cache_build_that_is_interrupted_leaves_no_process_and_no_entry(
    tmp_path: Path, own_cache: Path, number: signal.Signals
) -> None:
    build = f"""
import signal
from ground import cache, report
for number in report.ENDING:  # who starts us in the background has Ctrl-C ignored
    signal.signal(number, report.interrupt)
cache.entry("thing", "r", lambda folder: cache.run(["sh", "-c", "echo $$ > {tmp_path}/pid; sleep 60"], "Building"))
"""
    process = subprocess.Popen([sys.executable, "-c", build], stderr=subprocess.DEVNULL)
    pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()))
    process.send_signal(number)
    process.wait(10)
    eventually(lambda: not Process(pid, "build", tmp_path).alive)
    assert cache.entry("thing", "r", write_file("whole")).is_dir()
    assert list(own_cache.glob("*.making")) == []


def test_cache_build_failure_names_its_last_line_and_log_file() -> None:
    with pytest.raises(Missing) as raised:
        cache.run(["sh", "-c", "echo first >&2; echo the reason >&2; exit 3"], "Building it")
    message = str(raised.value)
    assert message.startswith("Building it failed: the reason (all of it: ")
    assert "first" in Path(message.rpartition(": ")[2].rstrip(")")).read_text()


def test_cache_build_step_times_out() -> None:
    with pytest.raises(Missing, match="did not end within 0 s"):
        cache.run(["sleep", "60"], "Waiting", timeout=0.1)


def test_cache_reports_a_full_disk_in_one_sentence() -> None:
    def fill(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Missing, match=r"No room left on a disk; .*ROTA_GROUND_CACHE"):
        cache.entry("thing", "recipe", fill)
    with pytest.raises(Missing, match="No room left"):
        cache.run(["sh", "-c", "echo 'write x: no space left on device' >&2; exit 1"], "Building")
    with pytest.raises(Missing, match=r"Building needs 1e\+09 GiB on the disk of"):
        cache.need_room(1e9)


def test_cache_reports_a_full_file_system_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=False).returncode
    ):
        pytest.skip("a small file system can be mounted by root only")
    try:
        monkeypatch.setenv("ROTA_GROUND_CACHE", str(small))
        with pytest.raises(Missing, match="No room left on a disk"):
            cache.entry("thing", "recipe", write_file("x" * 2**20))
        assert [path.name for path in small.iterdir()] == ["thing.lock"]
    finally:
        subprocess.run(["umount", small], check=True)


def test_cache_reports_a_folder_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROTA_GROUND_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(Missing, match=r"cannot be made .*ROTA_GROUND_CACHE"):
        cache.folder()


def test_cache_removes_a_folder_with_read_only_parts(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("")
    (tmp_path / "a" / "b").chmod(0o555)
    cache.remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()
