"""What docs/policies.md shows is so: its YAML is understood, its pictures and its table come out of `rota plan`."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kube.pages import a_shell, typed
from rota.cli import main
from rota.ranges import from_ranges
from rota.spec import parse_policy
from rota.strategies import STRATEGIES, allocate

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "policies.md").read_text()
POLICIES = ROOT / "docs" / "examples" / "policies.yaml"
NAMES = {
    body["spec"]["strategy"]: body["metadata"]["name"]
    for body in yaml.safe_load_all(POLICIES.read_text())
    if body["kind"] == "RebalancePolicy"
}
ROOMS = ["m0=east", "m1=west", "m2=east", "m3=west"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def plan(policy: str, members: int, queues: int, current: Path | None = None) -> Any:
    """Plan with so many queues on each of the page's two brokers."""
    world = ["-f", str(POLICIES), "--policy", policy, "--members", str(members)]
    world += ["--rooms", ",".join(ROOMS[:members])]
    world += ["--queues", f"orders=east@broker-a:{queues},west@broker-b:{queues}"]
    ran = CliRunner().invoke(main, ["plan", *world, *(["--current", str(current)] if current else []), "-o", "json"])
    return json.loads(ran.output)


def change(policy: str, members: tuple[int, int], queues: int, folder: Path) -> tuple[Any, Any]:
    """Plan, and plan again on top of it with another number of members."""
    before = plan(policy, members[0], queues)
    (folder / "before.json").write_text(json.dumps(before))
    return before, plan(policy, members[1], queues, folder / "before.json")


def drawn(share: dict[str, dict[str, str]]) -> str:
    return " ".join(f"{queue.broker[0]}{queue.id}" for queue in from_ranges(share)) or "-"


def test_docs_policies_page_has_a_section_and_example_for_every_strategy() -> None:
    assert re.findall(r"^### (\w+)$", PAGE, re.MULTILINE) == list(STRATEGIES)
    assert list(NAMES) == [name for name in STRATEGIES if name != "Custom"]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_docs_policies_page_yaml_is_valid(block: str) -> None:
    shown = yaml.safe_load(block)
    parse_policy(shown if "kind" in shown else {"spec": shown})


def test_docs_policies_page_yaml_equals_the_example_file() -> None:
    examples = {
        body["spec"]["strategy"]: body["spec"]
        for body in yaml.safe_load_all(POLICIES.read_text())
        if body["kind"] == "RebalancePolicy"
    }
    shown = [body for body in map(yaml.safe_load, blocks("yaml")) if "kind" not in body]
    assert {body["strategy"]: body for body in shown if body["strategy"] != "Custom"} == examples


@pytest.mark.parametrize("strategy", NAMES)
def test_docs_policies_page_diagrams_match_the_plan_when_a_member_joins(strategy: str, tmp_path: Path) -> None:
    section = re.search(rf"^### {strategy}$(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    assert section
    before, after = change(NAMES[strategy], (2, 3), 3, tmp_path)
    assert re.findall(r"^    (m\d): (.*?) +-> +\1: (.*)$", section[1], re.MULTILINE) == [
        (member, drawn(before["members"].get(member, {})), drawn(after["members"][member]))
        for member in ("m0", "m1", "m2")
    ]


@pytest.mark.parametrize("strategy", NAMES)
def test_docs_policies_page_table_matches_the_planned_moves(strategy: str, tmp_path: Path) -> None:
    cells = [NAMES[strategy], strategy]
    for members in ((3, 4), (4, 3)):
        _, after = change(NAMES[strategy], members, 8, tmp_path)
        cells += [str(len(after["moves"])), f"{after['spread']['least']} to {after['spread']['most']}"]
    assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("field", ["mode", "drainTimeout", "lostAfter", "debounce", "resync", "unreadyGrace"])
def test_docs_policies_page_defaults_match_the_spec(field: str) -> None:
    row = re.search(rf"^\| `(\w+)\.{field}` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert row
    assert parse_policy({"spec": {row[1]: {field: row[2]}}}) == parse_policy({})


def test_docs_policies_page_custom_strategy_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,), (project,) = blocks("python"), blocks("toml")
    (points,) = tomllib.loads(project)["project"]["entry-points"].values()
    ((name, place),) = points.items()
    (tmp_path / f"{place.partition(':')[0]}.py").write_text(source)
    info = tmp_path / "my_strategies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rota.strategies]\n{name} = {place}\n")
    monkeypatch.syspath_prepend(tmp_path)
    (shown,) = [body for body in map(yaml.safe_load, blocks("yaml")) if body.get("strategy") == "Custom"]
    queues = [("orders", "broker-a", number) for number in range(5)]
    shares = allocate("Custom", queues, ["m0", "m1", "m2"], options=shown["options"]["custom"])
    assert [len(share) for share in shares.values()] == [3, 2, 0]


async def test_docs_policies_page_commands_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # what is written there goes elsewhere
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    async with a_shell(tmp_path, {"PATH": path}) as shell:
        for it in typed(ROOT / "docs" / "policies.md"):
            await shell.follow(it)
    assert json.loads((tmp_path / "before.json").read_text())["members"]
