"""A recorded step shown with the simulated one: a trace that was uploaded."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from zsim.comparison.compare import compare
from zsim.comparison.comparison import twin_timeline
from zsim.engine.micro_batches import SimulatedStep
from zsim.errors import InputError
from zsim.report.breakdown import step_breakdown
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.timeline import stream_timeline
from zsim.report.views.meanings import BREAKDOWN
from zsim.trace.readers.read import read_trace
from zsim.trace.trace import Trace
from zsim.ui.answer import check_size
from zsim.ui.process.worker import Backends
from zsim.ui.words import run_safely
from zsim.units import format_count, format_seconds

MAX_TRACE = 30_000_000  # bytes; zsim compare and zsim replay read larger ones
_MAX_RECORDINGS = 3
_KEY_DIGITS = 16
_KEY = re.compile(rf"[0-9a-f]{{{_KEY_DIGITS}}}")
_RECORDING = "recording-"
_HEAD = 65_536
_BINARY_MAGIC = (b"\x1f\x8b", b"SQLite format 3\x00")  # gzip, nsys export
_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"pg_config"')  # Kineto's, and Flight Recorder's


def is_recorded(content: bytes, name: str) -> bool:
    """Whether a file is a recorded trace, by how its kind begins or its name ends."""
    head = content[:_HEAD]
    is_archive = head.startswith(_BINARY_MAGIC) or content[257:262] == b"ustar"
    return is_archive or name.endswith(".jsonl") or any(key in head for key in _KEYS)


@dataclass(frozen=True)
class Recordings:
    """The last recordings that were uploaded, by their content. The page's address names one."""

    folder: Path | None = None
    """Recordings in it outlive the process."""
    traces: dict[str, Trace] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def take(self, content: bytes, name: str) -> str:
        """The key of a recording, which is kept from now on.

        Raises InputError for a file that is no trace of a complete step, and for one that is too large.
        """
        if len(content) > MAX_TRACE:
            raise InputError(
                f"{name}: found {len(content):,} bytes, expected at most {MAX_TRACE:,}; zsim compare reads "
                "more"
            )
        key = hashlib.sha256(content).hexdigest()[:_KEY_DIGITS]
        with tempfile.TemporaryDirectory(prefix="zsim-ui-") as folder:
            self._keep(key, _read(Path(folder) / Path(name).name, content, name))
        if self.folder is not None:
            for old in sorted(self.folder.glob(f"{_RECORDING}*"), key=os.path.getmtime)[
                : 1 - _MAX_RECORDINGS
            ]:
                old.unlink()
            (self.folder / f"{_RECORDING}{key}-{Path(name).name}").write_bytes(content)
        return key

    def _keep(self, key: str, recorded: Trace) -> None:
        with self.lock:
            self.traces[key] = recorded
            while len(self.traces) > _MAX_RECORDINGS:
                self.traces.pop(next(iter(self.traces)))

    def _reload(self, key: str, name: str) -> Trace | None:
        """A recording that an earlier process took."""
        path = self.folder and self.folder / f"{_RECORDING}{key}-{Path(name).name}"
        if path is None or not _KEY.fullmatch(key) or not path.is_file():
            return None
        self._keep(key, read_trace(path))
        return self.traces[key]

    def compare_step(self, key: str, name: str, step: SimulatedStep) -> dict[str, Any]:
        """The figure and the sentences of a recorded step compared with a simulated one.

        They are compared call by call where both are of as many ranks. Otherwise the recording is shown
        without the simulated step. Raises InputError where the recording is not here, as after another start
        of the page.
        """
        recorded = self.traces.get(key) or self._reload(key, name)
        if recorded is None:
            raise InputError(
                f"{name} stood here; an address names a recording and cannot hold it: choose the file again"
            )
        is_whole = step.is_complete or step.is_loop
        if step.outcome.trace.world_size != recorded.world_size or not is_whole:
            figure, lines = _show_unmatched(recorded.typical_step(), name, step.outcome.trace.world_size)
        else:
            check_size(step.job)
            compared = compare(step.whole_outcome.trace, recorded, names=("simulated", name))
            figure, lines = twin_timeline(compared), str(compared).splitlines()
        return {"twins": figure.to_plotly_json(), "words": "\n".join(lines)}


def show_recorded(app: Any, backends: Backends) -> None:
    """Show the recording that the page names with each answer."""
    from dash import Input, Output

    @app.callback(  # type: ignore[untyped-decorator]
        Output("recorded", "data"), Input("recording", "data"), Input("asked", "data")
    )
    def show(recording: Mapping[str, str] | None, request: Mapping[str, Any] | None) -> Any:
        if not recording or not request:
            return None
        arguments = recording["key"], recording["name"], request["shown"], request["more"]
        comparison_data, error = run_safely(backends.answer_worker.result, "compare_recording", *arguments)
        return {"words": error} if comparison_data is None else comparison_data

    app.clientside_callback(
        "(clicks) => clicks ? null : window.dash_clientside.no_update",
        Output("recording", "data", allow_duplicate=True),
        Input("forget", "n_clicks"),
        prevent_initial_call=True,
    )


def _read(path: Path, content: bytes, name: str) -> Trace:
    path.write_bytes(content)
    try:
        return read_trace(path)
    except InputError as error:
        raise InputError(str(error).replace(str(path), name)) from None


def _show_unmatched(recorded: Trace, name: str, world_size: int) -> tuple[Figure, list[str]]:
    breakdown = step_breakdown(recorded)
    total_seconds = sum(breakdown.seconds.values())
    part_texts = [
        f"{meaning.label} {breakdown.seconds[key] / total_seconds * 100:.0f} %"
        for key, meaning in BREAKDOWN.items()
        if breakdown.seconds.get(key)
    ]
    ranks = format_count(recorded.world_size, "rank")
    lines = [
        f"{name}: a step of {format_seconds(recorded.step_seconds)} on {ranks}: {', '.join(part_texts)}.",
        f"The page's job has {world_size:,} ranks; with as many, both are compared call by call.",
    ]
    return stream_timeline(recorded, breakdown), lines
