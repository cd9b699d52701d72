"""nanotron's, llm-foundry's and OLMo's YAML as experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.ddp.settings import DdpTable
from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.programs.nanotron.read import stage_layers
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

NANOTRON = """\
general: {project: p, run: r}
model:
  dtype: bfloat16
  model_config: {hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 32,
    num_key_value_heads: 8, vocab_size: 49152, is_llama_config: true, tie_word_embeddings: true}
parallelism: {dp: 2, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER,
  tp_linear_async_communication: true, recompute_layer: true}
optimizer: {zero_stage: 1, clip_grad: 1.0, accumulate_grad_in_fp32: true,
  optimizer_factory: {name: adamW, torch_adam_is_fused: true}}
tokens: {sequence_length: 2048, micro_batch_size: 2, batch_accumulation_per_replica: 4, train_steps: 10}
"""
FOUNDRY = """\
variables: {length: 2048}
max_seq_len: ${variables.length}
model: {name: mpt_causal_lm, d_model: 4096, n_heads: 32, n_layers: 32, vocab_size: 50368, no_bias: true,
  attn_config: {attn_impl: flash, alibi: true}}
optimizer: {name: decoupled_adamw, lr: 1.0e-4}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}
global_train_batch_size: 1024
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config: {sharding_strategy: SHARD_GRAD_OP, mixed_precision: PURE, activation_checkpointing: true,
  activation_checkpointing_reentrant: false, limit_all_gathers: true}
surprise: {batch: 2}
"""
OLMO = """\
run_name: r
model: {d_model: 4096, n_heads: 32, n_layers: 32, mlp_hidden_size: 22016, weight_tying: false, rope: true,
  block_type: sequential, layer_norm_type: rms, attention_layer_norm: true, norm_after: true,
  include_bias: false, flash_attention: true, max_sequence_length: 4096, embedding_size: 100352,
  activation_type: swiglu}
activation_checkpointing: one_in_two
fused_loss: true
global_train_batch_size: 1024
device_train_microbatch_size: 2
precision: amp_bf16
max_grad_norm: 1.0
fsdp: {wrapping_strategy: by_block, precision: mixed}
"""


def read(folder: Path, text: str, **overrides: Any) -> Experiment:
    path = folder / "a.yaml"
    path.write_text(text)
    return build_experiment(
        {"cluster": "dgx-h100"}, {"strategy.config": str(path), **overrides}, origin="test"
    )


def test_nanotron_is_the_engine_that_zsim_has(tmp_path: Path) -> None:
    """16 layers of 16.8 + 50.3 million FLOPs' weights and a head of 100.7 million on 2 stages."""
    found = read(tmp_path, NANOTRON)
    table, training, parallelism = of_kind(found.strategy, MegatronTable), found.training, found.parallelism
    assert (table.engine, table.distributed_optimizer, table.vocabulary_multiple) == ("nanotron", True, 1)
    assert (found.gpus, parallelism.tensor, parallelism.pipeline, parallelism.schedule) == (8, 2, 2, "1f1b")
    assert (parallelism.sequence_parallel, parallelism.async_tensor) == (True, True)
    assert (training.sequence_length, training.micro_batch_size) == (2048, 2)
    assert (training.gradient_accumulation_steps, training.activation_checkpointing) == (4, "full")
    assert found.program == "nanotron"
    job = resolve(found)
    assert job.model.numel == 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) + (
        49152 * 2048 + 2048
    )


@pytest.mark.parametrize(
    "fields", ["is_mamba_config: true, d_model: 1536", "is_starcoder2_config: true", "moe_config: {top_k: 2}"]
)
def test_nanotrons_other_models_are_asked_for(tmp_path: Path, fields: str) -> None:
    """Whose fields are not Llama's, so that Llama's sizes would stand in for them."""
    text = "parallelism: {dp: 8, tp: 1, pp: 1}\ntokens: {sequence_length: 1024, micro_batch_size: 1}\n"
    path = tmp_path / "a.yaml"
    path.write_text(f"{text}model: {{model_config: {{{fields}, num_hidden_layers: 4}}}}\n")
    with pytest.raises(InputError, match="names no model"):
        build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(path)}, origin="test")


