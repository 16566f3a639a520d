"""The report in a real browser."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from ground.browser import CONTRASTS, Browser, a_browser, chromium
from ground.fixtures import skip_what_is_missing
from ground.instance import Instance
from pipeline.simulation_results import (
    POLICIES,
    a_result,
    results,
    rolled_out_group,
    satisfied_group,
    series,
    skewed_group,
)
from pipeline.test_backtest import fleet
from rota.pipeline.common.schemas import BACKTEST, RESULTS, SERIES
from rota.pipeline.recommend.backtest import BacktestRow
from rota.pipeline.recommend.cost_weights import CostWeights
from rota.pipeline.recommend.ranking import compute_costs, recommend_policies
from rota.pipeline.replay.job import Simulation
from rota.pipeline.report.earlier_advice import EarlierAdvice, observe_advice
from rota.pipeline.report.formatting import describe_change, format_duration, format_percent, format_value
from rota.pipeline.report.html import render_report
from rota.pipeline.report.outputs import REPORT_FILE, ReportExtras, write_recommendation
from rota.pipeline.report.plots import BarSegment, PlotLine, draw_bar, draw_lines, format_number
from rota.pipeline.report.report_data import (
    MAX_LINE_POINTS,
    MAX_PLOTS,
    collect_findings,
    count_problems,
    downsample_series,
)
from rota.spec import parse_policy

PICTURES = Path(__file__).parents[2] / "docs" / "images"
HOSTILE_NAME = '<img src=x onerror="document.title=1"></title><script>document.title=1</script>'
NOON = 1_795_348_800.0  # 2026-11-22 12:00 UTC
FLEET = [
    *rolled_out_group(),
    *rolled_out_group("shop/parcels", 2),
    *skewed_group(),
    *skewed_group("pay/refunds"),
    *satisfied_group(),
    *satisfied_group("pay/audit"),
    a_result("ads/clicks", problem="Group ads/clicks is Broadcasting: its queues have no owner"),
    a_result("ads/clicks", "steady", problem="Group ads/clicks is Broadcasting: its queues have no owner"),
]

RING = {"policy": "ring", "strategy": "ConsistentHash", "imbalance": 2.6, "lag_peak": 190_000.0}


def render(result_frame: DataFrame, series_frame: DataFrame, **options: Any) -> str:
    costs_frame = compute_costs(result_frame, CostWeights())
    chosen = recommend_policies(costs_frame, result_frame)
    defaults: dict[str, Any] = {"policies": POLICIES, "weights": CostWeights()}
    return render_report(
        collect_findings(
            results=result_frame, series=series_frame, costs=costs_frame, chosen=chosen, **(defaults | options)
        ),
        NOON,
    )


def a_report(spark: SparkSession, rows: list[Row], **options: Any) -> str:
    return render(results(spark, rows), series(spark, rows), **options)


@pytest.fixture(scope="module")
def folder(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all outputs of a recommendation for a fleet."""
    folder = tmp_path_factory.mktemp("advice")
    tables = folder / "tables"

    def write_table(name: str, rows: DataFrame) -> DataFrame:
        path = str(tables / name.rpartition("/")[2])
        rows.write.parquet(path)
        return spark.read.parquet(path)

    extras = ReportExtras(
        page_url="https://rota.example.com/",
        board_url="https://grafana.example.com",
        earlier=EarlierAdvice(earlier_advice(spark), NOON - 86_400),
        backtest=spark.createDataFrame([_backtest_row(row) for row in fleet()], BACKTEST),
    )
    simulation = Simulation(results(spark, FLEET), series(spark, FLEET))
    write_recommendation(simulation, POLICIES, folder / "advice", NOON, write_table=write_table, extras=extras)
    return folder / "advice"


def _backtest_row(row: BacktestRow) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in BACKTEST.names)


def earlier_advice(spark: SparkSession) -> DataFrame:
    """Return recommendations of the day before: one was followed, one not, one is of a group without a cost now."""
    rows = [
        ("shop/payments", "Averagely", "steady", True, 900.0, 500.0),
        ("shop/mail", "Sticky", "gone", True, 40.0, 20.0),
        ("pay/audit", "Sticky", "even", False, 40.0, 40.0),
        ("ads/clicks", "Sticky", "even", True, 40.0, 20.0),
        ("shop/removed", "Sticky", "even", True, 40.0, 20.0),
    ]
    schema = "group string, strategy string, use string, change boolean, cost_now double, cost_then double"
    return spark.createDataFrame(rows, schema)


