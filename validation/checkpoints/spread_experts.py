"""A mixture of experts whose routed experts are spread over ranks, sharded as torchtitan 0.2.2 does.

The calls are those of its distributed/expert_parallel.py (`ExpertParallel._partition_fn`) and
models/llama4/infra/parallelize.py (`apply_fsdp`); torchtitan itself imports triton, which CPUs lack.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from validation.record.cases import EXPERT_MODELS

Shape = dict[str, Any]


class ExpertsTrainer:
    """Qwen 3 MoE of `EXPERT_MODELS` without its forward; the optimizer has stepped, with gradients of zero.
    `expert`: ranks that share the experts; `replicate`: of hybrid sharding."""

    def __init__(self, model_name: str, expert: int, replicate: int = 1) -> None:
        shards = dist.get_world_size() // replicate
        dense = init_device_mesh("cpu", (replicate, shards), mesh_dim_names=("dp_replicate", "fsdp"))
        names = ("dp_replicate", "efsdp", "ep")
        sparse = init_device_mesh("cpu", (replicate, shards // expert, expert), mesh_dim_names=names)
        is_hybrid = replicate > 1
        dense_mesh = dense if is_hybrid else dense["fsdp"]
        sparse_mesh = sparse["dp_replicate", "efsdp"] if is_hybrid else sparse["efsdp"]
        is_wide = sparse["efsdp"].size() * expert > EXPERT_MODELS[model_name]["num_experts"]
        self.model = Model(EXPERT_MODELS[model_name])
        for layer in self.model.blocks:
            for name, parameter in list(layer.mlp.experts.named_parameters()):
                whole = distribute_tensor(parameter, sparse["ep"], [Shard(0)])
                layer.mlp.experts.register_parameter(name, nn.Parameter(whole))
        fully_shard(self.model.embed_tokens, mesh=dense_mesh)
        for layer in self.model.blocks:
            place = _next_dimension if is_wide else None
            fully_shard(layer.mlp.experts, mesh=sparse_mesh, shard_placement_fn=place)
            fully_shard(layer, mesh=dense_mesh)
        fully_shard([self.model.norm, self.model.lm_head], mesh=dense_mesh)
        fully_shard(self.model, mesh=dense_mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def close(self) -> None:
        del self.model, self.optimizer


def _next_dimension(_: nn.Parameter) -> Shard:
    return Shard(1)


class Model(nn.Module):
    """Parameters alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = [_Layer(shape) for _ in range(shape["num_hidden_layers"])]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape["hidden_size"]
        self.self_attn = _Attention(shape)
        self.mlp = _SparseMlp(shape)
        self.input_layernorm = nn.RMSNorm(hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, size = shape["hidden_size"], shape["head_dim"]
        queries, keys = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)


class _SparseMlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.experts = _Experts(shape["num_experts"], shape["moe_intermediate_size"], shape["hidden_size"])
        self.gate = nn.Linear(shape["hidden_size"], shape["num_experts"], bias=False)


class _Experts(nn.Module):
    def __init__(self, number: int, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(number, width, hidden))
        self.w3 = nn.Parameter(torch.zeros(number, width, hidden))
        self.w2 = nn.Parameter(torch.zeros(number, hidden, width))
