"""Fits the CPU and long attention to Llama-3.1-8B on 8 H200 and B200 (role "calibrate" only).

    python validation/published/calibrate_offload.py [TABLE.csv]

Rows of stas00-h200-b200 (ZeRO-3 with CPU-Adam, 8k to 256k tokens; ZeRO-2 without offload at 8k) and
stas00-b200-1gpu. Per machine, two or three numbers by least squares on the logarithm of predicted over
measured: the CPU's fraction of its memory bandwidth; on H200 the backward of FlashAttention-3 (its forward is
measured); on B200 the scales of FlashAttention-4 and of the products, for which there is no measurement.
Prints the factors, and the error of every row with the current files, fitted, and left out of the fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from validation.published.predict import predict_row, shipped_tables
from validation.published.table import PublishedRun, read_runs
from zsim.arrays import Floats
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.job import Job

STEP = 0.05
SOURCES = ("stas00-h200-b200", "stas00-b200-1gpu")
MACHINES = {"H200": ("cpu", "attention backward"), "B200": ("cpu", "attention", "gemm")}


@dataclass(frozen=True)
class Scale:
    """Changes a job's hardware by factors, by the names of MACHINES."""

    factors: tuple[tuple[str, float], ...]

    def __call__(self, job: Job) -> Job:
        cluster = job.cluster
        for name, factor in self.factors:
            cluster = SCALERS[name](cluster, factor)
        return replace(job, cluster=cluster)


def _cpu(cluster: Cluster, factor: float) -> Cluster:
    rates = cluster.offload
    update = {
        "optimizer_fraction": rates.optimizer_fraction * factor,
        "copy_fraction": rates.copy_fraction * factor,
    }
    return cluster.model_copy(update={"offload": rates.model_copy(update=update)})


def _gpu(cluster: Cluster, part: str, *names: str, factor: float) -> Cluster:
    gpu: Gpu = cluster.gpu
    table = getattr(gpu, part)
    update = {name: getattr(table, name) * factor for name in names}
    gpu = gpu.model_copy(update={part: table.model_copy(update=update)})
    return cluster.model_copy(update={"gpu": gpu})


SCALERS: dict[str, Callable[[Cluster, float], Cluster]] = {
    "cpu": _cpu,
    "attention": lambda cluster, factor: _gpu(
        cluster, "attention", "forward_fraction", "backward_fraction", factor=factor
    ),
    "attention backward": lambda cluster, factor: _gpu(
        cluster, "attention", "backward_fraction", factor=factor
    ),
    "gemm": lambda cluster, factor: _gpu(cluster, "gemm", "max_fraction", factor=factor),
}


def log_errors(runs: Sequence[PublishedRun], names: Sequence[str], theta: Floats) -> Floats:
    """Logarithm of predicted over measured seconds, one per run."""
    tweak = Scale(tuple(zip(names, np.exp(theta).tolist(), strict=True)))
    errors = [predict_row(run, tweak=tweak).relative_error for run in runs]
    logarithms: Floats = np.log1p(np.array(errors, dtype=float))
    return logarithms


def fit(runs: Sequence[PublishedRun], names: Sequence[str]) -> Floats:
    """Gauss-Newton, starting from the current files."""
    theta = np.zeros(len(names))
    for _ in range(5):
        errors = log_errors(runs, names, theta)
        columns = []
        for place in range(len(names)):
            moved = theta.copy()
            moved[place] += STEP
            columns.append((log_errors(runs, names, moved) - errors) / STEP)
        step, *_ = np.linalg.lstsq(np.stack(columns, axis=1), -errors, rcond=None)
        theta = np.clip(theta + step, -1.5, 1.5)
        if np.max(np.abs(step)) < 1e-4:
            break
    return theta


def report(machine: str, runs: Sequence[PublishedRun]) -> None:
    names = MACHINES[machine]
    theta = fit(runs, names)
    now, fitted = log_errors(runs, names, np.zeros(len(names))), log_errors(runs, names, theta)
    print(f"{machine}: " + ", ".join(f"{n} x {f:.3f}" for n, f in zip(names, np.exp(theta), strict=True)))
    unseen = []
    for place, run in enumerate(runs):
        rest = [other for other in runs if other is not run]
        unseen.append(float(log_errors([run], names, fit(rest, names))[0]))
        figures = (now[place], fitted[place], unseen[-1])
        print(f"    {run.row_id}  " + "  ".join(f"{np.expm1(figure):+7.1%}" for figure in figures))
    for what, errors in (("as the files are", now), ("fitted", fitted), ("left out", np.array(unseen))):
        print(f"    {what}: mean absolute {np.abs(np.expm1(errors)).mean():.2%}")


def main(paths: Sequence[str]) -> None:
    table = read_runs([Path(path) for path in paths] or shipped_tables())
    runs = [run for run in table.runs if run.role == "calibrate" and run.source in SOURCES]
    for machine in MACHINES:
        report(machine, [run for run in runs if run.text("gpu").startswith(machine)])


if __name__ == "__main__":
    main(sys.argv[1:])
