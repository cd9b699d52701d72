"""`python -m validation.deepspeed_calls.experts`: what DeepSpeed sends for a mixture of experts.

A Llama on CPU ranks (gloo) whose MLPs are routed experts: DeepSpeed's own layer (`deepspeed.moe.layer.MoE`),
or a block with the names of transformers' Mixtral, which AutoEP replaces. Its collectives of one steady
step, in order. AutoEP's router deals tokens out to the experts in turn, so that all ranks send and receive
the same; where DeepSpeed's layer drops no token, its first two experts get all of them.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from validation.collective_log import CollectiveLog
from validation.deepspeed_calls.recording import options_of, write_cases
from validation.examples import make_batch
from validation.launch import run
from validation.llama import MLP, Llama, LlamaShape

SHAPE = LlamaShape(64, 96, 2, 4, 2, 256)
EXPERTS, TOP_K, LENGTH, WARM_UP_STEPS = 8, 2, 16, 3
BF16 = {"bf16": {"enabled": True}}
SMALL = {"reduce_bucket_size": 40_000}
STAGE_3 = {
    "stage": 3,
    **SMALL,
    "stage3_prefetch_bucket_size": 30_000,
    "stage3_param_persistence_threshold": 1_000,
}

# name: (layer, ranks that share experts, micro-batches, keys of the JSON)
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "moe, stage 0": ("moe", 2, 1, {"zero_optimization": {"stage": 0}, **BF16}),
    "moe, stage 1": ("moe", 2, 1, {"zero_optimization": {"stage": 1, **SMALL}, **BF16}),
    "moe, stage 2": ("moe", 2, 1, {"zero_optimization": {"stage": 2, **SMALL}, **BF16}),
    "moe, stage 2, fp32": ("moe", 2, 1, {"zero_optimization": {"stage": 2, **SMALL}}),
    "moe, stage 2, accumulated": ("moe", 2, 2, {"zero_optimization": {"stage": 2, **SMALL}, **BF16}),
    "moe, stage 2, all ranks": ("moe", 4, 1, {"zero_optimization": {"stage": 2, **SMALL}, **BF16}),
    "moe, stage 2, owners": (
        "moe", 2, 1,
        {"zero_optimization": {"stage": 2, **SMALL, "use_multi_rank_bucket_allreduce": False}, **BF16},
    ),
    "moe, stage 2, all tokens": ("moe-dropless", 2, 1, {"zero_optimization": {"stage": 2, **SMALL}, **BF16}),
    "autoep, stage 0": ("autoep", 2, 1, {"zero_optimization": {"stage": 0}, **BF16}),
    "autoep, stage 1": ("autoep", 2, 1, {"zero_optimization": {"stage": 1, **SMALL}, **BF16}),
    "autoep, stage 2": ("autoep", 2, 1, {"zero_optimization": {"stage": 2, **SMALL}, **BF16}),
    "autoep, stage 3": ("autoep", 2, 1, {"zero_optimization": STAGE_3, **BF16}),
    "autoep, stage 3, accumulated": ("autoep", 2, 2, {"zero_optimization": STAGE_3, **BF16}),
    "autoep, stage 3, all ranks": ("autoep", 4, 1, {"zero_optimization": STAGE_3, **BF16}),
    "autoep, stage 3, at home": ("autoep", 1, 1, {"zero_optimization": STAGE_3, **BF16}),
}  # fmt: skip


class OwnLayer(nn.Module):
    """DeepSpeed's layer, with the model's MLP as expert."""

    def __init__(self, ep_size: int, *, drops: bool) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(
            SHAPE.hidden_size, MLP(SHAPE), num_experts=EXPERTS, ep_size=ep_size, k=TOP_K, drop_tokens=drops,
            top2_2nd_expert_sampling=False,
        )  # fmt: skip
        if not drops:  # every token goes to the first two experts, as long as the gate is not trained
            self.moe.deepspeed_moe.gate.wg.weight.data.zero_()
            self.moe.deepspeed_moe.gate.wg.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(x)[0]
        return out


class Gate(nn.Module):
    """`MixtralTopKRouter`, as far as AutoEP reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, SHAPE.hidden_size))


class StackedExperts(nn.Module):
    """`MixtralExperts`, as far as AutoEP reads it."""

    def __init__(self) -> None:
        super().__init__()
        hidden, features = SHAPE.hidden_size, SHAPE.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * features, hidden) / 50)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, hidden, features) / 50)
        self.act_fn = F.silu


class SparseBlock(nn.Module):
    """`MixtralSparseMoeBlock`: AutoEP's layer takes its place, so it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Gate(), StackedExperts()


class Dealt:
    """torch for `deepspeed.moe.ep_router`, whose choice of experts is one after the other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def topk(self, scores: Tensor, k: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Scores and experts: row i k + j goes to expert i k + j, modulo their number."""
        chosen = (torch.arange(len(scores) * k) % scores.shape[1]).view(len(scores), k)
        return scores.gather(1, chosen), chosen


def model_of(layer: str, ep_size: int) -> nn.Module:
    """The model with one of the layers for its MLPs."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    for block in model.model.layers:
        is_own = layer.startswith("moe")
        block.mlp = OwnLayer(ep_size, drops=layer == "moe") if is_own else SparseBlock()
    config = SimpleNamespace(
        model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_act="silu"
    )
    setattr(model, "config", config)  # noqa: B010 - torch types what is assigned to a module
    return model


def calls_of(rank: int, ranks: int, name: str) -> list[Any]:
    """(kind, bytes, dtype, ranks of the group, their distance) of every call of a steady step."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(rank))
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    layer, ep_size, micro_batches, keys = CASES[name]
    model = model_of(layer, ep_size)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, **keys,
    }  # fmt: skip
    if layer == "autoep":
        from deepspeed.moe import ep_router

        ep_router.torch = Dealt()
        config["expert_parallel"] = {"enabled": True, "autoep_size": ep_size, "use_grouped_mm": False}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )

    def step(number: int) -> None:
        for micro in range(micro_batches):
            tokens, labels = make_batch(number * micro_batches + micro, 1, LENGTH, SHAPE.vocab_size)
            engine.backward(engine(tokens, labels).loss)
            engine.step()

    for number in range(WARM_UP_STEPS):
        step(number)
    with CollectiveLog() as log:
        step(WARM_UP_STEPS)
    return [call.wire for call in log.calls]


def with_sorted_gathers(calls: list[Any]) -> list[Any]:
    """The calls with each run of all-gathers in order of size: DeepSpeed keeps the parameters of a fetch in a
    set, so that which ranks it gathers from first is a matter of addresses."""
    found: list[Any] = []
    for kind, group in groupby(calls, key=lambda call: call[0]):
        some = list(group)
        found += sorted(some) if kind == "all_gather" else some
    return found


def main(words: list[str]) -> int:
    options = options_of(words, "experts")
    found = {}
    for name in CASES:
        if (options.only or "") in name:
            ranks = run("validation.deepspeed_calls.experts:calls_of", 4, (name,), timeout=300)
            if any(with_sorted_gathers(calls) != with_sorted_gathers(ranks[0]) for calls in ranks):
                raise RuntimeError(f"{name}: ranks made different calls")
            found[name] = ranks[0]
            if options.out is not None:
                write_cases(found, options.out, "experts")
            print(name, len(ranks[0]), file=sys.stderr, flush=True)
    if options.out is None:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
