"""LLaMA-Factory's file: the job that it starts, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zsim
from tests.expect import of_kind, there
from tests.programs.reading import notes_of, read_job, read_text
from tests.specs.test_towers import QWEN3_VL
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.specs.formats.detect import read_training_file

FULL = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
do_train: true
finetuning_type: full
dataset: alpaca_en_demo
template: llama3
cutoff_len: 4096
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
bf16: true
output_dir: saves/full
logging_steps: 10
"""
LORA = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
do_train: true
template: llama3
bf16: true
"""


def test_a_full_training_keeps_fp32_weights_under_autocast(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, FULL, model=None)
    training = experiment.training
    assert (experiment.model, experiment.program, experiment.strategy.kind) == (
        "llama-3-8b",
        "llama-factory",
        "ddp",
    )
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 8)
    assert (training.sequence_length, training.precision, training.stored_dtype) == (4096, "bf16", "fp32")
    assert (training.activation_checkpointing, training.checkpoint_is_reentrant) == ("full", True)
    assert (training.lora, training.gradient_clipping) == (None, 1.0)
    assert "not read" not in notes_of(experiment)


def test_pure_bf16_keeps_everything_in_bf16(tmp_path: Path) -> None:
    """Llama-3-8B has 8,030,261,248 parameters, of 2 bytes."""
    text = FULL.replace("bf16: true", "pure_bf16: true\nenable_liger_kernel: true\nflash_attn: fa2")
    experiment = read_text(tmp_path, text, changes={"training.sequence_length": 1024})
    assert (experiment.training.stored_dtype, experiment.training.liger) == ("bf16", True)
    peaks = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]
    assert peaks["parameters"] == 2 * 8_030_261_248
    assert peaks["optimizer_states"] == pytest.approx(4 * 8_030_261_248, rel=1e-3)


def test_lora_is_what_it_trains_where_nothing_says_more(tmp_path: Path) -> None:
    """Rank 8 on every linear layer but the head, checkpoints on, micro-batches of TrainingArguments' 8."""
    experiment = read_text(tmp_path, LORA)
    training, lora = experiment.training, there(experiment.training.lora)
    assert (lora.rank, lora.alpha, lora.targets, lora.dropout) == (8, 16, "all-linear", 0)
    assert (lora.quantized, lora.dtype, training.frozen_dtype) == (None, None, None)
    assert (training.sequence_length, training.micro_batch_size) == (2048, 8)
    assert training.activation_checkpointing == "full"
    notes = notes_of(experiment)
    assert "finetuning_type lora" in notes
    assert "cutoff_len 2048" in notes
    assert "per_device_train_batch_size 8" in notes


def test_four_bits_are_bitsandbytes(tmp_path: Path) -> None:
    lora = there(
        read_text(tmp_path, LORA + "quantization_bit: 4\nlora_target: q_proj,v_proj\n").training.lora
    )
    assert (lora.quantized, lora.double_quantization, lora.preparation) == ("nf4", True, "none")
    assert lora.targets == ("q_proj", "v_proj")
    with pytest.raises(NotSimulatedError, match="in 3 bits; expected 4 or 8"):
        read_text(tmp_path, LORA + "quantization_bit: 3\n")
    with pytest.raises(InputError, match="finetuning_type full, which LLaMA-Factory refuses"):
        read_text(tmp_path, FULL + "quantization_bit: 4\n")


def test_checkpoints_may_be_turned_off(tmp_path: Path) -> None:
    text = LORA + "disable_gradient_checkpointing: true\n"
    assert read_text(tmp_path, text).training.activation_checkpointing == "none"


def test_optimizers_have_transformers_names(tmp_path: Path) -> None:
    assert read_text(tmp_path, FULL + "optim: paged_adamw_8bit\n").training.optimizer == "paged-adamw-8bit"
    assert read_text(tmp_path, FULL + "optim: adafactor\n").training.optimizer == "adafactor-transformers"


def test_unsloth_s_checkpoints_are_kept_on_the_host(tmp_path: Path) -> None:
    training = read_text(tmp_path, FULL + "use_unsloth_gc: true\n").training
    assert (training.activation_checkpointing, training.checkpoint_offload) == ("full", "pinned")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("use_galore: true\n", "use_galore True: .*GaLore"),
        ("use_apollo: true\n", "APOLLO"),
        ("use_badam: true\n", "BAdam"),
        ("tensor_model_parallel_size: 2\n", "Megatron-Core under LLaMA-Factory"),
        ("mixture_of_depths: convert\n", "mixtures of depths"),
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read_text(tmp_path, FULL + lines)


