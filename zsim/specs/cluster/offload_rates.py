"""`[offload]` of a cluster file: rates of a host for offloaded work, besides the sizes in [host] and
[nvme]."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from zsim.specs.cluster.table import Fraction, Table
from zsim.units import BytesPerSecond


class OffloadRates(Table):
    """Rates of CPU and host memory for offloaded work.

    `optimizer_fraction`, `copy_fraction`: fractions of `host.memory_bandwidth` that CPU-Adam and the CPU's
    casts and copies reach with all cores (remote memory, page walks and threads included); `dma_fraction`:
    the fraction available to copy engines and drives. `pageable_bandwidth`: copies from and to unpinned
    memory, through the driver's buffer, per GPU. `threads_per_rank`: OMP_NUM_THREADS; None shares all cores.

    On hosts with several sockets: `bound`: each rank's threads stay on the socket of its GPU
    (`deepspeed --bind_cores_to_rank`, numactl), else they run on all sockets. `placement` of a rank's host
    memory: "local" to its GPU, "interleaved" over the sockets, or all on the "first".
    """

    optimizer_fraction: Fraction
    copy_fraction: Fraction
    dma_fraction: Fraction = 0.8
    pageable_bandwidth: BytesPerSecond
    threads_per_rank: int | None = Field(default=None, gt=0)
    bound: bool = False
    placement: Literal["local", "interleaved", "first"] = "local"


def default_offload_table() -> dict[str, Any]:
    """`[offload]` of clusters whose file has none, in the file's shape."""
    return {
        "source": (
            "optimizer_fraction and copy_fraction: what the step times of Llama-3.1-8B under ZeRO-3 with "
            "CPU-Adam on 8 H200 leave for the CPU (stas00/ml-engineering@744d01e1 "
            "insights/when-to-upgrade-gpus), taken for other hosts; dma_fraction and pageable_bandwidth "
            "assumed"
        ),
        "evidence": "assumed",
        "optimizer_fraction": 0.35,
        "copy_fraction": 0.35,
        "pageable_bandwidth": "6 GB/s",
    }


def default_offload_rates() -> OffloadRates:
    return OffloadRates.model_validate(default_offload_table())
