"""One self-contained HTML page of figures and tables, as every study writes it."""

from __future__ import annotations

import gzip
import importlib.resources
import re
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from zsim.files import TEMPLATES
from zsim.report.views.html.figure import Figure
from zsim.report.views.result import Bar, ResultTable, Section
from zsim.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

_COMPRESSION = 6  # gzip's level: an eighth of a second; the next ones save nothing
_URL = re.compile(r"https?://[^\s,;)\"'<>]+")


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure on a page."""

    id: str
    caption: str
    json: str
    """The data that plotly.js draws."""


def plot(name: str, caption: str, figure: Figure | Callable[[], Figure]) -> Plot:
    return Plot(name, caption, (figure() if callable(figure) else figure).to_json())


def render(template: str, **values: Any) -> str:
    """A template filled with `values`, with plotly.js included, so that the page fetches nothing."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["linked"] = _link_urls
    environment.filters["without_bars"] = _drop_bars
    return environment.get_template(template).render(
        version=__version__, plotly_js=Markup(_plotly_script()), **values
    )


@cache
def _plotly_script() -> str:
    """plotly.js, gzipped and in base 64: 2 MB instead of 4.8. Pages unpack it.

    plotly.offline.get_plotlyjs returns the same script, and imports all that plotly can draw.
    """
    script = importlib.resources.files("plotly").joinpath("package_data/plotly.min.js")
    return b64encode(gzip.compress(script.read_bytes(), _COMPRESSION, mtime=0)).decode()


def page(title: str, kicker: str, sections: Iterable[Section], summary: str = "") -> str:
    """The page as text. `kicker` is the word next to the version above the title."""
    cards = [
        {
            "title": section.title,
            "figures": [plot(*figure) for figure in section.figures],
            "table": section.table,
        }
        for section in sections
    ]
    return render("page.html.j2", title=title, kicker=kicker, sections=cards, summary=summary)


def _drop_bars(table: ResultTable) -> ResultTable:
    """The table without its columns of bars."""
    bars = {n for row in table.rows for n, cell in enumerate(row) if isinstance(cell, Bar)}
    columns = [column for n, column in enumerate(table.columns) if n not in bars]
    rows = [[cell for n, cell in enumerate(row) if n not in bars] for row in table.rows]
    return replace(table, columns=columns, rows=rows)


def _link_urls(text: str) -> Markup:
    """`text` with its URLs as links."""
    from markupsafe import Markup, escape

    fragments: list[str] = []
    position = 0
    for match in _URL.finditer(text):
        url = match[0].rstrip(".")
        fragments += [
            escape(text[position : match.start()]),
            Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(url),
        ]
        position = match.start() + len(url)
    return Markup("").join([*fragments, escape(text[position:])])
