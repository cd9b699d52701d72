"""Fits of a GPU's tables to timed kernels, with the cost models that the simulator uses.

Few numbers are fitted to many points so that disturbed points do not pull them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from zsim.arrays import Floats
from zsim.calibrate.measurements import Measurement, Measurements
from zsim.cost.kernels.kernel import Kernel, Layout
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import OptimizerImplementation, optimizer_kernels
from zsim.cost.rates.efficiency import LONG_PRODUCT
from zsim.cost.rates.gpu import kernel_seconds
from zsim.extras import require
from zsim.operations import BACKWARD, FORWARD
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.model.spec import Loss, Module, Norm

Predict = Callable[[Mapping[str, float]], Sequence[float]]

# Residuals of the logarithm beyond this count as disturbance rather than error: about the spread of one
# quiet microbenchmark.
_RESIDUAL_SCALE = 0.05


@dataclass(frozen=True, slots=True)
class FitParameter:
    """A number to fit, between `low` and `high`. The search begins at `start`. All are above 0."""

    name: str
    start: float
    low: float
    high: float


@dataclass(frozen=True)
class FitPoint:
    """One measurement and its prediction by the fitted numbers."""

    label: str
    x: float
    """Its abscissa in plots."""
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class CurveFit:
    """A group of numbers fitted jointly."""

    title: str
    values: Mapping[str, float]
    """By dotted name in the hardware file."""
    points: tuple[FitPoint, ...]
    ranges: Mapping[str, tuple[float, float]]
    """The range of the points, by the name of what varies."""
    sources: tuple[str, ...]
    units: Mapping[str, str] = field(default_factory=dict)
    """The unit of each value."""
    at_bound: tuple[str, ...] = ()
    """Numbers that stopped at a limit, which the points therefore do not determine."""

    @property
    def median_error(self) -> float:
        return float(np.median([abs(point.error) for point in self.points])) if self.points else 0.0

    @property
    def worst_error(self) -> float:
        return max((abs(point.error) for point in self.points), default=0.0)

    @property
    def bias(self) -> float:
        return float(np.mean([point.error for point in self.points])) if self.points else 0.0


def robust_fit(
    parameters: Sequence[FitParameter], predict: Predict, measured: Sequence[float]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The numbers that bring `predict` nearest to `measured`, and those that stopped at a limit.

    Minimises the sum of soft-L1 losses of log(predicted / measured), over the logarithms of the numbers:

        sum 2 s^2 (sqrt(1 + (r/s)^2) - 1),   s = 0.05

    which is least squares for small residuals and their absolute values for large ones (scipy's
    `least_squares`, loss "soft_l1", and Triggs et al. 1999). Raises InputError where scipy is not installed.
    """
    require("scipy", "zsim calibrate")
    from scipy.optimize import least_squares

    names = [parameter.name for parameter in parameters]
    target = np.log(np.asarray(measured, dtype=np.float64))

    def residuals(theta: Floats) -> Floats:
        values = dict(zip(names, np.exp(theta).tolist(), strict=True))
        return np.log(np.maximum(np.asarray(predict(values), dtype=np.float64), 1e-12)) - target

    low = np.log([parameter.low for parameter in parameters])
    high = np.log([parameter.high for parameter in parameters])
    start = np.clip(np.log([parameter.start for parameter in parameters]), low + 1e-6, high - 1e-6)
    solution = least_squares(
        residuals,
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_RESIDUAL_SCALE,
        diff_step=[1e-3],
        max_nfev=200,
    )
    values = dict(zip(names, np.exp(solution.x).tolist(), strict=True))
    is_at_bound = (np.abs(solution.x - low) < 1e-3) | (np.abs(solution.x - high) < 1e-3)
    return values, tuple(name for name, is_stuck in zip(names, is_at_bound.tolist(), strict=True) if is_stuck)


def fit_points(
    labels: Sequence[str], xs: Sequence[float], measured: Sequence[float], predicted: Sequence[float]
) -> tuple[FitPoint, ...]:
    return tuple(FitPoint(*row) for row in zip(labels, xs, measured, predicted, strict=True))


