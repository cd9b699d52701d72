"""Whether a job fits, from its plan alone: memory follows the order of the host program, not the clock."""

from __future__ import annotations

from zsim.plan.memory.peaks import device_peaks, pinned_peak
from zsim.plan.ops import Device, Memory, Plan
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job


def usable_bytes(cluster: Cluster) -> int:
    """GPU memory that tensors and framework can have: what the driver reports over the allocator's margin.

    The allocator reserves (1 + margin) times what is allocated, so of the capacity C with F bytes of
    framework (C - F) / (1 + margin) + F are usable; F is small, and C / (1 + margin) is taken.
    """
    return int(cluster.gpu.memory.capacity / (1 + cluster.framework_memory.allocator_margin))


def framework_memory(job: Job, plan: Plan) -> Memory:
    """The CUDA context, and the buffers of one communicator per process group."""
    memory = job.cluster.framework_memory
    communicators = sum(group.size > 1 for group in plan.groups.values())
    return Memory("framework", memory.context + communicators * memory.communicator)


def resident_bytes(job: Job, plan: Plan, device: Device) -> int:
    """Memory before a step: that of a GPU, or of all ranks of a node on its host or drives."""
    held = max(
        sum(memory.bytes for memory in program.resident if memory.device == device)
        for program in plan.programs
    )
    return held + framework_memory(job, plan).bytes if device == "gpu" else held * job.gpus_per_node


def step_peak_bytes(job: Job, plan: Plan) -> int:
    """Maximum GPU memory of a rank over a step."""
    framework = framework_memory(job, plan)
    return max(device_peaks(program, [framework]).get("gpu", 0) for program in plan.programs)


def peak_bytes(job: Job, plan: Plan) -> int:
    """Maximum GPU memory of a rank over a step, or before the first."""
    return max(step_peak_bytes(job, plan), startup_bytes(job, plan))


def startup_bytes(job: Job, plan: Plan) -> int:
    """GPU memory of a rank before the first step; 0 where that is no more than it keeps."""
    most = max(program.startup_bytes for program in plan.programs)
    return most + framework_memory(job, plan).bytes if most else 0


def node_peak_bytes(job: Job, plan: Plan, device: Device) -> int:
    """Maximum host or NVMe memory of a node over a step: that of all its ranks."""
    return max(device_peaks(program).get(device, 0) for program in plan.programs) * job.gpus_per_node


def pinned_bytes(job: Job, plan: Plan) -> int:
    """Maximum page-locked host memory of a node over a step."""
    return max(pinned_peak(program) for program in plan.programs) * job.gpus_per_node


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
