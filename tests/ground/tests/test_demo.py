"""`make demo` run from outside, to its end and interrupted; and the figures that it computes from the apps' notes."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ground.clusters import KUBECONFIG
from ground.deliveries import noted, queue_moves, repeated_arrivals
from ground.instance import Instance
from ground.poll import eventually

BORN = "2026-11-21T08:00:00.000Z"
LATER = "2026-11-21T08:00:03.000Z"
GRACEFUL = ("3 members start", "3 become 6", "6 become 2", "the fleet is rolled")
UNPLANNED = ("a member is killed", "a node dies")


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("demo")
    monkeypatch.setenv("ROTA_GROUND_HOME", str(home))
    monkeypatch.delenv(KUBECONFIG, raising=False)
    return home


def demo(seconds: str) -> subprocess.Popen[str]:
    env = {**os.environ, "DEMO_SECONDS": seconds}
    argv = [sys.executable, "-m", "ground.demo"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def instance_of(home: Path) -> Instance:
    (path,) = eventually(lambda: [*home.glob("demo-*/instance.json")])
    return Instance(path.parent)


@pytest.mark.timeout(480)
@pytest.mark.slow("`make demo` from start to end")
def test_demo_loses_no_message_duplicates_none_gracefully_and_cleans_up(home: Path) -> None:
    process = demo("1")
    assert process.stdout
    lines = []
    page = ""
    for line in process.stdout:  # while the demo prints them
        lines.append(line)
        if line.startswith("The operator's page"):
            with urllib.request.urlopen(line.split()[-1]) as answer:
                page = answer.read().decode()
            instance = instance_of(home)
    _, errors = process.communicate()
    text = "".join(lines)
    assert process.returncode == 0, text + errors
    assert "<title>" in page
    assert 40 <= len(lines) <= 100, "it is to be read"
    rows = {
        re.split(r"  +", row)[0]: re.split(r"  +", row.strip()) for row in text.rpartition("-----\n")[2].splitlines()
    }
    costs = {title: rows[title] for title in (*GRACEFUL, *UNPLANNED)}
    assert {title: cost[6] for title, cost in costs.items()} == dict.fromkeys(costs, "0"), f"lost:\n{text}"
    assert {title: costs[title][5] for title in GRACEFUL} == dict.fromkeys(GRACEFUL, "0"), f"twice:\n{text}"
    assert all(int(cost[2]) > 0 for title, cost in costs.items() if title != GRACEFUL[0]), f"moved:\n{text}"
    assert "MemberJoined" in text
    assert "granted without a report of their release" in text, "no forced grant of the dead node's queues"
    assert re.search(r"the first message was delivered [\d.]+ s after", text)
    assert_nothing_is_left(instance, home)


@pytest.mark.slow("`make demo`, interrupted")
def test_demo_that_is_interrupted_exits_with_130_and_cleans_up(home: Path) -> None:
    process = demo("600")
    instance = instance_of(home)
    eventually(lambda: instance.log("kube-apiserver").exists())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "demo: interrupted; what had begun is taken down."
    assert "Traceback" not in errors
    assert_nothing_is_left(instance, home)


def assert_nothing_is_left(instance: Instance, home: Path) -> None:
    assert instance.processes() == []
    assert not instance.folder.exists()
    assert not [*home.glob("*/instance.json")]


@pytest.mark.parametrize("seconds", ["soon", "-1", "1.5", "²", "1" * 30])
def test_demo_rejects_invalid_seconds_with_one_sentence(home: Path, seconds: str) -> None:
    process = demo(seconds)
    output, errors = process.communicate(timeout=180)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith(f"demo: DEMO_SECONDS is {seconds!r}; give whole seconds, from 0 to 604800: ")
    assert len(errors.splitlines()) == 1
    assert not [*home.iterdir()]


def test_demo_reads_pauses_and_duplicates_from_delivery_logs(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(f"1000000 1 0 {BORN}\n1500000 2 1 {BORN}\n1700000 9 -1 {BORN}\n9")
    (tmp_path / "b").write_text(f"3000000 3 0 {BORN}\n3100000 2 -1 {BORN}\n3200000 1 0 {BORN}\n3300000 3 0 {LATER}\n")
    came = [arrival for member in "ab" for arrival in noted(member, tmp_path / member)]
    assert [(move.seconds, move.queue, move.member) for move in queue_moves(came)] == [(2.0, 0, "a")]
    assert [(arrival.number, arrival.at) for arrival in repeated_arrivals(came)] == [(2, 3.1), (1, 3.2)]
