"""Links of the report: to a group's page and board, and downloads of tables whose data is inside the report."""

import csv
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from pyspark.sql import Row

from rota.pipeline.common.names import replace_unprintable
from rota.pipeline.recommend.policy_manifests import parse_group_name
from rota.pipeline.report.plots import escape_text

BOARD_PATH = "/d/rota-group"  # path in Grafana of the Helm chart's board of one group
_FORMULA_STARTS = ("=", "+", "-", "@")  # a spreadsheet would run a text that begins so

Cell = str | float | bool | None


class ReportLinks(NamedTuple):
    """Base URLs of the operator's page and of Grafana; None: no links."""

    page_url: str | None = None
    board_url: str | None = None


def check_url(url: str, option: str) -> str:
    """Return a base URL without a slash at its end; raise ValueError if it is no http or https URL."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and url.isprintable() and " " not in url
    except ValueError:
        is_valid = False
    if not is_valid or parts.query or parts.fragment:
        raise ValueError(
            f"{option} {replace_unprintable(url)} is no base URL; give one such as https://rota.example.com"
        )
    return url.rstrip("/")


def render_group_links(links: ReportLinks, group: str) -> str:
    """Return links to a group's page and board as HTML; empty without base URLs or without a valid name."""
    location = parse_group_name(group)
    if not location:
        return ""
    urls: list[tuple[str, str]] = []
    if links.page_url:
        urls.append((f"{links.page_url}/#{quote(location.namespace)}/{quote(location.name)}", "operator's page"))
    if links.board_url:
        query = urlencode({"var-namespace": location.namespace, "var-group": location.name})
        urls.append((f"{links.board_url}{BOARD_PATH}?{query}", "board"))
    anchors: list[str] = []
    for url, title in urls:
        label = f"{title} of {escape_text(group)}"
        anchors.append(f'<a href="{escape(url, quote=True)}" rel="noreferrer" aria-label="{label}">{title}</a>')
    return f'<p class="links">{" · ".join(anchors)}</p>' if urls else ""


def render_card_link(row: Row, rank: int, *, has_card: bool) -> str:
    """Return a group's name as HTML, with a link to its card in the report if it has a card."""
    name = escape_text(row["group"])
    return f'<a href="#group-{rank}">{name}</a>' if has_card else name


def render_download(name: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a link that saves a table as a CSV file; the link contains the data, so the report stays one file."""
    file = StringIO()
    writer = csv.writer(file)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_text(value) for value in row])
    data = b64encode(file.getvalue().encode()).decode()
    return (
        f'<p class="links"><a href="data:text/csv;charset=utf-8;base64,{data}" download="{escape_text(name)}.csv">'
        f"Download {escape_text(name)}.csv</a></p>"
    )


def render_row_download(name: str, columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a link that saves some columns of Spark's rows as a CSV file."""
    cells: list[list[Cell]] = []
    for row in rows:
        values = [row[column] for column in columns]
        cells.append(values)
    return render_download(name, columns, cells)


def _csv_text(value: Cell) -> Cell:
    """Return a cell's value; a text that looks like a formula gets an apostrophe: spreadsheets then show it as text."""
    if not isinstance(value, str):
        return value
    text = replace_unprintable(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
