"""A mixture of experts parallelized by torchtitan's own code on fake process groups: its collectives.

Run as a script with a JSON list of questions; prints a JSON list of answers: the calls of rank 0 in the
second step as [kind, bytes, dtype, ranks]. `apply_moe_ep_tp`, `apply_fsdp` (llama4's parallelize.py), `MoE`
and `ParallelDims` are torchtitan 0.2's. Its Triton kernel of padded indices is replaced by torch; fake groups
deliver nothing, so the counts of the others are taken to be the rank's own: routing is balanced.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.plan.run_torchtitan import Attention, Log, apply_ac


def padded_indices(
    counts: Tensor, experts: int, ranks: int, most: int, alignment: int, use_cpu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`generate_permute_indices` of torchtitan's models/moe/kernels.py: rows by expert, padded with -1."""
    table = counts.view(ranks, experts).long()
    starts = (counts.long().cumsum(0) - counts.long()).view(ranks, experts)
    sizes = (table.sum(0).clamp(min=alignment) + alignment - 1) // alignment * alignment
    ends = sizes.cumsum(0)
    indices = torch.full((most,), -1, dtype=torch.int64)
    for expert in range(experts):
        place = int(ends[expert] - sizes[expert])
        for rank in range(ranks):
            first, count = int(starts[rank, expert]), int(table[rank, expert])
            indices[place : place + count] = torch.arange(first, first + count)
            place += count
    return indices, sizes.to(torch.int32), ends.to(torch.int32)


kernels: Any = types.ModuleType("torchtitan.models.moe.kernels")
kernels.generate_permute_indices = padded_indices
kernels.fill_indices_wrapper = None
sys.modules["torchtitan.models.moe.kernels"] = kernels

from torchtitan.distributed import expert_parallel, parallel_dims  # noqa: E402
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402
from torchtitan.models.llama4.infra import parallelize  # noqa: E402
from torchtitan.models.moe.moe import MoE, MoEArgs  # noqa: E402


def _histogram(chosen: Tensor, bins: int, **_: Any) -> Tensor:
    """`torch.histc` of integers, which CPUs lack."""
    return torch.bincount(chosen, minlength=bins)


def own_counts(counts: Tensor, _out: Any, _in: Any, group: Any) -> Tensor:
    """The exchange of counts, as issued; what comes back are the rank's own."""
    torch.ops._c10d_functional.all_to_all_single(counts, [len(counts) // group.size()] * group.size(),
        [len(counts) // group.size()] * group.size(), group.group_name)  # fmt: skip
    return counts.clone()


class Block(nn.Module):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.moe_enabled = True
        args = MoEArgs(
            num_experts=shape["experts"], num_shared_experts=0, top_k=shape["top_k"], use_grouped_mm=False,
            score_func="softmax", load_balance_coeff=None, _debug_force_load_balance=True,
        )  # fmt: skip
        self.moe = MoE(args, dim=shape["hidden"], hidden_dim=shape["width"])
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape["hidden"]), nn.RMSNorm(shape["hidden"])

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        made: Tensor = h + self.moe(self.ffn_norm(h))
        return made


class Transformer(nn.Module):
    def __init__(self, shape: Any, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape["vocab"], shape["hidden"])
        self.layers = nn.ModuleDict({str(number): Block(shape) for number in range(layers)})
        self.norm = nn.RMSNorm(shape["hidden"])
        self.output = nn.Linear(shape["hidden"], shape["vocab"], bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        made: Tensor = self.output(self.norm(h))
        return made


def answer(question: Any) -> list[list[Any]]:
    world = question["world"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return _answer(question)
    finally:
        dist.destroy_process_group()


def _answer(question: Any) -> list[list[Any]]:
    parallel_dims.device_type = "cpu"
    dims = ParallelDims(
        dp_replicate=1, dp_shard=-1, cp=1, tp=question["tensor"], pp=1, ep=question["expert"],
        etp=question["expert_tensor"], world_size=question["world"],
    )  # fmt: skip
    dims.build_mesh()
    model = Transformer(question["shape"], question["layers"])
    parallelize.apply_moe_ep_tp(
        model,
        tp_mesh=dims.get_optional_mesh("tp"),
        ep_mesh=dims.get_optional_mesh("ep"),
        etp_mesh=dims.get_optional_mesh("etp"),
        ep_etp_mesh=dims.get_optional_mesh(["ep", "etp"]),
    )
    if question["tensor"] > 1:
        _apply_tp(model, dims.get_mesh("tp"))
    whole: Any = model
    apply_ac(whole, question["checkpointing"])
    parallelize.apply_fsdp(
        model,
        dims.get_mesh("fsdp"),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        ep_degree=dims.ep,
        edp_mesh=dims.get_optional_mesh("efsdp"),
    )
    expert_parallel.all_to_all_single = own_counts
    own: Any = torch
    own.histc = _histogram
    log = Log()
    for _ in range(2):
        log.found.clear()
        with log:
            tokens = torch.zeros(1, question["length"], dtype=torch.int64)
            logits = model(tokens)
            logits.float().sum().backward()
        model.zero_grad()
    return log.found


def _apply_tp(model: Transformer, mesh: Any) -> None:
    """The tensor parallelism around experts, of `apply_non_moe_tp`, with a head that is whole."""
    from torch.distributed.tensor import Replicate, Shard

    whole = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=True),
    }
    parallelize_module(model, mesh, whole)
    for block in model.layers.values():
        plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


if __name__ == "__main__":
    print(json.dumps([answer(question) for question in json.loads(sys.argv[1])]))
