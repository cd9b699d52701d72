"""TRL's YAML, and recipes of the alignment handbook: SFT as it is, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.expect import of_kind, there
from tests.programs.reading import notes_of, read_job, read_text
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.rl import RlTable

FULL = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: trl-lib/Capybara
bf16: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
max_length: 2048
packing: true
output_dir: out
learning_rate: 2.0e-5
"""
QLORA = """
model_name_or_path: mistralai/Mistral-7B-v0.1
use_peft: true
load_in_4bit: true
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
per_device_train_batch_size: 4
max_length: 1024
"""


def test_a_model_that_is_loaded_in_bf16_is_kept_so(tmp_path: Path) -> None:
    """Llama-3-8B's 8,030,261,248 parameters, gradients and states are of 2, 2 and 4 bytes."""
    experiment = read_text(tmp_path, FULL, model=None)
    training = experiment.training
    assert (experiment.model, experiment.program, experiment.strategy.kind) == ("llama-3-8b", "trl", "ddp")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.sequence_length, training.activation_checkpointing) == (2048, "full")
    assert (training.stored_dtype, training.precision, training.lora) == ("bf16", "bf16", None)
    assert not training.checkpoint_is_reentrant
    peaks = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]
    assert peaks["parameters"] == peaks["gradients"] == 2 * 8_030_261_248


def test_qlora_is_no_full_training(tmp_path: Path) -> None:
    """Adapters of 16 on q and v of Mistral-7B: 32 x 16 x (4,096 + 4,096 + 4,096 + 1,024) = "
    "6,815,744 of bf16."""
    experiment = read_text(tmp_path, QLORA, model=None)
    lora = there(experiment.training.lora)
    assert experiment.model == "mistral-7b"
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (16, 32, 0.05, ("q_proj", "v_proj"))
    assert (lora.quantized, lora.double_quantization, lora.preparation, lora.dtype) == (
        "nf4",
        False,
        "none",
        "bf16",
    )
    peaks = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]
    assert peaks["gradients"] == 2 * 6_815_744


def test_what_is_left_out_is_trls(tmp_path: Path) -> None:
    """TRL 1.10: fp32 weights under autocast, checkpoints, 1,024 tokens, the head in chunks."""
    text = "model_name_or_path: meta-llama/Meta-Llama-3-8B\npacking: false\nlearning_rate: 1.0e-5\n"
    experiment = read_text(tmp_path, text)
    training = experiment.training
    assert (training.sequence_length, training.micro_batch_size) == (1024, 8)
    assert (training.activation_checkpointing, training.precision) == ("full", "bf16")
    assert (training.stored_dtype, training.cross_entropy) == ("fp32", "trl-chunked")
    notes = notes_of(experiment)
    for word in (
        "per_device_train_batch_size 8",
        "bf16 true",
        "gradient_checkpointing true",
        "max_length 1024",
    ):
        assert word in notes


def test_adapters_on_weights_in_fp32_say_so(tmp_path: Path) -> None:
    text = QLORA.replace("load_in_4bit: true\n", "")
    assert read_text(tmp_path, text).training.frozen_dtype == "fp32"
    assert read_text(tmp_path, text + "dtype: bfloat16\n").training.frozen_dtype is None


def test_rank_without_use_peft_trains_everything(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, FULL + "lora_r: 64\n")
    assert experiment.training.lora is None
    assert "lora_r: no effect without use_peft" in notes_of(experiment)


