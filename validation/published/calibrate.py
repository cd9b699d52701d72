"""Fits a few numbers of the GPU files to published training steps (role "calibrate" only).

    python validation/published/calibrate.py TABLE.csv
    python validation/published/calibrate.py ALL_TRAINING_RUNS.csv --fit h100

Gauss-Newton on the logarithm of predicted over measured, with Huber's weights, so that runs which were slow
for a reason that no table states do not distort the fit. Prints the fitted numbers, the residual, and the
error on rows and groups that are left out of the fit in turn (each model size; each table), by the linearised
model. The fit h100 is of that GPU's products alone, to all programs' rows: what torch's own sustain, and the
ratio to them of those that Transformer Engine calls. It is printed with every source weighing the same too.
Most of its rows are not among those shipped here.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from validation.published.predict import predict_rows
from validation.published.table import PublishedRun, read_runs
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.job import Job

HUBER = 0.03
STEP = 0.05
RESAMPLED = 1000


@dataclass(frozen=True)
class Parameter:
    """One number: how to scale it in a GPU, in which GPUs, and its bounds relative to its current value."""

    name: str
    gpus: tuple[str, ...]
    low: float
    high: float


A100 = ("a100-sxm-80gb", "a100-sxm-40gb")
H100 = ("h100-sxm-80gb", "h100-sxm-96gb-500w")
TOGETHER = (
    Parameter("gemm.max_fraction", A100, 0.8, 1.25),  # one chip, clock and power limit, two memories
    Parameter("gemm.max_fraction", ("h100-sxm-80gb",), 0.8, 1.25),
    Parameter("gemm.max_fraction", ("h100-sxm-96gb-500w",), 0.8, 1.25),
    Parameter("gemm.k_half", A100 + H100, 0.3, 4.0),
    Parameter("flash1-triton", A100, 0.6, 1.8),
    Parameter("flash1-triton", H100, 0.6, 1.8),
    Parameter("flash1-triton.sequence_half", A100 + H100, 0.2, 5.0),
    Parameter("flash1-triton.head_dim_half", A100 + H100, 0.2, 5.0),
    Parameter("host", A100 + H100, 0.4, 2.5),
)


@dataclass(frozen=True)
class Fit:
    """Which rows of role calibrate determine which numbers."""

    sources: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    gpu: str = ""

    def uses(self, run: PublishedRun) -> bool:
        """Whether the row is of these sources and of a GPU whose name begins so. Of nanotron's sweep only
        what the network does not dominate: no pipeline, on up to 32 GPUs, tensor ranks within a node."""
        if run.source not in self.sources or not run.text("gpu").startswith(self.gpu):
            return False
        small = run.count("pp") == 1 and (run.count("tp") or 1) <= 8 and (run.count("n_gpus") or 0) <= 32
        return small or run.source != "nanotron-sweep"


FITS = {
    # All rows of role calibrate under FSDP and DDP on A100 and H100, except the single step of 2020 that
    # determines a V100.
    "together": Fit(("mosaic-2024-01", "torchtitan-pr135", "fms-acceleration", "litgpt-thunder"), TOGETHER),
    "h100": Fit(
        ("mosaic-2024-01", "dgxc-megatron", "nanotron-tp-scaling", "nanotron-sweep"),
        (
            Parameter("gemm.max_fraction", ("h100-sxm-80gb",), 0.8, 1.25),
            Parameter("gemm.transformer_engine_ratio", ("h100-sxm-80gb",), 0.8, 1.25),
        ),
        "H100-SXM5-80GB",
    ),
}


@dataclass(frozen=True)
class Scale:
    """Changes a job's hardware by factors, one per parameter; picklable, for other processes."""

    parameters: tuple[Parameter, ...]
    factors: tuple[float, ...]

    def __call__(self, job: Job) -> Job:
        cluster = job.cluster
        gpu, host = cluster.gpu, cluster.host
        for parameter, factor in zip(self.parameters, self.factors, strict=True):
            if gpu.name not in parameter.gpus:
                continue
            if parameter.name == "host":
                host = host.model_copy(
                    update={
                        "seconds_per_launch": host.seconds_per_launch * factor,
                        "overhead_factor": host.overhead_factor * factor,
                    }
                )
            else:
                gpu = SCALERS[parameter.name](gpu, factor)
        return replace(job, cluster=cluster.model_copy(update={"gpu": gpu, "host": host}))


