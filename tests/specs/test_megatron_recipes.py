"""Recipes of Megatron-Bridge and NeMo, and Megatron's own YAML, as experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.detect import read_training_file
from zsim.specs.model.expert_layer import stacked_experts

BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
comm_overlap:
  tp_comm_overlap: true
  overlap_grad_reduce: true
  overlap_param_gather: true
  bucket_size: 134217728
model:
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  kv_channels: null
  seq_length: 8192
  normalization: RMSNorm
  gated_linear_unit: true
  activation_func: torch.nn.functional.silu
  add_bias_linear: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  share_embeddings_and_output_weights: false
  position_embedding_type: rope
  vocab_size: 128256
  tensor_model_parallel_size: 4
  sequence_parallel: true
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  context_parallel_size: 2
  cp_comm_type: a2a
  gradient_accumulation_fusion: true
  bias_dropout_fusion: true
  attention_backend: AttnBackend.fused
train:
  train_iters: 100
  micro_batch_size: 1
  global_batch_size: 128
ddp:
  use_distributed_optimizer: true
  overlap_grad_reduce: false
  grad_reduce_in_fp32: false
  average_in_collective: true
  check_for_nan_in_grad: true
optimizer:
  optimizer: adam
  lr: 0.0003
  clip_grad: 0.5
  main_grads_dtype: torch.float32
mixed_precision: bf16_mixed
dataset:
  seq_length: 8192
"""
NEMO = """
trainer:
  devices: 8
  num_nodes: 4
  precision: bf16
model:
  micro_batch_size: 2
  global_batch_size: 128
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  encoder_seq_length: 4096
  max_position_embeddings: 4096
  num_layers: 24
  hidden_size: 2048
  ffn_hidden_size: 8192
  num_attention_heads: 16
  activation: fast-swiglu
  normalization: layernorm1p
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: true
  activations_checkpoint_granularity: full
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 2
  fp8: true
  fp8_hybrid: true
  make_vocab_size_divisible_by: 64
  optim:
    name: distributed_fused_adam
    overlap_grad_sync: true
    overlap_param_sync: true
"""
OWN = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 64
  --seq-length: 1024
  --max-position-embeddings: 1024
  --tensor-model-parallel-size: 2
  --use-distributed-optimizer: true
  --overlap-grad-reduce: false
  --bf16: true
"""


def job_of(text: str, folder: Path, **overrides: Any) -> Job:
    path = folder / "recipe.yaml"
    path.write_text(text)
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    data = {"cluster": "dgx-h100", "nodes": 4}
    return resolve(build_experiment(data, {"strategy.config": str(path), **changes}, origin="test"))


def test_a_recipe_of_bridge_is_an_experiment(tmp_path: Path) -> None:
    """32 GPUs in groups of 4 x 2 x 2: 2 replicas with 64 sequences each. Overlap is written over ddp's."""
    job = job_of(BRIDGE, tmp_path)
    parallelism, training = job.parallelism, job.training
    assert (parallelism.tensor, parallelism.pipeline, parallelism.context) == (4, 2, 2)
    assert (parallelism.virtual_stages, parallelism.schedule) == (4, "interleaved-1f1b")
    assert (parallelism.async_tensor, parallelism.context_method) == (True, "all-to-all")
    assert (training.sequence_length, training.gradient_accumulation_steps) == (8192, 64)
    assert (training.precision, training.attention, training.gradient_clipping) == ("bf16", "flash", 0.5)
    table = of_kind(job.experiment.strategy, MegatronTable)
    assert (table.distributed_optimizer, table.overlap_grad_reduce, table.bucket_size) == (True, True, 2**27)
    assert (table.grad_reduce_dtype, table.average_in_collective) == ("bf16", True)
    assert job.model.numel == 8_030_261_248 + 2 * 256 * 4096


def test_a_recipe_of_nemo_is_an_experiment(tmp_path: Path) -> None:
    """LayerNorm1p is a LayerNorm; the first 2 of every 12 layers are checkpointed; 128 = 2 x 8 x 8."""
    job = job_of(NEMO, tmp_path, model__vocab_size=32_000)
    assert (job.world_size, job.parallelism.tensor, job.parallelism.pipeline) == (32, 2, 2)
    assert (job.training.precision, job.training.gradient_accumulation_steps) == ("fp8", 8)
    assert job.training.block_checkpointing == (("full",) * 2 + ("none",) * 10) * 2
    table = of_kind(job.experiment.strategy, MegatronTable)
    assert (table.distributed_optimizer, table.overlap_param_gather, table.vocabulary_multiple) == (
        True,
        True,
        64,
    )
    assert job.model.is_tied