def value_range(values: Sequence[float]) -> tuple[float, float]:
    return (float(min(values)), float(max(values)))


_BEYOND_CACHES = 100e6
_NO_WORK = 1e6  # bytes, under a microsecond of a GPU's memory
_ELEMENTWISE = ("residual", "silu_times", "rms_norm")
ADAMW_IMPLEMENTATIONS: dict[str, OptimizerImplementation] = {
    "fused": "fused",
    "foreach": "foreach",
    "loop": "for_loop",
}
# Rows of torch's default on GPUs, causal, with queries, keys and values of one shape.
_FLASH = {"backend": "flash", "causal": None, "kv_heads": None, "value_dim": None}
_UNFITTED = (
    "batched_gemm", "grouped_gemm", "rows_by_index", "chain", "rotary", "embedding", "gemm_beside_copy",
)  # fmt: skip
Timed = tuple[Measurement, tuple[Kernel, ...]]


def fit_gpu(gpu: Gpu, measured: Measurements) -> tuple[Gpu, list[CurveFit]]:
    """The GPU with the tables that follow from the measurements.

    They are fitted in the order of their dependence: launches, peaks, memory, optimizer, products, attention,
    interference.
    """
    fits: list[CurveFit] = []
    for fit in (_launch, _peaks, _memory, _optimizer, _gemm, _attention, _interference):
        gpu, new_fits = fit(gpu, measured)
        fits += new_fits
    return gpu, fits


def unfitted(gpu: Gpu, measured: Measurements) -> list[str]:
    """A note on the rows that no number is fitted to, if there are any."""
    modules = () if gpu.vendor == "cpu" else ("rms_norm_eager", "cross_entropy")
    counts = Counter(row.family for row in measured.select(*_UNFITTED, *modules))
    texts = [f"{count} of {family}" for family, count in counts.items()]
    others = len(measured.select("fused_attention")) - len(measured.select("fused_attention", **_FLASH))
    if others:
        texts.append(f"{others} of fused_attention (only causal flash with equal heads and widths is fitted)")
    timed = measured.select("copy", *_ELEMENTWISE, "gemm")
    timed += measured.select("adamw", place=_device_name(gpu))
    if num_short := len(timed) - len(_longer_than_issue(gpu, measured, timed)):
        texts.append(f"{num_short} as short as the host takes to issue a kernel")
    return [f"rows to which nothing is fitted: {', '.join(texts)}"] if texts else []


def replace_values(gpu: Gpu, values: Mapping[str, float]) -> Gpu:
    """The GPU with these values replaced, by dotted name ("gemm.k_half", "gemm.by_dtype.bf16")."""
    tables: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        table, _, name = dotted.partition(".")
        changes = tables.setdefault(table, {})
        if name.startswith("by_dtype."):
            fractions = changes.get("by_dtype", dict(gpu.gemm.by_dtype))
            changes["by_dtype"] = fractions | {name.removeprefix("by_dtype."): value}
        else:
            changes[name] = round(value) if name == "bytes_half" else value
    return gpu.model_copy(
        update={table: getattr(gpu, table).model_copy(update=changes) for table, changes in tables.items()}
    )


def _launch(gpu: Gpu, measured: Measurements) -> tuple[Gpu, list[CurveFit]]:
    """On a CPU the thread that issues an operation runs it, so the dispatch is part of the kernel's time."""
    rows = measured.select("host", what="launch")
    if gpu.vendor != "cpu" or not rows:
        return gpu, []
    seconds = min(row.seconds / row.calls for row in rows)
    value = {"launch.seconds_per_kernel": seconds}
    fit = CurveFit(
        "dispatch of one operation", value, (), {}, sources(rows), {"launch.seconds_per_kernel": "s"}
    )
    return replace_values(gpu, value), [fit]


