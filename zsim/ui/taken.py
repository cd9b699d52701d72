"""The files that the page offers of what it shows."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zsim.specs.experiment.tables import Experiment
from zsim.ui.form import Form
from zsim.ui.prediction import Predictions, token_of
from zsim.ui.process.backends import Backends
from zsim.ui.words import CSV_FILE, JSON_FILE, OF_STEP, TRACE_FILE, said


def offer_files(app: Any, backends: Backends) -> None:
    """A click on a file's name downloads it."""
    from dash import ALL, Input, Output, State, ctx, no_update

    @app.callback(  # type: ignore[untyped-decorator]
        Output("download", "data"),
        Input({"type": "file", "name": ALL}, "n_clicks"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def take(clicks: list[int | None], asked: Mapping[str, Any]) -> Any:
        if not any(clicks) or not isinstance(ctx.triggered_id, Mapping):
            return no_update
        name, shown, more = str(ctx.triggered_id["name"]), asked["shown"], asked["more"]
        content, _ = said(lambda: backends.answers.result("file", name, shown, more))
        if content is None:
            return no_update
        return {"content": b64encode(content).decode(), "filename": name, "base64": True}


def film_content(form: Form, outcomes: Predictions, shown: Mapping[str, Any], more: str) -> bytes:
    """The animation of the step as a separate page."""
    from zsim.study.topologies.film import film_of_step
    from zsim.study.topologies.page import film_page

    token = token_of(shown, more)
    step = outcomes.step_of(token, form, shown, more)
    title = outcomes.outcome_of(token, form, shown, more).title
    return film_page(film_of_step(step.outcome), title).encode()


def file_content(experiment: Experiment, name: str) -> bytes:
    """The content of one of the files that the page offers, other than the animation."""
    if name in OF_STEP:
        return _of_step(experiment, name)
    from zsim.specs.experiment.resolve import resolve
    from zsim.specs.formats.export import export_files

    return export_files(resolve(experiment)).files[name].encode()


def _of_step(experiment: Experiment, name: str) -> bytes:
    from zsim.study.advice import simulate

    result = simulate(experiment)
    if name == JSON_FILE:
        return (json.dumps(result.report.to_dict(), indent=2, default=str) + "\n").encode()
    if name == CSV_FILE:
        rows = [asdict(row) for row in result.report.collectives]
        table = io.StringIO()
        writer = csv.DictWriter(table, list(rows[0]) if rows else ["kind"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return table.getvalue().encode()
    if name == TRACE_FILE:
        from zsim.trace.chrome.write import write_chrome_trace

        with tempfile.TemporaryDirectory(prefix="zsim-ui-") as folder:
            path = Path(folder) / name
            write_chrome_trace(result.trace, path)
            return path.read_bytes()
    from zsim.report.views.html.report import html_report

    return html_report(result.report, result.trace).encode()
