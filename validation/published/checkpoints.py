"""Published saves and loads against zsim, into checkpoints.md.

python -m validation.published.checkpoints            prints the page
python -m validation.published.checkpoints --update   writes it

`checkpoint_rows.csv` has the rows, `checkpoint_rows.toml` what a prediction takes of each, or why there is
none.
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.api import simulate
from zsim.goodput.checkpoints.cost import cost_of
from zsim.goodput.checkpoints.machine import OverlappedStep, overlapped_step
from zsim.goodput.checkpoints.saved import saved_files
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.checkpoint import CheckpointTable
from zsim.specs.experiment.run.run import StorageTable, resolve_storage
from zsim.specs.experiment.tables import Experiment

FOLDER = Path(__file__).parent
PAGE = FOLDER / "checkpoints.md"
FACTOR = 2.0  # that a prediction may be off by
_OWN_KEYS = ("what", "bound", "storage", "checkpoint")
_NO_STEP = OverlappedStep(1.0, 0.0, 1.0, 0)  # a save that blocks has none beside it


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A published figure and zsim's. `is_bound`: the published one is an upper bound."""

    row: Mapping[str, str]
    what: str
    predicted: float
    store: str
    is_bound: bool

    @property
    def measured(self) -> float:
        return float(self.row["measured_value"])

    @property
    def is_time(self) -> bool:
        return self.what != "bytes"

    @property
    def is_met(self) -> bool:
        """Within the factor; a bound: not above it."""
        if self.is_bound:
            return self.predicted <= self.measured
        return self.measured / FACTOR <= self.predicted <= FACTOR * self.measured


def rows() -> dict[str, dict[str, str]]:
    """The rows by number."""
    with open(FOLDER / "checkpoint_rows.csv", newline="") as file:
        return {row["row_id"]: row for row in csv.DictReader(file)}


def described() -> dict[str, Any]:
    """The content of checkpoint_rows.toml."""
    return tomllib.loads((FOLDER / "checkpoint_rows.toml").read_text())


def predicted() -> list[PredictedRow]:
    """Every row that can be predicted."""
    published = rows()
    return [_predict(published[number], entry) for number, entry in described()["predicted"].items()]


def _predict(row: Mapping[str, str], entry: Mapping[str, Any]) -> PredictedRow:
    experiment = Experiment(**{key: value for key, value in entry.items() if key not in _OWN_KEYS})
    table = CheckpointTable(**entry.get("checkpoint", {}))
    stated = entry.get("storage")
    storage = resolve_storage(None) if stated is None else StorageTable(**stated)
    job, step = resolve(experiment), _NO_STEP
    if table.mode != "sync":
        result = simulate(experiment)
        job, step = result.job, overlapped_step(result)
    found = cost_of(job, saved_files(job, table), table, storage, step)
    values = {
        "blocking": found.blocking_seconds, "durable": found.durable_seconds,
        "slowdown": found.slowdown_seconds, "load": found.load_seconds, "bytes": float(found.bytes),
    }  # fmt: skip
    store = "" if stated is None else stated["source"]
    return PredictedRow(row, entry["what"], values[entry["what"]], store, entry.get("bound", False))


def page() -> str:
    """The page."""
    found = predicted()
    times = [one for one in found if one.is_time]
    met = sum(one.is_met for one in times)
    lines = [
        "# Published saves and loads",
        "",
        "Made by `python -m validation.published.checkpoints --update`. Rows of role report that state what",
        "a prediction needs: the model's shape, the ranks that share its states, a mechanism that zsim has",
        "and, where the time depends on it, the store's rate from another source than the row's own time.",
        "What the host takes (archives, planner, finding states) is measured on another machine",
        "(`traces/checkpoints/clock.json`, `zsim/presets/checkpoints.toml`), not on any of these rows.",
        "",
        f"Within a factor of {FACTOR:g}, bounds as bounds: **{met} of {len(times)}** times.",
        "",
        "| row | run | what | published | zsim | zsim / published | met |",
        "|---|---|---|---:|---:|---:|---|",
        *map(_line, found),
        "",
        "What the rates of stores are from:",
        "",
        *(f"- {one.row['row_id']}: {one.store}." for one in found if one.store),
        "",
        "## Misses",
        "",
        *_misses(found),
        "",
        "## Rows that are not predicted, and why",
        "",
        *(f"- {why}: {', '.join(numbers)}." for why, numbers in described()["reasons"].items()),
        "",
    ]
    return "\n".join(lines)


def _line(one: PredictedRow) -> str:
    row = one.row
    run = ", ".join(filter(None, (row["model"], row["framework"], row["mechanism"], _gpus(row))))
    bound = "at most " if one.is_bound else ""
    figures = f"{bound}{_figure(one.measured, one)} | {_figure(one.predicted, one)}"
    ratio = f"{one.predicted / one.measured:.2f}"
    return f"| {row['row_id']} | {run} | {one.what} | {figures} | {ratio} | {'yes' if one.is_met else 'no'} |"


def _gpus(row: Mapping[str, str]) -> str:
    return f"{row['gpus']} GPUs" if row["gpus"] else ""


def _figure(value: float, one: PredictedRow) -> str:
    return f"{value:.3g} s" if one.is_time else f"{value / 1e9:,.1f} GB"


def _misses(found: list[PredictedRow]) -> list[str]:
    missed = [one.row["row_id"] for one in found if not one.is_met]
    return [f"- {number}: not explained." for number in missed] or ["None."]


def main(words: list[str]) -> int:
    if "--update" in words:
        PAGE.write_text(page())
    else:
        print(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
