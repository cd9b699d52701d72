"""`[offload]` of a cluster file: rates of a host for offloaded work, besides the sizes in [host] and
[nvme].
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from zsim.resources import preset_table
from zsim.specs.cluster.table import Fraction, Table
from zsim.specs.strategy.sentences import left_out
from zsim.units import BytesPerSecond


class OffloadRates(Table):
    """Rates of CPU and host memory for offloaded work.

    `optimizer_fraction` and `copy_fraction` contain what remote memory, page walks and threads cost. Threads
    that are not bound (`deepspeed --bind_cores_to_rank`, numactl) run on all sockets.
    """

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
        description="threads of a rank (OMP_NUM_THREADS, torch.set_num_threads); left out: "
        f"{left_out('offload.threads_per_rank')}",
    )
    thread_bandwidth: BytesPerSecond | None = Field(
        default=None,
        description="what one thread reaches with fused Adam of fp32 states; left out: a core's even share "
        "of what all reach",
    )
    bound: bool = Field(default=False, description="a rank's threads stay on the socket of its GPU")
    placement: Literal["local", "interleaved", "first"] = Field(
        default="local",
        description="the socket of a rank's host memory: its GPU's, all in turn, or the first",
    )


def default_offload_table() -> dict[str, Any]:
    """`[offload]` of clusters whose file has none, in the file's shape (`presets/offload.toml`)."""
    return dict(preset_table("offload"))


def default_offload_rates() -> OffloadRates:
    return OffloadRates.model_validate(default_offload_table())
