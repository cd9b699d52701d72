"""Predict experiments whose steps were measured, and print the errors by source, kind of job and GPU.

python -m validation.published.measured_experiments RUNS.json [--rows TEXT] [--studied] [--json FILE]
                                                              [--record]

RUNS.json, such as `experiments.json` here, is a list of rows, each with an `experiment` (the keys of an
experiment file), a `row_id`, a `source` and, where they were published, `measured_step_seconds` and one of
`measured_allocated_gb`, `measured_reserved_gb` and `measured_device_gb` (10^9 bytes), which is compared with
the same figure of zsim's. `--rows` takes rows whose names contain TEXT. Each row is simulated as it stands,
as somebody who never saw its source would write it: no rule of published_sources.toml applies. With
`--studied` those do that say what was found out of its source. `--record` writes the errors and what they
depend on to `TABLE`, in place of those of the same rows, and keeps the first error of a row: a source is
predicted blind once. Intervals and docs/accuracy.md are made of the first errors. Exit code 2 says what is
wrong with the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import zsim
from validation.published.shipped import format_validated_table
from validation.published.sources import changes_of_source
from zsim.errors import InputError, ZsimError
from zsim.report.fit import allocated_bytes, reserved_memory
from zsim.report.report import Report
from zsim.specs.experiment.load import change_experiment
from zsim.study.measured.prediction import error_figures
from zsim.validated.features import Features
from zsim.validated.runs import BLIND, Settings, ValidatedRun, read_validated

TABLE = Path(__file__).resolve().parent / "experiment_errors.csv"
_MEMORY = ("allocated", "reserved", "device")


@dataclass(frozen=True)
class ExperimentError:
    """A measured experiment and zsim's answer."""

    row_id: str
    source: str
    kind: str
    """The kind of job: its strategy, and whether it is a mixture of experts, adapted, or offloaded."""
    gpu: str
    measured_seconds: float | None
    predicted_seconds: float | None = None
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    reason: str | None = None
    """The reason why it could not be simulated."""
    predicted_range_seconds: tuple[float, float] | None = None
    """The interval of 80 % of the step."""
    features: Features | None = None
    """The features that the interval depends on."""
    input_ends: tuple[float, float] = (1.0, 1.0)
    """The spread of the job's inputs, which it depends on too (`Validation.input_ends`)."""

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, less one."""
        if not (self.measured_seconds and self.predicted_seconds):
            return None
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def is_within(self) -> bool | None:
        """Whether the measured step lies in its interval. None without both."""
        if not (self.measured_seconds and self.predicted_range_seconds):
            return None
        low, high = self.predicted_range_seconds
        return low <= self.measured_seconds <= high

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured bytes of the published figure, less one."""
        if not (self.measured_bytes and self.predicted_bytes):
            return None
        return self.predicted_bytes / self.measured_bytes - 1


def read_experiments(path: Path) -> list[dict[str, Any]]:
    """The rows of a file. Raises InputError for a file that is no such list."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}; expected a JSON list of measured experiments") from error
    missing = {"row_id", "source", "experiment"}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and missing <= set(row) for row in rows):
        raise InputError(f"{path}: expected a list of objects with row_id, source and experiment")
    return rows


def memory_figures(report: Report) -> dict[str, int]:
    """The fullest GPU's peak bytes by the figure that people publish: "allocated" and "reserved" of torch,
    and "device", which nvidia-smi shows. Where torch's allocator was not simulated it reserves what it
    allocates.
    """
    allocated, memory = allocated_bytes(report), reserved_memory(report)
    reserved = allocated if memory is None else max(allocated, memory.torch_bytes)
    outside = report.peaks["gpu"].at_total.get("framework", 0)
    return {"allocated": allocated, "reserved": reserved, "device": reserved + outside}


def predict_experiment(row: Mapping[str, Any], *, is_studied: bool = False) -> ExperimentError:
    """The step and memory of one row, with what was found out of its source if it `is_studied`."""
    found = next((name for name in _MEMORY if row.get(f"measured_{name}_gb")), None)
    measured = round(row[f"measured_{found}_gb"] * 1e9) if found else None
    experiment, seconds = row["experiment"], row.get("measured_step_seconds")
    base = (row["row_id"], row["source"], _kind(experiment), str(experiment.get("cluster")), seconds)
    try:
        asked = zsim.Experiment(**experiment)
        if is_studied:
            asked = change_experiment(asked, changes_of_source(row["source"], experiment))
        report = zsim.simulate(asked).report
    except ZsimError as error:
        return ExperimentError(*base, measured_bytes=measured, reason=str(error))
    content = report.to_dict()
    return ExperimentError(
        *base,
        content["step_seconds"],
        measured,
        memory_figures(report)[found] if found else None,
        predicted_range_seconds=content["step_seconds_range"],
        features=None if report.validation is None else report.validation.features,
        input_ends=(1.0, 1.0) if report.validation is None else report.validation.input_ends,
    )


def recorded_experiments(path: Path = TABLE) -> list[ValidatedRun]:
    """The recorded errors, in the columns of validated runs. Empty without a file."""
    return list(read_validated(path.read_text(encoding="utf-8"))) if path.exists() else []


def validated_experiments(
    rows: Iterable[Mapping[str, Any]], errors: Iterable[ExperimentError]
) -> list[ValidatedRun]:
    """The predicted experiments as validated runs, predicted blind."""
    validated = []
    for row, found in zip(rows, errors, strict=True):
        if found.features is None or not (found.measured_seconds and found.predicted_seconds):
            continue
        training, model = row["experiment"].get("training", {}), row["experiment"]["model"]
        settings = Settings(
            model if isinstance(model, str) else model.get("model_type", "config"),
            training.get("sequence_length", 0),
            training.get("micro_batch_size", 0),
            training.get("gradient_accumulation_steps", 1),
            ", ".join([str(training.get("precision", "")), *(["LoRA"] if training.get("lora") else [])]),
            0.0,
        )
        error = log(found.measured_seconds / found.predicted_seconds)
        validated.append(
            ValidatedRun(
                found.row_id, found.source, BLIND, row.get("tier", ""), found.features, settings,
                error, error, *found.input_ends,
            )
        )  # fmt: skip
    return validated


def merge_experiments(
    recorded: Iterable[ValidatedRun], rows: Iterable[Mapping[str, Any]], predicted: Iterable[ValidatedRun]
) -> list[ValidatedRun]:
    """The recorded runs with those of `rows` as they are predicted now, the error of their first prediction
    being the stranger's. One that no longer is predicted has none."""
    names, first = {row["row_id"] for row in rows}, {run.row_id: run for run in recorded}
    anew = [
        replace(run, stranger_error=first[run.row_id].stranger_error) if run.row_id in first else run
        for run in predicted
    ]
    return [*(run for name, run in first.items() if name not in names), *anew]


