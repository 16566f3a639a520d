"""The cost of policies for groups, the recommended policy of each, and the manifests that apply it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import StructType
from pyspark.testing import assertDataFrameEqual, assertSchemaEqual

from pipeline.simulation_results import POLICIES, a_result, results, rolled_out_group, satisfied_group, skewed_group
from rota.cli.commands.pipeline.recommend import print_summary
from rota.pipeline.common.schemas import CHOSEN, COSTS
from rota.pipeline.recommend.cost_weights import MEASURES, CostWeights, parse_weights
from rota.pipeline.recommend.group_costs import COST_COLUMNS
from rota.pipeline.recommend.policy_manifests import (
    build_manifest,
    check_policy_names,
    parse_group_name,
    patch_command,
    write_manifests,
)
from rota.pipeline.recommend.ranking import (
    OWN_POLICIES,
    compute_costs,
    recommend_policies,
    sum_over_groups,
)
from rota.pipeline.report.report_data import (
    MAX_PROBLEMS,
    Findings,
    HistoryScope,
    LeadingGroup,
    best_for_all,
    count_problems,
    find_leading_group,
    sum_by_policy,
)
from rota.spec import PolicySpec, parse_policy

CRD = Path(__file__).parents[2] / "crds" / "rota.dev_rebalancepolicies.yaml"
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "policies.yaml"
ZERO_WEIGHTS = CostWeights(**dict.fromkeys(MEASURES, 0.0))
OTHERS = ("imbalance", "lag_mean", "lag_peak")


def recommend(spark: SparkSession, rows: list[Row], weights: CostWeights | None = None, **options: Any) -> DataFrame:
    result_frame = results(spark, rows)
    return recommend_policies(compute_costs(result_frame, weights or CostWeights()), result_frame, **options)


def findings_of_costs(groups: int = 0, **costs_by_policy: float) -> Findings:
    """Return the findings of that many groups, with their total cost under each policy, the cheapest first."""
    rows = [
        Row(policy=OWN_POLICIES if name == "each" else name, usable=1, cost=cost)
        for name, cost in costs_by_policy.items()
    ]
    return Findings(scope=HistoryScope(groups=groups), policy_sums=rows)


def findings_of_gains(groups: dict[str, tuple[float, float]]) -> Findings:
    """Return the findings of groups that gain, each with its present cost and the recommended one."""
    rows = [Row(group=name, change=True, cost_now=now, cost_then=then) for name, (now, then) in groups.items()]
    total_now = sum(now for now, _ in groups.values())
    total_then = sum(then for _, then in groups.values())
    return replace(findings_of_costs(len(groups), each=total_then, recorded=total_now), groups=rows)


def ranked_policies(spark: SparkSession, rows: list[Row]) -> list[str]:
    ranked = compute_costs(results(spark, rows), CostWeights()).filter("rank is not null").orderBy("rank")
    return [row["policy"] for row in ranked.collect()]


# Costs.


def test_recommend_cost_is_the_weighted_sum_of_daily_measures(spark: SparkSession) -> None:
    two_days = a_result(
        hours=48.0,
        moves=20,
        pause_seconds=100.0,
        duplicates=40.0,
        imbalance=1.5,
        idle_member_hours=6.0,
        unowned_queue_seconds=8.0,
        lag_mean=1000.0,
        lag_peak=7000.0,
    )
    weights = CostWeights(moves=1, pause=0.2, duplicates=0.1, imbalance=100, idle=1, unowned=0.5, lag=20)
    parts = {"moves": 10.0, "pause": 10.0, "duplicates": 2.0, "imbalance": 50.0, "idle": 3.0, "unowned": 2.0}
    cost_parts = {f"cost_{name}": value for name, value in parts.items()} | {"cost_lag": 40.0}  # lag: 1 and 3 doublings
    row = {"group": "shop/orders", "policy": "recorded", "rank": 1, "cost": 117.0, **cost_parts}
    expected = spark.createDataFrame([tuple(row[name] for name in COSTS.names)], COSTS)
    costs_frame = compute_costs(results(spark, [two_days]), weights)
    assertSchemaEqual(costs_frame.schema, COSTS, ignoreNullable=True)
    assertDataFrameEqual(costs_frame, expected)


@pytest.mark.parametrize("group", [rolled_out_group, skewed_group])
def test_recommend_cost_is_independent_of_the_history_length(spark: SparkSession, group: Any) -> None:
    totals = ("moves", "pause_seconds", "duplicates", "hours")
    week = []
    for row in group():
        longer = {name: row[name] * 7 for name in totals}
        week.append(Row(**{**row.asDict(), **longer}))
    assertDataFrameEqual(
        compute_costs(results(spark, week), CostWeights()), compute_costs(results(spark, group()), CostWeights())
    )


def test_recommend_ranks_sticky_first_for_rollouts_and_balanced_for_skewed_load(spark: SparkSession) -> None:
    assert ranked_policies(spark, rolled_out_group()) == ["steady", "even", "recorded"]
    assert ranked_policies(spark, skewed_group()) == ["even", "steady", "recorded"]


def test_recommend_breaks_ties_by_recorded_policy_then_moves_then_name(spark: SparkSession) -> None:
    rows = [a_result(policy=name, moves=moves) for name, moves in (("a", 9), ("recorded", 9), ("b", 9), ("c", 3))]
    ranks = compute_costs(results(spark, rows), ZERO_WEIGHTS).orderBy("rank").select("policy", "rank")
    expected = ["recorded", "c", "a", "b"]
    assertDataFrameEqual(ranks, [Row(policy=name, rank=rank) for rank, name in enumerate(expected, 1)])


def test_recommend_gives_no_rank_or_cost_to_an_unusable_policy(spark: SparkSession) -> None:
    unusable = a_result(policy="steady", problem="Custom strategy x is not installed")
    row = (
        compute_costs(results(spark, [*satisfied_group()[:1], unusable]), CostWeights())
        .filter("policy = 'steady'")
        .first()
    )
    assert row is not None
    assert [row[name] for name in ("rank", "cost", *COST_COLUMNS)] == [None] * 9


def test_recommend_ignores_a_measure_that_is_unknown_for_one_usable_policy(spark: SparkSession) -> None:
    unknown = [None, float("nan"), float("inf")]
    rows = [a_result(f"a/{lag}", moves=5, lag_mean=9000.0) for lag in unknown]
    rows += [a_result(f"a/{lag}", "steady", moves=9, lag_mean=lag) for lag in unknown]
    first = compute_costs(results(spark, rows), CostWeights()).filter("rank = 1").select("policy").collect()
    assert [row["policy"] for row in first] == ["recorded"] * 3, "otherwise an unknown measure would be the cheapest"
    broken = [rows[0], Row(**{**rows[3].asDict(), "problem": "It is broken"})]
    row = compute_costs(results(spark, broken), CostWeights()).filter("policy = 'recorded'").first()
    assert row is not None
    assert row["cost_lag"] > 0, "an unusable policy hides no measure"


def test_recommend_accepts_a_history_of_zero_hours(spark: SparkSession) -> None:
    rows = [a_result(hours=0.0), a_result(policy="steady", hours=0.0)]
    assert recommend(spark, rows).collect()[0]["use"] == "recorded"


# Recommendations.


def test_recommend_chooses_a_policy_for_each_group(spark: SparkSession) -> None:
    chosen = recommend(spark, [*rolled_out_group(), *skewed_group(), *satisfied_group()])
    assertSchemaEqual(chosen.schema, CHOSEN, ignoreNullable=True)
    columns = chosen.select("group", "strategy", "use", "change", "best")
    schema = StructType(CHOSEN.fields[:5])
    expected = [
        ("shop/mail", "Averagely", "recorded", False, "recorded"),
        ("shop/orders", "Averagely", "steady", True, "steady"),
        ("shop/payments", "Averagely", "even", True, "even"),
    ]
    assertDataFrameEqual(columns, spark.createDataFrame(expected, schema))


def test_recommend_changes_a_policy_only_for_a_gain_of_5_percent(spark: SparkSession) -> None:
    cases = {95: "steady", 96: "recorded", 100: "recorded", 101: "recorded"}
    rows = [a_result(f"a/{moves}", moves=100) for moves in cases]
    rows += [a_result(f"a/{moves}", "steady", moves=moves) for moves in cases]
    for row in recommend(spark, rows).collect():
        use = cases[int(row["group"].removeprefix("a/"))]
        assert row["use"] == use
        assert row["gain"] == pytest.approx(0.05 if use == "steady" else 0.0)
        assert row["cost_then"] == (95 if use == "steady" else 100)


def test_recommend_minimum_gain_is_configurable(spark: SparkSession) -> None:
    rows = [a_result(moves=100), a_result(policy="steady", moves=60)]
    assert [recommend(spark, rows, min_gain=min_gain).collect()[0]["use"] for min_gain in (0.4, 0.41)] == [
        "steady",
        "recorded",
    ]


def test_recommend_choice_follows_the_weights(spark: SparkSession) -> None:
    calm = CostWeights(imbalance=0, lag=0)
    assert recommend(spark, skewed_group(), calm).collect()[0]["use"] == "steady"


EXPLANATIONS: list[tuple[list[Row], str]] = [
    (
        rolled_out_group(),
        (
            "62 moves a day instead of 310; 140 s of pauses a day instead of 720; a mean lag of 900 (highest 2,100) "
            "instead of 900 (highest 5,200)."
        ),
    ),
    (
        skewed_group(),
        (
            "The busiest member has 1.15 times the mean load instead of 2.4; a mean lag of 2,100 (highest 9,400) "
            "instead of 31,000 (highest 182,000); but 44 moves a day instead of 12."
        ),
    ),
    (  # a difference that the written digits do not show is not named
        [a_result(moves=100, imbalance=1.1112), a_result(policy="steady", moves=9, imbalance=1.1109)],
        "9 moves a day instead of 100.",
    ),
    (satisfied_group(), "Keep the policy: no tested policy costs less."),
    (
        [a_result(moves=100), a_result(policy="steady", moves=98)],
        "Keep the policy: the best alternative, steady, would save 2 %, which is below 5 %.",
    ),
    (
        [a_result(problem="It is Broadcasting"), a_result(policy="steady")],
        "The policy in use has no known cost (It is Broadcasting); of the other policies, steady costs least.",
    ),
    (
        [a_result(policy="steady")],
        "The policy in use has no known cost (it was not simulated); of the other policies, steady costs least.",
    ),
    (
        [a_result(problem="It is Broadcasting"), a_result(policy="steady", problem="It is Broadcasting")],
        "The policy in use has no known cost (It is Broadcasting), and neither has any other policy.",
    ),
]


def test_recommend_explanation_is_a_sentence(spark: SparkSession) -> None:
    rows: list[Row] = []
    for number, (rows_of_case, _) in enumerate(EXPLANATIONS):
        rows += [Row(**{**row.asDict(), "group": f"a/{number}"}) for row in rows_of_case]
    explanations = {row["group"]: row["evidence"] for row in recommend(spark, rows).collect()}
    assert [explanations[f"a/{number}"] for number in range(len(EXPLANATIONS))] == [
        explanation for _, explanation in EXPLANATIONS
    ]


def test_recommend_changes_nothing_when_the_current_cost_is_unknown(spark: SparkSession) -> None:
    row = recommend(spark, [a_result(problem="It is Broadcasting"), a_result(policy="steady")]).first()
    assert row is not None
    assert (row["use"], row["change"], row["best"], row["gain"]) == ("recorded", False, "steady", None)


def test_recommend_accepts_no_groups_or_the_recorded_policy_only(spark: SparkSession) -> None:
    assert recommend(spark, []).collect() == []
    row = recommend(spark, [a_result(moves=3)]).first()
    assert row is not None
    assert (row["use"], row["cost_now"], row["gain"]) == ("recorded", 3.0, 0.0)


def test_recommend_names_no_policy_for_all_without_another_policy() -> None:
    assert best_for_all(findings_of_costs()) is None
    assert best_for_all(findings_of_costs(recorded=3.0)) is None


# The fleet.


def test_recommend_fleet_cost_sums_groups_and_keeps_groups_that_cannot_switch(spark: SparkSession) -> None:
    rows = [
        a_result("a/a", moves=100),
        a_result("a/a", "steady", moves=10),
        a_result("a/a", "even", problem="It cannot be used"),
        a_result("a/b", moves=50),
        a_result("a/b", "steady", moves=90),
        a_result("a/b", "even", moves=20),
        a_result("a/c", problem="It is Broadcasting"),
        a_result("a/c", "steady", moves=1000),
    ]
    result_frame = results(spark, rows)
    costs_frame = compute_costs(result_frame, CostWeights())
    sums = sum_over_groups(costs_frame, result_frame, recommend_policies(costs_frame, result_frame)).select(
        "policy", "cost", "moves", "usable", "unusable"
    )
    schema = "policy string, cost double, moves double, usable long, unusable long"
    expected = [(OWN_POLICIES, 30.0, 30.0, 2, 0), ("steady", 100.0, 100.0, 2, 0), ("even", 120.0, 120.0, 1, 1)]
    expected.append(("recorded", 150.0, 150.0, 2, 0))
    assertDataFrameEqual(sums, spark.createDataFrame(expected, schema), checkRowOrder=True)
    best = best_for_all(Findings(scope=HistoryScope(), policy_sums=sums.collect()))
    assert best is not None
    assert best["policy"] == "steady"


@pytest.mark.parametrize(("cost", "is_named"), [(105.0, False), (104.5, True)])
def test_recommend_names_a_policy_for_all_only_with_a_sufficient_gain(cost: float, is_named: bool) -> None:  # noqa: FBT001
    assert (best_for_all(findings_of_costs(each=90.0, steady=cost, recorded=110.0)) is not None) == is_named


def test_recommend_prints_the_gain_that_no_single_policy_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    findings = findings_of_costs(each=90.0, steady=108.0, recorded=110.0)
    print_summary(replace(findings, min_gain=0.02))
    assert capsys.readouterr().out.endswith("\nNo single policy would be better for all groups by 2 % or more\n")


def test_recommend_names_a_group_that_makes_most_of_the_gain() -> None:
    groups = {"a/a": (100.0, 20.0)}
    assert find_leading_group(findings_of_gains(groups)) is None, "no other group gains"
    groups["a/b"] = (100.0, 80.0)
    assert find_leading_group(findings_of_gains(groups)) == LeadingGroup("a/a", 0.8)
    groups["a/c"] = (100.0, 40.0)
    assert find_leading_group(findings_of_gains(groups)) is None, "the group makes no more than half of the gain"


def test_recommend_totals_use_the_recorded_result_where_a_policy_is_unusable(spark: SparkSession) -> None:
    rows = [
        a_result("a/a", moves=100, lag_mean=5.0),
        a_result("a/a", "steady", moves=10, lag_mean=3.0),
        a_result("a/b", moves=50, lag_mean=2.0),
        a_result("a/b", "steady", moves=1, problem="It cannot be used"),
        a_result("a/c", problem="It is Broadcasting"),
        a_result("a/c", "steady", problem="It is Broadcasting"),
        a_result("a/a", "even", problem="It cannot be used"),
    ]
    totals = sum_by_policy(results(spark, rows)).select("policy", "groups", "problems", "moves", "lag_mean")
    schema = "policy string, groups long, problems long, moves long, lag_mean double"
    expected = [("even", 1, 1, None, None), ("recorded", 3, 1, 150, 7.0), ("steady", 3, 2, 60, 5.0)]
    assertDataFrameEqual(totals, spark.createDataFrame(expected, schema), checkRowOrder=True)
    examples = [(row.policy, row.example) for row in count_problems(results(spark, rows)).collect()]
    assert examples == [("even", "a/a"), ("recorded", "a/c"), ("steady", "a/b")], "each reason is listed once"


def test_recommend_limits_listed_reasons_per_policy(spark: SparkSession) -> None:
    failed_once = [a_result("a/a", problem="It failed once"), a_result("a/a", "steady", problem="It is not for this")]
    many = [a_result(f"b/{number}", "even", problem=f"Reason {number}") for number in range(MAX_PROBLEMS + 5)]
    policies = [row.policy for row in count_problems(results(spark, [*failed_once, *many])).collect()]
    assert policies == ["even"] * MAX_PROBLEMS + ["recorded", "steady"]


# Weights.


def test_recommend_weights_that_are_not_set_keep_their_defaults() -> None:
    assert parse_weights("moves: 3\nlag: 0.5") == CostWeights(moves=3, lag=0.5)
    assert parse_weights("moves: 1e+06") == CostWeights(moves=1e6)  # as Helm writes a million
    assert parse_weights("") == parse_weights("~") == parse_weights("{}") == CostWeights()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("move: 1", "w.yaml names 'move', which is not a weight; choose from moves, pause, duplicates, imbalance, "),
        ("1: 1", "w.yaml names '1', which is not a weight"),
        ("moves: -1", "w.yaml: moves is -1; give a number of at least 0, below 1e+12"),
        ("lag: .nan", "w.yaml: lag is nan; give a number of at least 0, below 1e+12"),
        ("lag: 10000000000000", "w.yaml: lag is 10000000000000; give a number of at least 0, below 1e+12"),
        ("lag: .inf", "w.yaml: lag is inf; give a number of at least 0, below 1e+12"),
        ("idle: yes", "w.yaml: idle is True; give a number of at least 0, below 1e+12"),
        ("idle: much", "w.yaml: idle is much; give a number of at least 0, below 1e+12"),
        ("idle:", "w.yaml: idle is None; give a number of at least 0, below 1e+12"),
        ("moves: 1\nlag: 2\nmoves: 3", "w.yaml names moves twice; give each weight once"),
        ('{"lag": 2, lag: 2}', "w.yaml names lag twice; give each weight once"),
        ("- moves", "w.yaml contains no weights; write lines such as moves: 1"),
        ("{", "w.yaml is not valid YAML; write lines such as moves: 1"),
        (", ".join(f"{name}: 0" for name in MEASURES).join("{}"), "w.yaml sets every weight to 0"),
    ],
)
def test_recommend_rejects_an_invalid_weight_with_a_sentence_naming_it(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        parse_weights(text, "w.yaml")


def test_recommend_weights_each_have_a_unit_and_a_reason() -> None:
    assert set(MEASURES) == set(CostWeights.__struct_fields__)
    assert all(measure.title and measure.unit and measure.reason.endswith(".") for measure in MEASURES.values())


# Manifests.


def schema_problems(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    """Return how a value violates a CRD's schema: fields, types, enums and patterns."""
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    if not isinstance(value, kinds[schema["type"]]):
        return [f"{path} is no {schema['type']}"]
    if isinstance(value, str):
        is_valid = value in schema.get("enum", [value]) and re.search(schema.get("pattern", ""), value)
        return [] if is_valid else [f"{path} is {value}"]
    if isinstance(value, list):
        problems = []
        for index, item in enumerate(value):
            problems += schema_problems(item, schema["items"], f"{path}[{index}]")
        return problems
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    fields = schema.get("properties", {})
    problems = [f"{path}.{name} is missing" for name in schema.get("required", []) if name not in value]
    problems += [f"{path}.{name} is unknown" for name in value if name not in fields]
    for name, item in value.items():
        if name in fields:
            problems += schema_problems(item, fields[name], f"{path}.{name}")
    return problems


