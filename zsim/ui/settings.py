"""Callbacks on full settings: kept in the page's address, compared, remedied where they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zsim.specs.formats.toml import toml_text
from zsim.ui.answer import Prediction, Predictions, differences, setting_token
from zsim.ui.field import KIND, Field, fields_of
from zsim.ui.form import Form
from zsim.ui.layout import aria_label, field_id
from zsim.ui.process.worker import Backends
from zsim.ui.words import remedy_buttons, run_safely
from zsim.units import format_bytes, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE, SEVERAL_SETTINGS, is_ratio_significant

Setting = tuple[Mapping[str, Any], str]
_LETTERS = "ABCDEFGH"
MAX_PINS = len(_LETTERS) - 1


def comparison(
    fields: Mapping[str, Field], settings: Sequence[Setting], outcomes: Sequence[Prediction | str]
) -> Any:
    """The table: one column per setting, the last one the page's.

    An outcome that is text is the error of a setting that cannot be simulated.
    """
    from dash import html

    return html.Div(
        html.Table(
            [
                html.Caption(
                    "Differences are marked; the first column is what the others are compared with."
                ),
                html.Thead(html.Tr([html.Td(), *_heads(outcomes)])),
                html.Tbody([*_setting_rows(fields, settings), *_outcome_rows(outcomes)]),
            ]
        ),
        className="table sided",
        tabIndex=0,
        role="region",
        **aria_label("Settings side by side"),
    )


def _heads(outcomes: Sequence[Prediction | str]) -> Iterator[Any]:
    from dash import html

    last = len(outcomes) - 1
    for number, outcome in enumerate(outcomes):
        title = outcome if isinstance(outcome, str) else outcome.title
        name = "Now" if number == last else _LETTERS[number]
        children: list[Any] = [html.Span(name, className="letter"), html.Span(title, className="small")]
        if number < last:
            button_id = {"type": "unpin", "number": number}
            children.append(
                html.Button("Remove", id=button_id, type="button", **aria_label(f"Remove {name}"))
            )
        yield html.Th(html.Div(children), scope="col")


def _setting_rows(fields: Mapping[str, Field], settings: Sequence[Setting]) -> Iterator[Any]:
    from dash import html

    for label, texts in differences(fields, settings):
        cells = [
            html.Td(html.Mark(text) if text != texts[0] else text, className="setting") for text in texts
        ]
        yield html.Tr([html.Th(label, scope="row"), *cells])


def _outcome_rows(outcomes: Sequence[Prediction | str]) -> Iterator[Any]:
    from dash import html

    first = outcomes[0]
    slowest = max(
        (_upper_seconds(outcome) for outcome in outcomes if isinstance(outcome, Prediction)), default=0.0
    )
    rows: list[tuple[str, Callable[[Prediction], Any]]] = [
        ("Memory", lambda outcome: html.Span(outcome.verdict, className=f"verdict {outcome.tone}")),
        ("Step time", lambda outcome: format_seconds(outcome.step_seconds)),
        ("80 % interval", lambda outcome: _interval(outcome, slowest)),
        ("Tokens/s/GPU", lambda outcome: _number(outcome.tokens_per_second_per_gpu, "{:,.0f}")),
        (
            "Tokens/s in all",
            lambda outcome: [f"{outcome.tokens_per_second:,.0f}", _ratio_to_first(outcome, first)],
        ),
        ("MFU", lambda outcome: _number(outcome.mfu_fraction, "{:.1f} %", 100)),
        ("Peak of a GPU", lambda outcome: format_bytes(outcome.peak_bytes)),
    ]
    for label, cell in rows:
        cells = [html.Td("-" if isinstance(outcome, str) else cell(outcome)) for outcome in outcomes]
        yield html.Tr([html.Th(label, scope="row"), *cells])


def _number(value: float | None, form: str, scale: float = 1) -> str:
    return "-" if value is None else form.format(value * scale)


def _upper_seconds(prediction: Prediction) -> float:
    return max(
        prediction.step_seconds, prediction.step_seconds_range[1] if prediction.step_seconds_range else 0.0
    )


def _ratio_to_first(prediction: Prediction, first: Prediction | str) -> Any:
    from dash import html

    if prediction is first or isinstance(first, str):
        return None
    is_shared = prediction.is_shared or first.is_shared
    words = ratio_words(prediction.tokens_per_second, first.tokens_per_second, is_shared=is_shared)
    return html.Span(words, className="small")


def ratio_words(now: float, first: float, *, is_shared: bool) -> str:
    """E.g. "+12.0 %", with a word of warning where validated runs cannot tell the two apart.

    `is_shared` says that several ranks have a replica in one of them.
    """
    words = f"{(now / first - 1) * 100:+.1f} %"
    return (
        words
        if is_ratio_significant(first, now, [SEVERAL_SETTINGS], is_shared=is_shared)
        else f"{words}: {NO_DIFFERENCE}"
    )


def _interval(prediction: Prediction, slowest: float) -> Any:
    """The interval in words, and as a bar with its point on an axis that all columns share."""
    from dash import html

    if prediction.step_seconds_range is None or not slowest:
        return "no similar validated run"
    low, high = prediction.step_seconds_range
    span = {"left": f"{low / slowest:.2%}", "width": f"{(high - low) / slowest:.2%}"}
    marks = [html.I(style=span), html.B(style={"left": f"{prediction.step_seconds / slowest:.2%}"})]
    bar = html.Div(marks, className="interval", role="presentation")
    return [html.Span(f"{format_seconds(low)} to {format_seconds(high)}"), bar]


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
            Output("named", "data"),
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
    def compare(request: Request | None, pins: Sequence[Request] | None) -> Any:
        if not request or not pins:
            return None, True, not request
        settings = [
            (setting_shown["shown"], setting_shown["more"]) for setting_shown in (*pins[:MAX_PINS], request)
        ]
        predictions: list[Prediction | str] = []
        for field_values, other_settings in settings:
            setting = field_values, other_settings
            outcome, error = run_safely(_setting_outcome, backends, outcomes, *setting)
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
        setting = request["shown"], request["more"]
        remedies, error = run_safely(backends.remedy_worker.result, "mends", *setting)
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
