"""litgpt's YAML: full, LoRA and QLoRA fine-tuning, pre-training, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import zsim
from tests.expect import of_kind, there
from tests.programs.reading import notes_of, read_text
from zsim.errors import NotSimulatedError
from zsim.frameworks.fsdp1.settings import Fsdp1Table

FULL = """
checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B
out_dir: out/finetune/full
precision: bf16-true
devices: 8
num_nodes: 1
data:
  class_path: litgpt.data.Alpaca2k
train:
  global_batch_size: 64
  micro_batch_size: 2
  max_seq_length: 512
  max_norm:
  epochs: 1
eval:
  interval: 25
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.0002
"""
QLORA = FULL.replace(
    "devices: 8", "devices: 1\nquantize: bnb.nf4-dq\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05"
)
PRETRAINING = """
model_name: Llama-3-8B
precision: bf16-mixed
devices: auto
train:
  global_batch_size: 512
  micro_batch_size: 4
  max_seq_length: 2048
  max_norm: 1.0
"""


def test_several_gpus_are_fsdp1_with_checkpoints(tmp_path: Path) -> None:
    """A step of 64 sequences is 4 micro-batches of 2 on 8 GPUs."""
    experiment = read_text(tmp_path, FULL, model=None)
    training, strategy = experiment.training, of_kind(experiment.strategy, Fsdp1Table)
    assert (experiment.model, experiment.program, experiment.gpus) == ("llama-3-8b", "litgpt", 8)
    assert (training.micro_batch_size, training.gradient_accumulation_steps, training.sequence_length) == (
        2,
        4,
        512,
    )
    assert (training.stored_dtype, training.activation_checkpointing) == ("bf16", "full")
    assert (training.gradient_clipping, training.optimizer_implementation) == (0.0, "foreach")
    assert (strategy.sharding_strategy, strategy.wrapping, strategy.no_sync) == (
        "FULL_SHARD",
        "huggingface",
        True,
    )
    peaks = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]
    assert peaks["parameters"] == pytest.approx(2 * 8_030_261_248 / 8, rel=1e-3)
    assert "not read" not in notes_of(experiment)


def test_qlora_is_of_one_gpu_with_a_paged_optimizer(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, QLORA)
    training, lora = experiment.training, there(experiment.training.lora)
    assert (experiment.strategy.kind, experiment.gpus, training.gradient_accumulation_steps) == ("ddp", 1, 32)
    assert (lora.rank, lora.targets, lora.quantized) == (32, ("q_proj", "v_proj"), "nf4")
    assert (lora.double_quantization, lora.dtype) == (True, "bf16")
    assert (training.optimizer, training.activation_checkpointing) == ("paged-adamw", "none")
    single = read_text(tmp_path, QLORA.replace("nf4-dq", "nf4"))
    assert not there(single.training.lora).double_quantization


def test_lora_on_several_gpus_is_fsdp2(tmp_path: Path) -> None:
    text = FULL + "lora_r: 8\nlora_key: true\nlora_mlp: true\n"
    experiment = read_text(tmp_path, text)
    assert experiment.strategy.kind == "fsdp2"
    assert there(experiment.training.lora).targets == (
        "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip


def test_pretraining_is_hybrid_compiled_and_without_checkpoints(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, PRETRAINING, model=None, changes={"nodes": 2})
    training, strategy = experiment.training, of_kind(experiment.strategy, Fsdp1Table)
    assert (experiment.model, strategy.sharding_strategy) == ("llama-3-8b", "HYBRID_SHARD")
    assert (training.compile, training.activation_checkpointing, training.gradient_clipping) == (
        True,
        "none",
        1.0,
    )
    assert (training.gradient_accumulation_steps, training.stored_dtype) == (8, "fp32")


def test_what_litgpt_refuses_or_zsim_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSimulatedError, match="which litgpt refuses"):
        read_text(tmp_path, QLORA.replace("devices: 1", "devices: 4"))
    with pytest.raises(NotSimulatedError, match="that quantisation"):
        read_text(tmp_path, QLORA.replace("nf4-dq", "int8-training"))
    with pytest.raises(NotSimulatedError, match="adapters on Phi's q, k and v"):
        read_text(tmp_path, QLORA.replace("meta-llama/Meta-Llama-3-8B", "microsoft/Phi-3-mini-4k-instruct"))
    with pytest.raises(NotSimulatedError, match="another model's shapes"):
        read_text(tmp_path, PRETRAINING + "model_config:\n  name: tiny\n")