@pytest.mark.parametrize("stage", ["rm", "ppo"])
def test_other_stages_are_refused_by_name(tmp_path: Path, stage: str) -> None:
    with pytest.raises(NotSimulatedError, match=f"stage '{stage}': is of LLaMA-Factory"):
        read_text(tmp_path, FULL.replace("stage: sft", f"stage: {stage}"))


def test_a_file_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    text = "model_name_or_path: meta-llama/Meta-Llama-3-8B\ntemplate: llama3\nexport_dir: out\n"
    with pytest.raises(InputError, match="LLaMA-Factory's, but trains nothing"):
        read_text(tmp_path, text)


def test_a_key_that_stands_twice_is_said(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, FULL + "cutoff_len: 1024\n")
    assert experiment.training.sequence_length == 1024
    assert "'cutoff_len' stands again in line 14; the last of them counts" in notes_of(experiment)


def test_a_job_comes_of_it(tmp_path: Path) -> None:
    assert read_job(tmp_path, LORA).training.micro_batch_size == 8


def test_a_preference_is_two_sequences_and_dpo_asks_a_reference(tmp_path: Path) -> None:
    """The reference of full training is a copy that nothing casts to fp32."""
    training = read_text(tmp_path, FULL.replace("stage: sft", "stage: dpo")).training
    assert (training.micro_batch_size, training.reference, training.frozen_dtype) == (4, "copy", "bf16")
    lora = read_text(tmp_path, LORA.replace("stage: sft", "stage: dpo")).training
    assert (lora.micro_batch_size, lora.reference) == (16, "base")
    orpo = read_text(tmp_path, LORA.replace("stage: sft", "stage: dpo\npref_loss: orpo")).training
    assert (orpo.micro_batch_size, orpo.reference) == (16, None)
    with pytest.raises(NotSimulatedError, match="another model than the trained one"):
        read_text(tmp_path, FULL.replace("stage: sft", "stage: dpo\nref_model: meta-llama/Llama-2-7b-hf"))


@pytest.mark.parametrize(
    ("lines", "trained"),
    [
        ("", []),
        ("freeze_multi_modal_projector: false", ["visual.merger"]),
        ("freeze_vision_tower: false", ["audio_tower.ln_post"]),
    ],
)
def test_a_frozen_tower_of_sounds_is_frozen_to_its_end(
    tmp_path: Path, lines: str, trained: list[str]
) -> None:
    """`vision_model_keys` has all of "audio_tower", `projector_keys` "audio_tower.proj" too."""
    text = FULL.replace("meta-llama/Meta-Llama-3-8B", "Qwen/Qwen2.5-Omni-7B")
    model = read_job(tmp_path, f"{text}\n{lines}", model=None).model
    after = [module.name for tower in model.towers for module in tower.after if module.trainable_numel]
    assert {".".join(name.split(".")[1:3]) for name in after} == set(trained)


def test_eight_bits_are_llm_int8(tmp_path: Path) -> None:
    assert there(read_text(tmp_path, LORA + "quantization_bit: 8\n").training.lora).quantized == "int8"


def test_a_vision_tower_is_not_trained_unless_the_file_says_so(tmp_path: Path) -> None:
    """Neither the tower nor its merger by default, and adapters are on neither."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL))
    named = f"model_name_or_path: {tmp_path}"
    full = FULL.replace("model_name_or_path: meta-llama/Meta-Llama-3-8B", named).replace("4096", "512")
    model = read_job(tmp_path, full, model=None).model
    assert model.vision_tower is not None
    assert not any(module.trainable_numel for module in model.vision_tower.modules)
    assert model.trainable_numel == model.numel - model.vision_tower.numel
    model = read_job(tmp_path, f"{full}\nfreeze_vision_tower: false", model=None).model
    assert model.vision_tower is not None
    assert [
        module.name for module in model.vision_tower.after if module.parameters and not module.trainable_numel
    ]
    assert all(module.trainable_numel for module in model.vision_tower.before if module.parameters)
    lora = LORA.replace("model_name_or_path: meta-llama/Meta-Llama-3-8B", named)
    names = [name for name, _ in read_job(tmp_path, lora, model=None).model.named_parameters()]
    assert any("language_model" in name for name in names if "lora_A" in name)
    assert not any("visual" in name for name in names if "lora_A" in name)


def test_all_linear_layers_of_a_mixture_are_its_attentions(tmp_path: Path) -> None:
    """find_all_linear_modules gives PEFT names, and Qwen3's experts and router are no linear modules."""
    text = LORA.replace("meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-30B-A3B")
    lora = there(read_text(tmp_path, text, model=None).training.lora)
    assert lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


ENGINE = """
model: Qwen/Qwen3-0.6B
model_class: llm
kernel_config: {name: auto}
dist_config: {name: fsdp2, reshard_after_forward: false}
train_dataset: data/v1_sft_demo.yaml
micro_batch_size: 2
cutoff_len: 1024
"""


