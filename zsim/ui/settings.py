"""Callbacks on full settings: kept in the page's address, compared, remedied where they do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zsim.specs.formats.toml import toml_text
from zsim.ui.comparison import MAX_PINS, comparison
from zsim.ui.fields import KIND
from zsim.ui.form import Form
from zsim.ui.framework import fields_of
from zsim.ui.layout import field_id
from zsim.ui.prediction import Prediction, Predictions, setting_token
from zsim.ui.process.backends import Backends
from zsim.ui.words import remedy_buttons, run_safely

Request = Mapping[str, Any]


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


def compare_settings(app: Any, backends: Backends, outcomes: Predictions) -> None:
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
        clicks: int | None, removals: Sequence[int | None], pins: list[Request] | None, request: Request
    ) -> Any:
        if isinstance(ctx.triggered_id, Mapping):
            return remove_pin(pins or [], ctx.triggered_id["number"]) if any(removals) else no_update
        return add_pin(pins or [], request) if clicks and request else no_update

    @app.callback(  # type: ignore[untyped-decorator]
        Output("sided", "children"),
        Output("card-sided", "hidden"),
        Output("pin", "disabled"),
        Input("asked", "data"),
        Input("pins", "data"),
    )
    def beside(request: Request | None, pins: Sequence[Request] | None) -> Any:
        if not request or not pins:
            return None, True, not request
        settings = [
            (setting_shown["shown"], setting_shown["more"]) for setting_shown in (*pins[:MAX_PINS], request)
        ]
        predictions: list[Prediction | str] = []
        for field_values, other_settings in settings:
            outcome, error = run_safely(
                partial(_setting_outcome, backends, outcomes, field_values, other_settings)
            )
            predictions.append(error if outcome is None else outcome)
        return comparison(backends.form.fields, settings, predictions), False, len(pins) >= MAX_PINS


def _setting_outcome(
    backends: Backends, outcomes: Predictions, field_values: Mapping[str, Any], other_settings: str
) -> Prediction:
    """The prediction of a setting, which the server keeps when the page's process has to go."""
    token = setting_token(field_values, other_settings)
    prediction = outcomes.predictions.get(token)
    if prediction is None:
        prediction = backends.answer_worker.result("outcome", field_values, other_settings)
        outcomes.store(token, prediction)
    return prediction


def add_pin(pins: Sequence[Request], request: Request) -> list[Request]:
    """The pins and the setting that is shown. A setting is pinned once."""
    pin = {"shown": request["shown"], "more": request["more"]}
    return [*pins] if pin in pins else [*pins, pin][:MAX_PINS]


def remove_pin(pins: Sequence[Request], number: int) -> list[Request]:
    return [pin for index, pin in enumerate(pins) if index != number]


def offer_remedies(app: Any, backends: Backends) -> None:
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
    def offer(request: Request) -> tuple[list[Any], list[Mapping[str, Any]]]:
        if request["fits"]:
            return [], []
        remedies, error = run_safely(
            lambda: backends.remedy_worker.result("mends", request["shown"], request["more"])
        )
        return ([error], []) if remedies is None else (remedy_buttons(remedies), list(remedies.values()))

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
    def turn(clicks: Sequence[int | None], offered: Sequence[Mapping[str, Any]], request: Request) -> Any:
        if not any(clicks) or not isinstance(ctx.triggered_id, Mapping):
            return no_update
        field_values, other_settings = apply_remedy(
            form, request["shown"], request["more"], offered[ctx.triggered_id["number"]]
        )
        return [*(field_values[key] for key in form.fields), other_settings, other_settings]


def apply_remedy(
    form: Form, field_values: Mapping[str, Any], other_settings: str, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The setting after `overrides`: in its field where a key has one, else a line of the other settings."""
    framework = fields_of(form.fields[KIND].read(field_values[KIND]))
    new_fields, lines = dict(field_values), [line for line in other_settings.splitlines() if line.strip()]
    for key, value in overrides.items():
        name, shown_value = framework.shown(key, value)
        field = form.fields.get(name)
        if field is not None:
            new_fields[name] = field.show(shown_value)
            continue
        lines = [line for line in lines if line.partition("=")[0].strip() != key]
        lines.append(f"{key} = {toml_text({'x': value}).partition('=')[2].strip()}")
    return new_fields, "\n".join(lines)