@pytest.fixture(scope="module")
async def chrome(instance: Instance) -> AsyncIterator[Browser]:
    with skip_what_is_missing():
        await asyncio.to_thread(chromium)
    async with a_browser(instance) as started:
        yield started


@pytest.fixture
async def browser(chrome: Browser) -> AsyncIterator[Browser]:
    """A tab that must have no errors, and that may request nothing but the report's file."""
    await chrome.prefer("light")
    await chrome.size(1280, 900)
    chrome.forget()
    yield chrome
    assert chrome.errors == []
    assert [url for url in chrome.requests if not url.startswith(("file:", "data:", "about:"))] == []
    assert len([url for url in chrome.requests if url.startswith("file:")]) <= 1
    await chrome.open("about:blank")


async def read_report(browser: Browser, path: Path, html: str) -> str:
    """Open a report and return its visible text."""
    await asyncio.to_thread(path.write_text, html, encoding="utf-8")
    await browser.open(path.as_uri())
    text: str = await browser.evaluate("document.body.innerText")
    return text.replace("\N{NO-BREAK SPACE}", " ")


# Content.


def test_recommend_writes_tables_and_a_folder_with_policies_and_report(folder: Path, spark: SparkSession) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["policies", REPORT_FILE]
    assert sorted(path.name for path in (folder / "policies").iterdir()) == ["even.yaml", "steady.yaml"]
    tables = folder.parent / "tables"
    assert sorted(path.name for path in tables.iterdir()) == ["chosen", "costs"]
    chosen = spark.read.parquet(str(tables / "chosen")).filter("change").orderBy("group").select("group", "use")
    assert [tuple(row) for row in chosen.collect()] == [
        ("pay/refunds", "even"),
        ("shop/orders", "steady"),
        ("shop/parcels", "steady"),
        ("shop/payments", "even"),
    ]


async def test_recommend_report_shows_the_answer_first_with_what_it_saves(browser: Browser, folder: Path) -> None:
    await browser.open((folder / REPORT_FILE).as_uri())
    text = (await browser.evaluate("document.body.innerText")).replace("\N{NO-BREAK SPACE}", " ")
    expected = [
        "7 groups, from 2026-11-21 00:00 to 2026-11-21 23:45 UTC",
        "Up to 1 d of each group's history was replayed; counts are per day.",
        "The answer",
        "4 of 6 groups would benefit from another policy. If each used its own, all together would cost 69 %",
        "As one policy for all groups: steady, 54 % less than now.",
        "Begin with the groups that save most:",
        "shop/parcels: use steady instead of Averagely, ",
        "All groups",
        "Cost a day",
        "294 moves of queues instead of 974; queues are paused for 7 min 10 s in total instead of 24 min 40 s",
        "In the second half of each history, advice from the first half cost 15 % less than no change; 2 of 3 advised",
        "1 group could not be evaluated",
        "Present policies in 1 group, such as ads/clicks: The group is Broadcasting: its queues have no owner",
        "If all groups used one policy",
        "Recommendation for each group",
        "What earlier advice came to",
        "The 4 groups that benefit most",
        "Manifests to apply",
        "Components of the cost",
        "Limits of these figures",
        "Was such advice good?",
        "The histories are real: recorded by an operator.",
    ]
    positions = [text.find(phrase) for phrase in expected]
    assert -1 not in positions, expected[positions.index(-1)]
    assert positions == sorted(positions)


@pytest.mark.slow("the report of a policy that cannot be used")
async def test_recommend_report_shows_a_reason_but_no_metrics_for_an_unusable_policy(
    browser: Browser, spark: SparkSession, tmp_path: Path
) -> None:
    reason = (
        "Queue orders/broker-a/0 would have no owner nearly all the time: the policy assigns it to no present member"
    )
    rows = [
        *rolled_out_group(),
        *satisfied_group(),
        *(a_result(group, "ring", moves=0, problem=reason) for group in ("shop/orders", "shop/mail")),
    ]
    text = await read_report(browser, tmp_path / REPORT_FILE, a_report(spark, rows))
    assert "ring in 2 groups, such as shop/mail: unusable: A queue would have no owner nearly all the time" in text
    assert "Not shown, because no group can use them: ring." in text
    table = await browser.evaluate("document.querySelector('[aria-labelledby=policies] tbody').innerText")
    assert "ring" not in table
    assert "; of that 100 % is group shop/orders." in text