def test_nanotrons_stages_end_where_their_share_of_the_work_does() -> None:
    """A layer of h (4 h + 3 f) = 67.1 million and a head of 100.7 million: half of the whole,
    587.2 million, is
    passed by the ninth layer.
    """
    assert stage_layers(16, 2048, 8192, 49152, ranks=2) == [9, 7]
    assert stage_layers(4, 1, 1, 0, ranks=2) == [3, 1]


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("zero_stage: 1", "zero_stage: 3", NotSimulatedError, "optimizer.zero_stage: .* expected 0, 1"),
        ("tp_mode: REDUCE_SCATTER", "tp_mode: RING", InputError, "found 'RING', expected ALL_REDUCE or"),
        ("dp: 2,", "dp: 2, context_parallel_size: 2,", NotSimulatedError, "context parallelism of nanotron"),
        ("dp: 2,", "dp: two,", InputError, "parallelism.dp: found 'two', expected a whole number"),
        ("accumulate_grad_in_fp32: true", "accumulate_grad_in_fp32: false", NotSimulatedError, "16-bit sums"),
    ],
)
def test_what_nanotron_cannot_be_simulated_with_is_refused(
    tmp_path: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    assert old in NANOTRON
    with pytest.raises(error, match=message):
        read(tmp_path, NANOTRON.replace(old, new))


def test_llm_foundry_is_composers_fsdp(tmp_path: Path) -> None:
    """1,024 sequences on 8 GPUs in micro-batches of 8 are 16 of them. PURE reduces in the type of "
    "products."""
    found = read(tmp_path, FOUNDRY)
    table, training = of_kind(found.strategy, Fsdp1Table), found.training
    assert (table.sharding_strategy, table.backward_prefetch) == ("SHARD_GRAD_OP", "BACKWARD_POST")
    assert (table.param_dtype, table.reduce_dtype, table.no_sync) == ("bf16", "bf16", False)
    assert (training.sequence_length, training.micro_batch_size) == (2048, 8)
    assert (training.gradient_accumulation_steps, training.gradient_clipping) == (16, 1.0)
    assert (training.activation_checkpointing, training.checkpoint_is_reentrant) == ("full", False)
    assert training.attention == "flash2"
    assert any("each its own unit there" in note for note in found.notes)
    job = resolve(found)
    assert job.model.numel == 32 * (12 * 4096**2 + 2 * 4096) + 50368 * 4096 + 4096
    assert [note for note in found.notes if "not read" in note] == [
        f"{tmp_path / 'a.yaml'}: not read: surprise.batch"
    ]


@pytest.mark.parametrize(
    ("text", "old", "new", "implementation"),
    [
        (FOUNDRY, "", "", "for_loop"),
        (FOUNDRY, "decoupled_adamw", "decoupled_lionw", "fused"),
        (OLMO, "", "", "foreach"),
    ],
)
def test_an_optimizer_that_says_no_kernels_has_its_programs(
    tmp_path: Path, text: str, old: str, new: str, implementation: str
) -> None:
    """Composer's DecoupledAdamW updates one tensor at a time, OLMo's is torch's AdamW, which lists them."""
    experiment = read(tmp_path, text.replace(old, new))
    assert experiment.training.optimizer_implementation == implementation


def test_composers_other_precisions_and_ddp(tmp_path: Path) -> None:
    default = read(tmp_path, FOUNDRY.replace("mixed_precision: PURE, ", ""))
    assert of_kind(default.strategy, Fsdp1Table).reduce_dtype == "fp32"
    alone = read(tmp_path, FOUNDRY[: FOUNDRY.index("fsdp_config")])
    assert of_kind(alone.strategy, DdpTable).no_sync


@pytest.mark.parametrize(
    ("old", "new", "types"),
    [
        ("mixed_precision: PURE", "mixed_precision: full", ("fp32", "fp32")),
        (
            "mixed_precision: PURE",
            "mixed_precision: {param_dtype: bf16, reduce_dtype: fp32}",
            ("bf16", "fp32"),
        ),
        ("mixed_precision: PURE", "mixed_precision: {param_dtype: bfloat16}", ("bf16", "bf16")),
        ("mixed_precision: PURE", "mixed_precision: {buffer_dtype: bf16}", ("fp32", "fp32")),
        ("no_bias: true", "no_bias: true, master_weights_dtype: bf16", ("bf16", "bf16")),
    ],
)
def test_composers_tables_of_types(tmp_path: Path, old: str, new: str, types: tuple[str, str]) -> None:
    """torch's FSDP reduces in the type that it gathers where a table has no `reduce_dtype`."""
    assert old in FOUNDRY
    found = read(tmp_path, FOUNDRY.replace(old, new))
    table = of_kind(found.strategy, Fsdp1Table)
    assert (table.param_dtype, table.reduce_dtype) == types
    assert found.training.stored_dtype == ("bf16" if "master" in new else "fp32")


def test_composers_degrees_decide_whether_there_are_replicas(tmp_path: Path) -> None:
    def table(text: str) -> Fsdp1Table:
        replaced = FOUNDRY.replace("sharding_strategy: SHARD_GRAD_OP", f"sharding_strategy: {text}")
        return of_kind(read(tmp_path, replaced).strategy, Fsdp1Table)

    degrees = "data_parallel_replicate_degree: 4, data_parallel_shard_degree: 2"
    assert table("HYBRID_SHARD").sharding_strategy == "FULL_SHARD"
    assert table("_hybrid_shard_zero2").sharding_strategy == "SHARD_GRAD_OP"
    for word, hybrid in (("full_shard", "HYBRID_SHARD"), ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")):
        found = table(f"{word}, {degrees}")
        assert (found.sharding_strategy, found.replicate) == (hybrid, 4)
    with pytest.raises(NotSimulatedError, match="found -1, which composer counts from the GPUs"):
        table("FULL_SHARD, data_parallel_replicate_degree: -1")


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ("expansion_ratio: 8", 8 * 4096),
        ("expansion_ratio: 2.5", 10240),
        ("expansion_ratio: 8, ffn_config: {ffn_hidden_size: 5120}", 5120),
        ("expansion_ratio: null", 4 * 4096),
    ],
)
def test_llm_foundrys_mpt_has_the_width_of_its_file(tmp_path: Path, keys: str, width: int) -> None:
    text = FOUNDRY.replace("no_bias: true", f"no_bias: true, {keys}")
    text = text.replace("alibi: true", "alibi: true, kv_n_heads: null")
    block = 4 * 4096**2 + 2 * 4096 * width + 2 * 4096
    assert resolve(read(tmp_path, text)).model.numel == 32 * block + 50368 * 4096 + 4096


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("device_train_microbatch_size: 8", "device_train_microbatch_size: auto", "tries batches on the GPU"),
        ("precision: amp_bf16", "precision: amp_fp8", "does not simulate 'amp_fp8'"),
        ("precision: amp_bf16", "precision: bf16", "does not simulate 'bf16'"),
        ("name: mpt_causal_lm", "name: mosaic_bert", "does not read the models of 'mosaic_bert'"),
        ("surprise:", "tp_config:", "composer's tensor parallelism"),
        ("name: decoupled_adamw", "name: adalr_lion", "optimizer.name: .* expected decoupled_adamw"),
    ],
)
def test_what_composer_does_and_zsim_does_not_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in FOUNDRY
    with pytest.raises(NotSimulatedError, match=message):
        read(tmp_path, FOUNDRY.replace(old, new))


def test_olmo_is_fsdp_with_its_own_wrapping(tmp_path: Path) -> None:
    """OLMo 2 7B has 7,298,617,344 parameters in transformers, with its vocabulary of 100,352."""
    found = read(tmp_path, OLMO)
    table, training = of_kind(found.strategy, Fsdp1Table), found.training
    assert (table.sharding_strategy, table.param_dtype, table.reduce_dtype) == ("FULL_SHARD", "bf16", "fp32")
    assert (training.sequence_length, training.micro_batch_size) == (4096, 2)
    assert (training.gradient_accumulation_steps, training.gradient_clipping) == (64, 1.0)
    assert (training.activation_checkpointing, training.checkpoint_every) == ("full", 2)
    assert training.cross_entropy == "fused"
    assert resolve(found).model.numel == 7_298_617_344


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("one_in_two", "two_in_three", "activation_checkpointing: zsim does not simulate 'two_in_three'"),
        ("by_block,", "size_based,", "fsdp.wrapping_strategy: zsim does not simulate 'size_based'"),
    ],
)
def test_what_olmo_does_and_zsim_does_not_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in OLMO
    with pytest.raises(NotSimulatedError, match=message):
        read(tmp_path, OLMO.replace(old, new))