def _gemm(name: str) -> Callable[[Gpu, float], Gpu]:
    def scale(gpu: Gpu, factor: float) -> Gpu:
        update = {name: getattr(gpu.gemm, name) * factor}
        return gpu.model_copy(update={"gemm": gpu.gemm.model_copy(update=update)})

    return scale


def _height(gpu: Gpu, factor: float) -> Gpu:
    """What products sustain, of fp8 too, whose ratio to 16 bits is measured."""
    by_dtype = {name: f * factor if name.startswith("fp8") else f for name, f in gpu.gemm.by_dtype.items()}
    update = {"max_fraction": gpu.gemm.max_fraction * factor, "by_dtype": by_dtype}
    return gpu.model_copy(update={"gemm": gpu.gemm.model_copy(update=update)})


def _attention(*names: str) -> Callable[[Gpu, float], Gpu]:
    def scale(gpu: Gpu, factor: float) -> Gpu:
        if not _runs_triton(gpu):
            return gpu
        update = {name: getattr(gpu.attention, name) * factor for name in names}
        return gpu.model_copy(update={"attention": gpu.attention.model_copy(update=update)})

    return scale


def _runs_triton(gpu: Gpu) -> bool:
    """Whether the job's attention is FlashAttention-1 in Triton: its forward reaches less than 0.6 of the
    peak on an A100, 0.36 on other GPUs."""
    return gpu.attention.forward_fraction < (0.6 if "a100" in gpu.name else 0.36)


SCALERS: dict[str, Callable[[Gpu, float], Gpu]] = {
    "gemm.max_fraction": _height,
    "gemm.k_half": _gemm("k_half"),
    "gemm.transformer_engine_ratio": _gemm("transformer_engine_ratio"),
    "flash1-triton": _attention("forward_fraction", "backward_fraction"),
    "flash1-triton.sequence_half": _attention("sequence_half"),
    "flash1-triton.head_dim_half": _attention("head_dim_half"),
}


def log_errors(runs: Sequence[PublishedRun], fit: Fit, theta: np.ndarray) -> np.ndarray:
    """Logarithm of predicted over measured seconds, one per run."""
    rows = predict_rows(runs, tweak=Scale(fit.parameters, tuple(np.exp(theta))))
    return np.array([np.log1p(row.relative_error) for row in rows if row.relative_error is not None])


def solve(
    fit: Fit, jacobian: np.ndarray, errors: np.ndarray, theta: np.ndarray, keep: np.ndarray
) -> np.ndarray:
    """The parameters that minimise the linearised errors with Huber's weights, within their bounds."""
    low = np.log([parameter.low for parameter in fit.parameters])
    high = np.log([parameter.high for parameter in fit.parameters])
    new, prior = theta.copy(), 0.02
    for _ in range(200):
        linear = errors + jacobian @ (new - theta)
        weights = np.where(np.abs(linear) < HUBER, 1.0, HUBER / np.maximum(np.abs(linear), 1e-9)) * keep
        # A weak pull keeps numbers that the rows do not determine at their sourced values.
        matrix = jacobian.T @ (weights[:, None] * jacobian) + prior * np.eye(len(theta))
        right = -jacobian.T @ (weights * (errors - jacobian @ theta))
        step = bounded(matrix, right, low, high)
        if np.max(np.abs(step - new)) < 1e-9:
            break
        new = 0.5 * (new + step)
    return new