def test_recommend_report_says_first_that_groups_are_synthetic(spark: SparkSession) -> None:
    mixed = a_report(spark, [*rolled_out_group("synthetic-1/a"), *satisfied_group("synthetic-rates-2/b"), *FLEET[:3]])
    notice = "2 of the groups are synthetic: their history is generated, not recorded."
    assert 0 < mixed.find(notice) < mixed.find("The answer")
    assert "All groups are synthetic" in a_report(spark, rolled_out_group("synthetic-1/a"))
    assert "synthetic" not in a_report(spark, rolled_out_group())


def test_recommend_lists_a_reason_once_for_queues_of_different_names(spark: SparkSession) -> None:
    problems = [(f"ads/{name}", "nearby", f"Queue {name}/broker-a/0 has no room: give it one") for name in "abc"]
    [row] = count_problems(spark.createDataFrame(problems, "group string, policy string, problem string")).collect()
    assert (row.groups, row.example, row.problem) == (3, "ads/a", "A queue has no room: give it one")


def test_recommend_compares_earlier_advice_with_the_present_cost(spark: SparkSession) -> None:
    rows = [("shop/payments", "Sticky", 450.0), ("shop/mail", "Sticky", 40.0), ("ads/clicks", "Sticky", None)]
    now = spark.createDataFrame(rows, "group string, strategy string, cost_now double")
    observed = observe_advice(EarlierAdvice(earlier_advice(spark), NOON), now, POLICIES)
    assert [(row.group, row.followed, row.predicted, row.observed) for row in observed.rows] == [
        ("shop/payments", True, 500.0, 450.0),
        ("shop/mail", False, 20.0, 40.0),
    ]
    sums = (observed.advised, observed.followed, observed.before, observed.predicted, observed.observed)
    assert sums == (2, 1, 900.0, 500.0, 450.0)


def test_recommend_rejects_an_invalid_base_url_before_it_writes(spark: SparkSession, tmp_path: Path) -> None:
    rows = rolled_out_group()
    simulation = Simulation(results(spark, rows), series(spark, rows))
    with pytest.raises(ValueError, match=r"^--page-url rota is no base URL"):
        write_recommendation(simulation, POLICIES, tmp_path, NOON, extras=ReportExtras("rota"))
    assert [*tmp_path.iterdir()] == []


async def test_recommend_report_sorts_groups_by_savings_and_shows_their_commands(
    browser: Browser, folder: Path
) -> None:
    await browser.open((folder / REPORT_FILE).as_uri())
    rows = "[...document.querySelectorAll('[aria-labelledby=groups] tbody tr')]"
    texts = await browser.evaluate(f"{rows}.map(it => it.innerText)")
    groups = ["shop/parcels", "shop/orders", "pay/refunds", "shop/payments", "pay/audit", "shop/mail", "ads/clicks"]
    assert [text.split()[0] for text in texts] == groups
    assert all(word in texts[1] for word in ("use steady", "now Averagely", "499", "121", "76", "62 moves a day"))
    assert "keep" in texts[4]
    await browser.evaluate(f"{rows}[1].querySelector('a').click()")
    assert await browser.evaluate("location.hash") == "#group-2"
    assert await browser.evaluate("document.querySelector('#group-2').innerText") == "shop/orders"
    await browser.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
    card = await browser.evaluate("document.querySelector('article:nth-of-type(2)').innerText")
    assert """kubectl patch consumergroup -n shop orders --type merge -p '{"spec":{"policyRef":""" in card
    assert "strategy: Sticky" in await browser.evaluate("document.querySelector('[aria-labelledby=apply]').innerText")


async def test_recommend_report_plots_are_visible_and_have_a_text_alternative(browser: Browser, folder: Path) -> None:
    await browser.open((folder / REPORT_FILE).as_uri())
    sizes = await browser.evaluate(
        "[...document.querySelectorAll('svg.plot, svg.bar, path.line')].map(it => {"
        "const {width, height} = it.getBoundingClientRect(); return [it.getAttribute('class'), width, height]})"
    )
    assert len([element for element in sizes if element[0] == "plot"]) == 4 * 3
    assert len([element for element in sizes if element[0].startswith("line")]) == 4 * 3 * 2 + 2
    assert [element for element in sizes if element[0] == "plot" and (element[1] < 250 or element[2] < 100)] == []
    assert [element for element in sizes if element[1] < 15] == []
    names = [name for role, name in await browser.accessible() if role == "image"]
    assert len(names) == 4 * 3 + 4, "three of each group, and a bar for each policy"
    lag = "shop/orders, Lag, messages: now: 540 to 4,840, highest at 2026-11-21 02:45"
    assert any(name.startswith(lag) and "with steady: " in name for name in names)


