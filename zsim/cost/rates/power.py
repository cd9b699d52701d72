"""Power and energy of a GPU by activity: idle, moving bytes, computing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.rates.gpu import arithmetic_seconds, hbm_seconds
from zsim.specs.cluster.gpu import Gpu, Power


class GpuActivity(NamedTuple):
    """Seconds of a GPU by limiting resource."""

    compute: float = 0.0
    """Kernels bound by arithmetic."""
    memory: float = 0.0
    """Kernels bound by HBM."""
    communication: float = 0.0
    """Only collectives run."""
    idle: float = 0.0
    """Between kernels, and waiting for the host or for offloaded work."""

    @property
    def seconds(self) -> float:
        return self.compute + self.memory + self.communication + self.idle

    def scaled(self, factor: float) -> GpuActivity:
        return GpuActivity(*(seconds * factor for seconds in self))


def kernel_activity(kernels: Iterable[Kernel], gpu: Gpu) -> GpuActivity:
    """Seconds of kernels in isolation on the GPU, each counted under the roof that bounds it (see
    `zsim.cost.rates.gpu.kernel_seconds`). Launch gaps are idle, once for launches that run at once.
    """
    compute = memory = idle = 0.0
    for kernel in kernels:
        arithmetic, traffic = arithmetic_seconds(kernel, gpu), hbm_seconds(kernel, gpu)
        if arithmetic >= traffic:
            compute += arithmetic
        else:
            memory += traffic
        idle += kernel.sequential_launches * gpu.launch.seconds_per_kernel
    return GpuActivity(compute, memory, 0.0, idle)


def energy_joules(activity: GpuActivity, power: Power) -> float | None:
    """Joules, E = sum of P_i t_i over the activities. None where the power under HBM-bound kernels is not
    known.

    Large matrix products run at the board's limit. Collectives draw `communication`, or where it is not known
    as much as HBM-bound kernels, since they are copies between HBM and a link.
    """
    memory = power.memory_bound
    if memory is None:
        return None
    communication = memory if power.communication is None else power.communication
    return (
        activity.compute * power.maximum
        + activity.memory * memory
        + activity.communication * communication
        + activity.idle * power.idle
    )
