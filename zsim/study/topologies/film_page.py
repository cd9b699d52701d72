"""The film of a step as one self-contained HTML page."""

from __future__ import annotations

from zsim.report.views.html.figure import script_json
from zsim.report.views.html.page import plot, render
from zsim.study.topologies.film import (
    CLUSTER_CAPTION,
    LOADS_CAPTION,
    SHADES,
    Film,
    cluster_figure,
    loads_figure,
)


def film_page(film: Film, title: str) -> str:
    """The page as text: the drawing, a slider and Play along the step, and the links' use."""
    return render(
        "film.html.j2",
        title=title,
        cluster=plot("cluster", CLUSTER_CAPTION, cluster_figure(film)),
        loads=plot("loads", LOADS_CAPTION, loads_figure(film)),
        shades=SHADES,
        frames=script_json(film.to_dict()),
        num_frames=len(film.words),
        words=film.words[0],
    )
