"""Parts of the report with values, without Spark and browser: links, downloads, the backtest, earlier advice."""

import csv
import re
from base64 import b64decode
from html import unescape
from io import StringIO

import pytest
from pyspark.sql import Row

from pipeline.test_backtest import fleet, judged, moves
from rota.pipeline.recommend.backtest import BacktestSummary, summarize
from rota.pipeline.report.earlier_advice import ObservedAdvice, render_observed
from rota.pipeline.report.links import ReportLinks, check_url, render_download, render_group_links
from rota.pipeline.report.sections.backtest_section import (
    backtest_table,
    describe_backtest,
    describe_result,
    describe_sources,
    render_backtest,
)

NAMES = ["steady", "even"]
LINKS = ReportLinks("https://rota.example.com/page", "https://grafana.example.com")


def visible_text(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", html)).replace("\N{NO-BREAK SPACE}", " ")


def downloaded(html: str) -> list[list[str]]:
    """Return the cells of the file in a download link."""
    data = re.search(r'href="data:text/csv;charset=utf-8;base64,([^"]*)"', html)
    assert data
    return list(csv.reader(StringIO(b64decode(data[1]).decode())))


# Links.


def test_report_links_a_group_to_its_page_and_its_board() -> None:
    links = re.findall(r'href="([^"]+)"', render_group_links(LINKS, "shop/orders"))
    assert [unescape(link) for link in links] == [
        "https://rota.example.com/page/#shop/orders",
        "https://grafana.example.com/d/rota-group?var-namespace=shop&var-group=orders",
    ]
    only_board = render_group_links(LINKS._replace(page_url=None), "shop/orders")
    assert 'aria-label="board of shop/orders"' in only_board
    assert only_board.count("href") == 1


@pytest.mark.parametrize("group", ["orders", 'shop/"><script>', "Shop/orders", "shop/a b", "javascript:/x"])
def test_report_has_no_links_for_an_invalid_group_name(group: str) -> None:
    assert render_group_links(LINKS, group) == ""
    assert render_group_links(ReportLinks(), "shop/orders") == ""


def test_report_accepts_base_urls_with_or_without_a_slash_at_the_end() -> None:
    assert check_url("http://localhost:8080", "--page-url") == "http://localhost:8080"
    assert check_url("https://rota.example.com/page/", "--page-url") == "https://rota.example.com/page"


@pytest.mark.parametrize(
    "url",
    ["javascript:alert(1)", "rota.example.com", "ftp://a", "https://", "https://a b", "https://a?b=c", "http://[a"],
)
def test_report_rejects_a_base_url_with_a_sentence(url: str) -> None:
    error = f"--board-url {url} is no base URL; give one such as https://rota.example.com"
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        check_url(url, "--board-url")


def test_report_downloads_are_csv_inside_the_link() -> None:
    html = render_download("groups", ["group", "change", "cost"], [["a,b", True, 1.5], ['say "x"', False, None]])
    assert 'download="groups.csv"' in html
    assert downloaded(html) == [["group", "change", "cost"], ["a,b", "True", "1.5"], ['say "x"', "False", ""]]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_report_downloads_contain_no_formulas_of_names(name: str) -> None:
    assert downloaded(render_download("groups", ["group", "gain"], [[name, -0.5]]))[1] == [f"'{name}", "-0.5"]


# The backtest.


def test_report_backtest_tells_what_advice_saved_and_how_often_it_was_wrong() -> None:
    assert describe_backtest(summarize(fleet(), NAMES)) == [
        (
            "Tested on 4 groups: policies were advised from the first half of each history, and compared in its second "
            "half, up to 1 d."
        ),
        "The histories are real: recorded by an operator.",
        "Not tested: 1 group with less than two hours of history, or whose present policy has no known cost.",
        "As advised, all groups together cost 15 % less than without a change.",
        (
            "Regret: 39 points a day (44 %) more than the best policy of each group in hindsight; 18 % more than even, "
            "the best single policy for all groups in hindsight."
        ),
        (
            "Of 3 groups advised to change, 2 (67 %) changed for the worse (1 because the policy could not be used), "
            "by 7 points a day; the others saved 30 points a day."
        ),
    ]


def test_report_backtest_result_is_one_sentence() -> None:
    start = "In the second half of each history, advice from the first half cost"
    wrong = "2 of 3 advised changes would have been wrong"
    assert describe_result(summarize(fleet(), NAMES)) == f"{start} 15 % less than no change; {wrong}"
    unadvised_row = judged(moves(recorded=10, steady=10), moves(recorded=10, steady=10))
    unchanged = "as much as no change; no group was advised to change"
    assert describe_result(summarize([unadvised_row], NAMES)) == f"{start} {unchanged}"


def test_report_backtest_without_wrong_changes_or_without_changes_says_so() -> None:
    right = judged(moves(recorded=100, steady=50), moves(recorded=90, steady=60))
    unadvised_row = judged(moves(recorded=10, steady=10), moves(recorded=10, steady=10))
    assert describe_backtest(summarize([right, unadvised_row], NAMES))[-1] == (
        "Of 1 group advised to change, no change was wrong: together they saved 30 points a day."
    )
    assert describe_backtest(summarize([unadvised_row], NAMES))[-1] == "No group was advised to change its policy."
    assert describe_backtest(BacktestSummary(untested=3)) == [
        (
            "No advice could be tested: 3 groups with less than two hours of history, or whose present policy has no "
            "known cost."
        )
    ]


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ({"synthetic": 2}, "The histories are synthetic: members and message rates are generated"),
        ({"rates": 2}, "The histories are generated, with message rates that were recorded elsewhere"),
        (
            {"synthetic": 1, "real": 2},
            (
                "Of the histories 2 are real: recorded by an operator; 1 are synthetic: members and message rates are "
                "generated"
            ),
        ),
    ],
)
def test_report_backtest_says_whether_histories_are_synthetic_or_real(sources: dict[str, int], sentence: str) -> None:
    assert describe_sources(BacktestSummary(groups=2, sources=sources)) == sentence


