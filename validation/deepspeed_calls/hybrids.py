"""The collectives of small hybrid models of transformers, trained for a few steps on gloo: `python -m
validation.deepspeed_calls.hybrids --out traces/deepspeed`.

Layers of two kinds, of one mixer each, with experts, or that share a block: the classes that people train,
under FSDP2 (each layer and the root, as accelerate wraps them) and under ZeRO-3. FSDP2 refuses Zamba2.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from validation.backends import Optimization, Strategy, make_trainer
from validation.collective_log import CollectiveLog
from validation.deepspeed_calls.configurations import STAGE_3, configuration
from validation.deepspeed_calls.recording import options_of, write_cases
from validation.launch import run
from zsim.comparison.plan_check import fold

TOKENS = 16
WARM_UP_STEPS = 3  # ZeRO-3 observes the first, records the second, and prefetches from the third on
_SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_SIZES, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**_SIZES, **_DELTA},
    "olmo_hybrid": {**_SIZES, **_DELTA},
    "nemotron_h": {
        **_SIZES, "hybrid_override_pattern": "ME*-", "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32, "chunk_size": 8,
    },
    "lfm2": {**_SIZES, "layer_types": ["conv", "full_attention"] * 2},
    "bamba": {
        **_SIZES, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 16,
    },
    "zamba2": {
        "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_mem_blocks": 1,
        "adapter_rank": 8, "n_mamba_heads": 4, "mamba_d_state": 16, "num_hidden_layers": 5, "pad_token_id": 0,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"], "max_position_embeddings": 64,
    },
}  # fmt: skip


CASES = [
    (kind, name) for kind in ("fsdp2", "deepspeed") for name in HYBRIDS if (kind, name) != ("fsdp2", "zamba2")
]


def calls_of(rank: int, world_size: int, cases: list[tuple[str, str]]) -> list[list[Any]]:
    """The folded calls of each (framework, model type)'s fourth step."""
    return [_calls(rank, *case) for case in cases]


def _calls(rank: int, framework: str, model_type: str) -> list[Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **HYBRIDS[model_type]))
    step = (_fsdp2 if framework == "fsdp2" else _deepspeed)(model.train())
    generator = torch.Generator().manual_seed(rank)
    for _ in range(WARM_UP_STEPS):
        step(torch.randint(3, 100, (1, TOKENS), generator=generator))
    with CollectiveLog() as log:
        step(torch.randint(3, 100, (1, TOKENS), generator=generator))
    return fold(log.calls)


def _fsdp2(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(tokens: Tensor) -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(model: Any) -> Any:
    options = dict(configuration("hybrids", STAGE_3).options)
    trainer: Any = make_trainer(Strategy("deepspeed", options), model, Optimization())

    def step(tokens: Tensor) -> None:
        trainer.model.backward(trainer.model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        trainer.model.step()

    return step


def main(words: list[str]) -> int:
    options = options_of(words, "hybrids")
    cases = [case for case in CASES if not options.only or options.only in " ".join(case)]
    results = run("validation.deepspeed_calls.hybrids:calls_of", 2, (cases,), timeout=900)
    if results[0] != results[1]:
        raise RuntimeError("ranks made different calls")
    found = {}
    for (kind, name), calls in zip(cases, results[0], strict=True):
        found[f"{kind} {name}"] = {"model": {"model_type": name, **HYBRIDS[name]}, "calls": calls}
    if options.out:
        write_cases(found, options.out, "hybrids")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
