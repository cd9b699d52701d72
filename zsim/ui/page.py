"""The HTML around the page: the reports' colours and painter, and nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from zsim.resources import TEMPLATES

POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)


def index_page() -> str:
    """Dash's index with its places for what Dash brings."""
    import jinja2

    own = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([own, TEMPLATES]), undefined=jinja2.StrictUndefined
    )
    return environment.get_template("index.html.j2").render()
