"""Which modules ZeRO-3 enters. What real models are entered in is held by tests/validation."""

from __future__ import annotations

from typing import Any

import zsim
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import trace_of
from zsim.frameworks.deepspeed.stage3.module_order import HookedModules
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.resolve import resolve

ONE_BLOCK = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 128,
}


def order(checkpointing: str = "none", **zero: Any) -> list[str]:
    config = {"zero_optimization": {"stage": 3, **zero}, "train_micro_batch_size_per_gpu": 1}
    job = resolve(
        zsim.Experiment(
            model=ONE_BLOCK,
            cluster="dgx-h100",
            gpus=8,
            training={"sequence_length": 16, "activation_checkpointing": checkpointing},
            strategy={"kind": "deepspeed", "config": config},
        )
    )
    assert isinstance(job.strategy, DeepSpeedConfig)
    workload = make_workload(job.model, job.training)
    hooked: HookedModules = trace_of(workload, job.strategy.zero, 8).hooked
    return [name.removeprefix("model.layers.0.") or "the model" for name in hooked.order(workload)]


ATTENTION = ["self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj"]
FORWARD = [
    "the model", "model", "model.embed_tokens", "model.rotary_emb", "model.layers.0", "input_layernorm",
    *ATTENTION, "post_attention_layernorm", *MLP, "model.norm", "lm_head",
]  # fmt: skip


def inside_out(modules: list[str]) -> list[str]:
    """Backward enters the module around first, then what is in it, last first."""
    return [modules[0], *reversed(modules[1:])]


BACKWARD = [
    "the model", "lm_head", "model", "model.norm", "model.layers.0",
    *inside_out(MLP), "post_attention_layernorm", *inside_out(ATTENTION), "input_layernorm",
    "model.embed_tokens",
]  # fmt: skip


def test_modules_that_hold_others_or_nothing_are_entered_too() -> None:
    assert order() == [*FORWARD, *BACKWARD]


def test_a_checkpoint_runs_again_inside_the_last_module_that_backward_enters() -> None:
    """The block itself is not entered again: its hooks are outside of the checkpoint."""
    again = ["input_layernorm", *ATTENTION, "post_attention_layernorm", *MLP]
    at = BACKWARD.index("mlp.down_proj") + 1
    assert order("full") == [*FORWARD, *BACKWARD[:at], *again, *BACKWARD[at:]]


def test_below_a_leaf_module_nothing_is_entered() -> None:
    found = order(leaf_module={"name_suffixes": ["mlp"]})
    assert found.count("mlp") == 2
    assert not [name for name in found if name.startswith("mlp.")]
    whole = order(leaf_module={"names": ["model.layers.0"]}, checkpointing="full")
    assert [name for name in whole if "layernorm" in name or "self_attn" in name] == []
    assert whole.count("model.layers.0") == 2
