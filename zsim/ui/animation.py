"""The card of the cluster at work: the step as an animation over the drawing of its fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.study.topologies.animation import NUM_FRAMES, animate_step, cluster_figure, loads_figure
from zsim.ui.form import Form
from zsim.ui.prediction import Predictions, setting_token
from zsim.ui.process.backends import Backends
from zsim.ui.words import run_safely


def show_animation(app: Any, backends: Backends) -> None:
    """After each answer the animation is made of the step that was simulated for it. The browser shows its
    frames.
    """
    from dash import ClientsideFunction, Input, Output

    @app.callback(  # type: ignore[untyped-decorator]
        Output("film", "data"),
        Output("film-words", "children"),
        Output("frame", "max"),
        Input("asked", "data"),
    )
    def make(request: Mapping[str, Any] | None) -> Any:
        if not request:
            return None, "", NUM_FRAMES - 1
        film, error = run_safely(
            lambda: backends.answer_worker.result("film", request["shown"], request["more"])
        )
        return film, error, NUM_FRAMES - 1

    app.clientside_callback(
        ClientsideFunction("zsim", "frame"),
        Output("shown-frame", "data"),
        Output("film-words", "children", allow_duplicate=True),
        Input("frame", "value"),
        Input("film", "data"),
        prevent_initial_call="initial_duplicate",
    )


def animation_data(
    form: Form, outcomes: Predictions, field_values: Mapping[str, Any], other_settings: str
) -> dict[str, Any]:
    """The two figures of the animation, by name, and its frames as its `to_dict` has them."""
    step = outcomes.get_step(setting_token(field_values, other_settings), form, field_values, other_settings)
    film = animate_step(step.whole_outcome)
    return {
        "cluster": cluster_figure(film).to_plotly_json(),
        "loads": loads_figure(film).to_plotly_json(),
        "frames": film.to_dict(),
    }
