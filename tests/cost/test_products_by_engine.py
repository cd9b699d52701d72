"""Which products Transformer Engine calls, and on which GPUs their rate is known to be another."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.files import CHECKOUT
from zsim.plan.make import stages_of
from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import make_workload
from zsim.specs.cluster.files import load_gpu
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1024, "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {"o_proj", "q_proj", "k_proj", "v_proj"}
EXPERTS = {"gate_up_proj", "down_proj"}


def called(
    strategy: dict[str, Any], training: dict[str, Any] | None = None, model: Any = MIXTURE
) -> set[str]:
    """Last parts of the names of modules all of whose products Transformer Engine calls, both ways."""
    job = resolve(
        Experiment(
            model=model,
            cluster="dgx-h100",
            gpus=1,
            training={"sequence_length": 512, "precision": "bf16", **(training or {})},
            strategy=strategy,
        )
    )
    found: set[str] = set()
    others: set[str] = set()
    for segment in make_workload(stages_of(job.model, job.parallelism)[0], job.training).segments:
        for call in segment.calls:
            kernels = [
                kernel
                for issued in (call.work.forward, call.work.backward)
                for kernel in kernels_of(issued).kernels
                if kernel.kind == "gemm"
            ]
            if kernels:
                by_engine = {kernel.is_transformer_engine for kernel in kernels}
                assert len(by_engine) == 1, call.name
                (found if by_engine == {True} else others).add(call.name.rpartition(".")[2])
    assert "lm_head" in others
    return found


@pytest.mark.parametrize(
    ("strategy", "training", "expected"),
    [
        ({"kind": "megatron", "moe_grouped_gemm": True}, {}, DENSE | EXPERTS),
        ({"kind": "megatron"}, {}, DENSE | EXPERTS),
        ({"kind": "megatron"}, {"precision": "fp8"}, DENSE | EXPERTS),
        ({"kind": "megatron", "transformer_impl": "local"}, {}, set()),
        ({"kind": "fsdp2"}, {}, set()),
        ({"kind": "fsdp2"}, {"precision": "fp8"}, set()),
        ({"kind": "fsdp2"}, {"precision": "fp8", "fp8_recipe": "delayed"}, DENSE),
    ],
)
def test_transformer_engine_calls_the_products_of_its_layers(
    strategy: dict[str, Any], training: dict[str, Any], expected: set[str]
) -> None:
    """Attention's and the experts' of Megatron's blocks, grouped or in a loop, never the router's and the LM
    head's; elsewhere those of its recipes of fp8, but for experts in one kernel, which was timed as it is."""
    assert called(strategy, training) == expected


def test_adapters_are_torchs_products() -> None:
    """Megatron-Bridge's are of Megatron's own parallel layers."""
    training = {"lora": {"rank": 16, "targets": ["linear_qkv", "linear_proj"]}}
    assert called({"kind": "megatron"}, training, "llama-3.2-1b") == {
        "base_layer", "linear_fc1", "linear_fc2",
    }  # fmt: skip


def test_only_the_chip_whose_steps_tell_it_has_a_ratio() -> None:
    """H100 at 700 W with the cuBLAS of these steps, and H200 and GH200, the same chip."""
    names = sorted(path.stem for path in (CHECKOUT / "topologies" / "gpus").glob("*.toml"))
    ratios = {name: load_gpu(name).gemm.transformer_engine_ratio for name in names}
    assert {name for name, ratio in ratios.items() if ratio != 1} == {
        "gh200-96gb", "h100-sxm-80gb", "h200-sxm-141gb",
    }  # fmt: skip
