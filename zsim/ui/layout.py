"""The layout of the page: settings on the left, results on the right."""

from __future__ import annotations

from typing import Any

from zsim.report.views.html.report import DEVICES, MEMORY_CAPTION, STEP_CAPTION, TIMELINE_CAPTION
from zsim.specs.strategy.requirement import phrase
from zsim.study.topologies.figures import CLUSTER_CAPTION, LOADS_CAPTION, NUM_FRAMES, SHADES
from zsim.ui.field import Field
from zsim.ui.form import Form
from zsim.ui.recordings import MAX_TRACE
from zsim.version import __version__

MAIN = ("step", "timeline", *(f"{kind}-{device}" for device in DEVICES for kind in ("waterfall", "memory")))
CURVE = ("efficiency", "throughput")
ANIMATION = ("cluster", "loads")
RUN = ("run-waterfall", "run-progress")
COMPARED = ("twins",)
_MODES = {"weak": "same batch per GPU (weak)", "strong": "same batch in all (strong)"}
_GROUPS = {
    "Model and cluster": "", "Training": "training", "Adapters": "training.lora", "Strategy": "strategy",
    "A whole run": "run",
}  # fmt: skip
_TICK_MILLISECONDS = 200
_LIST_PIXELS = 360
MAX_UPLOAD = 200_000  # bytes; a config.json has a few thousand, and what is given stands in the address
_MIN_SEARCHABLE = 3  # choices from which on a list has a box to search it


def layout(form: Form) -> Any:
    """All components of the page, still empty."""
    from dash import dcc, html

    return html.Div(
        id="shell",
        children=[
            html.A("Skip to the results", href="#", id="skip"),
            html.Aside(_settings(form), id="settings", **aria_label("Settings")),
            html.Main(
                [html.Div(id="error", role="alert"), _held_settings(), html.Div(_results(), id="results")],
                id="main",
                tabIndex=-1,
                **aria_label("Results"),
            ),
            dcc.Location(id="place", refresh=False),
            dcc.Store(id="initial", data=dict(form.initial)),
            dcc.Store(id="applied", data=""),
            dcc.Store(id="pins"),
            dcc.Store(id="held"),
            dcc.Store(id="named"),
            dcc.Store(id="remembered"),
            dcc.Store(id="figures"),
            dcc.Store(id="asked"),
            dcc.Store(id="offered"),
            dcc.Store(id="wanted"),
            dcc.Store(id="curve"),
            dcc.Store(id="film"),
            dcc.Store(id="shown-frame"),
            dcc.Store(id="run"),
            dcc.Store(id="recording"),
            dcc.Store(id="recorded"),
            dcc.Interval(id="tick", interval=_TICK_MILLISECONDS),
            dcc.Download(id="download"),
        ],
    )


def field_id(key: str) -> str:
    """The field's id. Dash does not allow dots in ids."""
    return "field-" + key.replace(".", "-")


def aria_label(name: str) -> dict[str, Any]:
    """The name that a screen reader says."""
    return {"aria-label": name}


def aria_live() -> dict[str, Any]:
    """A screen reader says what is new there once it is silent."""
    return {"aria-live": "polite", "aria-atomic": "false"}


def row_id(key: str) -> str:
    return "row-" + key.replace(".", "-")


def _settings(form: Form) -> list[Any]:
    from dash import dcc, html

    def group(name: str, table: str) -> Any:
        fields = [field for field in form.fields.values() if _table(field.key) == table]
        return html.Fieldset([html.Legend(name), *(_row(field, form) for field in fields)])

    example = "cluster.nvme.drives = 9\ntraining.expandable_segments = true"
    hint = "KEY = VALUE, one a line; any key of the experiment, as with --set."
    other_settings = [
        html.Legend("Other settings"),
        dcc.Textarea(id="more", value="", rows=3, placeholder=example, title=hint),
        html.P(hint, className="hint"),
        html.Button("Apply", id="apply", type="button"),
    ]
    paste = (
        "Paste a model's config.json, a topology TOML, nvidia-smi topo -m, NCCL's XML, "
        f"{phrase('texts of the page')}. A recorded trace comes as a file."
    )
    upload_fields = [
        html.Legend("Your own model, cluster, training file"),
        dcc.Textarea(id="given", value="", rows=3, placeholder=paste, title=paste),
        html.Button("Use the text", id="use", type="button"),
        html.Label(
            dcc.Upload(
                html.Button("Choose a file", type="button"), id="upload", multiple=False, max_size=MAX_TRACE
            )
        ),
        html.P(id="given-words", className="hint", role="status"),
    ]
    return [
        html.P(f"zsim {__version__}", className="brand"),
        *(group(name, table) for name, table in _GROUPS.items()),
        html.Fieldset(upload_fields),
        html.Fieldset(other_settings),
    ]


def _table(key: str) -> str:
    if key.startswith(("offload", "parallelism.")):
        return "strategy"
    if key.startswith("cost."):
        return "run"
    if key.startswith("training.lora."):
        return "training.lora"
    return key.partition(".")[0] if "." in key else ""