def _peaks(gpu: Gpu, measured: Measurements) -> tuple[Gpu, list[CurveFit]]:
    """The best rates of all rows, for a file without a data sheet: a CPU's, or a GPU's that the rows
    exceed."""
    values: dict[str, float] = {}
    used_measurements: list[Measurement] = []
    for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        rows = [row for row in measured.select("gemm", dtype=dtype) if row.flops > 0]
        if not rows:
            continue
        best = max(row.flops / row.seconds for row in rows)
        if gpu.vendor == "cpu" or best > (getattr(gpu.peak, dtype) or 0.0):
            values[f"peak.{dtype}"] = best
            used_measurements += rows
    rows = [
        row
        for row in measured.select("copy", "fill", "adamw")
        if row.bytes > _BEYOND_CACHES
        and row["place"] in (None, _device_name(gpu))
        and row["threads"] in (None, 1)
    ]
    if rows:
        best = max(row.bytes / row.seconds for row in rows)
        if gpu.vendor == "cpu" or best > gpu.memory.bandwidth:
            values["memory.bandwidth"] = best
            used_measurements += rows
    if not values:
        return gpu, []
    units = {name: "B/s" if name.startswith("memory") else "FLOP/s" for name in values}
    return replace_values(gpu, values), [
        CurveFit("best rates seen", values, (), {}, sources(used_measurements), units)
    ]


def _memory(gpu: Gpu, measured: Measurements) -> tuple[Gpu, list[CurveFit]]:
    """The rates of kernels bound by memory. A CPU's copies count only where they exceed every cache, as in a
    step.
    """
    min_bytes = _BEYOND_CACHES if gpu.vendor == "cpu" else 0.0
    copies = [
        (row, (Kernel("copy", 0.0, row.bytes),))
        for row in _longer_than_issue(gpu, measured, measured.select("copy"))
        if row.bytes > min_bytes
    ]
    elementwise: list[Timed] = [
        (row, (Kernel("elementwise", 0.0, row.bytes),))
        for row in _longer_than_issue(gpu, measured, measured.select(*_ELEMENTWISE))
        if row.bytes > 0 and not _has_backward(row)
    ]
    parameters = [FitParameter("memory_bound.bytes_half", max(gpu.memory_bound.bytes_half, 1024), 64, 64e6)]
    if copies:
        parameters.append(_fraction_parameter("memory_bound.copy_fraction", gpu.memory_bound.copy_fraction))
    if elementwise:
        parameters.append(
            _fraction_parameter("memory_bound.elementwise_fraction", gpu.memory_bound.elementwise_fraction)
        )
    if gpu.vendor == "cpu":
        elementwise += _modules(measured)
    return _fit(gpu, "kernels bound by memory", parameters, [*copies, *elementwise], "bytes", _bytes_of)


