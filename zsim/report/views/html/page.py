"""One HTML page of figures and tables that needs nothing else: what every study writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zsim.resources import TEMPLATES
from zsim.version import __version__

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Section:
    """A card of the page: figures as (id, caption, figure), ids unique on the page, and a table below."""

    title: str
    figures: Sequence[tuple[str, str, Figure]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def page(title: str, kicker: str, sections: Sequence[Section], summary: str = "") -> str:
    """The page as text; `kicker` is the word beside the version above the title."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        kicker=kicker,
        sections=[
            {
                "title": section.title,
                "figures": [
                    {"id": name, "caption": caption, "json": figure.to_json().replace("</", "<\\/")}
                    for name, caption, figure in section.figures
                ],
                "head": section.head,
                "rows": section.rows,
            }
            for section in sections
        ],
        summary=summary,
        version=__version__,
        plotly_js=Markup(get_plotlyjs()),
    )
