"""DeepSeek-V4: attention over a window and compressed entries, hyper-connections, what Megatron refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, NotSimulatedError
from zsim.explain.report_of import report_of
from zsim.operations import BACKWARD, FORWARD, Module
from zsim.operations.hyper_connection import StreamCollapse, StreamExpand
from zsim.operations.mixers.compressed_attention import CompressedAttention, KeyPooling
from zsim.operations.operation import operations_of
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.huggingface import model_from_config

WINDOW = CompressedAttention(64, 512, 128)
HEAVY = CompressedAttention(64, 512, 128, 128)
SPARSE = CompressedAttention(64, 512, 128, 4, 512, 64, 128)
TINY: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 1024, "hidden_size": 256, "num_attention_heads": 4,
    "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "q_lora_rank": 64, "head_dim": 64, "o_groups": 2, "o_lora_rank": 32, "index_n_heads": 4,
    "index_head_dim": 32, "index_topk": 64, "compress_ratios": [0, 128, 4, 128, 0],
}  # fmt: skip
OPTIONS = WorkOptions(compile=True)


def job_of(strategy: dict[str, Any], training: dict[str, Any] | None = None, **parallelism: Any) -> Job:
    experiment = {
        "model": TINY, "cluster": "dgx-h100", "gpus": 8, "strategy": strategy,
        "training": {"sequence_length": 512, "activation_checkpointing": "none", **(training or {})},
        **({"parallelism": parallelism} if parallelism else {}),
    }  # fmt: skip
    return resolve(Experiment.model_validate(experiment))


def flops(work: CompressedAttention, kind: str, in_pass: Any, tokens: int = 8192) -> float:
    kernels = Module("core", work).kernels(in_pass, BatchShape(1, tokens), OPTIONS)
    return sum(kernel.flops for kernel in kernels if kernel.kind == kind)


@pytest.mark.parametrize(
    ("work", "keys"), [(WINDOW, 128), (HEAVY, 128 + 8192 / 256), (SPARSE, 128 + 512)], ids=str
)
def test_a_token_sees_its_window_and_entries(work: CompressedAttention, keys: float) -> None:
    """4 H D k forward and 10 H D k backward. Half of the 64 entries of 8,192 tokens are before a mean one."""
    assert flops(work, "sparse_attention", FORWARD) == 8192 * 4 * 64 * 512 * keys
    assert flops(work, "sparse_attention", BACKWARD) == 8192 * 10 * 64 * 512 * keys


def test_the_indexer_scores_entries_and_not_tokens() -> None:
    """64 heads of 128, and their weighted sum, over half of 2,048 entries; nothing of it in backward."""
    assert flops(SPARSE, "indexer", FORWARD) == 8192 * 2 * 64 * 129 * 1024
    assert flops(SPARSE, "indexer", BACKWARD) == 0


def test_what_attention_keeps() -> None:
    """Queries and output of 64 x 512 numbers, a key and a quarter of an entry of 512, 64 sums, 512 ids."""
    kept = Module("core", SPARSE).saved_bytes(BatchShape(1, 4096), OPTIONS)
    assert kept == 4096 * (2 * 64 * 512 * 2 + 640 * 2 + 64 * 4 + 512 * 4)


def test_a_loss_of_the_indexer_compares_its_scores_with_the_attentions() -> None:
    """Of all 1,024 entries before a mean token or of 512 chosen ones: 64 x 512 for the attention's scores and
    2 x 64 x 128 for both gradients. Kept are the indexer's 64 queries of 128, a quarter of an entry of 128,
    and 64 weights, in 16 bits.
    """
    full, chosen = replace(SPARSE, loss="full"), replace(SPARSE, loss="sparse")
    for work, pairs in ((full, 8192 * 1024), (chosen, 8192 * 512)):
        assert flops(work, "indexer", FORWARD) - flops(SPARSE, "indexer", FORWARD) == 2 * 64 * 512 * pairs
        assert flops(work, "indexer", BACKWARD) == 2 * 2 * 64 * 128 * pairs
    kept = [Module("core", work).saved_bytes(BatchShape(1, 4096), OPTIONS) for work in (full, SPARSE)]
    assert kept[0] - kept[1] == 4096 * 2 * (64 * 128 + 32 + 64)


@pytest.mark.parametrize("loss", ["none", "full"])
def test_a_file_says_what_trains_the_indexer(loss: str) -> None:
    model = model_from_config({**TINY, "indexer_loss": loss}, "tiny", "tiny.json")
    works = operations_of(model.blocks[2].modules, CompressedAttention)
    assert [work.loss for work in works] == [loss]


def test_pooling_keeps_features_and_gates_of_both_windows() -> None:
    module = Module("pool", KeyPooling(512, 4, overlaps=True))
    assert module.saved_bytes(BatchShape(1, 4096), OPTIONS) == 4096 * 2 * 1024 * 2


def test_hyper_connections_move_and_keep_the_streams() -> None:
    """4 streams of 4,096: collapse reads them twice and writes one, expand reads five and writes four."""
    shape, stream = BatchShape(1, 1024), 1024 * 4096 * 2
    collapse, expand = Module("hc", StreamCollapse(4096, 4)), Module("hc.expand", StreamExpand(4096, 4))
    product, mix = collapse.kernels(FORWARD, shape, OPTIONS)
    assert product.shape == (1024, 24, 4 * 4096)
    assert mix.hbm_bytes == 5 * stream
    assert [kernel.hbm_bytes for kernel in expand.kernels(FORWARD, shape, OPTIONS)] == [9 * stream]
    assert collapse.saved_bytes(shape, OPTIONS) == 4 * stream + 1024 * 24 * 4
    assert expand.saved_bytes(shape, OPTIONS) == stream


def test_ratios_give_the_pattern_and_another_is_refused() -> None:
    blocks = model_from_config(TINY, "tiny", "tiny.json").blocks
    cores = [module.op_spec for block in blocks for module in block.modules if module.name == "self_attn"]
    assert [getattr(core, "ratio", None) for core in cores] == [0, 128, 4, 128]
    with pytest.raises(InputError, match="'compress_ratios' has 8; expected 0, 4 or 128"):
        model_from_config({**TINY, "compress_ratios": [0, 8, 4, 128]}, "tiny", "tiny.json")


@pytest.mark.parametrize("parallelism", [{}, {"expert": 2}], ids=str)
def test_megatron_trains_it(parallelism: dict[str, Any]) -> None:
    assert report_of(simulate_job(job_of({"kind": "megatron"}, **parallelism)), 0.0).step_seconds > 0


@pytest.mark.parametrize(
    ("strategy", "training", "parallelism", "key"),
    [
        ({}, {}, {"pipeline": 2}, "parallelism.pipeline: found 2"),
        ({}, {"activation_checkpointing": "full"}, {}, "activation_checkpointing: found 'full'"),
        ({"mtp_layers": 1}, {}, {}, "strategy.mtp_layers: found 1"),
    ],
)
def test_megatron_refuses_hyper_connections(
    strategy: dict[str, Any], training: dict[str, Any], parallelism: dict[str, Any], key: str
) -> None:
    with pytest.raises(InputError, match=f"{key} with the hyper-connections"):
        job_of({"kind": "megatron", **strategy}, training, **parallelism)


def test_axes_without_kernels_are_refused() -> None:
    with pytest.raises(NotSimulatedError, match="no tensor parallelism that zsim knows"):
        job_of({"kind": "megatron"}, tensor=2, sequence_parallel=True)
    with pytest.raises(NotSimulatedError, match="no context parallelism that zsim knows"):
        job_of({"kind": "megatron"}, context=2)


@pytest.mark.parametrize("strategy", [{"kind": "fsdp2"}, {"kind": "deepspeed", "stage": 3}])
def test_code_that_masks_all_scores_is_refused(strategy: dict[str, Any]) -> None:
    with pytest.raises(NotSimulatedError, match="computes under a mask"):
        job_of(strategy)
