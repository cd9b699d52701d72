"""Whether a job fits, from its plan alone: memory follows the order of the host program, not the clock."""

from __future__ import annotations

from itertools import accumulate

from zsim.engine.record import framework_memory
from zsim.errors import ZsimError
from zsim.plan.make import make_plan
from zsim.plan.ops import Device, Plan
from zsim.specs.experiment import Experiment
from zsim.specs.hardware import Cluster
from zsim.specs.job import Job, resolve

_MOST_GPUS = 65536


def usable_bytes(cluster: Cluster) -> int:
    """GPU memory that tensors and framework can have: what the driver reports, less the allocator's margin.

    The allocator reserves (1 + margin) times what is allocated, so of the capacity C with F bytes of
    framework (C - F) / (1 + margin) + F are usable; F is small, and C / (1 + margin) is taken.
    """
    return int(cluster.gpu.memory.capacity / (1 + cluster.framework_memory.allocator_margin))


def resident_bytes(job: Job, plan: Plan) -> int:
    """GPU memory of rank 0 before a step."""
    return sum(m.bytes for m in (*plan.resident, framework_memory(job, plan)) if m.device == "gpu")


def peak_bytes(job: Job, plan: Plan) -> int:
    """Highest GPU memory of rank 0 over a step."""
    start = resident_bytes(job, plan)
    changes = (change.bytes for change in plan.memory if change.device == "gpu")
    return max(accumulate(changes, initial=start))


def node_peak_bytes(job: Job, plan: Plan, device: Device) -> int:
    """Highest host or NVMe memory of a node over a step: that of all its ranks."""
    start = sum(memory.bytes for memory in plan.resident if memory.device == device)
    changes = (change.bytes for change in plan.memory if change.device == device)
    return max(accumulate(changes, initial=start)) * job.gpus_per_node


def node_capacity_bytes(cluster: Cluster) -> dict[Device, int | None]:
    """What a node's host memory and drives hold; None without drives."""
    nvme = cluster.nvme
    return {"host": cluster.host.memory, "nvme": nvme.drives * nvme.capacity if nvme else None}


def least_gpus(experiment: Experiment) -> int | None:
    """The fewest GPUs of the same cluster on which the job fits; None when none up to 65,536 do."""
    job = resolve(experiment)
    per_node = job.cluster.gpus_per_node
    low, high = 0, 1
    while not _fits(experiment, high * per_node):
        low, high = high, high * 2
        if high * per_node > _MOST_GPUS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(experiment, middle * per_node) else (middle, high)
    return high * per_node


def _fits(experiment: Experiment, gpus: int) -> bool:
    """Whether the job fits on so many GPUs; a count that the experiment does not allow does not."""
    try:
        job = resolve(experiment.model_copy(update={"gpus": gpus, "nodes": None}))
        plan = make_plan(job)
        nodes = node_capacity_bytes(job.cluster).items()
        return peak_bytes(job, plan) <= usable_bytes(job.cluster) and all(
            node_peak_bytes(job, plan, device) <= (limit or 0) for device, limit in nodes
        )
    except ZsimError:
        return False