async def test_recommend_report_has_landmarks_headings_and_tables_for_screen_readers(
    browser: Browser, folder: Path
) -> None:
    await browser.open((folder / REPORT_FILE).as_uri())
    nodes = await browser.accessible()
    for role, name in (
        ("banner", ""),
        ("main", ""),
        ("contentinfo", ""),
        ("region", "The answer"),
        ("heading", "Which policy for which group"),
        ("heading", "Limits of these figures"),
        ("heading", "shop/orders"),
        ("article", "shop/orders"),
        ("rowheader", "shop/mail"),
        ("columnheader", "Recommendation"),
        ("link", "shop/orders"),
        ("link", "operator's page of shop/orders"),
        ("link", "board of shop/orders"),
        ("link", "Download groups.csv"),
    ):
        assert (role, name) in nodes, (role, name)
    assert [name for role, name in nodes if role in {"image", "link", "region"} and not name] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_recommend_report_text_contrast_is_sufficient_in_light_and_dark(
    browser: Browser, folder: Path, scheme: str
) -> None:
    await browser.prefer(scheme)
    await browser.open((folder / REPORT_FILE).as_uri())
    await browser.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
    contrasts = await browser.evaluate(CONTRASTS)
    assert len(contrasts) > 200
    assert [contrast for contrast in contrasts if contrast[1] < 4.5] == []
    background = await browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("width", [320, 400, 1280, 2000])
async def test_recommend_report_fits_the_window_width(browser: Browser, folder: Path, width: int) -> None:
    await browser.size(width, 900)
    await browser.open((folder / REPORT_FILE).as_uri())
    await browser.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
    assert await browser.evaluate("document.documentElement.scrollWidth") == width


# Unusual input.


async def test_recommend_report_escapes_html_in_names(browser: Browser, spark: SparkSession, tmp_path: Path) -> None:
    rows = [
        a_result(HOSTILE_NAME, moves=100, strategy=HOSTILE_NAME),
        a_result(HOSTILE_NAME, "steady", moves=1, strategy=HOSTILE_NAME),
        a_result("shop/mail", problem=HOSTILE_NAME),
        a_result("shop/mail", HOSTILE_NAME, problem=HOSTILE_NAME),
    ]
    text = await read_report(
        browser, tmp_path / REPORT_FILE, a_report(spark, rows, policies=POLICIES | {HOSTILE_NAME: POLICIES["even"]})
    )
    assert HOSTILE_NAME in text
    assert "This is not a valid Kubernetes name." in await browser.evaluate("document.body.textContent")
    assert await browser.evaluate("document.images.length + document.scripts.length") == 0
    assert await browser.evaluate("document.title") == "Which policy for which group - Rota"


@pytest.mark.slow("the report's answer for rare input")
@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        pytest.param([], "There is nothing to recommend: no group was simulated.", id="nothing"),
        pytest.param(
            [a_result(moves=3)],
            "Keep the present policies: no group would save 5 % or more with another policy.",
            id="only recorded",
        ),
        pytest.param(
            satisfied_group(), "No single policy would be better for all groups by 5 % or more.", id="content"
        ),
        pytest.param([a_result()], "Keep the present policies", id="all is free"),
        pytest.param(
            [a_result(problem="It is Broadcasting")],
            "The present cost of the groups is unknown",
            id="no cost now",
        ),
        pytest.param(rolled_out_group(), "1 of 1 group would benefit from another policy.", id="one group"),
        pytest.param(
            [a_result(moves=9, hours=0.0), a_result(policy="steady", hours=0.0)],
            "Keep the present policies",
            id="no hours",
        ),
    ],
)
async def test_recommend_report_answers_for_every_kind_of_input(
    browser: Browser, spark: SparkSession, tmp_path: Path, rows: list[Row], answer: str
) -> None:
    assert answer in await read_report(browser, tmp_path / REPORT_FILE, a_report(spark, rows))


