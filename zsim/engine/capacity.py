"""Whether a job fits, from its plan alone: memory follows the order of the host program, not the clock."""

from __future__ import annotations

from itertools import accumulate

from zsim.engine.record import framework_memory
from zsim.plan.ops import Device, Plan
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job


def usable_bytes(cluster: Cluster) -> int:
    """GPU memory that tensors and framework can have: what the driver reports over the allocator's margin.

    The allocator reserves (1 + margin) times what is allocated, so of the capacity C with F bytes of
    framework (C - F) / (1 + margin) + F are usable; F is small, and C / (1 + margin) is taken.
    """
    return int(cluster.gpu.memory.capacity / (1 + cluster.framework_memory.allocator_margin))


def resident_bytes(job: Job, plan: Plan) -> int:
    """GPU memory of rank 0 before a step."""
    return sum(m.bytes for m in (*plan.resident, framework_memory(job, plan)) if m.device == "gpu")


def step_peak_bytes(job: Job, plan: Plan) -> int:
    """Highest GPU memory of rank 0 over a step."""
    start = resident_bytes(job, plan)
    changes = (change.bytes for change in plan.memory if change.device == "gpu")
    return max(accumulate(changes, initial=start))


def peak_bytes(job: Job, plan: Plan) -> int:
    """Highest GPU memory of rank 0 over a step, or before the first."""
    return max(step_peak_bytes(job, plan), startup_bytes(job, plan))


def startup_bytes(job: Job, plan: Plan) -> int:
    """GPU memory of rank 0 before the first step; 0 where that is no more than it keeps."""
    return plan.program.startup_bytes + framework_memory(job, plan).bytes if plan.program.startup_bytes else 0


def node_peak_bytes(job: Job, plan: Plan, device: Device) -> int:
    """Highest host or NVMe memory of a node over a step: that of all its ranks."""
    start = sum(memory.bytes for memory in plan.resident if memory.device == device)
    changes = (change.bytes for change in plan.memory if change.device == device)
    return max(accumulate(changes, initial=start)) * job.gpus_per_node


def pinned_bytes(job: Job, plan: Plan) -> int:
    """Most page-locked host memory of a node over a step."""
    start = sum(memory.bytes for memory in plan.resident if memory.is_pinned)
    changes = (change.bytes for change in plan.memory if change.is_pinned)
    return max(accumulate(changes, initial=start)) * job.gpus_per_node


def exceeds_pinned_limit(job: Job, plan: Plan) -> bool:
    """Whether more is page-locked than the host allows."""
    limit = job.cluster.host.pinned_limit
    return limit is not None and pinned_bytes(job, plan) > limit


def node_capacity_bytes(cluster: Cluster) -> dict[Device, int | None]:
    """What a node's host memory and drives hold; None without drives."""
    nvme = cluster.nvme
    return {"host": cluster.host.memory, "nvme": nvme.drives * nvme.capacity if nvme else None}


def fits(job: Job, plan: Plan) -> bool:
    """Whether a job's plan fits on every tier of its GPUs and nodes."""
    nodes = node_capacity_bytes(job.cluster).items()
    return (
        peak_bytes(job, plan) <= usable_bytes(job.cluster)
        and not exceeds_pinned_limit(job, plan)
        and all(node_peak_bytes(job, plan, device) <= (limit or 0) for device, limit in nodes)
    )