def all_policies() -> dict[str, PolicySpec]:
    bodies = [body for body in yaml.safe_load_all(EXAMPLES.read_text()) if body["kind"] == "RebalancePolicy"]
    return {body["metadata"]["name"]: parse_policy(body) for body in bodies} | POLICIES


@pytest.mark.parametrize("name", all_policies())
def test_manifest_of_a_recommended_policy_equals_the_simulated_one_and_fits_the_crd(name: str) -> None:
    policy = all_policies()[name]
    body = yaml.safe_load(build_manifest(name, policy, "shop"))
    assert parse_policy(body) == policy
    assert body["metadata"] == {"name": name, "namespace": "shop"}
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert schema_problems(body["spec"], schema["properties"]["spec"], "spec") == []


def test_manifest_files_hold_a_policy_per_namespace_and_commands_for_its_groups(
    spark: SparkSession, tmp_path: Path
) -> None:
    hostile = "shop/\n---\nkind: Pod # $(reboot)"
    rows = [
        *rolled_out_group(),
        *rolled_out_group("shop/parcels"),
        *rolled_out_group("pay/refunds"),
        *rolled_out_group(hostile),
        *skewed_group(),
        *satisfied_group(),
    ]
    outdated = tmp_path / "even.yaml"
    outdated.write_text("old")
    paths = write_manifests(recommend(spark, rows), POLICIES, tmp_path)
    assert [path.name for path in paths] == ["even.yaml", "steady.yaml"]
    text = (tmp_path / "steady.yaml").read_text()
    bodies = [body for body in yaml.safe_load_all(text) if body is not None]
    assert [(body["kind"], body["metadata"]["namespace"]) for body in bodies] == [
        ("RebalancePolicy", "pay"),
        ("RebalancePolicy", "shop"),
    ]
    assert text.startswith("# `rota pipeline recommend` recommends policy steady for 4 groups.\n")
    commands = [line for line in text.splitlines() if "kubectl patch" in line]
    patch = '\'{"spec":{"policyRef":{"name":"steady"}}}\''
    assert commands == [
        f"# kubectl patch consumergroup -n {namespace} {name} --type merge -p {patch}"
        for namespace, name in (("pay", "refunds"), ("shop", "orders"), ("shop", "parcels"))
    ]
    assert "# shop/ --- kind: Pod # $(reboot): not a valid Kubernetes name\n" in text


@pytest.mark.slow("files of policies that are no longer recommended")
def test_manifest_files_of_policies_no_longer_recommended_are_removed(spark: SparkSession, tmp_path: Path) -> None:
    write_manifests(recommend(spark, rolled_out_group()), POLICIES, tmp_path)
    (tmp_path / "notes.yaml").write_text("# Policy of the shop, by hand\n")
    assert write_manifests(recommend(spark, satisfied_group()), {}, tmp_path) == [], (
        "the files of policies that are tested no more are removed, too"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.yaml"]


@pytest.mark.parametrize(
    "group", ["orders", "shop/", "/orders", "Shop/orders", "shop/a b", "shop/a'b", "-n/x", "a/b/c"]
)
def test_manifest_commands_never_contain_an_invalid_group_name(group: str) -> None:
    assert parse_group_name(group) is None
    assert patch_command(group, "steady") is None


@pytest.mark.parametrize("name", ["recorded", "a/b", "../x", "A", "", OWN_POLICIES, "x" * 300])
def test_recommend_rejects_a_policy_with_an_invalid_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"is reserved for the policy in force|is not a valid RebalancePolicy name"):
        check_policy_names({name: POLICIES["steady"]})
