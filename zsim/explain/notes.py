"""The notes of a report: from the job, its plan and its simulation.

Among them is the work of a plan outside of the range in which the cluster's numbers were measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from zsim.cost.kernels.kernel import Kernel
from zsim.engine.simulate import Outcome
from zsim.plan.memory.capacity import (
    deciding_framework_range,
    excess_bytes,
    pinned_bytes_per_host,
    startup_bytes,
    usable_bytes,
)
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.report.framework import report_role
from zsim.report.memory import AllocatorRow, allocator_notes
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.collectives import LIBRARY_MULTIPROCESSORS, exchange_slowdown
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.job import Job, slowest_gpu_slowdown
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.units import format_bytes

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


def domains_note(job: Job) -> str | None:
    """A sentence on NVLink domains of several nodes that the job does not fill, or fills unevenly.

    None without such domains, and where the job has all nodes of each.
    """
    per_domain = job.cluster.node_link.nodes_per_domain
    if per_domain == 1:
        return None
    counts = Counter(node // job.nodes_per_domain for node in job.placement.nodes)
    sizes = sorted(counts.values(), reverse=True)
    partial_sizes = [size for size in sizes if size < per_domain]
    idle = sum(per_domain - size for size in partial_sizes)
    if not partial_sizes:
        return None
    gpus = idle * job.cluster.gpus_per_node
    if len(sizes) == 1:
        return (
            f"the job has {sizes[0]} of the {per_domain} nodes of an NVLink domain: {gpus} of its GPUs are "
            "left to others, or empty"
        )
    is_even = sizes[0] == sizes[-1]
    node_count = f"{sizes[0]}" if is_even else f"{sizes[-1]} to {sizes[0]}"
    domains_text = (
        f"each of its {len(sizes)} NVLink domains"
        if is_even
        else f"its {len(sizes)} NVLink domains, unevenly"
    )
    return (
        f"the job has {node_count} of the {per_domain} nodes of {domains_text}; {gpus} of their GPUs are "
        "left to others, or empty"
    )


def notes_of(outcome: Outcome, allocator: AllocatorRow | None) -> list[str]:
    """Notes on the job, its plan and its inputs, one sentence each."""
    job = outcome.job
    notes = [*job.notes, *outcome.plan.notes, *outcome.notes]
    domains = domains_note(job)
    notes += [domains] if domains else []
    for rows in extrapolations(outcome.plan, job.cluster).values():
        notes += [extrapolation_sentence(row) for row in rows]
    paging = paging_note(job, outcome.plan)
    notes += [paging] if paging else []
    is_expandable = job.training.expandable_segments
    notes += allocator_notes(allocator, is_expandable=is_expandable)
    startup = startup_bytes(job, outcome.plan)
    if startup:
        model_bytes = format_bytes(startup)
        notes.append(
            f"before the first step every GPU holds the whole model, {model_bytes} "
            f"(no {report_role(job.kind).sharded_builder})"
        )
    framework = deciding_framework_range(job, outcome.plan)
    if framework is not None:
        minimum, maximum = map(format_bytes, framework)
        notes.append(
            f"sources disagree on what the CUDA context and NCCL's buffers take, from {minimum} to the "
            f"{maximum} counted here, and with the least the tensors would fit: NCCL from 2.22 on connects "
            "only what is used"
        )
    locked = [(bytes, host.memory) for bytes, host in pinned_bytes_per_host(job, outcome.plan)]
    pinned, memory = max(locked, key=lambda node: node[0] / node[1])
    if pinned > memory / 2:
        notes.append(
            f"{format_bytes(pinned)} of each node's host memory are page-locked, {pinned / memory:.0%} of "
            "it: the kernel cannot swap or move them"
        )
    margin = job.cluster.framework_memory.allocator_margin
    if margin > 0:
        gpus = [job.cluster.gpus[kind] for kind in job.types]
        usable = ", ".join(format_bytes(usable_bytes(job.cluster, gpu)) for gpu in gpus)
        total = ", ".join(format_bytes(gpu.memory.capacity) for gpu in gpus)
        notes.append(
            f"capacity is {usable}, the GPU's {total} / {1 + margin:g}: the allocator is taken to reserve "
            f"{margin * 100:g}% more than tensors have"
        )
    hosts = job.cluster.hosts
    if outcome.plan.has_offload and any(host.sockets != hosts[0].sockets for host in hosts):
        notes.append(
            f"offloaded work finds {hosts[0].sockets} sockets on every node, as on those of "
            f"'{job.cluster.nodes[0].name}'"
        )
    slowest = slowest_gpu_slowdown(job)
    if slowest > 1:
        notes.append(
            f"kernels run {slowest:.3f} times slower on the slowest of {job.world_size:,} GPUs than on that "
            "of a node (assumed)"
        )
    interference = job.cluster.gpus[job.types[0]].interference
    if interference.compute_slowdown > 1:
        notes.append(
            f"kernels run {interference.compute_slowdown:g} times slower while a collective is under way "
            f"({interference.evidence})"
        )
    gpu, experts = job.cluster.gpus[job.types[0]], job.parallelism.experts
    narrow = exchange_slowdown(gpu, experts.dispatcher)
    if experts.ranks > 1 and narrow < interference.compute_slowdown:
        notes.append(
            f"kernels run {narrow:.3f} times slower while only exchanges of experts are under way, whose "
            f"kernels ('{experts.dispatcher}') hold {LIBRARY_MULTIPROCESSORS[experts.dispatcher]} of "
            f"{gpu.sm_count} multiprocessors"
        )
    if interference.communication_slowdown > 1:
        notes.append(
            f"collectives take {interference.communication_slowdown:g} times as long inside a node while "
            f"kernels run ({interference.evidence})"
        )
    return notes


def paging_note(job: Job, plan: Plan) -> str:
    """The sentence on the bytes that move in a step, "" if none move."""
    if not optimizer_of(job.training.optimizer).is_paged or job.training.paged_states is not None:
        return ""
    paged = max(
        sum(
            memory.bytes
            for memory in program.resident
            if (memory.category, memory.device) == ("optimizer_states", "host")
        )
        for program in plan.programs
    )
    if not paged:
        return ""
    room = max(0, -excess_bytes(job, plan))
    return (
        f"the paged optimizer's states, {format_bytes(paged)} of each GPU, have no room beside the step's "
        f"peak, which leaves {format_bytes(room)}: the driver moves out what was used longest ago, so all of "
        "them cross PCIe both ways in every step; they are counted as the host's between steps"
    )
