"""The recorded cases: strategies by models by ranks. No torch needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Two Llamas. "even": every dimension divides by 4, so FSDP2 and flat partitions pad nothing on 2 and 4 ranks.
# "uneven": an odd vocabulary, an MLP width that 4 does not divide, tied weights.
MODELS: dict[str, dict[str, Any]] = {
    "even": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    "uneven": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 192,
        "intermediate_size": 510,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 1001,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
}

# Mixtures of experts, for the files of experts that are spread over ranks. "few": fewer experts than ranks.
_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 352,
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERT_MODELS: dict[str, dict[str, Any]] = {"experts": _EXPERTS, "few": {**_EXPERTS, "num_experts": 2}}

# Larger models for `validation.predict`, in which operators take the time, not Python.
LARGER_MODELS: dict[str, dict[str, Any]] = {
    name: {
        **MODELS["even"],
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8 * hidden,
        "max_position_embeddings": 512,
    }
    for name, hidden in (("medium", 256), ("large", 512))
}
SHAPES = {**MODELS, **LARGER_MODELS}


def deepspeed_config(stage: int, **zero: Any) -> dict[str, Any]:
    """A user's DeepSpeed JSON: fp32, no clipping, and buckets and prefetches small enough to occur."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **zero},
    }


@dataclass(frozen=True)
class Recording:
    """A case: the backend that trains, its `options`, and zsim's equivalent (`strategy`).

    `strategy` is the experiment's table, or None where zsim has no plan of that kind.
    """

    name: str
    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] | None = None
    min_ranks: int = 2
    micro_batch_size: int = 2
    sequence_length: int = 64
    accumulation_steps: int = 1
    checkpointing: bool = False
    gradient_clipping: float = 0.0
    precision: str = "fp32"


_FSDP2 = {"kind": "fsdp2", "wrapping": "torchtitan-0.1", "param_dtype": "fp32", "reduce_dtype": "fp32"}

_ENGINE: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3-host": {"stage": 3, "optimizer_place": "host", "parameter_place": "host"},
    "zero3-nvme": {"stage": 3, "optimizer_place": "nvme", "parameter_place": "nvme"},
}

STRATEGIES = (
    Recording("ddp", "ddp", {}, {"kind": "ddp"}),
    *(
        Recording(name, "engine", options, {"kind": "reference", **options})
        for name, options in _ENGINE.items()
    ),
    Recording("fsdp2-reshard", "fsdp2", {}, {**_FSDP2, "reshard_after_forward": True}),
    Recording(
        "fsdp2-keep", "fsdp2", {"reshard_after_forward": False}, {**_FSDP2, "reshard_after_forward": False}
    ),
    *(
        Recording(
            f"deepspeed{stage}", "deepspeed", {"config": config}, {"kind": "deepspeed", "config": config}
        )
        for stage, config in (
            (0, deepspeed_config(0)),
            (1, deepspeed_config(1, reduce_bucket_size=200_000)),
            (2, deepspeed_config(2, reduce_bucket_size=200_000)),
            (
                3,
                deepspeed_config(
                    3,
                    reduce_bucket_size=200_000,
                    stage3_prefetch_bucket_size=50_000,
                    stage3_param_persistence_threshold=1_000,
                    stage3_max_reuse_distance=100_000,
                ),
            ),
        )
    ),
    Recording(
        "hsdp",
        "fsdp2",
        {"replicate": 2},
        {**_FSDP2, "reshard_after_forward": True, "replicate": 2},
        min_ranks=4,
    ),
)


def find(name: str) -> tuple[Recording, str]:
    """The recording and the model of a name: `zero3-even` -> (the recording, "even")."""
    known = [f"{strategy.name}-{model}" for strategy in STRATEGIES for model in MODELS]
    strategy_name, _, model = name.rpartition("-")
    for strategy in STRATEGIES:
        if strategy.name == strategy_name and model in MODELS:
            return strategy, model
    raise ValueError(f"no case '{name}'; expected one of {', '.join(known)}")


def recorded_cases() -> Iterator[tuple[Recording, str, int]]:
    """(strategy, model, ranks) of everything in `traces/gloo`."""
    for model in MODELS:
        for ranks in (2, 4):
            for strategy in STRATEGIES:
                if ranks >= strategy.min_ranks:
                    yield strategy, model, ranks


def folder_name(strategy: Recording, model: str, ranks: int) -> str:
    return f"{strategy.name}-{model}-{ranks}ranks"


def experiment(strategy: Recording, model: str, ranks: int) -> dict[str, Any] | None:
    """The run as a zsim experiment, without a cluster, on which a plan does not depend; None without a
    `strategy`. An optimizer that the strategy's own file names has one implementation."""
    if strategy.strategy is None:
        return None
    is_named = "optimizer" in strategy.strategy.get("config", {})
    is_fixed = is_named or strategy.backend == "engine"
    return {
        "model": SHAPES[model],
        "gpus": ranks,
        "training": {
            "sequence_length": strategy.sequence_length,
            "micro_batch_size": strategy.micro_batch_size,
            "gradient_accumulation_steps": strategy.accumulation_steps,
            "precision": strategy.precision,
            "activation_checkpointing": "full" if strategy.checkpointing else "none",
            "attention": "math",
            "optimizer": "adamw",
            "gradient_clipping": strategy.gradient_clipping,
            **({} if is_fixed else {"optimizer_implementation": "for_loop"}),
        },
        "strategy": dict(strategy.strategy),
    }


def as_json(strategy: Recording) -> dict[str, Any]:
    return dataclasses.asdict(strategy)
