"""The work of a plan that is outside of the range in which the cluster's calibrated numbers were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from zsim.cost.kernels.kernel import Kernel
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu

# A curve is trusted up to this factor beyond its first and last point; a smaller part of the work is ignored.
_SLACK = 2.0
_SMALL = 0.05
_MEMORY_BOUND = ("elementwise", "copy", "embedding", "loss", "optimizer")
_ATTENTION = ("attention_forward", "attention_backward")


def extrapolations(plan: Plan, cluster: Cluster) -> dict[str, list[OutOfRange]]:
    """Work out of the measured range by part of the result ("compute", "network"). Empty where nothing is
    extrapolated.
    """
    gpu, ranges = cluster.gpu, cluster.collectives.measured_range
    tables = (gpu.gemm, gpu.attention, gpu.memory_bound)
    if not ranges and not any(table.measured_range for table in tables):
        return {}
    times: Counter[int] = Counter()
    work_of_id = {}
    for work in plan.all_work():
        times[id(work)] += 1
        work_of_id[id(work)] = work
    kernels = [
        (kernel, times[key])
        for key, work in work_of_id.items()
        if isinstance(work, Kernels)
        for kernel in work.kernels
    ]
    calls = [(work.bytes, times[key]) for key, work in work_of_id.items() if isinstance(work, Collective)]
    rows_of_part = {
        "compute": list(_extrapolated_kernels(gpu, kernels)),
        "network": list(_extrapolated_calls(ranges, calls)),
    }
    return {part: rows for part, rows in rows_of_part.items() if rows}


def extrapolation_sentence(row: OutOfRange) -> str:
    """The sentence about `row` in the report's notes."""
    return (
        f"extrapolated: {row.fraction:.0%} of the work in {row.label} is in pieces beyond the "
        f"{row.low:.3g} to {row.high:.3g} {row.unit} that were measured"
    )


class OutOfRange(NamedTuple):
    """`fraction` of the work of a kind is in kernels or calls outside of the measured range."""

    label: str
    fraction: float
    low: float
    high: float
    unit: str


def _is_out_of_range(value: float, ends: tuple[float, float]) -> bool:
    """Whether a size is more than a factor of two outside of the measured range."""
    return value < ends[0] / _SLACK or value > ends[1] * _SLACK


def _extrapolated_kernels(gpu: Gpu, kernels: Iterable[tuple[Kernel, int]]) -> Iterator[OutOfRange]:
    """Kinds of kernels with more than 5 % of their work out of range. `kernels` are (kernel, count). Tables
    without a `measured_range` are skipped."""
    counted = list(kernels)
    for label, table, key, kinds in (
        ("matrix products", gpu.gemm, "flops", ("gemm",)),
        ("fused attention", gpu.attention, "flops", _ATTENTION),
        ("kernels bound by memory", gpu.memory_bound, "bytes", _MEMORY_BOUND),
    ):
        ends = table.measured_range.get(key)
        if ends is not None:
            sizes = [
                (_size(kernel, key), kernel.launches * times)
                for kernel, times in counted
                if kernel.kind in kinds
            ]
            yield from _share_out_of_range(label, sizes, ends, "FLOP" if key == "flops" else "B")


def _size(kernel: Kernel, key: str) -> float:
    return (kernel.flops if key == "flops" else kernel.hbm_bytes) / kernel.launches


def _extrapolated_calls(
    ranges: Mapping[str, tuple[float, float]], calls: Iterable[tuple[int, int]]
) -> Iterator[OutOfRange]:
    """Collectives, when more than 5 % of their bytes are out of range. `calls` are (bytes of the full tensor,
    count)."""
    if "bytes" in ranges:
        yield from _share_out_of_range(
            "collectives", [(float(size), times) for size, times in calls], ranges["bytes"], "B"
        )


def _share_out_of_range(
    label: str, sizes: list[tuple[float, int]], ends: tuple[float, float], unit: str
) -> Iterator[OutOfRange]:
    total = sum(size * times for size, times in sizes)
    outside_work = sum(size * times for size, times in sizes if _is_out_of_range(size, ends))
    if total > 0 and outside_work > _SMALL * total:
        yield OutOfRange(label, outside_work / total, *ends, unit)
