"""`zsim.sweep`: one experiment at many points."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.report.views.displayable import Displayable, Figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import COMMUNICATION
from zsim.report.views.result import Column
from zsim.report.views.text.plain import table
from zsim.resources import EXAMPLE
from zsim.specs.experiment.tables import Experiment
from zsim.specs.user_code import UserCode
from zsim.study.experiment_source import ExperimentSource, plain_table
from zsim.study.sweep.study_file import Study, load_study, study_from
from zsim.study.sweep.sweep import Row, Sweep, csv_text, run_sweep
from zsim.units import format_amount, format_bytes, format_percent

_NUM_BEST = 5
_RESULTS = ("status", "fits", "step_seconds", "tokens_per_second_per_gpu", "mfu_fraction", "gpu_peak_bytes")
_RUN_COLUMNS = ("expected_days", "goodput_fraction", "run_gpu_hours", "run_money")


class SweepResult(Displayable, Sweep):
    """A study that has run: `rows`, `to_frame()`, `best()`, and step times as `figure()`.

    A point that cannot be simulated is a row with `status` "error" and its reason in `error`.
    """

    def records(self) -> Sequence[Row]:
        """One row per point: the axes' values, the resolved settings, the results."""
        return self.rows

    def best(self, count: int = _NUM_BEST) -> list[Row]:
        """The rows of the `count` points that fit with the most tokens per second and GPU, best first.

        Of equal ones, complete runs with the fewest days come first.
        """
        return sorted(self._fitting_rows(), key=_sort_key)[:count]

    def headline(self) -> str:
        fresh = self.done - self.cached
        return (
            f"{self.done} of {len(self.rows)} points: {fresh} simulated, {self.cached} known, {self.failed} "
            "failed"
        )

    def columns(self) -> Sequence[str]:
        run_columns = [name for name in _RUN_COLUMNS if any(row.get(name) is not None for row in self.rows)]
        failed = ["error"] if self.failed else []
        return [*self.study.keys, *_RESULTS, *run_columns, *failed]

    def lines(self) -> Iterator[str]:
        yield self.headline()
        best = self.best()
        if best:
            cells = _cells_per_column(best)
            columns = [
                *map(Column, cells),
                Column(f"fastest that fit, of {len(self._fitting_rows())}", is_left=True),
            ]
            rows = [
                [*(cell(row) for cell in cells.values()), ", ".join(_values(row, self.study.keys))]
                for row in best
            ]
            yield from ["", *table(columns, rows)]
        yield from _reasons("failed", [row["error"] for row in self.rows if row["status"] == "error"])
        yield from _reasons("without a whole run", [row.get("run_error") for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """The rows with the axes, as plain data."""
        return {"name": self.study.name, "axes": list(self.study.keys), "rows": [dict(r) for r in self.rows]}

    def plots(self) -> Figures:
        return {"points": lambda: points_figure(self)}

    def pages(self) -> Mapping[str, str]:
        return {"results.csv": csv_text(self.rows)}

    def _fitting_rows(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "ok" and row["fits"]]


def sweep(
    study: ExperimentSource,
    axes: Mapping[str, Iterable[Any]] | None = None,
    *,
    zipped: Iterable[Mapping[str, Iterable[Any]]] = (),
    where: str | Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    backend: str = "loky",
    scheduler: str | None = None,
    code: UserCode | None = None,
) -> SweepResult:
    """Simulate an experiment at every combination of the values of `axes`, as `zsim sweep` does.

    `study` is a study file (or its content as a dict). With `axes` it is an experiment instead: a file, a
    `zsim.Experiment`, a dict, or None for the README's example. Keys of `axes` are dotted keys of the
    experiment, and values may be typed settings. `zipped` holds axes whose values go in parallel. `where`
    holds conditions on the keys, e.g. "nodes * 8 >= 16". `overrides` are keys that are set at all points.
    `out` is a folder in which results.csv and results.parquet are written too. `cache` is a folder of
    finished points, which are not simulated again. `jobs` is the number of processes, by default that of
    cores. `code` is the permission to run functions that files name as models, which `zsim sweep
    --allow-code` gives.

        found = zsim.sweep(None, {"nodes": [2, 4], "training.micro_batch_size": [1, 2]})
        found.to_frame().sort_values("step_seconds")

    Raises InputError for an unknown key and a condition that keeps no point.
    """
    loaded_study = _study(study, axes, list(zipped), where, overrides or {}, code)
    finished = run_sweep(
        loaded_study,
        None if out is None else Path(out),
        jobs=jobs or os.cpu_count() or 1,
        backend=backend,
        scheduler=scheduler,
        cache=None if cache is None else Path(cache),
    )
    return SweepResult(**{field.name: getattr(finished, field.name) for field in fields(finished)})


def _study(
    source: ExperimentSource,
    axes: Mapping[str, Iterable[Any]] | None,
    zipped: list[Mapping[str, Iterable[Any]]],
    where: str | Sequence[str],
    overrides: Mapping[str, Any],
    code: UserCode | None,
) -> Study:
    changes = {key: plain_table(value) for key, value in overrides.items()}
    if axes is None and not zipped:
        if isinstance(source, str | Path):
            return load_study(source, changes, code)
        if isinstance(source, Mapping):
            return study_from(source, folder=Path.cwd(), overrides=changes, code=code)
        raise InputError("sweep: nothing varies; expected a study file, or axes={'nodes': [1, 2, 4]}")
    data: dict[str, Any] = {
        "axes": _plain_axes(axes or {}),
        "zip": [_plain_axes(zipped_axes) for zipped_axes in zipped],
    }
    data["where"] = where if isinstance(where, str) else list(where)
    if isinstance(source, Experiment):
        data["base"] = source.model_dump(exclude_unset=True)
    elif isinstance(source, Mapping):
        data["base"] = {key: plain_table(value) for key, value in source.items()}
    else:
        data["experiment"] = str(Path(EXAMPLE if source is None else source).resolve())
    return study_from(data, folder=Path.cwd(), overrides=changes, code=code)


def _plain_axes(axes: Mapping[str, Iterable[Any]]) -> dict[str, Any]:
    """The axes with lists of plain values. Ranges ({from, to, factor}) stay."""
    columns: dict[str, Any] = {}
    for key, values in axes.items():
        if isinstance(values, Mapping | str) or not isinstance(values, Iterable):
            columns[key] = values  # a range, or refused with the rest of what is wrong
            continue
        plain_values = values.tolist() if hasattr(values, "tolist") else values
        columns[key] = [plain_table(value) for value in plain_values]
    return columns


def _values(row: Row, keys: Sequence[str]) -> Iterator[str]:
    """The row's values of the keys. A label replaces the tables next to it."""
    if "label" in keys:
        yield str(row["label"])
    for key in keys:
        value = row[key]
        if key != "label" and not ("label" in keys and isinstance(value, dict)):
            yield (
                f"{key.rpartition('.')[2]} {value:g}"
                if isinstance(value, float)
                else (f"{key.rpartition('.')[2]} {value}")
            )


def _sort_key(row: Row) -> tuple[float, float]:
    days = row.get("expected_days")
    return -(row["tokens_per_second_per_gpu"] or 0.0), math.inf if days is None else days


def _reasons(label: str, reasons: Iterable[str | None]) -> Iterator[str]:
    """The most frequent reasons, each with how many points it is of."""
    for reason, count in Counter(filter(None, reasons)).most_common(_NUM_BEST):
        yield f"\n{count} {label}: {reason}"


def _cells_per_column(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """A cell of each column, by its title. Complete runs have their days, goodput and cost instead of the
    MFU.
    """
    tokens = {"tokens/s/GPU": lambda row: f"{row['tokens_per_second_per_gpu'] or 0.0:,.0f}"}
    memory = {"GPU memory": lambda row: format_bytes(row["gpu_peak_bytes"])}
    if all(row.get("expected_days") is None for row in rows):
        return {**tokens, "MFU": lambda row: format_percent(row["mfu_fraction"], ""), **memory}
    is_priced = any(row.get("run_money") is not None for row in rows)
    cost = "run_money" if is_priced else "run_gpu_hours"
    return {
        **tokens,
        **memory,
        "days": lambda row: format_amount(row.get("expected_days")),
        "goodput": lambda row: format_percent(row.get("goodput_fraction"), ""),
        "cost" if is_priced else "GPU-hours": lambda row: format_amount(row.get(cost)),
    }


def points_figure(sweep_result: SweepResult) -> Figure:
    """Tokens per second and GPU over GB of the fullest GPU, one mark per point. Open marks do not fit."""
    figure = Figure(layout(460, hovermode="closest"))
    for name, fits, symbol in (("fits", True, "circle"), ("does not fit", False, "circle-open")):
        rows = [row for row in sweep_result.rows if row["status"] == "ok" and row["fits"] is fits]
        figure.add_scatter(
            name=name, mode="markers", marker={"color": COMMUNICATION.color, "symbol": symbol, "size": 9},
            x=[row["gpu_peak_bytes"] / 1e9 for row in rows],
            y=[row["tokens_per_second_per_gpu"] or 0.0 for row in rows],
            hovertext=["<br>".join(_values(row, sweep_result.study.keys)) for row in rows], hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title_text="GB of the fullest GPU", rangemode="tozero")
    figure.update_yaxes(title_text="tokens/s/GPU", rangemode="tozero", automargin=True)
    return figure
