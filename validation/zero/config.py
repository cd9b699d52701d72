"""The engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Place = Literal["device", "host", "nvme"]
Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class ZeroConfig:
    """One way to train. The defaults are plain fp32 ZeRO-3.

    `compute_dtype`: of gathered parameters and of gradients as autograd makes them.
    `reduce_dtype`: gradients are converted to it, reduced in it, and accumulated in it.
    `bucket_bytes`: units are reduced together until a bucket holds as many bytes; 0 reduces each alone.
    `prefetch`: how many units ahead stage 3 gathers.
    `max_reductions_in_flight`: bucket reductions that may be under way while backward goes on.
    `keep_gathered`: stage 3 leaves the root (embedding, head) and the last block gathered between forward and
        backward, which begins with them; False reshards every unit, as the ZeRO paper counts.
    `reduce_scatter`: "all_to_all" (and a local sum) moves what a reduce-scatter should; gloo's own ("native")
        is an all-reduce inside. None picks by backend.
    `optimizer_place`: of master weights, moments, reduced gradients; `parameter_place`: of stage 3's shards.
    `loss_scale`: fp16's; "dynamic" halves on overflow and doubles after `scale_window` good steps.
    `broadcast_buffers`: rank 0's buffers (batch-norm statistics) go to all before each forward, as in DDP.
    `poison`: fill gathered storage with NaN before it is gathered, so that a use before the wait shows.
    """

    stage: Stage = 3
    compute_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    accumulation_steps: int = 1
    bucket_bytes: int = 0
    prefetch: int = 1
    max_reductions_in_flight: int = 2
    keep_gathered: bool = True
    reduce_scatter: Literal["all_to_all", "native"] | None = None
    gradient_clipping: float = 0.0
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    no_decay: tuple[str, ...] = ()
    loss_scale: float | Literal["dynamic"] = 1.0
    scale_window: int = 1000
    optimizer_place: Place = "device"
    parameter_place: Place = "device"
    nvme_folder: Path | None = None
    broadcast_buffers: bool = True
    poison: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage: found {self.stage}, expected 0, 1, 2 or 3")
        if self.parameter_place != "device" and self.stage != 3:
            raise ValueError("parameter_place: only stage 3 has parameter shards to put elsewhere")
        if self.stage == 0 and self.optimizer_place == "nvme":
            raise ValueError("optimizer_place: 'nvme' needs stage 1, 2 or 3; stage 0 shards nothing")
        if "nvme" in (self.optimizer_place, self.parameter_place) and self.nvme_folder is None:
            raise ValueError("nvme_folder is needed for offload to NVMe")
        if self.accumulation_steps < 1:
            raise ValueError(f"accumulation_steps: found {self.accumulation_steps}, expected at least 1")
        if self.compute_dtype is torch.float16 and self.loss_scale == 1.0:
            raise ValueError("loss_scale: fp16 gradients vanish without one; use 'dynamic' or a power of two")
