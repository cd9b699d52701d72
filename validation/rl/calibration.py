"""The constants of `zsim.workflows` and of `zsim.frameworks` that come from a table of published steps.

python -m validation.rl.calibration RUNS.csv ...

Rows of role `calibrate` alone are read. Each section prints what its rows say, and the statistic that the
constant is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean, median

from validation.rl.predict import RowPrediction, predict_rows
from validation.rl.steps import row_experiment
from validation.rl.table import RlRow, read_rows
from zsim.engine.simulator import Simulator
from zsim.errors import ZsimError
from zsim.specs.library import Library
from zsim.workflows.rl.framework import workflow_of
from zsim.workflows.rl.job import RlJob, resolve_rl
from zsim.workflows.rl.phases import broadcast_bandwidth, model_bytes, num_tensors

_ONE_SENDER = r"checkpoint-engine, |single sender"
"""Notes of broadcasts by buckets from one rank."""
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
    for lines in (_shares(rows), _phases(rows, predictions), _lengths(rows), _spreads(predictions, rows)):
        print(*lines, "", sep="\n")
    return 0


def _shares(rows: Sequence[RlRow]) -> Iterator[str]:
    """What broadcasts reach of the bandwidth of their links."""
    yield "BROADCAST_SHARE: bytes/s of broadcasts from one rank, over those of its links"
    simulator, library = Simulator(), Library()
    shares = []
    for row in rows:
        if row.has_word("sync-only", "algorithm") and row.has_word(_ONE_SENDER, "notes"):
            asked = row_experiment(row, library)
            job = resolve_rl(asked.experiment, simulator)
            if job.transport == "broadcast" and not row.has_word("offload", "train_parallelism"):
                shares.append(_share(job, row.number("sync_s") or 0.0))
                yield f"  {row.row_id} {shares[-1]:.3f}"
    if shares:
        yield f"  geometric mean {exp(fmean(map(log, shares))):.3f}"


def _share(job: RlJob, measured: float) -> float:
    rates = job.sync
    moving = measured - rates.seconds - rates.seconds_per_tensor * num_tensors(job.update_job.model)
    return model_bytes(job) / moving / broadcast_bandwidth(job)


def _phases(rows: Sequence[RlRow], predictions: Mapping[str, RowPrediction]) -> Iterator[str]:
    """Seconds of the trainer's phases besides its passes."""
    yield "PHASES of verl: measured seconds less those of the simulated passes"
    seconds = workflow_of("verl").controllers["colocated"].phases
    for phase, extra in seconds.items():
        residuals = {
            row.row_id: row_prediction.measured_phases[phase] - row_prediction.predicted_phases[phase] + extra
            for row in rows
            if (row_prediction := predictions[row.row_id]).predicted_phases.get(phase)
            and row.has_word("verl", "framework")
            and phase in row_prediction.measured_phases
        }
        if residuals:
            yield f"  {phase} " + ", ".join(f"{name} {value:.2f}" for name, value in residuals.items())
            yield f"  {phase} median {median(residuals.values()):.2f}"


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