def test_deepspeed_has_its_own_masters(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    experiment = read_text(tmp_path, FULL + "deepspeed: ds.json\n")
    assert experiment.training.stored_dtype == "fp32"
    assert of_kind(resolve(experiment).strategy, DeepSpeedConfig).batch.micro_batch_size == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("num_ppo_epochs: 4\n", "PPO"),
        ("load_in_8bit: true\n", "quantised weights without adapters"),
        ("use_dora: true\n", "DoRA"),
        ("activation_offloading: true\ngradient_checkpointing: false\n", "all activations on the host"),
        ("optim: lomo\n", "LOMO"),
        ("load_in_4bit: true\n", "without adapters"),
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read_text(tmp_path, FULL + lines)


def test_checkpoints_are_on_the_host(tmp_path: Path) -> None:
    training = read_text(tmp_path, FULL + "activation_offloading: true\n").training
    assert (training.activation_checkpointing, training.checkpoint_offload) == ("full", "stream")


def test_weights_in_fp16_cannot_be_scaled(tmp_path: Path) -> None:
    text = FULL.replace("bfloat16", "float16").replace("bf16: true", "fp16: true")
    with pytest.raises(NotSimulatedError, match="whose gradients torch refuses to scale"):
        read_text(tmp_path, text)


def test_a_value_of_the_wrong_kind_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_length: found 'long', expected a number"):
        read_text(tmp_path, FULL.replace("max_length: 2048", "max_length: long"))
    with pytest.raises(InputError, match="gradient_checkpointing: found 'maybe', expected true or false"):
        read_text(tmp_path, FULL.replace("gradient_checkpointing: true", "gradient_checkpointing: maybe"))


@pytest.mark.parametrize(
    ("lines", "reference"),
    [
        ("beta: 0.1\n", "copy"),
        ("beta: 0.1\nprecompute_ref_log_probs: true\n", None),
        ("loss_type: [ipo]\n", "copy"),
        ("simpo_gamma: 0.5\n", None),
    ],
)
def test_a_preference_is_two_sequences_and_dpo_asks_a_reference(
    tmp_path: Path, lines: str, reference: str | None
) -> None:
    experiment = read_text(tmp_path, FULL + lines)
    training = experiment.training
    assert (training.micro_batch_size, training.reference, training.cross_entropy) == (4, reference, "eager")
    assert "a row of the batch is two sequences" in notes_of(experiment)


def test_orpo_is_told_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "orpo").mkdir()
    assert read_text(tmp_path / "orpo", FULL + "beta: 0.1\n").training.reference is None


def test_with_adapters_the_reference_is_their_base(tmp_path: Path) -> None:
    assert read_text(tmp_path, QLORA + "beta: 0.1\n").training.reference == "base"


GRPO = FULL.replace("max_length: 2048\npacking: true\n", "").replace("torch_dtype", "dtype") + (
    "num_generations: 8\nmax_prompt_length: 1024\nmax_completion_length: 3072\n"
)


def test_grpo_without_vllm_is_the_update_alone(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, GRPO)
    assert experiment.rl is None
    assert (experiment.training.sequence_length, experiment.training.micro_batch_size) == (4096, 2)
    assert "one update alone is simulated" in notes_of(experiment)
    assert "completions without vLLM (use_vllm)" in notes_of(experiment)


def grpo(folder: Path, lines: str, **overrides: Any) -> RlTable:
    """The rollout of a file with vLLM, on eight GPUs with 4 micro-batches of 2 a step."""
    path = folder / "train.yaml"
    path.write_text(f"{GRPO}use_vllm: true\n{lines}")
    data = {"cluster": "dgx-h100", "gpus": 8}
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    return there(build_experiment(data, {"strategy.config": str(path), **changes}, origin="test").rl)


def test_a_rollout_is_the_micro_batches_of_an_update(tmp_path: Path) -> None:
    """2 completions x 8 GPUs x 4 micro-batches are 64, 8 prompts with 8 each. The correction for vLLM
    needs a pass for old log-probabilities, and a reference only a KL term.
    """
    table = grpo(tmp_path, "")
    assert (table.framework, table.placement, table.algorithm) == ("trl", "colocated", "grpo")
    assert (table.prompts_per_step, table.samples_per_prompt, table.mini_batch_samples) == (8, 8, None)
    assert (table.old_logprobs, table.reference, table.epochs) == ("recomputed", "none", 1)
    assert (table.lengths.max_response, table.rollout.max_num_seqs, table.offload.sleep_level) == (3072, 8, 0)
    exact = grpo(tmp_path, "vllm_importance_sampling_correction: false\nvllm_enable_sleep_mode: true\n")
    assert (exact.old_logprobs, exact.offload.sleep_level) == ("skipped", 2)


