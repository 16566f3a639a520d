"""What a board asks of Prometheus, as Grafana sends it."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SPANS = {"__rate_interval": "1m", "__interval": "15s", "__range": "1h"}  # what Grafana itself fills in
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::\w+)?\}|\$([A-Za-z_]\w*)")
_LABEL_VALUES = re.compile(r"label_values\((.*), *\w+\)")


def expressions(board: Path, values: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the title and the expression of everything it asks, filled in: "group" of `values` stands for $group."""
    return [(title, filled(asked, values)) for title, asked in _asked(board)]


def filled(asked: str, values: Mapping[str, str]) -> str:
    """Return an expression with its variables filled in."""
    given = {**SPANS, **values}
    return _VARIABLE.sub(lambda it: given[it[1] or it[2]], asked)


def _asked(board: Path) -> Iterator[tuple[str, str]]:
    body: dict[str, Any] = json.loads(board.read_text())
    for panel in body["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for annotation in body["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]
    for variable in body["templating"]["list"]:
        if found := _LABEL_VALUES.fullmatch(variable.get("definition", "")):
            yield f"variable {variable['name']}", found[1]