@pytest.mark.slow("the report of series with gaps")
async def test_recommend_report_shows_groups_without_points_or_with_gaps(
    browser: Browser, spark: SparkSession, tmp_path: Path
) -> None:
    rows = [*rolled_out_group(), *rolled_out_group("shop/parcels")]
    without_imbalance = series(spark, rows[:3]).withColumn("imbalance", F.lit(None).cast("double"))
    with_gaps = without_imbalance.withColumn("lag", F.when(F.minute("at") > 0, F.col("lag")))
    text = await read_report(browser, tmp_path / REPORT_FILE, render(results(spark, rows), with_gaps))
    assert text.count("No data.") == 3 + 1
    assert await browser.evaluate("document.querySelectorAll('svg.plot').length") == 2


@pytest.mark.slow("the report of 10,000 groups")
def test_recommend_report_of_10000_groups_is_below_2_mb(spark: SparkSession) -> None:
    """Every group gains and has points for its plots and a long name; only the rows that are shown leave Spark."""
    name = F.concat(F.lit("namespace-" + "n" * 50 + "/" + "x" * 190), F.col("id").cast("string"))
    groups = spark.range(10_000).select(name.alias("group"))
    values = {field: F.lit(value) for field, value in a_result().asDict().items() if field not in {"group", "policy"}}
    values["lag_peak"], values["problem"] = F.lit(123_456.789), F.lit(None).cast("string")
    policies = spark.createDataFrame([("recorded", 4321), ("steady", 9)], "policy string, moves long")
    result_frame = groups.crossJoin(policies).withColumns(
        {field: value for field, value in values.items() if field != "moves"}
    )
    shown_groups = groups.filter(F.substring("group", -2, 2).isin("00", "01"))
    times = F.explode(
        F.sequence(
            F.lit("2026-11-21").cast("timestamp"), F.lit("2026-11-22").cast("timestamp"), F.expr("interval 5 minutes")
        )
    )
    points = shown_groups.crossJoin(policies).withColumn("at", times).withColumn("lag", F.rand(7) * 123_456)
    points = points.withColumn("imbalance", 1 + F.rand(8)).withColumn("moves", F.floor(F.rand(9) * 4321))
    text = render(result_frame.select(RESULTS.names), points.select(SERIES.names), max_plots=10_000)
    assert len(text.encode()) < 2_000_000
    assert text.count("<article") == MAX_PLOTS
    assert "And 9,800 more groups, 9,800 of which would benefit." in text


def test_recommend_report_series_is_thinned_but_keeps_its_peak(spark: SparkSession) -> None:
    downsampled = downsample_series(series(spark, rolled_out_group(), steps=1000))
    figures = downsampled.groupBy("policy").agg(F.count("*").alias("n"), F.max("lag").alias("lag")).collect()
    highest = {
        row["policy"]: row["lag"]
        for row in series(spark, rolled_out_group(), 1000).groupBy("policy").agg(F.max("lag").alias("lag")).collect()
    }
    assert {row["policy"]: row["lag"] for row in figures} == highest
    assert {row["n"] for row in figures} == {MAX_LINE_POINTS}


# Plots and texts by themselves.


def test_recommend_report_plot_of_one_value_or_none_is_drawn() -> None:
    assert draw_lines("Lag", []) == '<p class="none">No data.</p>'
    assert draw_lines("Lag", [PlotLine("now", "now", [(0, None), (1, float("nan"))])]).startswith("<p")
    for value in (0.0, 1.0, 1e-9, 1e15, 12345.6):
        drawn = draw_lines("Lag", [PlotLine("now", "now", [(NOON, value)])])
        assert re.findall(r"nan|inf", drawn) == []
        assert 2 <= drawn.count("text-anchor='end'") + drawn.count('text-anchor="end"') <= 8


def test_recommend_report_stepped_plot_holds_a_value_until_an_unknown_one() -> None:
    points = [(NOON, 1.0), (NOON + 600, 1.0), (NOON + 1200, None), (NOON + 1800, 2.0)]
    drawn = draw_lines("Moves", [PlotLine("now", "now", points)], is_stepped=True)
    ((start, end),) = re.findall(r"M([\d.]+) [\d.]+h\.1H([\d.]+)M", drawn)
    ((last, last_end),) = re.findall(r"M([\d.]+) [\d.]+h\.1H([\d.]+)[\"']", drawn)
    assert float(end) - float(start) == pytest.approx((float(last) - float(start)) * 2 / 3, abs=0.2)
    assert last_end == last


