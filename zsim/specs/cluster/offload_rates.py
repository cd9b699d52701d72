"""`[offload]` of a cluster file: rates of a host for offloaded work, besides the sizes in [host] and
[nvme]."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from zsim.specs.cluster.table import Fraction, Table
from zsim.units import BytesPerSecond


class OffloadRates(Table):
    """Rates of CPU and host memory for offloaded work. `optimizer_fraction` and `copy_fraction` contain what
    remote memory, page walks and threads cost. Threads that are not bound (`deepspeed --bind_cores_to_rank`,
    numactl) run on all sockets."""

    optimizer_fraction: Fraction = Field(
        description="what CPU-Adam reaches of host.memory_bandwidth, with all cores"
    )
    copy_fraction: Fraction = Field(
        description="what the CPU's casts and copies reach of host.memory_bandwidth"
    )
    dma_fraction: Fraction = Field(
        default=0.8, description="what copy engines and drives can have of host.memory_bandwidth"
    )
    pageable_bandwidth: BytesPerSecond = Field(
        description="copies from and to memory that is not page-locked, per GPU"
    )
    threads_per_rank: int | None = Field(
        default=None,
        gt=0,
        description="threads of a rank (OMP_NUM_THREADS); left out: the cores, shared evenly",
    )
    bound: bool = Field(default=False, description="a rank's threads stay on the socket of its GPU")
    placement: Literal["local", "interleaved", "first"] = Field(
        default="local",
        description="the socket of a rank's host memory: its GPU's, all in turn, or the first",
    )


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
