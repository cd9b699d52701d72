"""Predict experiments whose steps were measured, and print the errors by source, kind of job and GPU.

python -m validation.published.measured_experiments RUNS.json [--rows TEXT] [--json FILE]

RUNS.json is a list of rows, each with an `experiment` (the keys of an experiment file), a `row_id`, a
`source` and, where they were published, `measured_step_seconds` and one of `measured_allocated_gb`,
`measured_reserved_gb` and `measured_device_gb` (10^9 bytes). `--rows` takes rows whose names contain TEXT.
Each row is simulated as it stands, as somebody who never saw its source would write it: no rule of
published_sources.toml applies. Exit code 2 says what is wrong with the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zsim
from zsim.errors import InputError, ZsimError
from zsim.study.measured.statistics import error_figures

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

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, less one."""
        if not (self.measured_seconds and self.predicted_seconds):
            return None
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured bytes, less one. What torch reserves is compared with what it allocates."""
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


def predict_experiment(row: Mapping[str, Any]) -> ExperimentError:
    """The step and memory of one row."""
    found = next((name for name in _MEMORY if row.get(f"measured_{name}_gb")), None)
    measured = round(row[f"measured_{found}_gb"] * 1e9) if found else None
    experiment, seconds = row["experiment"], row.get("measured_step_seconds")
    base = (row["row_id"], row["source"], _kind(experiment), str(experiment.get("cluster")), seconds)
    try:
        report = zsim.simulate(zsim.Experiment(**experiment)).report.to_dict()
    except ZsimError as error:
        return ExperimentError(*base, measured_bytes=measured, reason=str(error))
    peak = report["peak_bytes"]["gpu"]
    own = peak["total"] - (0 if found == "device" else peak["framework"])
    return ExperimentError(*base, report["step_seconds"], measured, own if found else None)


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
            found = [row.error for row in errors if key(row) == name and row.error is not None]
            if found:
                figures_of = error_figures(found)
                mean, middle = figures_of["mean_absolute_error"], figures_of["median_absolute_error"]
                yield (
                    f"  {name:34} {len(found):3} rows  mean {_percent(mean, '')}  "
                    f"median {_percent(middle, '')}  bias {_percent(figures_of['bias'])}"
                )


def _percent(value: float | None, sign: str = "+") -> str:
    return "-" if value is None else format(value, f"{sign}.1%")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="measured experiments")
    parser.add_argument("--rows", default="", help="rows whose names contain this text")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    try:
        rows = [row for row in read_experiments(options.runs) if options.rows in row["row_id"]]
    except InputError as error:
        print(f"measured_experiments: {error}", file=sys.stderr)
        return 2
    errors = [predict_experiment(row) for row in rows]
    for line in lines(errors):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) | {"error": row.error} for row in errors], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