def _row(field: Field, form: Form) -> Any:
    from dash import dcc, html

    name, initial_value = field_id(field.key), form.initial[field.key]
    box: Any
    if field.choices is None:
        box = dcc.Input(
            id=name, type="number", step="any", debounce=True, value=initial_value, placeholder=""
        )
    else:
        options = field.options()
        box = dcc.Dropdown(
            options,
            initial_value,
            id=name,
            clearable=False,
            searchable=len(options) > _MIN_SEARCHABLE,
            maxHeight=_LIST_PIXELS,
        )
    unit = [html.Span(field.unit, className="unit")] if field.unit else []
    label = html.Div([html.Span(field.label), *unit], className="label")
    return html.Label(
        [label, box],
        id=row_id(field.key),
        hidden=False,
        title=field.sentence or None,
        className="row half" if field.is_half else "row",
    )


def _held_settings() -> Any:
    """The other settings that an address brought, until they are applied."""
    from dash import html

    words = (
        "The address brought other settings, which are not applied. Read them, then press Apply, at the end "
        "of the settings."
    )
    return html.Div([html.P(words), html.Pre(id="held-lines")], id="held-words", role="status", hidden=True)


def _results() -> list[Any]:
    from dash import dcc, html

    modes = [{"value": mode, "label": text} for mode, text in _MODES.items()]
    return [
        html.Div(
            [
                html.Button("Pin to compare", id="pin", type="button"),
                html.Button("Copy link", id="share", type="button"),
            ],
            className="views",
            id="actions",
        ),
        html.Div([html.Div(id="mends")], id="answer", **aria_live()),
        _card("Side by side", [html.Div(id="sided")], id="card-sided", hidden=True),
        _card("Where the step goes", [_plot("step", STEP_CAPTION)]),
        *(_memory_card(device, name) for device, name in DEVICES.items()),
        _card(
            "One step, stream by stream",
            [html.Div(id="views", className="views"), _plot("timeline", TIMELINE_CAPTION)],
        ),
        _card(
            "Recorded and simulated",
            [
                html.Div([html.Button("Remove it", id="forget", type="button")], className="views"),
                html.Pre(id="recorded-words", tabIndex=0),
                _plot("twins", "Both steps on one time axis."),
            ],
            id="card-recorded",
            hidden=True,
        ),
        _card("The cluster at work", _animation_card()),
        _card("A whole run", _whole_run()),
        _card(
            "More and fewer GPUs",
            [
                dcc.RadioItems(modes, "weak", id="mode"),
                html.P(id="curve-words"),
                _pair(
                    _plot("efficiency", "Against linear from the best point that fits; crosses do not fit."),
                    _plot("throughput", "All GPUs together; dashed: linear."),
                ),
            ],
        ),
        _card("Downloads", [html.Div(id="files"), html.P(id="file-words", className="hint", role="status")]),
    ]


def _animation_card() -> list[Any]:
    """The drawing, the frame's position in the step and its words, and the links' use over the step."""
    from dash import dcc, html

    frame_slider = dcc.Input(id="frame", type="range", min=0, max=NUM_FRAMES - 1, step=1, value=0)
    return [
        html.Div(
            [
                html.Button("Play", id="play", type="button"),
                html.Label(
                    [html.Span("Time in the step", className="unseen"), frame_slider], className="frame"
                ),
            ],
            className="views film",
        ),
        html.P(id="film-words", className="hint"),
        _plot("cluster", CLUSTER_CAPTION),
        html.Div(
            [
                html.Span("idle"),
                *(html.I(style={"background": shade}) for shade in SHADES),
                html.Span("full"),
            ],
            className="shades",
        ),
        _plot("loads", LOADS_CAPTION),
    ]


def _whole_run() -> list[Any]:
    from dash import html

    return [
        html.Div(
            [
                html.Button("Simulate the run", id="go", type="button", disabled=True),
                html.Button("goodput.html", id="run-file", type="button", disabled=True),
            ],
            className="views",
        ),
        html.Div(id="run-words", **aria_live()),
        _pair(
            _plot("run-waterfall", "Where the days go: the mean of the runs."),
            _plot("run-progress", "The run of the median's days, with its failures; dotted: without stops."),
        ),
    ]


def _memory_card(device: str, name: str) -> Any:
    pair = _pair(
        _plot(f"waterfall-{device}", "What is held at the peak."), _plot(f"memory-{device}", MEMORY_CAPTION)
    )
    return _card(name, [pair], id=f"card-{device}", hidden=True)


def _card(title: str, children: list[Any], **attributes: Any) -> Any:
    from dash import html

    return html.Section([html.H2(title), *children], className="card", **attributes)


def _pair(*figures: Any) -> Any:
    from dash import html

    return html.Div(list(figures), className="pair")


def _plot(name: str, caption: str) -> Any:
    """A figure and its caption, hidden until there is a figure."""
    from dash import dcc, html

    graph = dcc.Graph(id=f"plot-{name}", responsive=True)
    return html.Figure([graph, html.Figcaption(caption)], id=f"box-{name}", hidden=True)