def bounded(matrix: np.ndarray, right: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The solution with out-of-bounds numbers fixed at their bounds and the others solved for again: clipping
    afterwards would leave the others bent by a number that may not move."""
    solution, free = np.clip(np.zeros(len(right)), low, high), high > low
    while free.any():
        known = right[free] - matrix[np.ix_(free, ~free)] @ solution[~free]
        found = np.linalg.solve(matrix[np.ix_(free, free)], known)
        solution[free] = np.clip(found, low[free], high[free])
        leaves = found != solution[free]
        if not leaves.any():
            break
        free[np.flatnonzero(free)[leaves]] = False
    return solution


def describe(errors: np.ndarray) -> str:
    relative = np.expm1(errors)
    absolute = np.abs(relative)
    return (
        f"rows {len(errors)}, mean {absolute.mean():.2%}, median {np.median(absolute):.2%}, "
        f"worst {absolute.max():.1%}, bias {relative.mean():+.2%}, within 10 % {(absolute < 0.1).mean():.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--fit", choices=FITS, default="together")
    asked = parser.parse_args()
    fit = FITS[asked.fit]
    runs = [run for run in read_runs(asked.tables).runs if run.role == "calibrate" and fit.uses(run)]
    usable = predict_rows(runs)
    runs = [
        run
        for run, row in zip(runs, usable, strict=True)
        if row.relative_error is not None and not row.predicted_retries
    ]
    theta = np.zeros(len(fit.parameters))
    everything = np.ones(len(runs))
    rows_of = Counter(run.source for run in runs)
    alike = np.array([len(runs) / len(rows_of) / rows_of[run.source] for run in runs])
    for iteration in range(3):
        errors = log_errors(runs, fit, theta)
        print(f"iteration {iteration}: {describe(errors)}", flush=True)
        jacobian = np.zeros((len(runs), len(theta)))
        for column in range(len(theta)):
            moved = theta.copy()
            moved[column] += STEP if moved[column] <= 0 else -STEP
            jacobian[:, column] = (log_errors(runs, fit, moved) - errors) / (moved[column] - theta[column])
        old, theta = theta, solve(fit, jacobian, errors, theta, everything)
        by_source = solve(fit, jacobian, errors, old, alike)
        for parameter, value, other in zip(fit.parameters, theta, by_source, strict=True):
            said = f"x {np.exp(value):.3f}, every source alike x {np.exp(other):.3f}"
            print(f"    {parameter.name:<36} {','.join(parameter.gpus)[:40]:<42} {said}")
        leave_out(runs, fit, jacobian, errors, old)
        resample(runs, fit, jacobian, errors, old)
        by_sources(runs, errors + jacobian @ (theta - old))
    print(f"end: {describe(log_errors(runs, fit, theta))}")


def leave_out(
    runs: Sequence[PublishedRun], fit: Fit, jacobian: np.ndarray, errors: np.ndarray, theta: np.ndarray
) -> None:
    """Print the errors of groups that the fit did not see."""
    keys: dict[str, Callable[[PublishedRun], str]] = {
        "row": lambda run: run.row_id,
        "source": lambda run: run.source,
        "model size": lambda run: run.text("model"),
        "machine and model": lambda run: run.text("gpu") + run.text("model"),
        "sequence length": lambda run: run.text("seq_len"),
    }
    for what, key in keys.items():
        groups = np.array([key(run) for run in runs])
        unseen, found = np.zeros(len(runs)), []
        for group in sorted(set(groups)):
            out = groups == group
            fitted = solve(fit, jacobian, errors, theta, (~out).astype(float))
            unseen[out] = (errors + jacobian @ (fitted - theta))[out]
            found.append(fitted)
        print(
            f"    left out by {what}: {describe(unseen)}; {ranges(fit, np.array(found), 0, 100)}", flush=True
        )


def resample(
    runs: Sequence[PublishedRun], fit: Fit, jacobian: np.ndarray, errors: np.ndarray, theta: np.ndarray
) -> None:
    """Print between which values 95 % of fits are to rows drawn anew, of every source as many as it has."""
    sources = np.array([run.source for run in runs])
    draw, found = np.random.default_rng(1), []
    for _ in range(RESAMPLED):
        keep = np.zeros(len(runs))
        for source in sorted(set(sources)):
            own = np.flatnonzero(sources == source)
            np.add.at(keep, draw.choice(own, len(own)), 1.0)
        found.append(solve(fit, jacobian, errors, theta, keep))
    print(f"    rows drawn anew, 95 % of fits: {ranges(fit, np.array(found), 2.5, 97.5)}", flush=True)


def ranges(fit: Fit, found: np.ndarray, low: float, high: float) -> str:
    """The percentiles of every parameter's factor."""
    ends = np.exp(np.percentile(found, [low, high], axis=0)).T
    named = zip(fit.parameters, ends, strict=True)
    return ", ".join(f"{one.name} x {first:.3f} to {last:.3f}" for one, (first, last) in named)


def by_sources(runs: Sequence[PublishedRun], errors: np.ndarray) -> None:
    """Print the errors by source and precision, by the linearised model."""
    groups = np.array([f"{run.source} {run.text('precision')}" for run in runs])
    for group in sorted(set(groups)):
        print(f"        {group}: {describe(errors[groups == group])}", flush=True)


if __name__ == "__main__":
    main()
