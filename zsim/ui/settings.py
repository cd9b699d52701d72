"""Callbacks on full settings: kept in the page's address, compared, remedied where they do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zsim.specs.formats.toml import toml_text
from zsim.study.tune.axes import STAGE as JSON_STAGE
from zsim.study.tune.axes import ZERO
from zsim.ui.comparison import MAX_PINS, comparison
from zsim.ui.fields import OFFLOAD_PARAMETERS, OFFLOAD_STATES, STAGE
from zsim.ui.form import Form
from zsim.ui.layout import field_id
from zsim.ui.prediction import Prediction, Predictions, token_of
from zsim.ui.process.backends import Backends
from zsim.ui.words import mend_buttons, said

Asked = Mapping[str, Any]
_SPELT = {
    JSON_STAGE: STAGE,
    ZERO + OFFLOAD_STATES: OFFLOAD_STATES,
    ZERO + OFFLOAD_PARAMETERS: OFFLOAD_PARAMETERS,
}


def keep_state(app: Any, form: Form) -> None:
    """The settings are read from the address when the page opens, and written there when they change.

    Other settings that an address brings wait for a click, since any page may have linked here.
    """
    from dash import ClientsideFunction, Input, Output, State

    app.clientside_callback(
        ClientsideFunction("zsim", "restore"),
        [
            *(Output(field_id(key), "value") for key in form.fields),
            Output("more", "value"),
            Output("applied", "data"),
            Output("pins", "data"),
            Output("held", "data"),
            Output("recording", "data"),
        ],
        Input("place", "hash"),
        State("initial", "data"),
    )
    app.clientside_callback(
        ClientsideFunction("zsim", "apply"),
        [
            Output("applied", "data", allow_duplicate=True),
            Output("pins", "data", allow_duplicate=True),
            Output("held", "data", allow_duplicate=True),
        ],
        Input("apply", "n_clicks"),
        State("more", "value"),
        State("pins", "data"),
        State("held", "data"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        "(held) => [!held, held ? held.free : '']",
        [Output("held-words", "hidden"), Output("held-lines", "children")],
        Input("held", "data"),
    )
    app.clientside_callback(
        ClientsideFunction("zsim", "remember"),
        Output("remembered", "data"),
        Input("asked", "data"),
        Input("pins", "data"),
        Input("recording", "data"),
        State("initial", "data"),
    )


def set_side_by_side(app: Any, backends: Backends, outcomes: Predictions) -> None:
    """Compare pinned settings with the page's."""
    from dash import ALL, Input, Output, State, ctx, no_update

    @app.callback(  # type: ignore[untyped-decorator]
        Output("pins", "data", allow_duplicate=True),
        Input("pin", "n_clicks"),
        Input({"type": "unpin", "number": ALL}, "n_clicks"),
        State("pins", "data"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def pin(
        clicks: int | None, removals: Sequence[int | None], pins: list[Asked] | None, asked: Asked
    ) -> Any:
        if isinstance(ctx.triggered_id, Mapping):
            return without(pins or [], ctx.triggered_id["number"]) if any(removals) else no_update
        return with_pin(pins or [], asked) if clicks and asked else no_update

    @app.callback(  # type: ignore[untyped-decorator]
        Output("sided", "children"),
        Output("card-sided", "hidden"),
        Output("pin", "disabled"),
        Input("asked", "data"),
        Input("pins", "data"),
    )
    def beside(asked: Asked | None, pins: Sequence[Asked] | None) -> Any:
        if not asked or not pins:
            return None, True, not asked
        settings = [(one["shown"], one["more"]) for one in (*pins[:MAX_PINS], asked)]
        found: list[Prediction | str] = []
        for shown, more in settings:
            outcome, error = said(partial(_outcome, backends, outcomes, shown, more))
            found.append(error if outcome is None else outcome)
        return comparison(backends.form.fields, settings, found), False, len(pins) >= MAX_PINS


def _outcome(backends: Backends, outcomes: Predictions, shown: Mapping[str, Any], more: str) -> Prediction:
    """The prediction of a setting, which the server keeps when the page's process has to go."""
    token = token_of(shown, more)
    known = outcomes.kept.get(token)
    if known is None:
        known = backends.answers.result("outcome", shown, more)
        outcomes.keep(token, known)
    return known


def with_pin(pins: Sequence[Asked], asked: Asked) -> list[Asked]:
    """The pins and the setting that is shown. A setting is pinned once."""
    one = {"shown": asked["shown"], "more": asked["more"]}
    return [*pins] if one in pins else [*pins, one][:MAX_PINS]


def without(pins: Sequence[Asked], number: int) -> list[Asked]:
    return [one for place, one in enumerate(pins) if place != number]


def mend(app: Any, backends: Backends) -> None:
    """Search changes with which a job fits that does not, concurrently with the page. A click on one turns
    its settings.
    """
    from dash import ALL, Input, Output, State, ctx, no_update

    form = backends.form

    @app.callback(  # type: ignore[untyped-decorator]
        Output("mends", "children"),
        Output("offered", "data"),
        Input("asked", "data"),
        prevent_initial_call=True,
    )
    def offer(asked: Asked) -> tuple[list[Any], list[Mapping[str, Any]]]:
        if asked["fits"]:
            return [], []
        found, error = said(lambda: backends.remedies.result("mends", asked["shown"], asked["more"]))
        return ([error], []) if found is None else (mend_buttons(found), list(found.values()))

    @app.callback(  # type: ignore[untyped-decorator]
        [
            *(Output(field_id(key), "value", allow_duplicate=True) for key in form.fields),
            Output("more", "value", allow_duplicate=True),
            Output("applied", "data", allow_duplicate=True),
        ],
        Input({"type": "mend", "number": ALL}, "n_clicks"),
        State("offered", "data"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def turn(clicks: Sequence[int | None], offered: Sequence[Mapping[str, Any]], asked: Asked) -> Any:
        if not any(clicks) or not isinstance(ctx.triggered_id, Mapping):
            return no_update
        shown, more = mended(form, asked["shown"], asked["more"], offered[ctx.triggered_id["number"]])
        return [*(shown[key] for key in form.fields), more, more]


def mended(
    form: Form, shown: Mapping[str, Any], more: str, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The setting after `overrides`: in its field where a key has one, else a line of the other settings."""
    turned, lines = dict(shown), [line for line in more.splitlines() if line.strip()]
    for key, value in overrides.items():
        name = _SPELT.get(key, key)
        if name in (OFFLOAD_STATES, OFFLOAD_PARAMETERS):
            value = value["device"] if isinstance(value, Mapping) else value
        field = form.fields.get(name)
        if field is not None:
            turned[name] = field.show(value)
            continue
        lines = [line for line in lines if line.partition("=")[0].strip() != key]
        lines.append(f"{key} = {toml_text({'x': value}).partition('=')[2].strip()}")
    return turned, "\n".join(lines)
