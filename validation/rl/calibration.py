"""The constants of `zsim.workflows` and of `zsim.frameworks` that come from a table of published steps.

python -m validation.rl.calibration RUNS.csv ...

Rows of role `calibrate` alone are read. Each section prints what its rows say, and the statistic that the
constant is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean, median

from validation.rl.predict import RowPrediction, measured_phases, predict_rows
from validation.rl.steps import row_experiment
from validation.rl.table import RlRow, read_rows
from zsim.cost.inference.iteration import ADAPTER_SECONDS
from zsim.engine.simulator import Simulator
from zsim.errors import ZsimError
from zsim.specs.library import Library
from zsim.workflows.rl.job import RlJob, resolve_rl
from zsim.workflows.rl.phases import (
    BROADCAST_SHARE,
    broadcast_bandwidth,
    model_bytes,
    num_tensors,
    phase_times,
    reload_seconds,
)
from zsim.workflows.rl.result import simulate_rl

_ONE_SENDER = r"checkpoint-engine, |single sender"
"""Notes of broadcasts by buckets from one rank."""
_NO_BUCKETS = r"^per-tensor"
_COVERED = 0.9  # of errors, on one side of an end
_TRAINER = ("training", "old_logprobs", "reference")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.rl.calibration", description=__doc__)
    parser.add_argument("tables", nargs="+", type=Path, metavar="RUNS.csv")
    tables = parser.parse_args(arguments).tables
    try:
        rows = [row for row in read_rows(tables) if row.text("role") == "calibrate" and not row.is_engine]
    except ZsimError as error:
        print(f"validation.rl.calibration: {error}", file=sys.stderr)
        return 2
    predictions = {prediction.row_id: prediction for prediction in predict_rows(rows)}
    sections = _shares(rows), _phases(rows), _adapters(rows), _lengths(rows), _spreads(predictions, rows)
    for lines in sections:
        print(*lines, "", sep="\n")
    return 0


def _shares(rows: Sequence[RlRow]) -> Iterator[str]:
    """What broadcasts reach of the bandwidth of their links, and what those without buckets take beside."""
    for title, notes, value_of in (
        ("BROADCAST_SHARE: bytes/s of broadcasts over those of their links", _ONE_SENDER, _share),
        ("SINGLE_TENSOR_SECONDS", _NO_BUCKETS, _single_tensor_seconds),
    ):
        yield title
        values = []
        for row, job in _broadcasts(rows, notes):
            values.append(value_of(job, row.number("sync_s") or 0.0))
            yield f"  {row.row_id} {values[-1]:.3g}"
        if values:
            yield f"  geometric mean {exp(fmean(map(log, values))):.3g}"


def _broadcasts(rows: Sequence[RlRow], notes: str) -> Iterator[tuple[RlRow, RlJob]]:
    simulator, library = Simulator(), Library()
    for row in rows:
        if row.has_word("sync-only", "algorithm") and row.has_word(notes, "notes"):
            job = resolve_rl(row_experiment(row, library).experiment, simulator)
            is_issue_alone = (row.number("sync_s") or 0.0) < job.sync.seconds
            if job.transport == "broadcast" and not is_issue_alone:
                yield row, job


def _share(job: RlJob, measured: float) -> float:
    rates = job.sync
    moving = measured - rates.seconds - rates.seconds_per_tensor * num_tensors(job.update_job.model)
    return model_bytes(job) / moving / broadcast_bandwidth(job)


def _single_tensor_seconds(job: RlJob, measured: float) -> float:
    moving = model_bytes(job) / (BROADCAST_SHARE * broadcast_bandwidth(job))
    return (measured - job.sync.seconds - moving) / num_tensors(job.update_job.model)


@dataclass(frozen=True)
class OffloadedRun:
    """A run of verl with its parameters on the host: seconds of its phases less those of their passes."""

    row_id: str
    moved_bytes: float
    """Of a GPU, to it and back."""
    residuals: Mapping[str, float]


def offloaded_runs(rows: Sequence[RlRow]) -> list[OffloadedRun]:
    """The runs of verl whose phases are in `rows`."""
    simulator, library = Simulator(), Library()
    runs = []
    for row in rows:
        measured = measured_phases(row)
        if row.has_word("verl", "framework") and set(_TRAINER) <= set(measured):
            job = resolve_rl(row_experiment(row, library).experiment, simulator)
            times = phase_times(job, simulator)
            reload = reload_seconds(job, times.states)
            extra = job.framework.controllers[job.table.placement].phases
            residuals = {
                phase: measured[phase] - (getattr(times, phase) - reload - extra.get(phase, 0.0))
                for phase in _TRAINER
            }
            runs.append(OffloadedRun(row.row_id, reload * job.framework.reload_bandwidth, residuals))
    return runs


def reload_bandwidth(runs: Sequence[OffloadedRun]) -> float:
    """By least squares of what references take more than their passes, which have no other time."""
    squares = sum(run.moved_bytes**2 for run in runs)
    return squares / sum(run.moved_bytes * run.residuals["reference"] for run in runs)


def phase_seconds(runs: Sequence[OffloadedRun], bandwidth: float) -> dict[str, float]:
    """Medians of what phases take more than their passes and reloads."""
    return {
        phase: median(run.residuals[phase] - run.moved_bytes / bandwidth for run in runs)
        for phase in ("training", "old_logprobs")
    }


def _phases(rows: Sequence[RlRow]) -> Iterator[str]:
    """Seconds of the trainer's phases besides its passes."""
    yield "RELOAD_BANDWIDTH and PHASES of verl, from measured seconds less those of the simulated passes"
    if runs := offloaded_runs(rows):
        for run in runs:
            words = ", ".join(f"{phase} {value:.2f}" for phase, value in run.residuals.items())
            yield f"  {run.row_id} {words}, for {run.moved_bytes / 1e9:.1f} GB"
        bandwidth = reload_bandwidth(runs)
        yield f"  RELOAD_BANDWIDTH {bandwidth / 1e9:.0f}e9"
        for phase, value in phase_seconds(runs, bandwidth).items():
            yield f"  {phase} {value:.1f}"


