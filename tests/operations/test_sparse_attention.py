"""DeepSeek's sparse attention: FLOPs, what trains the indexer, ranks, and who has kernels of it."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.engine.simulate import simulate_job
from zsim.errors import NotSimulatedError
from zsim.explain.report_of import report_of
from zsim.operations import BACKWARD, FORWARD, Exchange, Module
from zsim.operations.mixers.sparse_attention import SparseAttention
from zsim.operations.operation import Role
from zsim.plan.make import plan_basis, stages_of
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

GLM = SparseAttention(64, 512, 64, 2048, 32, 128)
TINY: dict[str, Any] = {
    "model_type": "deepseek_v32", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_hidden_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 128,
    "q_lora_rank": 64, "kv_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 128, "indexer_loss": "sparse",
}  # fmt: skip


def job_of(strategy: dict[str, Any], **parallelism: Any) -> Job:
    experiment = {
        "model": TINY, "cluster": "dgx-h100", "gpus": 8, "strategy": strategy,
        "training": {"sequence_length": 512},
        **({"parallelism": parallelism} if parallelism else {}),
    }  # fmt: skip
    return resolve(Experiment.model_validate(experiment))


def flops(work: SparseAttention, kind: str, in_pass: Any, tokens: int = 8192) -> float:
    kernels = Module("core", work).kernels(in_pass, BatchShape(1, tokens), WorkOptions())
    return sum(kernel.flops for kernel in kernels if kernel.kind == kind)


def test_attention_is_linear_in_tokens_and_the_indexer_is_not() -> None:
    """2 x 64 x 2048 x (576 + 512) a token, and 2 x 32 x 128 x s / 2 for each of s tokens."""
    assert flops(GLM, "sparse_attention", FORWARD) == 8192 * 2 * 64 * 2048 * 1088
    assert flops(GLM, "indexer", FORWARD) == 8192 * 2 * 32 * 128 * 4096
    assert flops(GLM, "sparse_attention", FORWARD, 16384) == 2 * flops(GLM, "sparse_attention", FORWARD)
    assert flops(GLM, "indexer", FORWARD, 16384) == 4 * flops(GLM, "indexer", FORWARD)


def test_backward_of_attention_has_five_products() -> None:
    """Scores again, and gradients of queries and keys, of 576; of values and of probabilities, of 512."""
    assert flops(GLM, "sparse_attention", BACKWARD) == 8192 * 2 * 64 * 2048 * (3 * 576 + 2 * 512)


@pytest.mark.parametrize(("loss", "pairs"), [("none", 0), ("sparse", 8192 * 2048), ("full", 8192 * 4096)])
def test_only_a_loss_trains_the_indexer(loss: Any, pairs: int) -> None:
    """Over the chosen keys or all of them: main scores 2 x 64 x 576 forward, 4 x 32 x 128 backward."""
    work = SparseAttention(64, 512, 64, 2048, 32, 128, loss=loss)
    extra = flops(work, "indexer", FORWARD) - flops(GLM, "indexer", FORWARD)
    assert extra == 2 * 64 * 576 * pairs
    assert flops(work, "indexer", BACKWARD) == 4 * 32 * 128 * pairs


@pytest.mark.parametrize(("loss", "indexer"), [("none", 0), ("sparse", 2 * (32 * 128 + 128 + 32))])
def test_it_keeps_what_megatrons_function_saves(loss: Any, indexer: int) -> None:
    """By `save_for_backward` of Megatron-LM d98e8a64 dsa_cudnn_kernels.py `FusedIndexerSparseAttnFunc`, per
    token of GLM-5: queries of 64 x 576, latents of 576, the output of 64 x 512 in 16 bits, 64 sums in fp32,
    2,048 indices of 4 bytes, and with a loss the gradients of the indexer's 32 x 128 queries, 128 keys and 32
    weights, which forward makes already (`empty_like` of each).
    """
    work = SparseAttention(64, 512, 64, 2048, 32, 128, loss=loss)
    kept = Module("core", work).saved_bytes(BatchShape(1, 4096), WorkOptions())
    assert kept == 4096 * (2 * (64 * 576 + 576 + 64 * 512) + 4 * 64 + 4 * 2048 + indexer)


def test_a_layer_that_shares_a_choice_has_attention_alone() -> None:
    shared = SparseAttention(64, 512, 64, 2048, 32, 128, has_indexer=False)
    kernels = Module("core", shared).kernels(FORWARD, BatchShape(1, 8192), WorkOptions())
    assert [kernel.kind for kernel in kernels] == ["sparse_attention"]


def test_tensor_parallel_ranks_have_the_whole_indexer() -> None:
    """2 of 4 heads of attention. The indexer's products see all tokens, after gathers of the queries' 64
    numbers and of the input's 256, which two of them share.
    """
    job = job_of({"kind": "megatron"}, tensor=2, sequence_parallel=True)
    block = stages_of(job.model, plan_basis(job).parallelism)[0].blocks[0]
    core = next(module.op_spec for module in block.modules if module.role is Role.MIXER)
    assert core == SparseAttention(2, 96, 16, 128, 4, 32, loss="sparse")
    indexer = [module for module in block.modules if ".indexer." in module.name]
    shapes = {module.name: module.parameters[0].shape for module in indexer if module.parameters}
    assert shapes == {
        "self_attn.indexer.wq_b": (128, 64),
        "self_attn.indexer.wk": (32, 256),
        "self_attn.indexer.k_norm": (32,),
        "self_attn.indexer.weights_proj": (4, 256),
    }
    assert [module.op_spec.width for module in indexer if isinstance(module.op_spec, Exchange)] == [64, 256]


@pytest.mark.parametrize("strategy", [{"kind": "fsdp2"}, {"kind": "deepspeed", "stage": 3}])
def test_code_that_masks_all_scores_is_refused(strategy: dict[str, Any]) -> None:
    with pytest.raises(NotSimulatedError, match="computes under a mask"):
        job_of(strategy)


@pytest.mark.parametrize("parallelism", [{}, {"pipeline": 2}, {"expert": 2}], ids=str)
def test_megatron_trains_it(parallelism: dict[str, Any]) -> None:
    assert report_of(simulate_job(job_of({"kind": "megatron"}, **parallelism)), 0.0).step_seconds > 0
