"""The offline commands of the command line, on files and without a cluster."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from builders import a_roster
from rota.cli import main
from rota.planner import share_with_unmanaged
from rota.ranges import parse_ids

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
GROUP, POLICIES = str(EXAMPLES / "group.yaml"), str(EXAMPLES / "policies.yaml")
EIGHT = ["--queues", "orders=broker-a:8"]


def rota(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def a_group(*topics: str, **policy: Any) -> str:
    """Return the text of a manifest with a group of these topics, and its policy if one is given."""
    spec = {
        "broker": {"rocketmq": {"nameServers": ["ns:9876"]}},
        "subscriptions": [{"topic": topic} for topic in topics or ("orders",)],
    }
    group = {"kind": "ConsumerGroup", "spec": spec | ({"policyRef": {"name": "p"}} if policy else {})}
    rules = {"kind": "RebalancePolicy", "metadata": {"name": "p"}, "spec": policy}
    return yaml.safe_dump_all([group, rules] if policy else [group])


def queue_counts(*arguments: str, stdin: str | None = None) -> list[int]:
    """Return the number of queues that a plan gives each member."""
    planned = rota("plan", *arguments, "-o", "json", stdin=stdin)
    shares = json.loads(planned.output)["members"].values()
    return [sum(len(parse_ids(ids)) for brokers in share.values() for ids in brokers.values()) for share in shares]


@pytest.mark.parametrize("policy", ["averagely", "circle", "sticky", "balanced"])
@pytest.mark.parametrize(
    ("queues", "shares"),
    [
        (16, [16]),
        (16, [8, 8]),
        (16, [6, 5, 5]),
        (8, [4, 4]),
        (7, [4, 3]),
        (10, [4, 3, 3]),
        (12, [3, 3, 2, 2, 2]),
        (13, [3, 3, 3, 2, 2]),
    ],
)
def test_plan_shares_match_those_of_the_classic_client(policy: str, queues: int, shares: list[int]) -> None:
    arguments = ["-f", POLICIES, "--policy", policy, "--queues", f"orders=broker-a:{queues}"]
    assert queue_counts(*arguments, "--members", str(len(shares))) == shares


@pytest.mark.parametrize("policy", ["averagely", "sticky", "balanced"])
def test_plan_moves_two_of_five_queues_when_a_second_member_joins(policy: str, tmp_path: Path) -> None:
    arguments = ["plan", "-f", POLICIES, "--policy", policy, "--queues", "orders=broker-a:5", "-o", "json"]
    previous_file = tmp_path / "before.json"
    previous_file.write_text(rota(*arguments, "--members", "1").output)
    plan = json.loads(rota(*arguments, "--members", "2", "--current", str(previous_file)).output)
    assert [(move["from"], move["to"]) for move in plan["moves"]] == [("m0", "m1")] * 2
    assert plan["spread"] == {"least": 2, "most": 3}


@pytest.mark.parametrize(
    ("strategy", "shares"), [("Averagely", [2, 2, 0, 0]), ("Sticky", [1, 1, 1, 1]), ("Balanced", [1, 1, 1, 1])]
)
def test_plan_names_members_that_two_small_topics_leave_idle(strategy: str, shares: list[int]) -> None:
    stdin = a_group("one", "two", strategy=strategy)
    arguments = ["-f", "-", "--members", "4", "--queues", "one=b:2", "--queues", "two=b:2"]
    assert queue_counts(*arguments, stdin=stdin) == shares
    assert ("idle: m2, m3" in rota("plan", *arguments, stdin=stdin).output) == (strategy == "Averagely")


BROKER_ROOMS = [{"broker": f"{room}-b", "room": room} for room in ("east", "north", "west")]
NEARBY = {
    "strategy": "MachineRoomNearby",
    "options": {"machineRoomNearby": {"roomLabel": "zone", "inner": "Averagely", "brokers": BROKER_ROOMS}},
}
THREE_ROOMS = ["--queues", "orders=east-b:4,north-b:4,west-b:4", "--rooms", "m0=east,m1=west"]


def test_plan_shares_out_queues_of_a_machine_room_without_members() -> None:
    planned = rota("plan", "-f", "-", "--members", "2", *THREE_ROOMS, "-o", "json", stdin=a_group(**NEARBY))
    assert json.loads(planned.output)["members"] == {
        "m0": {"orders": {"east-b": "0-3", "north-b": "0-1"}},
        "m1": {"orders": {"north-b": "2-3", "west-b": "0-3"}},
    }


def test_plan_uses_the_groups_policy_or_the_one_the_option_names() -> None:
    arguments = ["plan", "-f", POLICIES, "--queues", "orders=east@broker-a:8"]
    assert "Sticky: 2 to 3 queues per member" in rota(*arguments).output
    assert "ByConfig: 0 to 8 queues per member" in rota(*arguments, "--policy", "by-config").output


def test_plan_shows_owners_spread_and_moves() -> None:
    shown = rota("plan", "-f", GROUP, "--members", "2", *EIGHT)
    assert shown.exit_code == 0
    assert "orders/broker-a/0,2,4,6" in shown.output
    assert "Sticky: 4 to 4 queues per member, 0 moves" in shown.output


def test_plan_with_current_owners_shows_moves(tmp_path: Path) -> None:
    previous_file = tmp_path / "before.json"
    previous_file.write_text(rota("plan", "-f", GROUP, "--members", "a,b", *EIGHT, "-o", "json").output)
    plan = json.loads(
        rota("plan", "-f", GROUP, "--members", "a,b,c", *EIGHT, "--current", str(previous_file), "-o", "json").output
    )
    assert [move["to"] for move in plan["moves"]] == ["c", "c"]
    assert plan["spread"] == {"least": 2, "most": 3}
    shown = rota("plan", "-f", GROUP, "--members", "a,b,c", *EIGHT, "--current", str(previous_file), "--diff")
    assert shown.output.count("broker-a") == 2


def test_plan_reads_an_assignment_document(tmp_path: Path) -> None:
    document = {"members": {"a": {"uid": "1", "queues": {"orders": {"broker-a": "0-7"}}}}}
    (tmp_path / "assignment.json").write_text(json.dumps(document))
    planned = rota(
        "plan", "-f", GROUP, "--members", "a,b", *EIGHT, "--current", f"{tmp_path}/assignment.json", "-o", "yaml"
    )
    assert len(yaml.safe_load(planned.output)["moves"]) == 4


def test_plan_names_idle_members() -> None:
    shown = rota("plan", "-f", GROUP, "--members", "a,b,c", "--queues", "orders=broker-a:2")
    assert "idle: c" in shown.output


def test_plan_with_unmanaged_consumers_leaves_them_their_share() -> None:
    planned = rota("plan", "-f", GROUP, "--members", "b,d", "--foreign", "a,c", *EIGHT, "-o", "json")
    outlook = json.loads(planned.output)
    assert outlook["strategy"] == "Averagely"
    assert outlook["members"] == {"b": {"orders": {"broker-a": "2-3"}}, "d": {"orders": {"broker-a": "6-7"}}}
    assert outlook["foreign"] == {"orders": {"broker-a": "0-1,4-5"}}
    assert outlook["unowned"] == {}
    assert (
        "foreign: orders/broker-a/0-1,4-5"
        in rota("plan", "-f", GROUP, "--members", "b,d", "--foreign", "a,c", *EIGHT).output
    )


def test_plan_diff_shows_an_unmanaged_consumer_as_new_owner(tmp_path: Path) -> None:
    previous_file = tmp_path / "before.json"
    previous_file.write_text(rota("plan", "-f", GROUP, "--members", "b", *EIGHT, "-o", "json").output)
    arguments = ["plan", "-f", GROUP, "--members", "b", "--foreign", "a", *EIGHT, "--current", str(previous_file)]
    shown = rota(*arguments, "--diff").output
    assert shown.count("unmanaged consumer") == 4
    assert "none" not in shown


def test_unmanaged_consumer_shares_follow_client_ids_not_pod_names() -> None:
    roster = a_roster(4, 1)
    owners = share_with_unmanaged(roster, ["10.0.0.9@1"], {"m0": "10.0.0.5@m0#0123abcd"})
    assert list(owners) == [0, 0, -1, -1]


def test_plan_reads_from_standard_input_and_needs_no_policy() -> None:
    group = {
        "kind": "ConsumerGroup",
        "spec": {"broker": {"rocketmq": {"nameServers": ["x"]}}, "subscriptions": [{"topic": "orders"}]},
    }
    planned = rota("plan", "-f", "-", "--members", "2", *EIGHT, "-o", "json", stdin=yaml.safe_dump(group))
    assert json.loads(planned.output)["members"]["m0"] == {"orders": {"broker-a": "0-3"}}


@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_strategy_list_includes_rocketmq_aliases(output: str) -> None:
    shown = rota("strategies", "-o", output)
    assert shown.exit_code == 0
    assert all(name in shown.output for name in ("Averagely", "AVG", "Sticky", "Custom"))


@pytest.fixture
def previous_plan(tmp_path: Path) -> str:
    """Write the owners while the group has two members to a file; return its path."""
    path = tmp_path / "before.json"
    path.write_text(rota("plan", "-f", GROUP, "--members", "2", *EIGHT, "-o", "json").output)
    return str(path)


def test_explain_gives_the_reason_why_one_queue_stays(previous_plan: str) -> None:
    shown = rota("explain", "-f", GROUP, "--members", "3", *EIGHT, "--current", previous_plan, "orders/broker-a/0")
    assert shown.exit_code == 0
    assert shown.output == "orders/broker-a/0 stays with m0: m0 keeps 3 of its 4 queues (an even share is 2 or 3)\n"


def test_explain_has_a_line_for_each_queue_that_moves(previous_plan: str) -> None:
    shown = rota("explain", "-f", GROUP, "--members", "3", *EIGHT, "--current", previous_plan)
    assert [line.partition(":")[0] for line in shown.output.splitlines()] == [
        "orders/broker-a/6 goes from m0 to m2",
        "orders/broker-a/7 goes from m1 to m2",
    ]


def test_explain_covers_queues_of_a_missing_member(previous_plan: str) -> None:
    shown = rota("explain", "-f", GROUP, "--members", "m0", *EIGHT, "--current", previous_plan)
    assert shown.output.count("goes to m0: its owner m1 is no longer a member; m0 had 4") == 4


def test_explain_has_a_line_for_each_member_if_nothing_moves() -> None:
    shown = rota("explain", "-f", GROUP, "--members", "3", "--queues", "orders=broker-a:2")
    lines = shown.output.splitlines()
    assert lines[0].startswith("m0 owns 1 of 2 queues; for example, orders/broker-a/0 goes to m0: ")
    assert lines[2] == "m2 owns 0 of 2 queues"


def test_explain_names_the_machine_room_without_members() -> None:
    arguments = ["-f", "-", "--members", "2", *THREE_ROOMS]
    shown = rota("explain", *arguments, "orders/north-b/3", stdin=a_group(**NEARBY))
    assert "its room north has no member; among all m1 is member 2 of 2" in shown.output


def test_explain_covers_queues_of_unmanaged_consumers() -> None:
    arguments = ["-f", GROUP, "--members", "b,d", "--foreign", "a,c", *EIGHT]
    shown = rota("explain", *arguments, "orders/broker-a/0").output
    assert shown.startswith("orders/broker-a/0 goes to a: a is member 1 of 4")
    assert "over members and unmanaged consumers: a, c" in shown


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_explain_prints_json_and_yaml(output: str, previous_plan: str) -> None:
    shown = rota("explain", "-f", GROUP, *EIGHT, "--current", previous_plan, "orders/broker-a/6", "-o", output)
    explanation = yaml.safe_load(shown.output)  # JSON is YAML
    assert explanation["strategy"] == "Sticky"
    (row,) = explanation["queues"]
    assert row.pop("why").startswith("orders/broker-a/6 goes from m0 to m2: ")
    assert row == {"topic": "orders", "broker": "broker-a", "id": 6, "from": "m0", "to": "m2"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-f", "nowhere.yaml", *EIGHT], "nowhere.yaml cannot be read: No such file or directory"),
        (["-f", "-", *EIGHT], "Standard input contains 0 ConsumerGroups"),
        (["-f", GROUP, "--queues", "payments=a:1"], "--queues names topic 'payments'"),
        (["-f", GROUP, "--queues", "orders=a"], "--queues 'orders=a' cannot be read"),
        (["-f", GROUP], "Give either --queues, such as orders=broker-a:8, or --name-server"),
        (
            ["-f", GROUP, *EIGHT, "--name-server", "a:1"],
            "Give either --queues, such as orders=broker-a:8, or --name-server",
        ),
        (
            ["-f", GROUP, "--queues", "orders=broker-a:99999999"],
            "--queues gives orders 99999999 queues on broker-a; a group can have at most 131072",
        ),
        (["-f", GROUP, "--name-server", "rmq"], "--name-server 'rmq' cannot be read: write it as host:9876"),
        (["-f", GROUP, "--name-server", "fd00::1:9876"], "cannot be read: write it as host:9876"),
        (["-f", GROUP, "--name-server", "127.0.0.1:1"], "(--name-server 127.0.0.1:1)"),
        (["-f", GROUP, *EIGHT, "--members", "a,a"], "Member a is listed twice"),
        (["-f", GROUP, *EIGHT, "--members", "a", "--foreign", "c,b,c"], "--foreign lists c twice; list each"),
        (["-f", GROUP, *EIGHT, "--members", "0"], "--members 0 is invalid: give a whole number of at least 1"),
        (["-f", GROUP, *EIGHT, "--rooms", "east"], "--rooms 'east' cannot be read"),
        (["-f", GROUP, *EIGHT, "--current", GROUP], "is not an assignment"),
        (["-f", GROUP, *EIGHT, "--members", ""], "A member's name is empty"),
        (["-f", GROUP, *EIGHT, "--members", "1000000"], "--members 1000000 is more than 99999"),
        (["-f", GROUP, "--queues", "orders=broker-a:0"], "The list of queues is empty"),
        (["-f", GROUP, *EIGHT, *EIGHT], "Queue orders/broker-a/0 is listed twice"),
        (["-f", GROUP, *EIGHT, "--rooms", "m0=east,m0=west"], "names a member twice"),
        (["-f", GROUP, *EIGHT, "--rooms", "m9=east"], "--rooms names m9, which is not one of the 3 members"),
        (["-f", GROUP, *EIGHT, "--members", "-1"], "--members -1 is invalid: give a whole number of at least 1"),
        (["-f", GROUP, *EIGHT, "--members", "1.5"], "--members 1.5 is invalid: give a whole number of at least 1"),
        (["-f", GROUP, *EIGHT, "--members", "a, a"], "Member a is listed twice"),
        (["-f", "", *EIGHT], "The file name is empty; give a file, or - for standard input"),
        (["-f", str(EXAMPLES), *EIGHT], "cannot be read: Is a directory"),
        (["-f", POLICIES, *EIGHT, "--policy", "fast"], "policies.yaml contains 0 RebalancePolicies named fast"),
        (["-f", POLICIES, *EIGHT, "--policy", "nearby"], "Queue orders/broker-a/0 has no room"),
        (["-f", POLICIES, "--queues", "orders=east@broker-a:1", "--policy", "nearby"], "Member m0 has no room"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_cli_user_mistake_is_one_sentence_and_exit_code_2(command: str, arguments: list[str], sentence: str) -> None:
    assert_rejected(sentence, command, *arguments, stdin="")


def assert_rejected(sentence: str, *arguments: str, stdin: str | None = None) -> None:
    shown = rota(*arguments, stdin=stdin)
    assert shown.exit_code == 2
    assert sentence in shown.output
    assert shown.output.startswith("rota: ")
    assert len(shown.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("queue", "sentence"),
    [
        ("orders/broker-a/8", "There is no queue orders/broker-a/8 among these 8"),
        ("payments/broker-a/0", "There is no queue payments/broker-a/0"),
        ("orders/0", "Invalid queue 'orders/0': write it as TOPIC/BROKER/ID"),
        ("orders/broker-a/x", "Invalid queue 'orders/broker-a/x'"),
    ],
)
def test_explain_rejects_an_unknown_or_malformed_queue(queue: str, sentence: str) -> None:
    assert_rejected(sentence, "explain", "-f", GROUP, *EIGHT, queue)


OVERLAPPING_MEMBERS = [
    {"index": 0, "queues": [{"topic": "orders", "broker": "broker-a", "ids": "0-1"}]},
    {"index": 1, "queues": [{"topic": "orders", "broker": "broker-a", "ids": "1"}]},
]


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (
            {"strategy": "Evenly"},
            "RebalancePolicy p: spec.strategy: invalid enum value 'Evenly'; choose one of Averagely, AveragelyByCircle",
        ),
        (
            {"handover": {"mode": "Slow"}},
            "spec.handover.mode: invalid enum value 'Slow'; choose one of Cooperative, Imm",
        ),
        ({"strategy": None}, "spec.strategy: expected str, got null"),
        ({"strategy": "Sticky", "options": {"ring": {}}}, "spec.options: object contains unknown field ring"),
        (
            {"strategy": "Sticky", "options": {"consistentHash": {"virtualNodes": 5}}},
            "spec.options.consistentHash does not belong to strategy Sticky; remove it",
        ),
        (
            {"strategy": "ConsistentHash", "options": {"consistentHash": {"virtualNodes": 0}}},
            "spec.options.consistentHash.virtualNodes: expected int >= 1",
        ),
        ({"strategy": "ByMachineRoom"}, "spec.options.byMachineRoom is missing"),
        (
            {"strategy": "ByMachineRoom", "options": {"byMachineRoom": {"rooms": []}}},
            "spec.options.byMachineRoom.rooms: expected array of length >= 1",
        ),
        (
            {"strategy": "ByMachineRoom", "options": {"byMachineRoom": {"rooms": None}}},
            "spec.options.byMachineRoom.rooms: expected array, got null",
        ),
        (
            {"strategy": "ByConfig", "options": {"byConfig": {"members": OVERLAPPING_MEMBERS}}},
            "spec.options.byConfig.members[1].queues[0].ids names queue orders/broker-a/1, which",
        ),
        (
            {"strategy": "Custom", "options": {"custom": {"name": "mine"}}},
            "There is no custom strategy mine: no installed package offers it",
        ),
    ],
)
def test_policy_that_is_invalid_is_rejected_with_a_sentence(policy: dict[str, Any], sentence: str) -> None:
    assert_rejected(sentence, "plan", "-f", "-", *EIGHT, stdin=a_group(**policy))


BROKER_SPEC = {"broker": {"rocketmq": {"nameServers": ["ns:9876"]}}}
POLICY = {"kind": "RebalancePolicy", "metadata": {"name": "p"}}
GROUP_WITH_POLICY: dict[str, Any] = {
    "kind": "ConsumerGroup",
    "spec": BROKER_SPEC | {"subscriptions": [{"topic": "orders"}], "policyRef": {"name": "p"}},
}


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        ([GROUP_WITH_POLICY, GROUP_WITH_POLICY], "Standard input contains 2 ConsumerGroups; exactly one is needed"),
        (
            [GROUP_WITH_POLICY],
            "Standard input contains 0 RebalancePolicies named p (from spec.policyRef); exactly one is needed",
        ),
        ([GROUP_WITH_POLICY, POLICY, POLICY], "Standard input contains 2 RebalancePolicies named p"),
        ([GROUP_WITH_POLICY, POLICY | {"metadata": "p"}], "Standard input contains 0 RebalancePolicies named p"),
        (
            [{"kind": "ConsumerGroup", "spec": BROKER_SPEC | {"subscriptions": []}}],
            "spec.subscriptions: expected array of",
        ),
        (
            [{"kind": "ConsumerGroup", "spec": BROKER_SPEC | {"subscriptions": None}}],
            "spec.subscriptions: expected array,",
        ),
        (
            [{"kind": "ConsumerGroup", "spec": GROUP_WITH_POLICY["spec"] | {"messageModel": "Broadcasting"}}, POLICY],
            "The group is Broadcasting: every member reads every queue, so no queue has an owner",
        ),
        (
            [{"kind": "ConsumerGroup", "metadata": {"name": "shop"}, "spec": {}}],
            "Standard input, line 4: ConsumerGroup shop: spec: object missing required field broker",
        ),
        ([{"kind": "ConsumerGroup", "spec": {1: 2}}], "ConsumerGroup: spec: of a key, expected str"),
        ([{"kind": "ConsumerGroup", "spec": GROUP_WITH_POLICY["spec"] | {5: 2}}], "ConsumerGroup: spec: "),
        ([{1: 2}], "Standard input contains 0 ConsumerGroups"),
        ([{"kind": "ConsumerGroup", "spec": None}], "spec: object missing required field broker"),
    ],
)
def test_plan_rejects_invalid_manifests_with_a_sentence(documents: list[Any], sentence: str) -> None:
    assert_rejected(sentence, "plan", "-f", "-", *EIGHT, stdin=yaml.safe_dump_all(documents))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[]", "is not an assignment"),
        (b"[" * 200_000, "is not an assignment"),
        (b'{"members": {"m0": {"uid": "u"}}}', "is not an assignment"),
        (b'{"members": null}', "is not an assignment"),
        (b'{"members": {"m0": null}}', "is not an assignment"),
        (b'{"members": {"m0": {"orders": {"broker-a": 3}}}}', "is not an assignment"),
        (b'{"members": {"m0": {"orders": {"broker-a": "3-1"}}}}', "current.json: Invalid queue ids '3-1'"),
        (b"null", "is not an assignment"),
        (b"true", "is not an assignment"),
        (b'{"members": {}, "releasing": {"orders": {"a": {"1": {"from": 5}}}}}', "is not an assignment"),
        (b'{"members": {}, "releasing": {"orders": {"a": {"1": {"to": "m0"}}}}}', "is not an assignment"),
        (
            b'{"members": {}, "releasing": {"orders": {"a": {"x": {"from": "m0"}}}}}',
            "current.json: Queue id 'x' is not a number",
        ),
        (
            b'{"members": {"m0": {"orders": {"broker-a": "0-3"}}, "m1": {"orders": {"broker-a": "3"}}}}',
            "gives queue orders/broker-a/3 to m0 and to m1; a queue has one owner",
        ),
    ],
)
def test_plan_rejects_invalid_current_owners_with_a_sentence(text: bytes, sentence: str, tmp_path: Path) -> None:
    current = tmp_path / "current.json"
    current.write_bytes(text)
    assert_rejected(sentence, "plan", "-f", GROUP, *EIGHT, "--current", str(current))


def test_plan_ignores_missing_members_and_queues_in_current_owners(tmp_path: Path) -> None:
    current = tmp_path / "current.json"
    shares = {"gone": {"orders": {"broker-a": "0-3"}}, "m0": {"orders": {"broker-a": "4-9", "gone": "0"}, "old": {}}}
    current.write_text(json.dumps({"members": shares}))
    planned = rota("plan", "-f", GROUP, "--members", "1", *EIGHT, "--current", str(current), "-o", "json")
    outlook = json.loads(planned.output)
    assert outlook["members"] == {"m0": {"orders": {"broker-a": "0-7"}}}
    assert outlook["moves"] == []


def test_plan_counts_queues_in_handover_for_their_next_owner(tmp_path: Path) -> None:
    handover = {"from": "m0", "uid": "u", "to": "m1", "since": 2, "at": "2026-11-21T08:00:00Z"}
    handover_to_missing = handover | {"to": "gone"}
    document = {
        "members": {"m0": {"uid": "u", "queues": {"orders": {"broker-a": "0-3"}}}},
        "releasing": {"orders": {"broker-a": {"4": handover, "5": handover, "6": handover_to_missing}}},
    }
    current = tmp_path / "assignment.json"
    current.write_text(json.dumps(document))
    arguments = ["--members", "2", "--queues", "orders=broker-a:7", "--current", str(current), "-o", "json"]
    outlook = json.loads(rota("plan", "-f", GROUP, *arguments).output)
    assert outlook["members"]["m1"] == {"orders": {"broker-a": "4-6"}}
    assert [(move["id"], move["from"], move["to"]) for move in outlook["moves"]] == [(6, "m0", "m1")]


def test_plan_keeps_member_names_when_the_count_grows(tmp_path: Path) -> None:
    previous_file = tmp_path / "before.json"
    queues = ["--queues", "orders=broker-a:20"]
    previous_file.write_text(rota("plan", "-f", GROUP, "--members", "9", *queues, "-o", "json").output)
    plan = json.loads(
        rota("plan", "-f", GROUP, "--members", "10", *queues, "--current", str(previous_file), "-o", "json").output
    )
    assert {move["to"] for move in plan["moves"]} == {"m9"}
    assert plan["notes"] == []


def test_plan_notes_missing_members_and_topics_without_queues(tmp_path: Path) -> None:
    current = tmp_path / "before.json"
    current.write_text(json.dumps({"members": {"old": {"orders": {"broker-a": "0-1"}}}}))
    group = {"kind": "ConsumerGroup", "spec": BROKER_SPEC | {"subscriptions": [{"topic": "orders"}, {"topic": "pay"}]}}
    shown = rota("plan", "-f", "-", *EIGHT, "--members", "2", "--current", str(current), stdin=yaml.safe_dump(group))
    assert "missing: 2 queues belong to members that do not exist, such as old\n" in shown.output
    assert "unknown: topics without queues: pay\n" in shown.output


def test_plan_reads_current_owners_with_a_topic_named_uid(tmp_path: Path) -> None:
    current = tmp_path / "before.json"
    current.write_text(json.dumps({"members": {"m0": {"orders": {"broker-a": "0-1"}, "uid": {"broker-a": "0"}}}}))
    assert rota("plan", "-f", GROUP, *EIGHT, "--current", str(current)).exit_code == 0


def install_strategy(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Install a package that offers the strategy `mine`, as pip does."""
    module = f"strategies_of_{hash(folder) % 10**9}"  # a name of its own for each test: modules stay imported
    (folder / f"{module}.py").write_text(source)
    (folder / f"{module}-1.dist-info").mkdir()
    (folder / f"{module}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (folder / f"{module}-1.dist-info" / "entry_points.txt").write_text(f"[rota.strategies]\nmine = {module}:mine\n")
    monkeypatch.syspath_prepend(folder)


CUSTOM_POLICY = {"strategy": "Custom", "options": {"custom": {"name": "mine"}}}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise KeyError('no idea')", "Custom strategy mine failed: KeyError: 'no idea'"),
        ("raise ValueError('one\\ntwo')", "Custom strategy mine failed: ValueError: one two"),
        ("return None", "Custom strategy mine must return one member index for each of 8 queues"),
        ("return [7] * 8", "Custom strategy mine gives queue orders/broker-a/0 to member number 7"),
    ],
)
def test_custom_strategy_error_or_invalid_result_is_one_sentence(
    body: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_strategy(tmp_path, monkeypatch, f"def mine(roster):\n    {body}\n")
    assert_rejected(sentence, "plan", "-f", "-", *EIGHT, stdin=a_group(**CUSTOM_POLICY))


def test_custom_strategy_load_failure_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_strategy(tmp_path, monkeypatch, "import nothing_of_the_kind\n")
    assert_rejected("Custom strategy mine cannot be loaded", "plan", "-f", "-", *EIGHT, stdin=a_group(**CUSTOM_POLICY))


def test_custom_strategy_without_reasons_is_explained_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_strategy(tmp_path, monkeypatch, "def mine(roster):\n    return [1] * len(roster.queues)\n")
    assert queue_counts("-f", "-", "--members", "2", *EIGHT, stdin=a_group(**CUSTOM_POLICY)) == [0, 8]
    shown = rota("explain", "-f", "-", *EIGHT, "orders/broker-a/0", stdin=a_group(**CUSTOM_POLICY))
    assert shown.output == "orders/broker-a/0 goes to m1: the custom strategy mine chose it and gives no reason\n"


@pytest.mark.parametrize(
    "text", ["a: [", "x: !!bool abc", "x: !!timestamp abc", "a: !!timestamp 2026-99-99", "? [a]\n: b", "!!python/x y"]
)
def test_plan_rejects_invalid_yaml_with_one_sentence(text: str) -> None:
    assert_rejected("Standard input is not valid YAML", "plan", "-f", "-", *EIGHT, stdin=text)


@pytest.mark.parametrize("levels", [450, 2000])
@pytest.mark.parametrize("command", [["plan", *EIGHT], ["explain", *EIGHT], ["inject", "--group", "orders"]])
def test_cli_rejects_a_deeply_nested_manifest_with_one_sentence(command: list[str], levels: int) -> None:
    """`kubectl get -o json` prints such JSON; an earlier error message called it invalid YAML."""
    template = {"metadata": {}, "spec": {"containers": [{"name": "app", "image": "x"}], "x": "nested"}}
    manifest = {"kind": "ConsumerGroup", "metadata": {"name": "orders"}, "spec": {"template": template}}
    if command[0] == "inject":
        manifest["kind"] = "Deployment"
    text = json.dumps(manifest).replace('"nested"', '[{"a":' * levels + "1" + "}]" * levels)
    assert_rejected("nested too deep", *command, "-f", "-", stdin=text)


def test_plan_reads_plain_yaml_values_as_kubectl_does() -> None:
    """A date is a string for kubectl, and 1e3 is a number: PyYAML reads them the other way round."""
    manifest = a_group("topic-of-a-day", strategy="ConsistentHash", options={"consistentHash": {"virtualNodes": 77}})
    of_a_day = manifest.replace("topic-of-a-day", "2026-11-21").replace("77", "1e2")
    assert queue_counts("-f", "-", "--queues", "2026-11-21=broker-a:8", "--members", "1", stdin=of_a_day) == [8]
    with_number = manifest.replace("topic-of-a-day", "1e3")
    assert_rejected("topic: expected str, got int", "plan", "-f", "-", *EIGHT, stdin=with_number)


def test_plan_yaml_error_names_its_line() -> None:
    assert_rejected("Standard input is not valid YAML, line 2", "plan", "-f", "-", *EIGHT, stdin="a: b\nx: [")


def test_plan_strips_names_and_prints_markup_in_them_literally() -> None:
    arguments = ["plan", "-f", GROUP, "--members", "a[b], [/foo]", "--queues", "orders=[red]x:2, y:1"]
    shown = rota(*arguments).output
    assert all(name in shown for name in ("a[b] ", "[/foo] ", "orders/[red]x/0"))
    assert list(json.loads(rota(*arguments, "-o", "json").output)["members"]) == ["[/foo]", "a[b]"]


def test_table_does_not_truncate_long_cells() -> None:
    topics = [f"{'long' * 10}{number}" for number in range(3)]
    queues = [part for topic in topics for part in ("--queues", f"{topic}=broker-a:3000")]
    shown = rota("plan", "-f", "-", "--members", "2", *queues, stdin=a_group(*topics, strategy="AveragelyByCircle"))
    assert "…" not in shown.output
    assert f"{topics[2]}/broker-a/0,2,4,6," in shown.output
    assert ",2994,2996,2998" in shown.output


@pytest.mark.parametrize(
    ("policy", "group", "note"),
    [
        ({"budget": {"maxMoves": 3}}, {}, "budget: at most 3 queues move in any 60s; the others move later"),
        ({"budget": {"maxMoves": 4}}, {}, ""),
        ({"strategy": "Balanced", "budget": {"maxMoves": 1}}, {}, "budget: at most 1 queues move in any 60s"),
        ({"paused": True}, {}, "paused: the policy is paused, so no queue is revoked from a member that consumes it"),
        ({}, {"paused": True}, "paused: the group is paused, so its members release everything"),
    ],
)
def test_plan_notes_a_pause_or_budget_that_delays_moves(
    policy: dict[str, Any], group: dict[str, Any], note: str, tmp_path: Path
) -> None:
    spec = GROUP_WITH_POLICY["spec"] | group
    file = tmp_path / "group.yaml"
    file.write_text(
        yaml.safe_dump_all([GROUP_WITH_POLICY | {"spec": spec}, POLICY | {"spec": {"strategy": "Sticky"} | policy}])
    )
    previous_file = tmp_path / "before.json"
    previous_file.write_text(rota("plan", "-f", str(file), "--members", "1", *EIGHT, "-o", "json").output)
    arguments = ["plan", "-f", str(file), "--members", "2", *EIGHT, "--current", str(previous_file)]
    notes = json.loads(rota(*arguments, "-o", "json").output)["notes"]
    assert [text.startswith(note) for text in notes] == [True] * bool(note)
    assert rota(*arguments).output.endswith("".join(f"{text}\n" for text in notes))


ROTA = f"{sys.executable} -m rota.cli"
PLAN = f"{ROTA} plan -f {GROUP} {' '.join(EIGHT)}"


@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [
        (f"{ROTA} strategies", 0, ""),
        (f"{PLAN} > /dev/full", 2, "rota: The output cannot be written: No space left on device\n"),
        (f"{PLAN} >&-", 2, "rota: The output cannot be written: standard output is closed\n"),
        (f"{PLAN} 2>&-", 0, ""),
        (f"{ROTA} plan -f - {' '.join(EIGHT)} <&-", 2, "rota: Standard input cannot be read: it is closed\n"),
        (f"set -o pipefail; {PLAN} | true", 0, ""),
        (f"set -o pipefail; {PLAN} -o json | true", 0, ""),
    ],
)
def test_cli_handles_broken_pipes_full_disks_and_closed_streams(command: str, code: int, stderr: str) -> None:
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=180)
    assert (process.returncode, process.stderr) == (code, stderr)


def test_cli_interrupt_exits_130_without_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rota.cli.console.inputs.read_group_inputs", interrupt)
    shown = rota("plan", "-f", GROUP, *EIGHT)
    assert (shown.exit_code, shown.output) == (130, "")
