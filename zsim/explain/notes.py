"""The notes of a report: from the job, its plan and its simulation."""

from __future__ import annotations

from zsim.engine.simulate import Outcome
from zsim.plan.memory.capacity import (
    deciding_framework_range,
    pinned_by_host,
    startup_bytes,
    usable_bytes,
)
from zsim.report.extrapolation import extrapolation_sentence, extrapolations
from zsim.report.views.text.allocator import AllocatorRow, allocator_notes
from zsim.specs.experiment.job import slowest_of
from zsim.units import format_bytes


def notes_of(outcome: Outcome, allocator: AllocatorRow | None) -> list[str]:
    """Notes on the job, its plan and its inputs, one sentence each."""
    job = outcome.job
    notes = [*job.notes, *outcome.plan.notes, *outcome.notes]
    for rows in extrapolations(outcome.plan, job.cluster).values():
        notes += [extrapolation_sentence(row) for row in rows]
    is_expandable = job.training.expandable_segments
    notes += allocator_notes(allocator, is_expandable=is_expandable)
    startup = startup_bytes(job, outcome.plan)
    if startup:
        whole = format_bytes(startup)
        notes.append(
            f"before the first step every GPU holds the whole model, {whole} (no deepspeed.zero.Init)"
        )
    framework = deciding_framework_range(job, outcome.plan)
    if framework is not None:
        least, most = map(format_bytes, framework)
        notes.append(
            f"sources disagree on what the CUDA context and NCCL's buffers take, from {least} to the {most} "
            "counted here, and with the least the tensors would fit: NCCL from 2.22 on connects only what is "
            "used"
        )
    locked = [(bytes, host.memory) for bytes, host in pinned_by_host(job, outcome.plan)]
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
    slowest = slowest_of(job)
    if slowest > 1:
        notes.append(
            f"kernels run {slowest:.3f} times slower on the slowest of {job.world_size:,} GPUs than on that "
            "of a node (assumed)"
        )
    beside = job.cluster.gpus[job.types[0]].interference
    if beside.compute_slowdown > 1:
        notes.append(
            f"kernels run {beside.compute_slowdown:g} times slower while a collective is under way "
            f"({beside.evidence})"
        )
    if beside.communication_slowdown > 1:
        notes.append(
            f"collectives take {beside.communication_slowdown:g} times as long inside a node while kernels "
            f"run ({beside.evidence})"
        )
    return notes
