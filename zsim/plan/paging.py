"""The place where the driver has the states of a paged optimizer.

# [Note: paged states]
bitsandbytes' paged optimizers (0.50.2 functional.py `get_paged`, csrc/pythonInterface.cpp) keep every state
of 100,000 elements or more in CUDA's unified memory. A step prefetches the states of one tensor to the GPU,
updates it, and waits, tensor by tensor (optim/optimizer.py `step`). Where cudaMalloc or a prefetch finds no
free memory, the driver moves unified memory to the host, in pieces of 2 MiB, those first that came to the GPU
or were prefetched longest ago (NVIDIA/open-gpu-kernel-modules, kernel-open/nvidia-uvm/uvm_pmm_gpu.c, head
comment and `pick_root_chunk_to_evict`). So torch gets what it asks for, and keeps it, and the states have
what the step's peak leaves. If that is enough, nothing moves. If not, a step visits them in the same order as
the one before, and the states that were used longest ago are needed next: all of them come over PCIe and go
back in every step, however little is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim.plan.framework_hooks import hooks_of
from zsim.plan.memory.capacity import excess_bytes
from zsim.plan.ops import Plan
from zsim.specs.experiment.job import Job
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.specs.strategy.training import TrainingConfig
from zsim.units import format_bytes


def place_paged_states(job: Job, make_plan: Callable[[TrainingConfig], Plan]) -> TrainingConfig:
    """The job's training with the device of paged states resolved. `make_plan` returns the plan of a
    training. Frameworks that keep states in their own partitions have them on the GPU.
    """
    training = job.training
    if training.paged_states is not None or not optimizer_of(training.optimizer).is_paged:
        return training
    gpu_training = replace(training, paged_states="gpu")
    has_own_states = hooks_of(job.strategy).pages_optimizer_states
    if not has_own_states or excess_bytes(job, make_plan(gpu_training)) <= 0:
        return gpu_training
    return replace(training, paged_states="host")


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