def test_a_rollout_feeds_several_updates(tmp_path: Path) -> None:
    """8 micro-batches of 16 completions are two updates of 64, in each of two passes."""
    lines = "num_iterations: 2\nbeta: 0.04\nvllm_tensor_parallel_size: 2\n"
    table = grpo(tmp_path, f"{lines}steps_per_generation: 8\n")
    assert table == grpo(tmp_path, f"{lines}generation_batch_size: 128\n")
    assert (table.prompts_per_step, table.mini_batch_samples, table.epochs) == (16, 64, 2)
    assert (table.old_logprobs, table.reference, table.rollout.tensor) == ("recomputed", "resident", 2)


def test_an_update_of_several_rollouts_is_left(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(f"{GRPO}use_vllm: true\nsteps_per_generation: 2\n")
    experiment = read_text(tmp_path, path.read_text())
    assert experiment.rl is None
    assert "an update of 4 micro-batches takes no whole part of the 2 of a rollout" in notes_of(experiment)


def test_a_server_has_gpus_beside_those_that_train(tmp_path: Path) -> None:
    """Of eight GPUs one serves, and seven have 2 x 4 completions each: 7 prompts."""
    table = grpo(tmp_path, "vllm_mode: server\n")
    assert (table.placement, table.rollout.gpus, table.prompts_per_step) == ("split", 1, 7)
    more = grpo(tmp_path, "vllm_mode: server\n", rl__rollout__gpus=4)
    assert (more.rollout.gpus, more.prompts_per_step) == (4, 4)
    with pytest.raises(InputError, match="8 GPUs generate, but the experiment has 8"):
        grpo(tmp_path, "vllm_mode: server\n", rl__rollout__gpus=8)


def test_a_launchers_processes_all_train(tmp_path: Path) -> None:
    command = (
        "accelerate launch --num_processes 4 grpo.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct "
        "--dataset_name x --num_generations 8 --use_vllm true --vllm_mode server --bf16 true"
    )
    data = {"cluster": "dgx-h100"}
    found = build_experiment(data, {"strategy.config": command, "rl.rollout.gpus": 2}, origin="test")
    assert (found.gpus, there(found.rl).prompts_per_step) == (6, 4)


def test_rloo_has_its_own_defaults(tmp_path: Path) -> None:
    """Two completions of a prompt, and a reference."""
    command = "trl rloo --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name x --use_vllm true"
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    table = there(found.rl)
    assert (table.algorithm, table.prompts_per_step, table.samples_per_prompt) == ("rloo", 32, 2)
    assert (table.reference, table.old_logprobs) == ("resident", "recomputed")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("num_generations: 7\n", "num_generations: found 7, expected a divisor of the 64 completions"),
        ("generation_batch_size: 40\n", "generation_batch_size: found 40, expected a multiple of"),
        ("generation_batch_size: 64\nsteps_per_generation: 4\n", "stands beside steps_per_generation"),
        ("vllm_mode: colocated\n", "vllm_mode: found 'colocated', expected one of colocate, server"),
    ],
)
def test_what_trl_refuses_of_a_rollout_is_refused(tmp_path: Path, lines: str, words: str) -> None:
    text = lines if "num_generations" not in lines else ""
    path = tmp_path / "train.yaml"
    base = GRPO if text else GRPO.replace("num_generations: 8\n", lines)
    path.write_text(f"{base}use_vllm: true\n{text}")
    with pytest.raises(InputError, match=words):
        build_experiment({"cluster": "dgx-h100", "gpus": 8}, {"strategy.config": str(path)}, origin="test")