@pytest.mark.parametrize("key", ["fp8_dot_product_attention", "fp8_multi_head_attention"])
def test_attention_in_fp8_is_refused(tmp_path: Path, key: str) -> None:
    """It was named among what is not read, and simulated in bf16."""
    precision = f"mixed_precision:\n  bf16: true\n  fp8: hybrid\n  fp8_recipe: delayed\n  {key}: "
    text = BRIDGE.replace("mixed_precision: bf16_mixed", precision)
    with pytest.raises(NotSimulatedError, match=f"mixed_precision.{key}: .*attention in fp8"):
        job_of(text.replace(f"{key}: ", f"{key}: true"), tmp_path)
    assert job_of(text.replace(f"{key}: ", f"{key}: false"), tmp_path).training.precision == "fp8"


def test_megatrons_own_yaml_has_flags_and_variables(tmp_path: Path) -> None:
    """Its tokenizer is GPT-2's unless it says otherwise, as on its command line."""
    job = job_of(OWN, tmp_path)
    assert (job.model.vocab_size, job.training.device_max_connections) == (50_432, 1)
    table = of_kind(job.experiment.strategy, MegatronTable)
    assert (table.distributed_optimizer, table.overlap_grad_reduce) == (True, False)


def test_a_recipe_without_a_network_takes_the_experiments_model(tmp_path: Path) -> None:
    text = "model:\n  tensor_model_parallel_size: 2\n  seq_length: 2048\ntrain:\n  micro_batch_size: 1\n"
    job = job_of(text, tmp_path, model="llama-3-8b")
    assert (job.model.name, job.parallelism.tensor) == ("llama-3-8b", 2)
    with pytest.raises(InputError, match="names no model: give it"):
        job_of(text, tmp_path)


def test_fields_that_are_not_flags_are_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(BRIDGE + "  random_seed: 3\nlogger:\n  log_interval: 1\n  another_thing: 2\n")
    notes = read_training_file(str(path)).notes
    assert f"{path}: not read: dataset.random_seed, logger.another_thing" in notes
    assert f"{path}: read, no effect on a step: --train-iters, --lr, --log-interval" in notes


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ("  num_layers: 32", InputError, "expected a whole number of at least 1"),
        ("  sequence_parallel: true", InputError, "sequence_parallel: found 'yes', expected true or false"),
        ("  gated_linear_unit: true", InputError, "silu with a gate only"),
        ("  cp_comm_type: a2a", InputError, "expected one of p2p, a2a, all_gather"),
    ],
)
def test_values_that_cannot_be_are_refused(
    tmp_path: Path, change: str, kind: type[Exception], message: str
) -> None:
    values = {"num_layers": "many", "sequence_parallel": "'yes'", "gated_linear_unit": "false"}
    key = change.strip().partition(":")[0]
    with pytest.raises(kind, match=message):
        job_of(BRIDGE.replace(change, f"  {key}: {values.get(key, 'ring')}"), tmp_path)


def test_experts_of_a_recipe_are_its_models(tmp_path: Path) -> None:
    text = BRIDGE.replace("  kv_channels: null", "  num_moe_experts: 8")
    assert stacked_experts(job_of(text, tmp_path).model) is not None


LORA = """
peft:
  _target_: megatron.bridge.peft.lora.LoRA
  dim: 16
  alpha: 32
  dropout: 0.0
  dropout_position: pre
  target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]
"""


def test_a_recipes_adapters_are_read(tmp_path: Path) -> None:
    """Rank 16 on Megatron's four products: 16 (3 x 4096 + 14336 + 6144 + 2 x 4096 + 28672) in 32 layers."""
    recipe = BRIDGE.replace("tp_comm_overlap: true", "tp_comm_overlap: false") + LORA
    job = job_of(recipe, tmp_path)
    assert job.model.trainable_numel == 32 * 16 * (3 * 4096 + 14336 + 6144 + 2 * 4096 + 28672)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("peft.lora.LoRA", "peft.dora.DoRA"), "does not simulate DoRA"),
        (("0.0\n  dropout_position: pre", "0.1\n  dropout_position: post"), "peft.dropout_position"),
    ],
)
def test_other_adapters_of_recipes_are_refused(
    tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(BRIDGE + LORA.replace(*change))
    with pytest.raises(NotSimulatedError, match=sentence):
        read_training_file(str(path))
    path.write_text(f"{BRIDGE}{LORA}  exclude_modules: [linear_fc2]\n")
    with pytest.raises(
        InputError, match=r"peft.exclude_modules: found \['linear_fc2'\] beside target_modules"
    ):
        read_training_file(str(path))
