"""The command line as a user meets it: on files, without a cluster."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from builders import a_roster
from rota.cli import main
from rota.planner import beside_foreigners

GROUP = str(Path(__file__).parents[2] / "docs" / "examples" / "group.yaml")
EIGHT = ["--queues", "orders=broker-a:8"]


def rota(*arguments: str, feed: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=feed)


def test_plan_shows_who_would_own_what() -> None:
    shown = rota("plan", "-f", GROUP, "--members", "2", *EIGHT)
    assert shown.exit_code == 0
    assert "orders/broker-a/0,2,4,6" in shown.output
    assert "Sticky: 4 to 4 queues a member, 0 moves" in shown.output


def test_plan_on_top_of_an_earlier_one_shows_what_moves(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(rota("plan", "-f", GROUP, "--members", "a,b", *EIGHT, "-o", "json").output)
    after = json.loads(
        rota("plan", "-f", GROUP, "--members", "a,b,c", *EIGHT, "--current", str(before), "-o", "json").output
    )
    assert [move["to"] for move in after["moves"]] == ["c", "c"]
    assert after["spread"] == {"least": 2, "most": 3}
    shown = rota("plan", "-f", GROUP, "--members", "a,b,c", *EIGHT, "--current", str(before), "--diff")
    assert shown.output.count("broker-a") == 2


def test_plan_reads_an_assignment_document(tmp_path: Path) -> None:
    document = {"members": {"a": {"uid": "1", "queues": {"orders": {"broker-a": "0-7"}}}}}
    (tmp_path / "assignment.json").write_text(json.dumps(document))
    planned = rota(
        "plan", "-f", GROUP, "--members", "a,b", *EIGHT, "--current", f"{tmp_path}/assignment.json", "-o", "yaml"
    )
    assert len(yaml.safe_load(planned.output)["moves"]) == 4


def test_plan_names_the_idle_and_what_is_nobodys() -> None:
    shown = rota("plan", "-f", GROUP, "--members", "a,b,c", "--queues", "orders=broker-a:2")
    assert "idle: c" in shown.output


def test_plan_beside_foreign_consumers_grants_only_our_share_of_what_they_compute() -> None:
    planned = rota("plan", "-f", GROUP, "--members", "b,d", "--foreign", "a,c", *EIGHT, "-o", "json")
    outlook = json.loads(planned.output)
    assert outlook["strategy"] == "Averagely"
    assert outlook["members"] == {"b": {"orders": {"broker-a": "2-3"}}, "d": {"orders": {"broker-a": "6-7"}}}
    assert outlook["unowned"] == {"orders": {"broker-a": "0-1,4-5"}}


def test_beside_foreigners_the_ids_at_the_broker_count_not_the_pods_names() -> None:
    roster = a_roster(4, 1)
    owners = beside_foreigners(roster, ["10.0.0.9@1"], {"m0": "10.0.0.5@m0#0123abcd"})
    assert list(owners) == [0, 0, -1, -1]


def test_plan_reads_from_standard_input_and_needs_no_policy() -> None:
    group = {
        "kind": "ConsumerGroup",
        "spec": {"broker": {"rocketmq": {"nameServers": ["x"]}}, "subscriptions": [{"topic": "orders"}]},
    }
    planned = rota("plan", "-f", "-", "--members", "2", *EIGHT, "-o", "json", feed=yaml.safe_dump(group))
    assert json.loads(planned.output)["members"]["m0"] == {"orders": {"broker-a": "0-3"}}


@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_strategies_are_listed_with_the_names_people_know(output: str) -> None:
    shown = rota("strategies", "-o", output)
    assert shown.exit_code == 0
    assert all(name in shown.output for name in ("Averagely", "AVG", "Sticky", "Custom"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-f", "nowhere.yaml", *EIGHT], "nowhere.yaml cannot be read: No such file or directory"),
        (["-f", "-", *EIGHT], "The file holds 0 ConsumerGroups"),
        (["-f", GROUP, "--queues", "payments=a:1"], "--queues names topic 'payments'"),
        (["-f", GROUP, "--queues", "orders=a"], "--queues 'orders=a' cannot be read"),
        (["-f", GROUP, *EIGHT, "--members", "a,a"], "Member a is listed twice"),
        (["-f", GROUP, *EIGHT, "--members", "0"], "There is nobody to assign to"),
        (["-f", GROUP, *EIGHT, "--rooms", "east"], "--rooms 'east' cannot be read"),
        (["-f", GROUP, *EIGHT, "--current", GROUP], "is no assignment"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    shown = rota("plan", *arguments, feed="")
    assert shown.exit_code == 2
    assert sentence in shown.output
    assert len(shown.output.splitlines()) == 1


def test_a_file_that_is_no_yaml_is_one_sentence() -> None:
    shown = rota("plan", "-f", "-", *EIGHT, feed="a: [")
    assert shown.exit_code == 2
    assert shown.output.startswith("rota: - is no YAML, line ")
