"""DeepSpeed, any configuration; optional: `pip install deepspeed`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from validation.backends import BackendMissing, Batch, Optimization, decay_groups, nothing
from validation.backends.ddp import storage_bytes
from validation.tracing import Tracer


class DeepSpeedTrainer:
    """DeepSpeed at a `stage`, or with a `config`, the content of a user's JSON file."""

    def __init__(
        self,
        model: nn.Module,
        optimization: Optimization,
        tracer: Tracer,
        stage: int = 0,
        config: dict[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise BackendMissing("DeepSpeed is not installed (pip install deepspeed)")
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        import deepspeed

        full = {
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed requires a number; nothing is scaled by it
            "gradient_accumulation_steps": optimization.accumulation_steps,
            "gradient_clipping": optimization.gradient_clipping,
            "zero_optimization": {"stage": stage},
            **(config or {}),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        groups = decay_groups(model, optimization)
        adamw = torch.optim.AdamW(groups, lr=optimization.learning_rate, foreach=False)
        self.tracer = tracer
        self.model, *_ = deepspeed.initialize(
            model=model,
            optimizer=None if "optimizer" in full else adamw,
            config=full,
            dist_init_required=False,
        )
        self.deepspeed = deepspeed

    def step(self, micro_batches: Sequence[Batch], before_update: Callable[[], None] = nothing) -> Tensor:
        losses = []
        for tokens, labels in micro_batches:
            with self.tracer.span("phase", "forward"):
                loss = self.model(tokens, labels).loss
            with self.tracer.span("phase", "backward"):
                self.model.backward(loss)
            before_update()
            with self.tracer.span("phase", "update"):
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
        """Bytes of live storages, each counted once. All count as the device's, offloaded or not, since a CPU
        accelerator's memory is the host's."""
        return {"device": storage_bytes(self._states())}

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        """(category, tensor); a master weight that shares the parameter's tensor counts as the parameter."""
        optimizer, parameters = self.model.optimizer, list(self.model.module.parameters())
        for parameter in parameters:
            yield "parameters", getattr(parameter, "ds_tensor", parameter)
        if hasattr(optimizer, "grad_partitions_flat_buffer"):  # stage 3
            yield "gradients", optimizer.grad_partitions_flat_buffer
        for parameter in parameters:
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for gradients in getattr(optimizer, "averaged_gradients", {}).values():
            yield from (("gradients", gradient) for gradient in gradients or [])
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            yield from (("optimizer_states", master) for master in getattr(optimizer, name, []))
        inner = getattr(optimizer, "optimizer", optimizer)
        for state in inner.state.values():
            yield from (("optimizer_states", value) for value in state.values() if isinstance(value, Tensor))

    def close(self) -> None:
        self.model.destroy()
        dist.barrier()
