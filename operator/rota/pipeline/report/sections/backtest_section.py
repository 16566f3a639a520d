"""Result of a backtest (a test of recommendations on past data): sentences and rows, and a section of the report."""

from collections.abc import Iterator

from rota.pipeline.common.history_sources import HistorySource
from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.backtest import ADVISED, BEST_IN_HINDSIGHT, BacktestLine, BacktestSummary, backtest_lines
from rota.pipeline.report.elements import number_cell, render_list, render_table
from rota.pipeline.report.formatting import compare_cost, describe_change, format_count, format_duration, format_percent
from rota.pipeline.report.links import render_download
from rota.pipeline.report.plots import escape_text, format_number

TITLE = "Was such advice good?"
MAX_LINES = 50  # lines of the report's table

_SOURCE_TEXTS = {
    HistorySource.REAL: "real: recorded by an operator",
    HistorySource.RATES: "generated, with message rates that were recorded elsewhere",
    HistorySource.SYNTHETIC: "synthetic: members and message rates are generated",
}
_LINE_TITLES = {
    RECORDED_POLICY: "Without a change",
    ADVISED: "As advised",
    BEST_IN_HINDSIGHT: "Best of each group, in hindsight",
}


def backtest_table(summary: BacktestSummary) -> list[dict[str, object]]:
    """Return the rows of a table for a terminal, the cheapest first."""
    return [_table_row(line, summary) for line in backtest_lines(summary)]


def _table_row(line: BacktestLine, summary: BacktestSummary) -> dict[str, object]:
    return {
        "policy": _LINE_TITLES.get(line.name, line.name).lower(),
        "cost": _plain(format_number(line.cost)),
        "against_no_change": _plain(_compare_with_recorded(line, summary)),
        "regret": _plain(format_number(line.regret)),
        "unusable": line.unusable,
    }


def _plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def _compare_with_recorded(line: BacktestLine, summary: BacktestSummary) -> str:
    return "" if line.name == RECORDED_POLICY else describe_change(summary.recorded, line.cost)


def describe_backtest(summary: BacktestSummary) -> list[str]:
    """Return sentences: how much was tested on which histories, what advice saved, and how often it was wrong."""
    if not summary.groups:
        return [f"{describe_result(summary)}."]
    length = format_duration(summary.longest * 3600)
    sentences = [
        (
            f"Tested on {format_count(summary.groups, 'group')}: policies were advised from the first half of each "
            f"history, and compared in its second half, up to {length}"
        ),
        describe_sources(summary),
    ]
    if summary.untested:
        sentences.append(f"Not tested: {_describe_untested(summary)}")
    advised = compare_cost(summary.recorded, summary.advised, "without a change")
    sentences.append(f"As advised, all groups together cost {advised}")
    sentences.append(_describe_regret(summary))
    sentences.append(_describe_changes(summary))
    return [f"{_plain(sentence)}." for sentence in sentences]


def describe_result(summary: BacktestSummary) -> str:
    """Return the result in one sentence, without a full stop."""
    if not summary.groups:
        return f"No advice could be tested: {_describe_untested(summary)}"
    change = compare_cost(summary.recorded, summary.advised, "no change")
    wrong = "no group was advised to change"
    if summary.changes:
        wrong = f"{summary.wrong:,} of {format_count(summary.changes, 'advised change')} would have been wrong"
    return _plain(f"In the second half of each history, advice from the first half cost {change}; {wrong}")


def backtest_value(summary: BacktestSummary) -> dict[str, float]:
    """Return the result for programs; costs are points a day."""
    names = ("groups", "untested", "changes", "wrong", "recorded", "advised", "best")
    return {name: getattr(summary, name) for name in names}


def _describe_regret(summary: BacktestSummary) -> str:
    """Return what the advice cost more than the best policies in hindsight: of each group, and for all groups."""
    regret = summary.advised - summary.best
    more = format_percent(regret / summary.best) if summary.best else "unknown"
    text = f"Regret: {format_number(regret)} points a day ({more}) more than the best policy of each group in hindsight"
    if summary.best_single is None:
        return text
    of_single = compare_cost(summary.costs[summary.best_single], summary.advised, summary.best_single)
    return f"{text}; {of_single}, the best single policy for all groups in hindsight"


def describe_sources(summary: BacktestSummary) -> str:
    """Return whether the histories are real, generated with recorded rates, or synthetic; or how many of each."""
    sources = [source for source in HistorySource if summary.sources.get(source)]
    if len(sources) == 1:
        return f"The histories are {_SOURCE_TEXTS[sources[0]]}"
    counts = [f"{summary.sources[source]:,} are {_SOURCE_TEXTS[source]}" for source in sources]
    return f"Of the histories {'; '.join(counts)}"


def _describe_untested(summary: BacktestSummary) -> str:
    groups = format_count(summary.untested, "group")
    return f"{groups} with less than two hours of history, or whose present policy has no known cost"


def _describe_changes(summary: BacktestSummary) -> str:
    if not summary.changes:
        return "No group was advised to change its policy"
    advised = f"{format_count(summary.changes, 'group')} advised to change"
    right = f"the others saved {format_number(summary.saved)} points a day"
    if not summary.wrong:
        return f"Of {advised}, no change was wrong: together they saved {format_number(summary.saved)} points a day"
    unusable = f" ({summary.unusable:,} because the policy could not be used)" if summary.unusable else ""
    share = format_percent(summary.wrong / summary.changes)
    wrong = (
        f"{summary.wrong:,} ({share}) changed for the worse{unusable}, by {format_number(summary.loss)} points a day"
    )
    return f"Of {advised}, {wrong}; {right}"


def render_backtest(summary: BacktestSummary) -> Iterator[str]:
    """Yield the parts of the report's section."""
    yield render_list(map(escape_text, describe_backtest(summary)))
    if not summary.groups:
        return
    lines = backtest_lines(summary)
    head = [("Policies", "name"), ("Cost", "number"), ("Against no change", "number"), ("Regret", "number")]
    head += [("Against the best single policy", "number")]
    yield (
        "<p>Points a day in the second half, for all groups together. Regret is what a choice costs more than the best "
        "policy of each group in hindsight, which no advice can know.</p>"
    )
    body = [_render_line(line, summary) for line in lines[:MAX_LINES]]
    yield render_table("Choices of policies in the second half, the cheapest first", head, body)
    columns = ("policies", "cost", "regret", "cost_beyond_best_single", "unusable_groups")
    yield render_download("backtest", columns, lines)


def _render_line(line: BacktestLine, summary: BacktestSummary) -> str:
    is_choice = line.name in _LINE_TITLES  # otherwise a single policy
    note = f"<small>{format_count(line.unusable, 'group')} cannot use it</small>" if line.unusable else ""
    of_single = "" if line.beyond_best_single is None else format_number(line.beyond_best_single)
    texts = [format_number(line.cost), _compare_with_recorded(line, summary), format_number(line.regret), of_single]
    return (
        f"<tr{' class=own' if is_choice else ''}>"
        f'<th scope="row" class="name">{escape_text(_LINE_TITLES.get(line.name, line.name))}{note}</th>'
        f"{''.join(map(number_cell, texts))}</tr>"
    )
