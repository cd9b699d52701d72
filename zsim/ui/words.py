"""The text components of an answer on the page. Figures are separate."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zsim.errors import ZsimError
from zsim.report.views.text.sentences import NO_CHANGE
from zsim.ui.answer import Answer, Tier
from zsim.ui.process.worker import InternalError, Superseded
from zsim.units import GIGABYTES
from zsim.validated.ratios import NO_DIFFERENCE, SEVERAL_SETTINGS, is_ratio_significant

SEARCHING = "Looking for changes with which it fits ..."
_TOO_LARGE = (MemoryError, OverflowError, RecursionError)
REPORT_FILE = "report.html"
ANIMATION_FILE = "film.html"
RUN_FILE = "goodput.html"
JSON_FILE, CSV_FILE, TRACE_FILE = "report.json", "collectives.csv", "trace.json.gz"
STEP_FILES = (REPORT_FILE, ANIMATION_FILE, JSON_FILE, CSV_FILE, TRACE_FILE)


def answer_words(answer: Answer, previous: Mapping[str, Any] | None = None) -> list[Any]:
    """Title, verdict, limits, numbers and memory tiers of an answer.

    `previous` holds `tokens_per_second` and `is_shared` of the previous one.
    """
    from dash import html

    previous = previous or {}
    fit, is_shared = answer.fit, answer.outcome.is_shared or bool(previous.get("is_shared"))
    change = change_words(answer.tokens_per_second, previous.get("tokens_per_second"), is_shared=is_shared)
    verdict = html.P([html.Strong(fit.label), " ", fit.words], className=f"verdict {fit.tone}")
    return [
        html.H1(_title_spans(answer.title)),
        verdict,
        html.Div([] if answer.has_room else SEARCHING, className="views mends", id="mends"),
        html.P(answer.limit, className="limit"),
        html.P(answer.trust, className="limit", id="trust"),
        html.P(change, id="change"),
        html.Div([tile(*words) for words in answer.tiles], className="tiles"),
        html.Div([_meter(tier) for tier in answer.tiers], className="tiers"),
        html.P(f"{GIGABYTES}.", className="source"),
    ]


def _title_spans(title: str) -> list[Any]:
    """The parts of a title, each on one line where it has room."""
    from dash import html

    first, *other_parts = title.split(" | ")
    return [
        html.Span(first),
        *(part for title_part in other_parts for part in (" | ", html.Span(title_part))),
    ]


def remedy_buttons(changes: Iterable[str]) -> list[Any]:
    """A button for each change, in words, that makes the job fit."""
    from dash import html

    buttons = [
        html.Button(words, id={"type": "mend", "number": number}, type="button")
        for number, words in enumerate(changes)
    ]
    return [html.Span("It fits with "), *buttons] if buttons else [html.Span(f"{NO_CHANGE}.")]


def change_words(now: float, previous_rate: float | None, *, is_shared: bool) -> str:
    """How much the last changed setting changed the throughput, or "" below a thousandth.

    `is_shared` says that several ranks have a replica, or had one.
    """
    if not previous_rate or abs(now / previous_rate - 1) < 1e-3:
        return ""
    ratio, previous_text = now / previous_rate, f"({previous_rate:,.0f})"
    if not is_ratio_significant(previous_rate, now, [SEVERAL_SETTINGS], is_shared=is_shared):
        previous_text += f": {NO_DIFFERENCE}"
    if ratio >= 2:
        return f"{ratio:.3g} times as many tokens per second as before {previous_text}."
    word = "more" if ratio > 1 else "fewer"
    return f"{abs(ratio - 1) * 100:.1f} % {word} tokens per second than before {previous_text}."


def tile(label: str, number: str, small: str) -> Any:
    """A number with its label and its small print."""
    from dash import html

    texts_by_class = {"label": label, "number": number, "small": small}
    return html.Div(
        [html.Span(text, className=name) for name, text in texts_by_class.items()], className="tile"
    )


def _meter(tier: Tier) -> Any:
    from dash import html

    width = f"{min(1.0, tier.fraction) * 100:.1f}%"
    bar = html.Div(html.I(style={"width": width}), className="meter")
    words = html.Div([html.Span(tier.name), html.Span(tier.words, className="n")], className="words")
    return html.Div([words, bar], className="tier" if tier.fits else "tier broken")


def view_buttons(views: Sequence[tuple[str, float, float]]) -> list[Any]:
    """Buttons for segments of the timeline to zoom to."""
    from dash import html

    buttons = []
    for name, start, end in views:
        plot_range: dict[str, Any] = {"data-plot": "plot-timeline", "data-start": start, "data-end": end}
        buttons.append(html.Button(name, type="button", **plot_range))
    return buttons


def files_and_notes(answer: Answer) -> Iterator[Any]:
    """A button for each file, the settings that no file can express, and how far to trust the numbers."""
    from dash import html

    names = (*sorted(answer.exported.files), *STEP_FILES)
    buttons = [html.Button(name, id={"type": "file", "name": name}, type="button") for name in names]
    yield html.Div(buttons, className="views")
    missing = [f"No {name}: {reason}." for name, reason in answer.exported.missing.items()]
    yield html.Ul([html.Li(line) for line in (*map(sentence, answer.exported.notes), *missing)])
    grades = ", ".join(f"{part} {grade}" for part, grade in answer.evidence.items())
    yield html.Details(
        [
            html.Summary("How far to trust it"),
            html.P(f"Evidence: {grades}."),
            html.Ul([html.Li(sentence(note)) for note in answer.notes]),
        ]
    )


def sentence(note: str) -> str:
    """A note with a capital letter and a full stop. A note that begins with a file's name keeps its case."""
    is_name = "." in note.partition(" ")[0]
    return (note if is_name else f"{note[:1].upper()}{note[1:]}") + ("" if note.endswith(".") else ".")


def run_safely(work: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """(the result of `work` with the arguments, or None, and the message for the user if it failed).

    The page never shows a traceback. That of a bug in zsim goes to the terminal. Superseded work has no
    message.
    """
    try:
        return work(*arguments), ""
    except Superseded:
        return None, ""
    except InternalError as error:
        name, details = error.args
        print(details, file=sys.stderr)
        return None, f"zsim made a mistake here ({name}); the terminal has the details"
    except ZsimError as error:
        return None, str(error)
    except _TOO_LARGE as error:
        return None, f"the numbers are larger than zsim can hold ({type(error).__name__})"
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return None, f"zsim made a mistake here ({type(error).__name__}); the terminal has the details"
