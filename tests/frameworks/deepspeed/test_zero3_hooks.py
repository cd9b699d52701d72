"""Which modules ZeRO-3 enters, and what their release frees. What real models are entered in is held by
tests/validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zsim
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import trace_of
from zsim.frameworks.deepspeed.stage3.module_order import HookedModules
from zsim.plan.make import make_plan
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


EXPERTS = 8 * 3 * 512 * 512  # elements of a layer's


def gathered_after_forward(family: str, checkpointing: str, software: str) -> int:
    """Bytes of gathered parameters that are left when backward begins: four layers of eight experts on eight
    GPUs, where norms and biases alone persist."""
    zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    shape = {
        "model_type": family, "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 512,
        "moe_intermediate_size": 512, "num_key_value_heads": 4, "vocab_size": 512, "num_experts": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    job = resolve(
        zsim.Experiment(
            model={**ONE_BLOCK, **shape},
            cluster="dgx-h100",
            gpus=8,
            training={
                "sequence_length": 16,
                "micro_batch_size": 1,
                "activation_checkpointing": checkpointing,
                "software": software,
            },
            strategy={
                "kind": "deepspeed",
                "version": "0.19.8",
                "config": {"zero_optimization": zero, "bf16": {"enabled": True}},
            },
        )
    )
    program = make_plan(job).program
    first = next(number for number, op in enumerate(program.ops) if op.phase != "forward")
    return sum(
        change.bytes for change in program.memory if change.op <= first and change.category == "buffers"
    )


@pytest.mark.parametrize(
    ("family", "checkpointing", "software", "layers"),
    [
        ("qwen3_moe", "none", "transformers 5.24", 4),
        ("qwen3_moe", "full", "transformers 5.24", 0),  # forward runs without autograd
        ("qwen3_moe", "none", "transformers 4.50", 0),  # experts are modules, of linear layers
        ("gpt_oss", "none", "transformers 5.24", 0),  # weights are stored as they are multiplied
    ],
)
def test_autograd_holds_stacked_experts_that_are_read_as_views(
    family: str, checkpointing: str, software: str, layers: int
) -> None:
    assert gathered_after_forward(family, checkpointing, software) == layers * 2 * EXPERTS


@pytest.mark.parametrize("trains", [True, False])
def test_a_released_weight_lives_on_in_its_views_alone(*, trains: bool) -> None:
    """What the plan's rule rests on, with the real functions: `free_param` empties the parameter. Frozen
    weights are saved alike, for the gradient of the input.
    """
    torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")
    linear = pytest.importorskip("deepspeed.runtime.zero.linear", reason="needs DeepSpeed").zero3_linear_wrap
    moe = pytest.importorskip("transformers.integrations.moe", reason="needs transformers 5")
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)

    def is_held(function: Callable[[Any, Any], Any], *shape: int) -> bool:
        weight = torch.nn.Parameter(torch.randn(*shape, dtype=torch.bfloat16), requires_grad=trains)
        storage = weight.data.untyped_storage()
        output = function(torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True), weight)
        weight.data = torch.empty(0, dtype=torch.bfloat16)
        assert output.grad_fn is not None
        return int(torch._C._storage_Use_Count(storage._cdata)) > 1

    assert not is_held(linear, 8, 16)
    assert is_held(torch.nn.functional.linear, 8, 16)
    assert is_held(lambda rows, weight: linear(rows, weight[1]), 4, 8, 16)
    assert is_held(lambda rows, weight: moe._grouped_linear(rows, weight, ends), 4, 8, 16)
    assert not is_held(
        lambda rows, weight: moe._grouped_linear(rows, weight, ends, is_transposed=True), 4, 16, 8
    )
