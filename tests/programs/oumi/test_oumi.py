"""oumi's YAML: TRL's trainers by oumi's names and defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.expect import of_kind, there
from tests.programs.reading import notes_of, read_text
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp1.settings import Fsdp1Table

SFT = """
model: {model_name: meta-llama/Llama-3.1-8B-Instruct, model_max_length: 4096, torch_dtype_str: bfloat16}
data: {train: {datasets: [{dataset_name: yahma/alpaca-cleaned}]}}
training:
  trainer_type: TRL_SFT
  gradient_accumulation_steps: 2
  enable_gradient_checkpointing: true
  optimizer: adamw_torch_fused
  dataloader_num_workers: auto
  some_thing: 1
"""
SHARDED = "fsdp: {enable_fsdp: true, forward_prefetch: true, auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
ADAPTED = SFT.replace("training:\n", "peft: {q_lora: true, lora_r: 16}\ntraining:\n  use_peft: true\n")


def test_what_is_left_out_is_as_oumi_has_it(tmp_path: Path) -> None:
    """Eight sequences at once, without autocast, so that all is in the weights' bf16."""
    experiment = read_text(tmp_path, SFT, model=None)
    training = experiment.training
    assert (experiment.model, experiment.strategy.kind) == ("llama-3.1-8b", "ddp")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (8, 2)
    assert (training.sequence_length, training.activation_checkpointing) == (4096, "full")
    assert (training.precision, training.stored_dtype, training.lora) == ("bf16", "bf16", None)
    notes = notes_of(experiment)
    assert "not read: training.some_thing" in notes
    assert "lora_r" not in notes


def test_fsdp_is_of_version_1_and_checkpoints_itself(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, SFT + SHARDED, model=None)
    strategy = of_kind(experiment.strategy, Fsdp1Table)
    assert (strategy.param_dtype, strategy.reduce_dtype) == ("bf16", "bf16")
    assert (strategy.backward_prefetch, strategy.forward_prefetch) == ("BACKWARD_PRE", True)
    assert experiment.training.activation_checkpointing == "full"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_precision_of_fsdp_counts_where_training_has_none(tmp_path: Path, dtype: str) -> None:
    """oumi hands it over as ACCELERATE_MIXED_PRECISION, and Accelerate's flat parameters are in fp32."""
    text = (SFT + SHARDED).replace("{enable_fsdp", "{mixed_precision: bf16, enable_fsdp")
    experiment = read_text(tmp_path, text.replace("bfloat16", dtype), model=None)
    assert of_kind(experiment.strategy, Fsdp1Table).param_dtype == "bf16"
    assert (experiment.training.precision, experiment.training.stored_dtype) == ("bf16", "fp32")
    alone = text.replace("enable_fsdp: true", "enable_fsdp: false").replace("bfloat16", "float32")
    assert read_text(tmp_path, alone, model=None).training.precision == "fp32"


def test_unknown_keys_of_fsdp_are_named(tmp_path: Path) -> None:
    text = (SFT + SHARDED).replace("{enable_fsdp", "{state_dict_type: FULL_STATE_DICT, shard: 1, enable_fsdp")
    notes = notes_of(read_text(tmp_path, text, model=None))
    assert "fsdp.shard" in notes
    assert "state_dict_type" not in notes


def test_notes_and_missing_models_are_named_by_oumis_keys(tmp_path: Path) -> None:
    notes = notes_of(read_text(tmp_path, SFT, model=None))
    assert "taken at model.model_max_length" in notes
    with pytest.raises(InputError, match=r"model\.model_name: unknown model 'nobody/nothing'"):
        read_text(tmp_path, SFT.replace("meta-llama/Llama-3.1-8B-Instruct", "nobody/nothing"), model=None)


def test_q_lora_has_no_effect_without_peft(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, ADAPTED.replace("use_peft: true", "use_peft: false"), model=None)
    assert (experiment.training.lora, experiment.training.frozen_dtype) == (None, None)
    assert "PEFT's preparation" not in notes_of(experiment)


def test_q_lora_says_what_of_pefts_preparation_is_left_out(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, ADAPTED, model=None)
    lora = there(experiment.training.lora)
    assert (lora.rank, lora.alpha, lora.quantized) == (16, 8.0, "nf4")
    assert "PEFT's preparation" in notes_of(experiment)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("TRL_SFT", "VERL_GRPO", r"training\.trainer_type: found 'VERL_GRPO'"),
        ("data:", "deepspeed: {enable_deepspeed: true}\ndata:", r"deepspeed\.enable_deepspeed"),
        ("adamw_torch_fused", "adamw_magic", r"training\.optimizer"),
        ("steps: 2", "steps: many", r"gradient_accumulation_steps: found 'many'"),
        ("TRL_SFT", "[TRL_SFT]", r"training\.trainer_type: found .* which zsim does not read of oumi"),
        ("steps: 2", "steps: 2\n  trainer_kwargs: 3", r"training\.trainer_kwargs: found 3, expected keys"),
        ("max_length: 4096", "max_length: []", r"model\.model_max_length: found \[\]"),
    ],
)
def test_what_is_wrong_is_named_by_oumis_keys(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises((InputError, NotSimulatedError), match=words):
        read_text(tmp_path, SFT.replace(old, new), model=None)
