"""`[offload]` of a cluster file: rates of a host for offloaded work, besides the sizes in [host] and
[nvme].
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from zsim.specs.cluster.table import Fraction, Table
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
        description="threads of a rank (OMP_NUM_THREADS, torch.set_num_threads); left out: one under FSDP, "
        "which torchrun gives every rank where several run on a node, else the cores, shared evenly",
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
    """`[offload]` of clusters whose file has none, in the file's shape."""
    return {
        "source": (
            "optimizer_fraction: a DGX-2's CPU-Adam of 2020 and 2021 reaches 0.177 (DeepSpeed's log of 10B "
            "parameters, microbenchmarks mb-00622) and 0.426 (ZeRO-Offload, arXiv 2101.06840, table 4: "
            "2.57 s for 10B), an H200's and a B200's host of 2025 0.359 and 0.372 "
            "(stas00/ml-engineering@744d01e1 insights/when-to-upgrade-gpus): between them by their "
            "logarithms, the DGX-2's 0.275 and the later 0.365, and the outermost as spread; copy_fraction: "
            "likewise 0.284 and 0.365; thread_bandwidth: fused AdamW of torch 2.11 over 10 million elements "
            "with one thread, 13.3 ms, on the host of one H100 (traces/h100-80gb-hbm3/microbench.json, "
            "family adamw); dma_fraction and pageable_bandwidth assumed"
        ),
        "evidence": "assumed",
        "optimizer_fraction": 0.316,
        "copy_fraction": 0.322,
        "pageable_bandwidth": "6 GB/s",
        "thread_bandwidth": "21 GB/s",
        "spread": {"optimizer_fraction": [0.177, 0.426], "copy_fraction": [0.284, 0.365]},
    }


def default_offload_rates() -> OffloadRates:
    return OffloadRates.model_validate(default_offload_table())
