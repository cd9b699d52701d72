"""The notes of a report: from the job, its plan and its simulation."""

from __future__ import annotations

from collections import Counter

from zsim.engine.simulate import Outcome
from zsim.plan.memory.capacity import (
    deciding_framework_range,
    excess_bytes,
    pinned_bytes_per_host,
    startup_bytes,
    usable_bytes,
)
from zsim.plan.ops import Plan
from zsim.report.extrapolation import extrapolation_sentence, extrapolations
from zsim.report.framework import report_role
from zsim.report.memory import AllocatorRow, allocator_notes
from zsim.specs.cluster.collectives import LIBRARY_MULTIPROCESSORS, exchange_slowdown
from zsim.specs.experiment.job import Job, slowest_gpu_slowdown
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.units import format_bytes


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
