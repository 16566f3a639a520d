"""Draws a dashboard of the chart from the answers of a real Prometheus: without Grafana, which cannot run here."""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ground.api import Object
from ground.browser import Browser
from ground.prometheus import Prometheus
from kube.panels import filled

PAGE = Path(__file__).with_name("board.html")
WIDTH = 1200
RATE = "4s"  # the interval of rates: what Grafana fills in if Prometheus scrapes every second
MAX_POINT_GAP_SECONDS = 1.5  # between points of one interval; Prometheus returns a point a second
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")

EMPTY = "[...document.querySelectorAll('.panel')].filter(it => it.dataset.drawn === '0').map(it => it.dataset.title)"


class Source(NamedTuple):
    """The Prometheus that a dashboard queries, the seconds up to now, and the values of its variables."""

    prometheus: Prometheus
    seconds: float
    values: Mapping[str, str]


async def draw(browser: Browser, board: Path, source: Source) -> list[str]:
    """Draw a dashboard in the browser, and return the titles of panels that stayed empty."""
    dashboard = await asyncio.to_thread(query_panels, board, source)
    await browser.size(WIDTH, 800)
    await browser.open(PAGE.as_uri())
    height = await browser.evaluate(f"draw({json.dumps(dashboard)})")
    await browser.size(WIDTH, height)  # a screenshot shows all of it
    empty: list[str] = await browser.evaluate(EMPTY)
    return empty


def query_panels(board: Path, source: Source) -> Object:
    """Return the dashboard's panels with the result of each query; times count from the first drawn second."""
    dashboard: Object = json.loads(board.read_text())
    queries = _Queries(source, time.time())
    return {
        "title": dashboard["title"],
        "description": dashboard["description"],
        "end": queries.end,
        "seconds": source.seconds,
        "panels": [{**panel, **queries.panel(panel)} for panel in dashboard["panels"]],
        "annotations": [
            interval for annotation in dashboard["annotations"]["list"] for interval in queries.annotation(annotation)
        ],
    }


class _Queries:
    def __init__(self, source: Source, end: float) -> None:
        self._prometheus = source.prometheus
        self._seconds = source.seconds
        self.end = end
        self._values = {"datasource": "ground", "__rate_interval": RATE, "__range": f"{source.seconds:.0f}s"}
        self._values.update(source.values)

    def panel(self, panel: Object) -> Object:
        targets = panel.get("targets", [])
        if panel["type"] == "table":
            return {"table": self._table(panel, targets)}
        return {"series": [target_series for target in targets for target_series in self._series(target)]}

    def annotation(self, annotation: Object) -> list[Object]:
        """Return the intervals in which the annotation's expression has a value."""
        intervals: list[Object] = []
        for series in self._graph(annotation["expr"]):
            text = _named(annotation["textFormat"], series["metric"])
            previous = -math.inf
            for at, _ in self._points(series["values"]):
                if at > previous + MAX_POINT_GAP_SECONDS:
                    intervals.append({"at": at, "text": text})
                intervals[-1]["until"] = at
                previous = at
        return intervals

    def _series(self, target: Object) -> Iterator[Object]:
        for series in self._graph(target["expr"]):
            if values := list(self._points(series["values"])):
                yield {"name": _named(target["legendFormat"], series["metric"]), "values": values}

    def _graph(self, expression: str) -> list[dict[str, Any]]:
        return self._prometheus.graph(filled(expression, self._values), self._seconds)

    def _points(self, values: Iterable[tuple[float, str]]) -> Iterator[tuple[float, float]]:
        """Return the finite values, with seconds since the first drawn time."""
        for at, text in values:
            if math.isfinite(value := float(text)):
                yield round(at - self.end + self._seconds, 1), value

    def _table(self, panel: Object, targets: list[Object]) -> Object:
        """Return the table of Grafana's transformations `merge` and `organize`: a row for each set of labels."""
        organize = next(
            transformation["options"]
            for transformation in panel["transformations"]
            if transformation["id"] == "organize"
        )
        lines: dict[tuple[tuple[str, str], ...], Object] = {}
        for target in targets:
            name = f"Value #{target['refId']}" if len(targets) > 1 else "Value"
            for sample in self._prometheus.query(filled(target["expr"], self._values)):
                line = lines.setdefault(tuple(sorted(sample["metric"].items())), dict(sample["metric"]))
                line[name] = float(sample["value"][1])
        columns: Object = {}
        for line in lines.values():
            columns.update(line)
        shown = [column for column in columns if not organize["excludeByName"].get(column)]
        names = [organize["renameByName"].get(column, column) for column in shown]
        rows = [list(map(line.get, shown)) for line in lines.values()]
        return {"columns": names, "units": [_unit(panel, column) for column in names], "rows": rows}


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return _LABEL.sub(lambda match: labels.get(match[1], ""), "" if legend == "__auto" else legend).strip()


def _unit(panel: Object, column: str) -> str:
    config = panel["fieldConfig"]
    own = [override for override in config["overrides"] if override["matcher"]["options"] == column]
    for override in own:
        for field in override["properties"]:
            if field["id"] == "unit":
                return str(field["value"])
    return str(config["defaults"]["unit"])
