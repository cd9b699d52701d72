"""torch FSDP2: `fully_shard` on each block and on the root; HSDP; CPU offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from validation.backends import Batch, Optimization, decay_groups, nothing
from validation.backends.ddp import model_states, storage_bytes
from validation.examples import blocks_of
from validation.tracing import Tracer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Fsdp2Trainer:
    """`reshard_after_forward` applies to the blocks, `reshard_ends` to the last block and the root;
    `replicate` > 1 is HSDP."""

    def __init__(
        self,
        model: nn.Module,
        optimization: Optimization,
        tracer: Tracer,
        reshard_after_forward: bool | int = True,
        reshard_ends: bool = False,
        replicate: int = 1,
        cpu_offload: bool = False,
        param_dtype: str = "fp32",
        reduce_dtype: str = "fp32",
        all_to_all: bool = False,
        device: str = "cpu",
    ) -> None:
        self.optimization = optimization
        self.tracer = tracer
        self.model = model
        world = dist.get_world_size()
        if replicate > 1:
            shape, names = (replicate, world // replicate), ("replicate", "shard")
            mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        else:
            mesh = init_device_mesh(device, (world,), mesh_dim_names=("shard",))
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(DTYPES[param_dtype], DTYPES[reduce_dtype]),
            # Without an accelerator, pinning memory is an error.
            "offload_policy": CPUOffloadPolicy(pin_memory=device != "cpu")
            if cpu_offload
            else OffloadPolicy(),
        }
        blocks = blocks_of(model)
        for block in blocks:
            is_end = block is blocks[-1] and not reshard_ends
            fully_shard(block, reshard_after_forward=False if is_end else reshard_after_forward, **options)
        fully_shard(model, reshard_after_forward=reshard_ends, **options)
        if all_to_all:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(AllToAllReduceScatter())
        groups = decay_groups(model, optimization)
        self.optimizer = torch.optim.AdamW(groups, lr=optimization.learning_rate, foreach=False)

    def step(self, micro_batches: Sequence[Batch], before_update: Callable[[], None] = nothing) -> Tensor:
        losses = []
        for tokens, labels in micro_batches:
            with self.tracer.span("phase", "forward"):
                loss = self.model(tokens, labels).loss
            with self.tracer.span("phase", "backward"):
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach().float())
        before_update()
        with self.tracer.span("phase", "update"):
            if self.optimization.gradient_clipping:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.optimization.gradient_clipping)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def full_parameters(self) -> dict[str, Tensor]:
        full = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            full[name] = parameter.full_tensor().detach().float()
        return full

    def held_bytes(self) -> dict[str, dict[str, int]]:
        return {"device": storage_bytes(model_states(self.model, self.optimizer))}

    def close(self) -> None:
        del self.model, self.optimizer


class AllToAllReduceScatter(ReduceScatter):
    """[Note: a true reduce-scatter], for FSDP2."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
