"""A comparison of settings: what differs, what comes out, and whether zsim can distinguish them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zsim.ui.field import Field
from zsim.ui.layout import aria_label
from zsim.ui.prediction import Prediction, differences
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
        return "no validated run is like it"
    low, high = prediction.step_seconds_range
    span = {"left": f"{low / slowest:.2%}", "width": f"{(high - low) / slowest:.2%}"}
    marks = [html.I(style=span), html.B(style={"left": f"{prediction.step_seconds / slowest:.2%}"})]
    bar = html.Div(marks, className="interval", role="presentation")
    return [html.Span(f"{format_seconds(low)} to {format_seconds(high)}"), bar]
