"""The card of a run of days: days, goodput and money of `[run]`, simulated when its button is pressed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from zsim.goodput import views
from zsim.goodput.views import detail_sentences, diverging_sentence, verdict_sentence
from zsim.report.views.html.figure import Figure
from zsim.specs.experiment.tables import Experiment
from zsim.study.whole_runs import RunResult, simulate_run
from zsim.ui.process.worker import Backends
from zsim.ui.words import RUN_FILE, run_safely, tile
from zsim.units import format_duration

SEEDS = 20  # runs that the page draws; `zsim goodput` draws run.seeds
Tile = tuple[str, str, str]


def show_run(app: Any, backends: Backends) -> None:
    """A click on the button simulates the run of what is shown. Another setting removes the answer."""
    from dash import Input, Output, State, ctx

    form = backends.form

    @app.callback(  # type: ignore[untyped-decorator]
        Output("run", "data"),
        Output("run-words", "children"),
        Output("go", "disabled"),
        Input("go", "n_clicks"),
        Input("asked", "data"),
        running=[(Output("go", "children"), "Simulating ...", "Simulate the run")],
    )
    def simulate(clicks: int | None, request: Mapping[str, Any] | None) -> Any:
        if not request or not form.has_run(request["shown"]):
            return {}, "Fill in the tokens of a whole run, on the left, to see its days.", True
        if ctx.triggered_id != "go" or not clicks:
            return {}, "", False
        setting = request["shown"], request["more"]
        run_parts, error = run_safely(backends.answer_worker.result, "run", *setting)
        if run_parts is None:
            return {}, error, False
        figures, tiles, lines = run_parts
        data = {name: figure.to_plotly_json() for name, figure in figures.items()}
        return data, run_words(tiles, lines), False

    @app.callback(  # type: ignore[untyped-decorator]
        Output("run-file", "disabled"), Input("run", "data")
    )
    def offer(run: Mapping[str, Any] | None) -> bool:
        return not run

    @app.callback(  # type: ignore[untyped-decorator]
        Output("download", "data", allow_duplicate=True),
        Input("run-file", "n_clicks"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def take(clicks: int | None, request: Mapping[str, Any]) -> Any:
        from dash import no_update

        if not clicks:
            return no_update
        setting = request["shown"], request["more"]
        content, _ = run_safely(backends.answer_worker.result, "file", RUN_FILE, *setting)
        return no_update if content is None else {"content": content.decode(), "filename": RUN_FILE}


def run_of(experiment: Experiment) -> RunResult:
    """The run, of a few seeds. Raises InputError and NotSimulatedError as `zsim.simulate_run` does."""
    seeds = SEEDS if experiment.run is None else min(SEEDS, experiment.run.seeds)
    return simulate_run(experiment, seeds=seeds, jobs=1, compares=False)


def run_figures(run: RunResult) -> dict[str, Figure]:
    return {"run-waterfall": views.waterfall(run), "run-progress": views.progress(run)}


def run_sentences(run: RunResult) -> Iterator[str]:
    yield from [] if run.tightest_report.verdict.word == "fits" else [verdict_sentence(run)]
    yield from diverging_sentence(run)
    yield from detail_sentences(run)


def run_words(tiles: Iterable[Tile], lines: Iterable[str]) -> list[Any]:
    """The answer in tiles and sentences."""
    from dash import html

    boxes = [tile(*words) for words in tiles]
    return [html.Div(boxes, className="tiles"), html.Ul([html.Li(line) for line in lines])]


def run_tiles(run: RunResult) -> Iterator[Tile]:
    """(label, number, small print) of the run's main numbers."""
    low, high = run.days_range
    days = "no mean" if run.expected_days is None else f"{run.expected_days:.2f}"
    ends = f"{low:.1f} to {high:.1f} in 90 %" if high is not None else f"from {low:.1f}"
    seeds = f"of {len(run.runs.ledgers)} runs drawn"
    yield "Days", days, f"{ends} {seeds}"
    worst, best = (part * 100 for part in run.goodput_range)
    yield "Goodput", f"{run.goodput_fraction * 100:.1f} %", f"{worst:.1f} to {best:.1f} %"
    low_failures, high_failures = run.failures_range
    failures = run.runs.mean_of(lambda ledger: ledger.num_failures)
    yield "Failures", f"{failures:,.1f}", f"{low_failures:,.0f} to {high_failures:,.0f}"
    bill = run.bill
    if bill.money is not None:
        yield "Money", f"{bill.money:,.0f}", f"{bill.currency}, {bill.gpu_hours:,.0f} GPU-hours"
    else:
        yield "GPU-hours", f"{bill.gpu_hours:,.0f}", "with a price: money"
    if run.checkpoint is not None:
        holds = format_duration(run.checkpoint.blocking_seconds)
        yield "A save every", format_duration(run.work_seconds), f"holds training {holds}"