def test_recommend_report_plot_escapes_the_name_of_a_line_once() -> None:
    drawn = draw_lines("a&b", [PlotLine("c&d", "now", [(NOON, 1.0)]), PlotLine("e<f", "best", [(NOON, None)])])
    label = re.search(r'aria-label="([^"]*)"', drawn)
    assert label
    assert re.findall(r"\S*&\S*", label[1]) == ["a&amp;b:", "c&amp;d:", "e&lt;f:"]


def test_recommend_report_plot_of_zeros_has_two_different_ticks() -> None:
    drawn = draw_lines("Lag", [PlotLine("now", "now", [(NOON, 0.0), (NOON + 600, 0.0)])])
    assert re.findall(r">([\d,.k]+)</text>", drawn) == ["0", "1"]


def test_recommend_report_plot_ticks_are_round_and_cover_all_values() -> None:
    drawn = draw_lines("Lag", [PlotLine("now", "now", [(NOON + 600 * index, index * 7.0) for index in range(100)])])
    assert re.findall(r">([\d,.k]+)</text>", drawn) == ["0", "250", "500", "750"]
    assert re.findall(r">(\d\d:\d\d)</text>", drawn) == ["12:00", "18:00", "00:00"]


def test_recommend_report_bar_length_is_proportional_to_the_maximum() -> None:
    drawn = draw_bar(
        "Cost", [BarSegment("Moves", "moves", 30), BarSegment("Lag", "lag", 20), BarSegment("Idle", "idle", 0)], 200
    )
    assert re.findall(r'x="([\d.]+)" width="([\d.]+)"', drawn) == [("0.00", "15.00"), ("15.00", "10.00")]
    assert 'aria-label="Cost: Moves 30, Lag 20"' in drawn
    assert "nothing" in draw_bar("Cost", [], 0)


def test_recommend_report_formats_numbers_durations_and_percentages() -> None:
    texts = [format_number(value) for value in (None, float("nan"), 0, 0.256, 3.4, 12.34, 123.4, 31_000, 1_234_567, -5)]
    assert " | ".join(texts).replace("\N{NO-BREAK SPACE}", " ") == (
        "unknown | unknown | 0 | 0.26 | 3.4 | 12.3 | 123 | 31,000 | 1.23 M | -5"
    )
    spans = [format_duration(value) for value in (None, 0, 1.5, 59.9, 60, 525, 12_000, 356_400)]
    assert spans == ["unknown", "0 s", "1.5 s", "59.9 s", "1 min", "8 min 45 s", "3 h 20 min", "4 d 3 h"]
    values = [format_value(value) for value in (None, 1_234_567.8, 0.123456, 7, True, "shop/orders")]
    assert values == ["unknown", "1.23 M", "0.12", "7", True, "shop/orders"]
    texts = [
        format_percent(0),
        format_percent(0.004),
        format_percent(0.5),
        describe_change(100, 50),
        describe_change(100, 150),
        describe_change(0, 0),
        describe_change(None, 1),
    ]
    assert " | ".join(texts).replace("\N{NO-BREAK SPACE}", " ") == (
        "0 % | less than 1 % | 50 % | 50 % less | 50 % more | as much | unknown"
    )


# Screenshots.


@pytest.mark.slow("pictures of the report, for manual review")
async def test_recommend_report_screenshot_has_a_plausible_size(
    browser: Browser, spark: SparkSession, tmp_path: Path
) -> None:
    """Draw the report; with ROTA_PICTURES=1 its picture goes to the docs."""
    folder = PICTURES if "ROTA_PICTURES" in os.environ else tmp_path
    rows = [
        *FLEET[:-2],
        *rolled_out_group("shop/stock", 3),
        *skewed_group("pay/fraud"),
        *satisfied_group("shop/reports"),
    ]
    rows += [
        Row(**{**row.asDict(), **RING}) for row in rows if row.policy == "recorded" and row.group != "shop/reports"
    ]
    rows += [
        a_result("shop/reports", "ring", problem="the strategy needs one member"),
        *satisfied_group("ads/bids"),
    ]
    policies = POLICIES | {"ring": parse_policy({"spec": {"strategy": "ConsistentHash"}})}
    await read_report(browser, tmp_path / REPORT_FILE, a_report(spark, rows, policies=policies, max_plots=3))
    await browser.size(1280, 2150)
    assert await browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the picture is cut off"
    for group in ("shop/stock", "pay/fraud", "shop/reports", "ads/bids"):
        assert group in await browser.evaluate("document.body.innerText")
    await browser.screenshot(folder / "report.png")
    assert 50_000 < (folder / "report.png").stat().st_size < 500_000