def _longer_than_issue(gpu: Gpu, measured: Measurements, rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows that take half as long again as a copy, or an update of their kind, of under 1 MB, which on a
    GPU takes what the host needs to issue it. All where the host's launches were not measured."""
    is_issued = gpu.vendor != "cpu" and bool(measured.select("host", what="launch"))
    issue_seconds = {
        key: 1.5 * min(row.seconds for row in small)
        for key in {(row["kind"], row["place"]) for row in rows if is_issued}
        if (small := [row for row in measured.select("copy", "adamw", kind=key[0], place=key[1])
                      if row.bytes < _NO_WORK])
    }  # fmt: skip
    return [row for row in rows if row.seconds > issue_seconds.get((row["kind"], row["place"]), 0.0)]


def _bytes_of(row: Measurement) -> float:
    """Bytes that a row moves. For a module about three passes over its rows."""
    width = row["vocab"] or row["width"]
    return row.bytes or 12.0 * float(row["tokens"]) * float(width)


def _modules(measured: Measurements) -> list[Timed]:
    """Modules of many passes, whose bytes zsim counts itself.

    On a CPU their backward takes much longer for its bytes than a forward pass, and a step has more of it.
    """
    options = WorkOptions("fp32")
    timed: list[Timed] = []
    for row in measured.select("rms_norm_eager", "cross_entropy", dtype="fp32"):
        is_loss = row.family == "cross_entropy"
        module = Module("module", Loss(int(row["vocab"])) if is_loss else Norm(int(row["width"]), "rms"))
        shape = BatchShape(1, int(row["tokens"]))
        backward = module.kernels(BACKWARD, shape, options) if _has_backward(row) else ()
        timed.append((row, (*module.kernels(FORWARD, shape, options), *backward)))
    return timed


def _optimizer(gpu: Gpu, measured: Measurements) -> tuple[Gpu, list[CurveFit]]:
    """Fits AdamW of every implementation. Each passes over memory as often as zsim counts for it."""
    rows = [
        row
        for row in _longer_than_issue(gpu, measured, measured.select("adamw", place=_device_name(gpu)))
        if row.bytes > 0 and (gpu.vendor != "cpu" or row["threads"] == 1)
    ]
    timed: list[Timed] = [
        (row, optimizer_kernels(int(row["numel"]), "adamw", ADAMW_IMPLEMENTATIONS[str(row["kind"])]))
        for row in rows
    ]
    parameters = [_fraction_parameter("memory_bound.optimizer_fraction", gpu.memory_bound.optimizer_fraction)]
    return _fit(gpu, "AdamW", parameters, timed, "bytes", lambda row: row.bytes)


def _gemm(gpu: Gpu, measured: Measurements) -> tuple[Gpu, list[CurveFit]]:
    """Fits products, of types that have long ones to those alone.

    Of products shorter than `LONG_PRODUCT` little depends on `k_half`, and a fit to both has several minima:
    of 167 products on an H100 (traces/h100-80gb-hbm3/microbench.json) 307, 394 and 1,062 by where its search
    begins, and 512 from wherever to the long ones. It stays the base's where no type has long ones of several
    inner dimensions.
    """
    timed: list[Timed] = []
    for row in _longer_than_issue(gpu, measured, measured.select("gemm")):
        if getattr(gpu.peak, str(row["dtype"]), None) is None:
            continue
        shape = (int(row["m"]), int(row["n"]), int(row["k"]))
        layout: Layout = row["layout"] if row["layout"] in get_args(Layout) else "nt"
        kernel = Kernel("gemm", row.flops, row.bytes, str(row["dtype"]), shape, layout=layout)
        timed.append((row, (kernel,)))
    dtypes = sorted({str(row["dtype"]) for row, _ in timed}, key=lambda dtype: (dtype != "bf16", dtype))
    parameters = []
    for index, dtype in enumerate(dtypes):
        name = "gemm.max_fraction" if index == 0 else f"gemm.by_dtype.{dtype}"
        parameters.append(_fraction_parameter(name, gpu.gemm.by_dtype.get(dtype, gpu.gemm.max_fraction)))
    if len(timed) <= len(parameters):
        return gpu, []
    long = {(row["dtype"], row["k"]) for row, _ in timed if row["k"] >= LONG_PRODUCT}
    has_long = {dtype for dtype, _ in long}
    if len(long) > len(has_long):
        parameters.append(FitParameter("gemm.k_half", max(gpu.gemm.k_half, 4.0), 1.0, 4096.0))
    fitted = [each for each in timed if each[0]["dtype"] not in has_long or each[0]["k"] >= LONG_PRODUCT]
    return _fit(gpu, "matrix products", parameters, timed, "flops", lambda row: row.flops, fitted)


def _attention(gpu: Gpu, measured: Measurements) -> tuple[Gpu, list[CurveFit]]:
    """Fits fused attention. Rows of both directions are a forward and a backward, whose FLOPs are 2.5 times
    as many."""
    timed: list[Timed] = []
    for row in (*measured.select("attention"), *measured.select("fused_attention", **_FLASH)):
        dtype = str(row["dtype"])
        if getattr(gpu.peak, dtype, None) is None:
            continue
        length, width = int(row["length"]), int(row["head_dim"])
        shape = (int(row["batch"]) * int(row["heads"]), length, length, width)
        is_both_directions = row["direction"] == "both"
        forward = row.flops / 3.5 if is_both_directions else row.flops
        kernels = [Kernel("attention_forward", forward, 0.0, dtype, shape)]
        if is_both_directions:
            kernels.append(Kernel("attention_backward", 2.5 * forward, 0.0, dtype, shape, 3))
        timed.append((row, tuple(kernels)))
    parameters = [
        _fraction_parameter("attention.forward_fraction", gpu.attention.forward_fraction),
        _fraction_parameter("attention.backward_fraction", gpu.attention.backward_fraction),
        FitParameter("attention.sequence_half", max(gpu.attention.sequence_half, 8.0), 1.0, 4096.0),
    ]
    backward_half = gpu.attention.backward_sequence_half
    if backward_half is not None:
        name = "attention.backward_sequence_half"
        parameters.append(FitParameter(name, max(backward_half, 8.0), 1.0, 4096.0))
    return _fit(gpu, "fused attention", parameters, timed, "flops", lambda row: row.flops)


def _interference(gpu: Gpu, measured: Measurements) -> tuple[Gpu, list[CurveFit]]:
    """Duration of products overlapping a collective over that of isolated products, and the same of a
    collective.

    It is the median over the group sizes measured, or the smallest of an even number.
    """
    fits = []
    for name, measurement_kind, title in (
        ("compute_slowdown", "gemm", "products beside a collective"),
        ("communication_slowdown", "all_reduce", "a collective beside products"),
    ):
        rows = measured.select("interference", measured=measurement_kind)
        isolated_seconds = {row["ranks"]: row.seconds for row in rows if not row["beside"]}
        overlapped = {row["ranks"]: row.seconds for row in rows if row["beside"]}
        measured_sizes = sorted(set(isolated_seconds) & set(overlapped))
        if not measured_sizes:
            continue
        ratios = sorted(max(1.0, overlapped[ranks] / isolated_seconds[ranks]) for ranks in measured_sizes)
        value = {f"interference.{name}": ratios[len(ratios) // 2] if len(ratios) % 2 else ratios[0]}
        gpu = replace_values(gpu, value)
        ranges = {"ranks": value_range([float(ranks) for ranks in measured_sizes])}
        fits.append(CurveFit(title, value, (), ranges, sources(rows)))
    return gpu, fits


def _fit(
    gpu: Gpu,
    title: str,
    parameters: Sequence[FitParameter],
    timed: Sequence[Timed],
    range_name: str,
    x: Callable[[Measurement], float],
    fitted: Sequence[Timed] | None = None,
) -> tuple[Gpu, list[CurveFit]]:
    """The fit to the `fitted` rows, by default all that were `timed`, with the errors of all."""
    fitted = timed if fitted is None else fitted
    if len(fitted) < len(parameters):
        return gpu, []

    def predict(values: Mapping[str, float], rows: Sequence[Timed]) -> list[float]:
        changed = replace_values(gpu, values)
        return [sum(kernel_seconds(kernel, changed) for kernel in kernels) for _, kernels in rows]

    values, stuck = robust_fit(
        parameters, lambda values: predict(values, fitted), [row.seconds for row, _ in fitted]
    )
    xs = [x(row) for row, _ in timed]
    measured = [row.seconds for row, _ in timed]
    points = fit_points([_label(row) for row, _ in timed], xs, measured, predict(values, timed))
    units = {name: "B" for name in values if name.endswith("bytes_half")}
    fit = CurveFit(
        title, values, points, {range_name: value_range(xs)}, sources(row for row, _ in timed), units, stuck
    )
    return replace_values(gpu, values), [fit]


def _fraction_parameter(name: str, start: float) -> FitParameter:
    return FitParameter(name, start, 0.01, 1.0)


def _device_name(gpu: Gpu) -> str:
    return "cpu" if gpu.vendor == "cpu" else "cuda"


def _has_backward(row: Measurement) -> bool:
    return bool(row["direction"] == "both")


def sources(rows: Iterator[Measurement] | Sequence[Measurement] | Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.source for row in rows))


def _label(row: Measurement) -> str:
    shown_parameters = {
        key: value for key, value in row.parameters.items() if key != "measured_threads" and value is not None
    }
    return f"{row.family} " + " ".join(str(value) for value in shown_parameters.values())