def test_report_backtest_table_has_costs_and_regret_of_each_choice() -> None:
    rows = [list(row.values()) for row in backtest_table(summarize(fleet(), NAMES))]
    assert rows == [
        ["best of each group, in hindsight", "88", "41 % less", "0", 0],
        ["even", "108", "28 % less", "20", 0],
        ["as advised", "127", "15 % less", "39", 0],
        ["steady", "127", "15 % less", "39", 1],
        ["without a change", "150", "", "62", 0],
    ]


def test_report_backtest_section_escapes_names_and_has_a_download() -> None:
    hostile = "<script>"
    first_half, second_half = (moves("shop/orders", **{"recorded": 9, hostile: count}) for count in (3, 4))
    rows = [judged(first_half, second_half)]
    html = "\n".join(render_backtest(summarize(rows, [hostile])))
    assert hostile not in html
    assert "As advised 4 56 % less 0 0" in " ".join(visible_text(html).split())
    assert [row[:2] for row in downloaded(html)] == [
        ["policies", "cost"],
        ["best in hindsight", "4.0"],
        ["as advised", "4.0"],
        [hostile, "4.0"],
        ["recorded", "9.0"],
    ]
    assert len([*render_backtest(BacktestSummary())]) == 1, "without a tested group there is no table"


# Earlier advice.


def test_report_shows_predicted_and_observed_cost_of_earlier_advice() -> None:
    costs = {"before": 100.0, "predicted": 60.0, "observed": 66.0}
    rows = [
        Row(group="shop/orders", use="steady", strategy="Sticky", followed=True, **costs),
        Row(group="shop/mail", use="even", strategy="Averagely", followed=False, **costs),
    ]
    html = "\n".join(render_observed(ObservedAdvice(at=1_795_348_800.0, advised=2, followed=1, rows=rows, **costs)))
    text = " ".join(visible_text(html).split())
    assert "On 2026-11-22 12:00 UTC, 2 groups of those in this report were advised to change; 1 now uses" in text
    assert "Those cost 100 points a day then; predicted were 60, observed are 66 : 34 % less than then" in text
    assert "and 10 % more than predicted." in text
    assert "shop/orders use steady followed; now Sticky 100 60 66 10 % more" in text
    assert "shop/mail use even not followed; now Averagely 100 60 66" in text
    assert downloaded(html)[1] == ["shop/orders", "steady", "Sticky", "True", "100.0", "60.0", "66.0"]


def test_report_of_earlier_advice_without_such_groups_has_no_table() -> None:
    [sentence] = render_observed(ObservedAdvice(at=0.0))
    assert "0 groups of those in this report were advised to change" in sentence
