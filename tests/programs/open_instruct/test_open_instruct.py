"""Open Instruct's YAML and flags: SFT and DPO by TRL's trainers, with Open Instruct's defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.reading import notes_of, read_text
from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

SFT = """
model_name_or_path: meta-llama/Llama-3.1-8B
use_flash_attn: true
use_slow_tokenizer: true
dataset_mixer: {allenai/some: 1.0}
max_seq_length: 4096
gradient_accumulation_steps: 2
learning_rate: 5.0e-06
num_train_epochs: 2
with_tracking: true
checkpointing_steps: epoch
"""
ADAPTED = SFT + "use_lora: true\nuse_qlora: true\ngradient_checkpointing: true\n"
DPO = SFT.replace("num_train_epochs", "num_epochs") + "per_device_train_batch_size: 1\n"
FLAGS = "--model_name_or_path meta-llama/Llama-3.1-8B --max_seq_length 1024 --per_device_train_batch_size 2"


def read(command: str) -> Experiment:
    return build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")


def test_what_is_left_out_is_as_open_instruct_has_it(tmp_path: Path) -> None:
    """Eight sequences at once, no checkpoints, and products in the weights' bf16, without autocast."""
    experiment = read_text(tmp_path, SFT, model=None)
    training = experiment.training
    assert (experiment.program, experiment.model) == ("open-instruct", "llama-3.1-8b")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (8, 2)
    assert (training.sequence_length, training.activation_checkpointing) == (4096, "none")
    assert (training.precision, training.stored_dtype, training.lora) == ("bf16", "bf16", None)
    assert training.cross_entropy is None
    assert "not read" not in notes_of(experiment)


def test_adapters_are_of_rank_64_on_every_linear_module_of_a_block(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, ADAPTED, model=None)
    lora = experiment.training.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.dropout, lora.quantized) == (64, 16, 0.1, "nf4")
    assert sorted(lora.targets or ()) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    assert (lora.preparation, experiment.training.optimizer) == ("peft", "paged-adamw")


def test_a_preference_is_two_sequences_whose_reference_ran_before(tmp_path: Path) -> None:
    training = read_text(tmp_path, DPO + "loss_type: dpo_norm\nbeta: 5\n", model=None).training
    assert (training.micro_batch_size, training.sequences_per_sample) == (2, 2)
    assert training.reference is None


def test_reinforcement_learning_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        NotSimulatedError, match="num_unique_prompts_rollout: is of Open Instruct's reinforce"
    ):
        read_text(tmp_path, SFT + "num_unique_prompts_rollout: 8\n", model=None)


def test_the_script_tells_the_trainer_and_the_launcher_the_precision(tmp_path: Path) -> None:
    """What `mason.py` starts stands behind its dashes. Weights' bf16 stays without a launcher's type."""
    launcher = "accelerate launch --num_processes 4 open_instruct"
    found = read(f"python mason.py --gpus 8 --budget x -- {launcher}/dpo_tune_cache.py {FLAGS}")
    assert (found.gpus, found.training.micro_batch_size, found.training.precision) == (4, 4, "bf16")
    found = read(f"{launcher}/finetune.py {FLAGS} --gradient_checkpointing")
    assert (found.training.micro_batch_size, found.training.activation_checkpointing) == (2, "full")
    assert (found.training.precision, found.training.stored_dtype) == ("bf16", "bf16")
    sharded = f"{launcher}/finetune.py {FLAGS}".replace("--num", "--mixed_precision bf16 --use_fsdp --num")
    assert (read(sharded).strategy.kind, read(sharded).training.precision) == ("fsdp1", "bf16")


def test_a_loop_clips_where_it_is_told_to_and_deepspeed_by_its_json(tmp_path: Path) -> None:
    """finetune.py has `clip_grad_norm` -1 and DPO no `max_grad_norm`. Under DeepSpeed Accelerate's "auto" is
    1 whatever they are (accelerate 1.15.0 accelerator.py `_prepare_deepspeed`).
    """
    assert read_text(tmp_path, SFT, model=None).training.gradient_clipping == 0
    assert read_text(tmp_path, SFT + "clip_grad_norm: 0.5\n", model=None).training.gradient_clipping == 0.5
    assert read_text(tmp_path, DPO, model=None).training.gradient_clipping == 0
    assert read_text(tmp_path, DPO + "max_grad_norm: 0.5\n", model=None).training.gradient_clipping == 0.5
    launcher = "accelerate launch --num_processes 4 --mixed_precision bf16"
    flags = f"open_instruct/finetune.py {FLAGS} --clip_grad_norm 0.5"
    for engine, norm in (
        ("--use_fsdp", 0.5), ("--use_deepspeed", 1.0), ("--use_deepspeed --gradient_clipping 0.7", 0.7),
    ):  # fmt: skip
        assert resolve(read(f"{launcher} {engine} {flags}")).training.gradient_clipping == norm


def test_dpo_makes_deepspeeds_json_of_its_flags_and_checkpoints_for_a_budget() -> None:
    launcher = "accelerate launch --num_processes 4 --mixed_precision bf16 open_instruct/dpo_tune_cache.py"
    found = read(f"{launcher} {FLAGS} --zero_stage 3 --offload_optimizer true --max_grad_norm 0.5")
    strategy = resolve(found).strategy
    assert isinstance(strategy, DeepSpeedConfig)
    assert (strategy.zero.stage, strategy.zero.offload_optimizer is None) == (3, False)
    assert strategy.gradient_clipping == 1.0
    assert found.training.activation_checkpointing == "none"
    found = read(f"{launcher} {FLAGS} --activation_memory_budget 0.5")
    assert (found.strategy.kind, found.training.activation_checkpointing) == ("ddp", "full")
    adapted = f"{launcher} {FLAGS} --activation_memory_budget 0.5 --use_lora"
    assert read(adapted).training.activation_checkpointing == "none"
    assert read(f"{adapted} --use_qlora").training.activation_checkpointing == "full"
    assert read(f"{launcher} {FLAGS.replace('--max_seq_length 1024', '')}").training.sequence_length == 4096
    assert "not read" not in notes_of(found)