def test_the_newer_engine_keeps_the_checkpoints_type(tmp_path: Path) -> None:
    """FSDP2 gathers in bf16, reduces in fp32 and in every micro-batch, and nothing has a copy in fp32."""
    experiment = read_text(tmp_path, ENGINE + "global_batch_size: 64\n", model=None)
    training, table = experiment.training, of_kind(experiment.strategy, Fsdp2Table)
    assert (experiment.model, training.sequence_length) == ("qwen3-0.6b", 1024)
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.precision, training.stored_dtype) == ("bf16", "bf16")
    assert (training.cross_entropy, training.optimizer_implementation) == ("eager", "foreach")
    assert training.activation_checkpointing == "full"
    assert (table.param_dtype, table.reduce_dtype, table.no_sync) == ("bf16", "fp32", False)
    assert table.reshard_after_forward is False
    assert "taken as sft" in notes_of(experiment)


def test_the_newer_engines_adapters_and_bits(tmp_path: Path) -> None:
    text = ENGINE + "peft_config: {name: lora, target_modules: all}\nquant_config: {name: bnb}\n"
    lora = there(read_text(tmp_path, text, model=None).training.lora)
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (8, 16, 0.05, "all-linear")
    assert (lora.quantized, lora.double_quantization) == ("nf4", True)


def test_the_newer_engines_deepspeed_is_its_json(tmp_path: Path) -> None:
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    text = ENGINE.replace(
        "{name: fsdp2, reshard_after_forward: false}", "{name: deepspeed, config_file: z3.json}"
    )
    job = read_job(tmp_path, text, model=None)
    assert of_kind(job.strategy, DeepSpeedConfig).stage == 3
    assert job.training.precision == "bf16"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("peft_config: {name: freeze}", "adapters of kind freeze"),
        ("peft_config: {name: lora, use_dora: true}", "DoRA"),
        ("dist_config: {name: fsdpturbo}", "its plugin fsdpturbo"),
        ("optim_config: {name: muon}", "Muon"),
        ("quant_config: {name: bnb}", "without an adapter"),
        ("cp_mode: ring", "how they do"),
    ],
)
def test_the_newer_engines_other_plugins_are_refused(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read_text(tmp_path, f"{ENGINE}{line}\n", model=None)
    with pytest.raises(InputError, match="trains nothing"):
        read_text(tmp_path, "model: x/y\npeft_config: {name: lora, export_dir: out}\n")


def test_stage_kto_is_three_forwards_without_gradients(tmp_path: Path) -> None:
    training = read_text(tmp_path, FULL.replace("stage: sft", "stage: kto")).training
    assert (training.reference, training.reference_forwards, training.micro_batch_size) == ("copy", 3, 2)


def test_ray_says_how_many_gpus_train(tmp_path: Path) -> None:
    """LLaMA-Factory looks at the key under Ray alone, which a command tells and a file does not."""
    alone = read_text(tmp_path, FULL + "ray_num_workers: 4\n")
    assert alone.gpus == 4
    assert "ray_num_workers: 4 GPUs, as under USE_RAY=1, without" in notes_of(alone)
    path = tmp_path / "ray.yaml"
    path.write_text(FULL + "ray_num_workers: 4\n")
    for variable, gpus in (("USE_RAY=1 ", 4), ("", None), ("USE_RAY=0 ", None)):
        (tmp_path / "run.sh").write_text(f"{variable}llamafactory-cli train {path}\n")
        assert read_training_file(str(tmp_path / "run.sh")).settings.get("gpus") == gpus


def test_frozen_weights_keep_the_checkpoints_type_without_a_precision(tmp_path: Path) -> None:
    """Weights that are trained are cast to fp32."""
    experiment = read_text(tmp_path, LORA.replace("bf16: true\n", ""), model=None)
    assert experiment.training.precision == "bf16"
    assert "frozen weights are in the checkpoint's type" in notes_of(experiment)
    assert read_text(tmp_path, FULL.replace("bf16: true\n", ""), model=None).training.precision == "fp32"


def test_llama_factorys_own_jsons_are_known_where_they_are_not_here(tmp_path: Path) -> None:
    text = FULL + "deepspeed: examples/deepspeed/ds_z3_offload_config.json\n"
    assert "is not here, so it is taken as LLaMA-Factory has it" in notes_of(read_text(tmp_path, text))
    assert of_kind(read_job(tmp_path, text).strategy, DeepSpeedConfig).stage == 3
    with pytest.raises(InputError, match="no such file"):
        read_text(tmp_path, FULL + "deepspeed: examples/deepspeed/ds_z9_config.json\n")