def _kind(experiment: Mapping[str, Any]) -> str:
    strategy, training = experiment.get("strategy", {}), experiment.get("training", {})
    words = [str(strategy.get("kind"))]
    if experiment.get("parallelism", {}).get("expert", 1) > 1:
        words.append("expert parallelism")
    if training.get("lora"):
        words.append("LoRA")
    if "offload" in json.dumps(strategy):
        words.append("offloading")
    return ", ".join([*words, str(training.get("precision"))])


def lines(errors: Sequence[ExperimentError]) -> Iterable[str]:
    """A line per row, then the errors by source, kind and cluster."""
    for row in errors:
        figures = [
            _percent(row.error),
            f"{row.measured_seconds:.3f} s" if row.measured_seconds else "-",
            f"{row.predicted_seconds:.3f} s" if row.predicted_seconds else "-",
            f"memory {_percent(row.memory_error)}",
        ]
        yield f"{row.row_id:34} {'  '.join(figures)}{'  ' + row.reason if row.reason else ''}"
    groups: tuple[tuple[str, Callable[[ExperimentError], str]], ...] = (
        ("source", lambda row: row.source),
        ("kind", lambda row: row.kind),
        ("cluster", lambda row: row.gpu),
        ("all", lambda row: "all"),
    )
    for title, key in groups:
        yield f"\nby {title}"
        for name in sorted({key(row) for row in errors}):
            of_group = [row for row in errors if key(row) == name]
            found = [row.error for row in of_group if row.error is not None]
            inside = [row.is_within for row in of_group if row.is_within is not None]
            if found:
                figures_of = error_figures(found)
                mean, middle = figures_of["mean_absolute_error"], figures_of["median_absolute_error"]
                yield (
                    f"  {name:34} {len(found):3} rows  mean {_percent(mean, '')}  "
                    f"median {_percent(middle, '')}  bias {_percent(figures_of['bias'])}  "
                    f"in the interval {sum(inside)} of {len(inside)}"
                )


def memory_lines(errors: Iterable[ExperimentError]) -> Iterable[str]:
    """The errors of memory by source, then of all rows and the mean of sources."""
    of_source: dict[str, list[float]] = {}
    for row in errors:
        if row.memory_error is not None:
            of_source.setdefault(row.source, []).append(row.memory_error)
    if not of_source:
        return
    yield "\nmemory by source"
    for name, found in (*sorted(of_source.items()), ("all", [e for own in of_source.values() for e in own])):
        figures = error_figures(found)
        mean, bias = _percent(figures["mean_absolute_error"], ""), _percent(figures["bias"])
        yield f"  {name:34} {len(found):3} rows  mean {mean}  bias {bias}"
    mean_of_sources = fmean(fmean(map(abs, found)) for found in of_source.values())
    yield f"  {'mean of sources':34} {len(of_source):3}       mean {_percent(mean_of_sources, '')}"


def _percent(value: float | None, sign: str = "+") -> str:
    return "-" if value is None else format(value, f"{sign}.1%")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="measured experiments")
    parser.add_argument("--rows", default="", help="rows whose names contain this text")
    parser.add_argument("--studied", action="store_true", help="with what was found out of the sources")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--record", action="store_true", help=f"write {TABLE.name} for docs/accuracy.md")
    options = parser.parse_args(arguments)
    try:
        rows = [row for row in read_experiments(options.runs) if options.rows in row["row_id"]]
    except InputError as error:
        print(f"measured_experiments: {error}", file=sys.stderr)
        return 2
    if options.record and options.studied:
        print("measured_experiments: --record is of rows as they stand; leave --studied out", file=sys.stderr)
        return 2
    errors = [predict_experiment(row, is_studied=options.studied) for row in rows]
    for line in (*lines(errors), *memory_lines(errors)):
        print(line)
    if options.record:
        runs = merge_experiments(recorded_experiments(), rows, validated_experiments(rows, errors))
        TABLE.write_text(format_validated_table(runs), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) | {"error": row.error} for row in errors], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
