"""The queries of a dashboard, as Grafana sends them to Prometheus."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SPANS = {"__rate_interval": "1m", "__interval": "15s", "__range": "1h"}  # the variables that Grafana itself fills in
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::\w+)?\}|\$([A-Za-z_]\w*)")
_LABEL_VALUES = re.compile(r"label_values\((.*), *\w+\)")


def expressions(board: Path, values: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return title and expression of each query, variables filled in: "group" of `values` stands for $group."""
    return [(title, filled(query, values)) for title, query in _queries(board)]


def filled(query: str, values: Mapping[str, str]) -> str:
    """Return an expression with its variables filled in."""
    variables = {**SPANS, **values}
    return _VARIABLE.sub(lambda match: variables[match[1] or match[2]], query)


def _queries(board: Path) -> Iterator[tuple[str, str]]:
    body: dict[str, Any] = json.loads(board.read_text())
    for panel in body["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for annotation in body["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]
    for variable in body["templating"]["list"]:
        if label_query := _LABEL_VALUES.fullmatch(variable.get("definition", "")):
            yield f"variable {variable['name']}", label_query[1]
