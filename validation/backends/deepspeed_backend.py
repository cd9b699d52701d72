"""DeepSpeed stages 0 to 3, with offload to host memory; optional: `pip install deepspeed`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from validation.backends import BackendMissing, Batch, Optimization, decay_groups
from validation.tracing import Tracer


class DeepSpeedTrainer:
    """`stage`, `offload_optimizer`, `offload_param` (device names), and more of `zero_optimization`."""

    def __init__(
        self,
        model: nn.Module,
        optimization: Optimization,
        tracer: Tracer,
        stage: int = 0,
        bf16: bool = False,
        **zero_options: Any,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise BackendMissing("DeepSpeed is not installed (pip install deepspeed)")
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        import deepspeed  # type: ignore[import-not-found]

        for name in ("offload_optimizer", "offload_param"):
            if name in zero_options:
                zero_options[name] = {"device": zero_options[name], "pin_memory": False}
        micro = 1  # DeepSpeed wants a number; it scales nothing by it
        config = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": optimization.accumulation_steps,
            "gradient_clipping": optimization.gradient_clipping,
            "zero_optimization": {"stage": stage, **zero_options},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bf16},
        }
        adamw = torch.optim.AdamW(
            decay_groups(model, optimization), lr=optimization.learning_rate, foreach=False
        )
        self.model, *_ = deepspeed.initialize(
            model=model, optimizer=adamw, config=config, dist_init_required=False
        )
        self.deepspeed = deepspeed

    def step(self, micro_batches: Sequence[Batch]) -> Tensor:
        losses = []
        for tokens, labels in micro_batches:
            loss = self.model(tokens, labels).loss
            self.model.backward(loss)
            self.model.step()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean()

    def full_parameters(self) -> dict[str, Tensor]:
        full = {}
        for name, parameter in self.model.module.named_parameters():
            with self.deepspeed.zero.GatheredParameters([parameter]):
                full[name] = parameter.detach().float().clone()
        return full

    def held_bytes(self) -> dict[str, dict[str, int]]:
        return {}

    def close(self) -> None:
        self.model.destroy()
        dist.barrier()