def adapter_seconds(rows: Sequence[RlRow]) -> dict[str, float]:
    """Seconds of Python of a product's adapters by run: what is simulated, and what the rollout took more,
    over its iterations and the products of a pass. Launches last longer than kernels there."""
    simulator, library = Simulator(), Library()
    seconds = {}
    for row in rows:
        measured = measured_phases(row).get("rollout")
        if row.has_word("lora", "algorithm") and measured:
            result = simulate_rl(row_experiment(row, library).experiment, simulator)
            if result.job.serves_adapters:
                iterations = max(log.iterations for log in result.step.logs)
                products = iterations * sum(result.job.model.products.values())
                seconds[row.row_id] = ADAPTER_SECONDS + (measured - result.step.rollout) / products
    return seconds


def _adapters(rows: Sequence[RlRow]) -> Iterator[str]:
    yield "ADAPTER_SECONDS"
    if seconds := adapter_seconds(rows):
        for row_id, value in seconds.items():
            yield f"  {row_id} {1e3 * value:.2f} ms"
        yield f"  geometric mean {1e3 * exp(fmean(map(log, seconds.values()))):.2f} ms"


def _lengths(rows: Sequence[RlRow]) -> Iterator[str]:
    """Mean lengths of responses over their caps."""
    yield "Mean length of responses over their cap"
    shares, means = [], []
    for row in rows:
        mean, prompt = row.number("response_len_mean"), row.number("prompt_len_mean") or 0.0
        total = row.number("total_len_max")
        cap = row.number("response_len_max") or (total - prompt if total else None)
        if mean and cap:
            shares.append(mean / cap)
            means.append(mean)
    if shares:
        geometric = exp(fmean(map(log, shares)))
        yield f"  {len(shares)} rows, {min(shares):.2f} to {max(shares):.2f}, geometric mean {geometric:.3f}"
        yield f"  longest mean {max(means):,.0f} tokens"


def _spreads(predictions: Mapping[str, RowPrediction], rows: Sequence[RlRow]) -> Iterator[str]:
    """The factors of `zsim.workflows.rl.result`, below and above what is simulated."""
    yield "Spreads: simulated over measured seconds"
    kinds: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        prediction = predictions[row.row_id]
        pairs: dict[str, tuple[float | None, float | None]] = {}
        pairs["step"] = (prediction.predicted_seconds, prediction.measured_seconds)
        for phase, measured in prediction.measured_phases.items():
            kind = "trainer" if phase in _TRAINER else f"{phase} of {row.text('source')}"
            pairs[f"{kind}: {phase}"] = prediction.predicted_phases.get(phase), measured
        for name, (simulated, found) in pairs.items():
            if simulated and found:
                kinds.setdefault(name.partition(":")[0], []).append((simulated / found, row.row_id))
    for kind, ratios in kinds.items():
        place = min(len(ratios), ceil(_COVERED * (len(ratios) + 1))) - 1
        ordered = sorted(ratio for ratio, _ in ratios)
        yield f"  {kind}, {len(ratios)}: {ordered[place]:.2f} below, {1 / ordered[-1 - place]:.2f} above"
        yield "    " + ", ".join(f"{name} {ratio:.2f}" for ratio, name in ratios)


if __name__ == "__main__":
    sys.exit(main())
