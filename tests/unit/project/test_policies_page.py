"""Tests docs/policies.md: its YAML is valid, and its diagrams and its table match the output of `rota plan`."""

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

from kube.pages import a_shell, typed_commands
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
    """Return the output of `rota plan` with this many queues on each of the two brokers of the page."""
    arguments = ["-f", str(POLICIES), "--policy", policy, "--members", str(members)]
    arguments += ["--rooms", ",".join(ROOMS[:members])]
    arguments += ["--queues", f"orders=east@broker-a:{queues},west@broker-b:{queues}"]
    result = CliRunner().invoke(
        main, ["plan", *arguments, *(["--current", str(current)] if current else []), "-o", "json"]
    )
    return json.loads(result.output)


def plan_twice(policy: str, members: tuple[int, int], queues: int, folder: Path) -> tuple[Any, Any]:
    """Return two plans: the second continues from the first with another number of members."""
    first_plan = plan(policy, members[0], queues)
    (folder / "before.json").write_text(json.dumps(first_plan))
    return first_plan, plan(policy, members[1], queues, folder / "before.json")


def share_text(share: dict[str, dict[str, str]]) -> str:
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
    first_plan, second_plan = plan_twice(NAMES[strategy], (2, 3), 3, tmp_path)
    assert re.findall(r"^    (m\d): (.*?) +-> +\1: (.*)$", section[1], re.MULTILINE) == [
        (member, share_text(first_plan["members"].get(member, {})), share_text(second_plan["members"][member]))
        for member in ("m0", "m1", "m2")
    ]


@pytest.mark.parametrize("strategy", NAMES)
def test_docs_policies_page_table_matches_the_planned_moves(strategy: str, tmp_path: Path) -> None:
    cells = [NAMES[strategy], strategy]
    for members in ((3, 4), (4, 3)):
        _, second_plan = plan_twice(NAMES[strategy], members, 8, tmp_path)
        cells += [
            str(len(second_plan["moves"])),
            f"{second_plan['spread']['least']} to {second_plan['spread']['most']}",
        ]
    assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("field", ["mode", "drainTimeout", "lostAfter", "debounce", "resync", "unreadyGrace"])
def test_docs_policies_page_defaults_match_the_spec(field: str) -> None:
    row = re.search(rf"^\| `(\w+)\.{field}` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert row
    assert parse_policy({"spec": {row[1]: {field: row[2]}}}) == parse_policy({})


def test_docs_policies_page_custom_strategy_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("python")
    (project,) = blocks("toml")
    (entry_points,) = tomllib.loads(project)["project"]["entry-points"].values()
    ((name, target),) = entry_points.items()
    (tmp_path / f"{target.partition(':')[0]}.py").write_text(source)
    metadata_folder = tmp_path / "my_strategies-1.0.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 1.0\n")
    (metadata_folder / "entry_points.txt").write_text(f"[rota.strategies]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    (sample,) = [body for body in map(yaml.safe_load, blocks("yaml")) if body.get("strategy") == "Custom"]
    queues = [("orders", "broker-a", number) for number in range(5)]
    shares = allocate("Custom", queues, ["m0", "m1", "m2"], options=sample["options"]["custom"])
    assert [len(share) for share in shares.values()] == [3, 2, 0]


async def test_docs_policies_page_commands_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # the commands write files outside of docs
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    async with a_shell(tmp_path, {"PATH": path}) as shell:
        for command in typed_commands(ROOT / "docs" / "policies.md"):
            await shell.run_as_shown(command)
    assert json.loads((tmp_path / "before.json").read_text())["members"]