def test_fsdp_beside_deepspeed_is_refused(tmp_path: Path) -> None:
    """As transformers' Trainer refuses it. `fsdp: ""` is its default."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    text = FULL + "deepspeed: ds.json\n"
    with pytest.raises(InputError, match="fsdp stands beside deepspeed"):
        read_text(tmp_path, text + "fsdp: full_shard auto_wrap\n")
    assert read_text(tmp_path, text + 'fsdp: ""\n').strategy.kind == "deepspeed"


@pytest.mark.parametrize(
    ("json_key", "name"),
    [
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    ],
)
def test_a_json_that_differs_is_told_by_the_files_own_key(tmp_path: Path, json_key: str, name: str) -> None:
    content = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, json_key: 8}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=rf"ds\.json: {json_key}: found 8, but {name} of .*train\.yaml is "
    ) as (caught):
        read_text(tmp_path, FULL + "deepspeed: ds.json\n")
    assert "[training]" not in str(caught.value)


def test_a_reward_model_has_one_output_and_rows_of_two_sequences(tmp_path: Path) -> None:
    """PEFT trains the head whole beside the adapters. Llama-3-8B without its head of 128,256 words, and with
    4,096 weights of one output, has 8,030,261,248 - 525,336,576 + 4,096 parameters.
    """
    lines = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 2\n"
    reward = "center_rewards_coefficient: 0.01\n"
    job = read_job(tmp_path, lines + reward)
    assert job.model.numel == 8_030_261_248 - 525_336_576 + 4_096
    assert job.training.micro_batch_size == 4
    adapted = read_text(tmp_path, lines + reward + "use_peft: true\nlora_r: 8\n")
    assert there(adapted.training.lora).modules_to_save == ("score",)
    assert adapted.training.labels == 1


def test_keys_of_older_releases_mean_transformers_4(tmp_path: Path) -> None:
    """torch_dtype is of TRL on transformers 4, whose checkpoints are reentrant unless a file says."""
    older = read_text(tmp_path, FULL)
    assert older.training.software == "transformers 4.57"
    assert not resolve(older).training.checkpoint_is_reentrant
    lines = FULL.replace("gradient_checkpointing_kwargs:\n  use_reentrant: false\n", "")
    assert resolve(read_text(tmp_path, lines)).training.checkpoint_is_reentrant
    newer = read_text(tmp_path, lines.replace("torch_dtype", "dtype"))
    assert newer.training.software == "transformers 5.23"
    assert not resolve(newer).training.checkpoint_is_reentrant


def test_kto_asks_both_models_for_mismatched_pairs(tmp_path: Path) -> None:
    """Rows are single sequences; without the pairs the reference alone runs forward."""
    training = read_text(tmp_path, FULL + "desirable_weight: 1.0\n").training
    assert (training.micro_batch_size, training.reference, training.reference_forwards) == (2, "copy", 3)
    assert training.cross_entropy == "eager"
    lines = FULL + "use_peft: true\ndesirable_weight: 1.0\nloss_type: apo_zero_unpaired\n"
    training = read_text(tmp_path, lines).training
    assert (training.reference, training.reference_forwards) == ("base", 1)


def test_releases_before_0_19_keep_activations_and_train_in_fp32(tmp_path: Path) -> None:
    """max_seq_length ended with 0.20. bf16 and checkpoints became defaults in 0.19."""
    lines = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 1\n"
    older = read_text(tmp_path, f"{lines}max_seq_length: 512\n").training
    assert (older.precision, older.activation_checkpointing) == ("fp32", "none")
    newer = read_text(tmp_path, f"{lines}max_length: 512\n").training
    assert (newer.precision, newer.activation_checkpointing) == ("bf16", "full")


@pytest.mark.parametrize(
    ("keys", "precision", "is_compiled"),
    [
        ("max_seq_length: 512\nmixed_precision: bf16\ndynamo_backend: inductor\n", "bf16", True),
        ("max_seq_length: 512\nmixed_precision: bf16\nfp16: true\n", "fp16", False),
        ("max_length: 512\nmixed_precision: fp16\ndynamo_backend: 'NO'\n", "bf16", False),
        ("max_length: 512\nbf16: false\nmixed_precision: 'no'\n", "fp32", False),
        ("max_length: 512\nbf16: false\nmixed_precision: fp16\n", "fp16", False),
    ],
)
def test_products_are_accelerates_where_neither_bf16_nor_fp16_is_on(
    tmp_path: Path, keys: str, precision: str, is_compiled: bool
) -> None:
    lines = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 1\n"
    training = read_text(tmp_path, lines + keys).training
    assert (training.precision, bool(training.compile)) == (precision, is_compiled)


def test_simpo_has_pairs_and_no_reference(tmp_path: Path) -> None:
    found = read_text(tmp_path, FULL + "beta: 10\ngamma_beta_ratio: 0.5\n")
    assert (found.training.micro_batch_size, found.training.reference) == (4, None)
    assert "SimPO" in notes_of(found)
    assert found.training.sequences_per_sample == 2


@pytest.mark.parametrize(
    ("lines", "nodes", "gpus"),
    [
        ("num_processes: 1\nnum_machines: 1\n", None, 1),
        ("num_machines: 2\n", 2, None),
        ("num_machines: 2\nnum_processes: 16\n", 2, 16),
    ],
)
def test_processes_in_a_file_are_gpus(
    tmp_path: Path, lines: str, nodes: int | None, gpus: int | None
) -> None:
    found = read_text(tmp_path, FULL + lines + "mixed_precision: 'no'\n")
    assert (found.nodes, found.gpus) == (nodes, gpus)


@pytest.mark.parametrize(
    "line",
    [
        "lora_enable: true",
        "vision_tower: openai/clip-vit-large-patch14",
        "use_lora: 1",
        "negatives_cross_device: true",
        "target_modules: [q_proj, v_proj]",
    ],
)
def test_a_scripts_own_key_that_changes_what_is_trained_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(NotSimulatedError, match=rf"{line.split(':')[0]} .*a script's own"):
        read_text(tmp_path, f"{FULL}{line}\n")
    read_text(tmp_path, f"{FULL}{line.split(':')[0]}: false\ntokenizer_revision: main\n")


def test_scripts_of_older_releases_say_length_and_kernels_by_other_names(tmp_path: Path) -> None:
    """`max_seq_len` of scripts that pass it on, `use_liger` until TRL 0.16, `evaluation_strategy` before
    transformers 4.46.
    """
    text = FULL.replace("max_length: 2048", "max_seq_len: 4096\nuse_liger: true")
    training = read_text(tmp_path, text, model=None).training
    assert (training.sequence_length, training.liger) == (4096, True)
    assert training.software == "transformers 4.57"
    assert training.cross_entropy is None
    older = read_text(
        tmp_path, FULL.replace("gradient_checkpointing: true", "evaluation_strategy: epoch"), model=None
    ).training
    assert (older.activation_checkpointing, older.software) == ("none", "transformers 4.57")
    blocks = read_text(tmp_path, FULL.replace("max_length", "block_size"), model=None).training
    assert blocks.sequence_length == 2048
    newer = read_text(tmp_path, FULL.replace("torch_dtype", "dtype"), model=None).training
    assert newer.software == "transformers 5.23"


def test_engines_have_gpus_of_their_own_before_trl_1(tmp_path: Path) -> None:
    """`vllm_mode` was "server" where left out, as in files with `torch_dtype`: 7 of 8 GPUs train."""
    text = GRPO.replace("\ndtype", "\ntorch_dtype").replace("generations: 8", "generations: 7")
    experiment = read_text(tmp_path, f"{text}use_vllm: true\n")
    assert there(experiment.rl).placement == "split"
    assert "vllm_mode server, the default before TRL 1.0" in notes_of(experiment)
    assert there(experiment.rl).reference == "none"
    memory = "use_vllm: true\nvllm_gpu_memory_utilization: 0.7\n"
    assert there(read_text(tmp_path, text + memory).rl).rollout.gpu_memory_utilization is None  # the server's
    oldest = read_text(tmp_path, f"{text}{memory}vllm_device: auto\n")  # beta was 0.04 until 0.19
    assert there(oldest.rl).reference == "resident"
    assert there(oldest.rl).rollout.gpu_memory_utilization == 0.7


@pytest.mark.parametrize(
    ("name", "micro_batch", "reference"),
    [
        ("dpo/config_full", 4, "copy"),
        ("run-orpo-llama", 4, None),
        ("sft_then_dpo", 2, None),
        ("qwen_rm", 4, None),
    ],
)
def test_a_files_name_or_folder_tells_the_trainer(
    tmp_path: Path, name: str, micro_batch: int, reference: str | None
) -> None:
    """Recipes of the alignment handbook are dpo/config_full.yaml; two trainers in a name tell none."""
    (tmp_path / "dpo").mkdir()
    training = read_text(tmp_path, FULL.replace("packing: true\n", ""), f"{name}.yaml").training
    assert (training.micro_batch_size, training.reference) == (micro_batch, reference)


@pytest.mark.parametrize("line", ["model_config: {hidden_size: 1024}", "spectrum_config_path: x.yaml"])
def test_keys_of_a_script_that_change_the_model_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(NotSimulatedError, match="is a script's own"):
        read_text(tmp_path, f"{FULL}{line}\n", model=None)
