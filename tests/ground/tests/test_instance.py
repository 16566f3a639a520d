"""An instance finds and ends exactly its own processes, and is isolated from others."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ground import instance as instances
from ground.instance import Instance, Process
from ground.poll import eventually
from ground.report import Missing


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROTA_GROUND_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def standing() -> Iterator[Instance]:
    instance = Instance.open("one")
    yield instance
    if instance.folder.exists():
        instance.down()


def test_instance_opened_twice_is_the_same_and_others_get_other_addresses(standing: Instance) -> None:
    again = Instance.open("one")
    other_instance = Instance.open("two")
    assert (again.id, again.block) == (standing.id, standing.block)
    assert other_instance.block != standing.block
    other_instance.down()
    assert Instance.find("two") is None


def test_instance_starts_a_program_once(standing: Instance) -> None:
    first = standing.start("sleeper", ["sleep", "60"])
    assert standing.start("sleeper", ["sleep", "60"]).pid == first.pid
    assert Instance.open("one").start("sleeper", ["sleep", "60"]).pid == first.pid


def test_instance_down_ends_orphaned_grandchildren_and_no_other_process(standing: Instance, tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    standing.start("parent", ["sh", "-c", f"setsid sleep 60 & echo $! > {tmp_path}/orphan"])
    orphan = int(eventually(lambda: (tmp_path / "orphan").exists() and (tmp_path / "orphan").read_text().strip()))
    eventually(lambda: [process.pid for process in standing.processes()] == [orphan])
    standing.down()
    assert not Process(orphan, "orphan", tmp_path).alive
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_instance_stop_ends_processes_that_ignore_sigterm_or_are_suspended(standing: Instance) -> None:
    stubborn = standing.start("stubborn", ["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1; done"])
    eventually(lambda: "deaf" in stubborn.log.read_text())
    frozen = standing.start("frozen", ["sleep", "60"])
    frozen.signal(signal.SIGSTOP)
    standing.stop("frozen", grace=30)
    standing.stop("stubborn", grace=0.1)
    assert not stubborn.alive
    assert not frozen.alive


def test_instance_reports_a_program_that_ends_at_start_with_its_last_output(standing: Instance) -> None:
    standing.start("broken", ["sh", "-c", "echo my disk is gone >&2; exit 1"])
    with pytest.raises(Missing, match="The thing ended at start: my disk is gone"):
        standing.wait("broken", lambda: False, 10, "The thing")


def test_instance_reports_a_program_that_never_gets_ready(standing: Instance) -> None:
    standing.start("slow", ["sleep", "60"])
    with pytest.raises(Missing, match="The thing is not ready after 0 s: it said nothing"):
        standing.wait("slow", lambda: False, 0, "The thing")


def test_instance_skips_busy_ports_and_reserves_a_port_once(standing: Instance) -> None:
    with socket.socket() as busy:
        busy.bind((standing.address(), 0))
        busy.listen()
        preferred = busy.getsockname()[1]
        assigned = standing.port("server", preferred)
        assert assigned != preferred
    assert standing.port("server", preferred) == assigned
    assert standing.port("other", assigned) != assigned
    assert standing.port("elsewhere", assigned, standing.address(2)) == assigned


def test_instance_down_runs_cleanup_commands_once_in_reverse_order(standing: Instance, tmp_path: Path) -> None:
    for name in ("a", "b", "b"):
        standing.at_down("sh", "-c", f"echo {name} >> {tmp_path}/undone")
    standing.down()
    assert (tmp_path / "undone").read_text().split() == ["b", "a"]


def test_instance_note_keeps_its_first_value(standing: Instance) -> None:
    assert standing.note("cluster", "") == ""
    assert standing.note("cluster", "own") == "own"
    assert standing.note("cluster", "kind") == "own"


def test_instance_of_a_killed_test_run_is_swept_by_the_next_run(own_home: Path) -> None:
    run = """
from ground.instance import temporary
with temporary("test") as standing:
    print(standing.start("sleeper", ["sleep", "60"]).pid, flush=True)
    input()
"""
    owner = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert owner.stdout
    assert owner.stdin
    sleeper = int(owner.stdout.readline())
    instances.sweep()
    assert Path(f"/proc/{sleeper}").exists(), "it was swept while its owner lived"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    owner.stdin.close()
    instances.sweep()
    assert not Process(sleeper, "sleeper", own_home).alive
    assert list(own_home.glob("*/instance.json")) == []


def test_instance_reports_that_all_address_blocks_are_taken(own_home: Path) -> None:
    for number in range(instances.FIRST_BLOCK, instances.LAST_BLOCK):
        (own_home / str(number)).mkdir(parents=True)
        (own_home / str(number) / "instance.json").write_text(json.dumps({"id": "x", "block": f"127.{number}"}))
    with pytest.raises(Missing, match="All address blocks are taken"):
        Instance.open("one-too-many")


def test_instance_down_continues_after_a_cleanup_command_fails(standing: Instance) -> None:
    standing.at_down("/nowhere/kubectl", "delete", "node")
    standing.down()
    assert not standing.folder.exists()


@pytest.mark.parametrize("name", ["a/b", "", "Blocks", "a b", ".."])
def test_instance_rejects_an_invalid_name(name: str) -> None:
    with pytest.raises(Missing, match="cannot be named"):
        Instance.open(name)


def test_instance_that_is_corrupt_does_not_affect_others(own_home: Path, standing: Instance) -> None:
    (own_home / "spoilt").mkdir()
    (own_home / "spoilt" / "instance.json").write_text("{")
    instances.sweep()
    assert [instance.name for instance in instances.standing()] == [standing.name]
