"""The work of a plan that is outside of the range in which the cluster's calibrated numbers were measured."""

from __future__ import annotations

from collections import Counter

from zsim.cost.ranges import OutOfRange, extrapolated_calls, extrapolated_kernels
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.specs.cluster.cluster import Cluster


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
        "compute": list(extrapolated_kernels(gpu, kernels)),
        "network": list(extrapolated_calls(ranges, calls)),
    }
    return {part: rows for part, rows in rows_of_part.items() if rows}


def extrapolation_sentence(row: OutOfRange) -> str:
    """The sentence about `row` in the report's notes."""
    return (
        f"extrapolated: {row.fraction:.0%} of the work in {row.label} is in pieces beyond the "
        f"{row.low:.3g} to {row.high:.3g} {row.unit} that were measured"
    )
