"""A board of the chart, drawn from what a real Prometheus says: by ourselves, for Grafana cannot run here."""

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
RATE = "4s"  # over which rates are taken: what Grafana fills in where Prometheus scrapes every second
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")

EMPTY = "[...document.querySelectorAll('.panel')].filter(it => it.dataset.drawn === '0').map(it => it.dataset.title)"


class Source(NamedTuple):
    """Whom a board asks, of how many seconds up to now, and of what: its variables."""

    prometheus: Prometheus
    seconds: float
    values: Mapping[str, str]


async def draw(browser: Browser, board: Path, source: Source) -> list[str]:
    """Draw a board in the browser, and return the titles of panels that stayed empty."""
    told = await asyncio.to_thread(answered, board, source)
    await browser.size(WIDTH, 800)
    await browser.open(PAGE.as_uri())
    height = await browser.evaluate(f"draw({json.dumps(told)})")
    await browser.size(WIDTH, height)  # all of it is to be seen in a picture
    empty: list[str] = await browser.evaluate(EMPTY)
    return empty


def answered(board: Path, source: Source) -> Object:
    """Return what is drawn: the board's panels with what Prometheus says to each, times from the first one."""
    body: Object = json.loads(board.read_text())
    asking = _Asking(source, time.time())
    return {
        "title": body["title"],
        "description": body["description"],
        "end": asking.end,
        "seconds": source.seconds,
        "panels": [{**panel, **asking.panel(panel)} for panel in body["panels"]],
        "annotations": [it for one in body["annotations"]["list"] for it in asking.annotation(one)],
    }


class _Asking:
    def __init__(self, source: Source, end: float) -> None:
        self._prometheus, self._seconds, self.end = source.prometheus, source.seconds, end
        self._values = {"datasource": "ground", "__rate_interval": RATE, "__range": f"{source.seconds:.0f}s"}
        self._values.update(source.values)

    def panel(self, panel: Object) -> Object:
        targets = panel.get("targets", [])
        if panel["type"] == "table":
            return {"table": self._table(panel, targets)}
        return {"series": [it for target in targets for it in self._series(target)]}

    def annotation(self, annotation: Object) -> list[Object]:
        """Return since when something was so, and until when, each time."""
        found: list[Object] = []
        for one in self._graph(annotation["expr"]):
            text, before = _named(annotation["textFormat"], one["metric"]), -math.inf
            for at, _ in self._points(one["values"]):
                if at > before + 1.5:
                    found.append({"at": at, "text": text})
                found[-1]["until"] = before = at
        return found

    def _series(self, target: Object) -> Iterator[Object]:
        for one in self._graph(target["expr"]):
            if values := list(self._points(one["values"])):
                yield {"name": _named(target["legendFormat"], one["metric"]), "values": values}

    def _graph(self, expression: str) -> list[dict[str, Any]]:
        return self._prometheus.graph(filled(expression, self._values), self._seconds)

    def _points(self, values: Iterable[tuple[float, str]]) -> Iterator[tuple[float, float]]:
        """Return seconds since the first time that is drawn, and the values that are numbers."""
        for at, text in values:
            if math.isfinite(value := float(text)):
                yield round(at - self.end + self._seconds, 1), value

    def _table(self, panel: Object, targets: list[Object]) -> Object:
        """Return what Grafana's `merge` and `organize` make of it: a line for each set of labels."""
        organize = next(it["options"] for it in panel["transformations"] if it["id"] == "organize")
        lines: dict[tuple[tuple[str, str], ...], Object] = {}
        for target in targets:
            name = f"Value #{target['refId']}" if len(targets) > 1 else "Value"
            for one in self._prometheus.query(filled(target["expr"], self._values)):
                line = lines.setdefault(tuple(sorted(one["metric"].items())), dict(one["metric"]))
                line[name] = float(one["value"][1])
        columns = list(dict.fromkeys(it for line in lines.values() for it in line))
        shown = [it for it in columns if not organize["excludeByName"].get(it)]
        names = [organize["renameByName"].get(it, it) for it in shown]
        rows = [[line.get(it) for it in shown] for line in lines.values()]
        return {"columns": names, "units": [_unit(panel, it) for it in names], "rows": rows}


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return _LABEL.sub(lambda it: labels.get(it[1], ""), "" if legend == "__auto" else legend).strip()


def _unit(panel: Object, column: str) -> str:
    config = panel["fieldConfig"]
    own = [it for it in config["overrides"] if it["matcher"]["options"] == column]
    units = [one["value"] for it in own for one in it["properties"] if one["id"] == "unit"]
    return str(next(iter(units), config["defaults"]["unit"]))
