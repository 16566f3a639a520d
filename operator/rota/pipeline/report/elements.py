"""Elements of the report's HTML: sections, lists, tables, their cells, and titles of policies."""

from collections.abc import Iterable
from html import escape

from rota.pipeline.common.names import replace_unprintable
from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.ranking import OWN_POLICIES
from rota.pipeline.report.plots import escape_text


def render_section(name: str, title: str, parts: Iterable[str]) -> str:
    """Return a section with a heading; `name` is the heading's id."""
    body = "\n".join(parts)
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape_text(title)}</h2>\n{body}\n</section>\n'


def render_list(items: Iterable[str]) -> str:
    """Return a list of HTML texts."""
    return f'<ul class="known">{"".join(map("<li>{}</li>".format, items))}</ul>'


def render_table(caption: str, head: Iterable[tuple[str, str]], rows: Iterable[str]) -> str:
    """Return a table; `head` has the title and the CSS class of each column."""
    cells = ""
    for title, style in head:
        cells += f'<th scope="col" class="{style}">{title}</th>'
    return (
        f'<div class="wide" role="region" aria-label="{caption}" tabindex="0"><table><caption>{caption}</caption>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def number_cell(text: str) -> str:
    """Return a table's cell with a number."""
    return f'<td class="number">{text}</td>'


def escape_lines(text: str) -> str:
    """Escape a text for HTML; line breaks stay, other unprintable characters are replaced."""
    return escape("\n".join(map(replace_unprintable, text.split("\n"))), quote=True)


def render_policy_title(policy: str) -> str:
    """Return a policy's name, or a title for RECORDED_POLICY and OWN_POLICIES, as HTML."""
    return {RECORDED_POLICY: "Present policies", OWN_POLICIES: "Each group its own"}.get(policy, escape_text(policy))
