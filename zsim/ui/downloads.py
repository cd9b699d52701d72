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

from zsim.report.views.html.report import html_report
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.export import export_files
from zsim.study.search import simulate
from zsim.study.topologies.figures import NUM_FRAMES
from zsim.trace.chrome import write_chrome_trace
from zsim.ui.process.worker import Backends
from zsim.ui.words import CSV_FILE, JSON_FILE, STEP_FILES, TRACE_FILE, run_safely


def offer_files(app: Any, backends: Backends) -> None:
    """A click on a file's name downloads it."""
    from dash import ALL, Input, Output, State, ctx, no_update

    @app.callback(  # type: ignore[untyped-decorator]
        Output("download", "data"),
        Input({"type": "file", "name": ALL}, "n_clicks"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def take(clicks: list[int | None], request: Mapping[str, Any]) -> Any:
        if not any(clicks) or not isinstance(ctx.triggered_id, Mapping):
            return no_update
        name, field_values, other_settings = str(ctx.triggered_id["name"]), request["shown"], request["more"]
        content, _ = run_safely(
            lambda: backends.answer_worker.result("file", name, field_values, other_settings)
        )
        if content is None:
            return no_update
        return {"content": b64encode(content).decode(), "filename": name, "base64": True}


def file_content(experiment: Experiment, name: str) -> bytes:
    """The content of one of the files that the page offers, other than the animation."""
    if name in STEP_FILES:
        return _step_file(experiment, name)
    return export_files(resolve(experiment)).files[name].encode()


def _step_file(experiment: Experiment, name: str) -> bytes:
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
        with tempfile.TemporaryDirectory(prefix="zsim-ui-") as folder:
            path = Path(folder) / name
            write_chrome_trace(result.trace, path)
            return path.read_bytes()
    return html_report(result.report, result.trace).encode()


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
