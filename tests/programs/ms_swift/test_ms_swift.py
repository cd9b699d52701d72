"""ms-swift's YAML: the job that it starts, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.expect import of_kind, there
from tests.programs.reading import notes_of, read_job, read_text
from tests.specs.test_towers import QWEN3_VL
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.experiment.resolve import resolve

FULL = """
model: Qwen/Qwen2-7B-Instruct
tuner_type: full
torch_dtype: bfloat16
dataset: swift/self-cognition#500
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
max_length: 4096
deepspeed: zero3
"""
LORA = """
model: Qwen/Qwen2-7B-Instruct
dataset: [swift/self-cognition#500]
torch_dtype: bfloat16
max_length: 2048
"""


def test_zero3_is_a_name(tmp_path: Path) -> None:
    job = read_job(tmp_path, FULL, model=None)
    strategy = of_kind(job.strategy, DeepSpeedConfig)
    assert (strategy.stage, strategy.batch.micro_batch_size, strategy.batch.gradient_accumulation_steps) == (
        3,
        1,
        2,
    )
    assert (job.model.name, job.training.precision, job.training.sequence_length) == (
        "qwen2-7b",
        "bf16",
        4096,
    )
    assert job.training.activation_checkpointing == "full"


def test_offloading_by_name(tmp_path: Path) -> None:
    job = read_job(tmp_path, FULL.replace("zero3", "zero2_offload"))
    zero = of_kind(job.strategy, DeepSpeedConfig).zero
    assert zero.offload_optimizer is not None
    assert zero.offload_param is None


def test_a_name_that_is_no_file_lists_the_names(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="zero9': no such file; expected a DeepSpeed JSON, or one of zero0, zero1"
    ):
        read_text(tmp_path, FULL.replace("zero3", "zero9"))


def test_lora_is_what_it_trains_where_nothing_says_more(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, LORA, model=None)
    lora = there(experiment.training.lora)
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (8, 32, 0.05, "all-linear")
    assert experiment.training.micro_batch_size == 1
    assert experiment.training.gradient_accumulation_steps == 2
    assert (experiment.program, experiment.strategy.kind) == ("ms-swift", "ddp")
    assert "tuner_type lora" in notes_of(experiment)


def test_a_full_training_keeps_the_type_of_the_weights(tmp_path: Path) -> None:
    text = FULL.replace("deepspeed: zero3\n", "")
    assert read_text(tmp_path, text).training.stored_dtype == "bf16"


def test_four_bits_are_bitsandbytes(tmp_path: Path) -> None:
    lora = there(read_text(tmp_path, LORA + "quant_method: bnb\nquant_bits: 4\n").training.lora)
    assert (lora.quantized, lora.double_quantization) == ("nf4", True)
    with pytest.raises(NotSimulatedError, match=r"besides bitsandbytes' .*quant_bits 4 or 8"):
        read_text(tmp_path, LORA + "quant_method: hqq\nquant_bits: 4\n")


@pytest.mark.parametrize("key", ["tuner_type", "train_type", "sft_type"])
def test_the_key_of_older_files_counts(tmp_path: Path, key: str) -> None:
    assert read_text(tmp_path, LORA + f"{key}: full\n").training.lora is None
    with pytest.raises(NotSimulatedError, match=f"{key} longlora"):
        read_text(tmp_path, LORA + f"{key}: longlora\n")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("rlhf_type: ppo\n", "swift rlhf"),
        ("use_galore: true\n", "GaLore"),
        ("lisa_activated_layers: 2\n", "LISA"),
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read_text(tmp_path, LORA + lines)


def test_a_beginning_that_no_name_has_freezes_nothing(tmp_path: Path) -> None:
    """ms-swift writes those of a family, of which this size has no audio tower."""
    text = FULL + "freeze_parameters: [model.embed_tokens, model.audio_tower]\n"
    found = read_text(tmp_path, text, model=None)
    assert found.training.frozen == ("model.embed_tokens*",)
    assert "freeze_parameters: no parameter begins with model.audio_tower" in notes_of(found)


def test_a_share_of_the_layers_is_zero_by_default(tmp_path: Path) -> None:
    assert read_text(tmp_path, LORA + "freeze_parameters_ratio: 0.0\n").training.lora is not None


def test_a_preference_is_two_sequences_and_dpo_asks_a_reference(tmp_path: Path) -> None:
    training = read_text(tmp_path, LORA + "rlhf_type: dpo\n").training
    assert (training.micro_batch_size, training.reference) == (2, "base")
    assert read_text(tmp_path, LORA + "rlhf_type: simpo\n").training.reference is None


def test_fsdp_is_a_name_or_a_file(tmp_path: Path) -> None:
    lines = FULL.replace("deepspeed: zero3", "fsdp: fsdp2")
    named = read_text(tmp_path, lines)
    assert (named.strategy.kind, named.training.activation_checkpointing) == ("fsdp2", "full")
    (tmp_path / "own.json").write_text('{"fsdp_config": {"fsdp_version": 2, "reshard_after_forward": false}}')
    own = read_text(tmp_path, lines.replace("fsdp: fsdp2", "fsdp: own.json"))
    assert of_kind(own.strategy, Fsdp2Table).reshard_after_forward is False
    (tmp_path / "own.json").write_text('{"fsdp_config": {"fsdp_version": 2, "activation_cpu_offload": true}}')
    with pytest.raises(NotSimulatedError, match="all activations on the host until backward"):
        read_text(tmp_path, lines.replace("fsdp: fsdp2", "fsdp: own.json"))
    with pytest.raises(InputError, match=r"fsdp: 'none.json': no such file; expected a JSON, or fsdp2"):
        read_text(tmp_path, lines.replace("fsdp: fsdp2", "fsdp: none.json"))


def test_tables_may_be_json_as_on_a_command_line(tmp_path: Path) -> None:
    lines = FULL + "gradient_checkpointing_kwargs: '{\"use_reentrant\": true}'\n"
    assert read_text(tmp_path, lines).training.checkpoint_is_reentrant


def test_eight_bits_are_llm_int8(tmp_path: Path) -> None:
    assert (
        there(read_text(tmp_path, LORA + "quant_method: bnb\nquant_bits: 8\n").training.lora).quantized
        == "int8"
    )


def test_a_classifier_has_as_many_outputs_as_labels(tmp_path: Path) -> None:
    classifier = read_text(tmp_path, LORA + "task_type: seq_cls\nnum_labels: 5\n").training
    assert (classifier.labels, there(classifier.lora).modules_to_save) == (5, ("score",))
    reward = read_text(tmp_path, FULL + "rlhf_type: rm\n").training
    assert (reward.labels, reward.micro_batch_size) == (1, 2)
    with pytest.raises(NotSimulatedError, match="embeddings and rerankers; expected causal_lm or seq_cls"):
        read_text(tmp_path, LORA + "task_type: embedding\n")


def test_a_vision_tower_is_not_trained_unless_the_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL))
    full = FULL.replace("Qwen/Qwen2-7B-Instruct", str(tmp_path)).replace("4096", "512")
    frozen = read_job(tmp_path, full, model=None).model
    trained = read_job(tmp_path, f"{full}\nfreeze_vit: false\nfreeze_aligner: false", model=None).model
    assert frozen.vision_tower is not None
    assert trained.trainable_numel - frozen.trainable_numel == frozen.vision_tower.numel


def test_a_frozen_tower_of_sounds_has_its_last_norm(tmp_path: Path) -> None:
    """Below `audio_tower` the aligner is `proj` alone (model/model_arch.py)."""
    full = FULL.replace("Qwen/Qwen2-7B-Instruct", "Qwen/Qwen2.5-Omni-7B")
    model = read_job(tmp_path, f"{full}\nfreeze_aligner: false", model=None).model
    trained = {module.name for tower in model.towers for module in tower.modules if module.trainable_numel}
    assert {".".join(name.split(".")[1:3]) for name in trained} == {"audio_tower.proj", "visual.merger"}


def test_all_linear_layers_of_a_mixture_are_its_attentions(tmp_path: Path) -> None:
    """find_all_linears gives PEFT names, and Qwen3's experts and router are no linear modules."""
    text = LORA.replace("Qwen/Qwen2-7B-Instruct", "Qwen/Qwen3-30B-A3B")
    lora = there(read_text(tmp_path, text, model=None).training.lora)
    assert lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


GRPO = """
rlhf_type: grpo
model: Qwen/Qwen2-7B-Instruct
tuner_type: full
torch_dtype: bfloat16
dataset: some/prompts
reward_funcs: [accuracy]
per_device_train_batch_size: 4
num_generations: 16
max_length: 1024
max_completion_length: 3072
use_vllm: true
vllm_mode: colocate
vllm_tensor_parallel_size: 2
sleep_level: 1
offload_model: true
deepspeed: zero3
"""


def test_grpo_is_a_whole_step(tmp_path: Path) -> None:
    """4 completions x 8 GPUs are one micro-batch and 2 prompts with 16 each. ms-swift's own defaults are 0.9
    of the memory and a reference, since beta is 0.04, and one micro-batch where SFT takes 16 sequences.
    """
    experiment = read_text(tmp_path, GRPO, model=None)
    table = there(experiment.rl)
    assert (table.prompts_per_step, table.samples_per_prompt, table.algorithm) == (2, 16, "grpo")
    assert (table.placement, table.reference, table.old_logprobs) == ("colocated", "resident", "recomputed")
    assert (table.rollout.tensor, table.rollout.gpu_memory_utilization) == (2, 0.9)
    assert (table.offload.sleep_level, table.offload.parameters, table.offload.optimizer) == (1, True, False)
    training = experiment.training
    assert (training.sequence_length, training.gradient_accumulation_steps) == (4096, 1)
    assert "not read" not in notes_of(experiment)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("advantage_estimator: rloo\nbeta: 0\n", None),
        ("async_generate: true\n", "one step ahead"),
        ("sequence_parallel_size: 2\n", "ranks that share sequences"),
    ],
)
def test_other_rollouts_are_said(tmp_path: Path, lines: str, words: str | None) -> None:
    experiment = read_text(tmp_path, GRPO + lines, model=None)
    if words is None:
        assert (there(experiment.rl).algorithm, there(experiment.rl).reference) == ("rloo", "none")
    else:
        assert experiment.rl is None
        assert words in notes_of(experiment)


def test_models_that_reward_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSimulatedError, match="reward models beside the trainer"):
        read_text(tmp_path, GRPO + "reward_model: [Qwen/Qwen2-7B]\n", model=None)


@pytest.mark.parametrize("strategy", ["deepspeed: zero3", "fsdp: fsdp2", "output_dir: out"])
def test_ranks_that_share_sequences_exchange_heads(tmp_path: Path, strategy: str) -> None:
    """Qwen2-7B has 4 heads of keys and values, of which 8 ranks would have a ring."""
    text = FULL.replace("deepspeed: zero3", strategy)
    job = read_job(tmp_path, text + "sequence_parallel_size: 2\n", model=None)
    assert (job.parallelism.context, job.parallelism.context_method) == (2, "all-to-all")
    with pytest.raises(NotSimulatedError, match="8 do not divide the 4 heads"):
        read_text(tmp_path, text + "sequence_parallel_size: 8\n", model=None)


MEGATRON = """
model: Qwen/Qwen3-30B-A3B
tuner_type: lora
micro_batch_size: 8
global_batch_size: 16
max_length: 2048
expert_model_parallel_size: 2
tensor_model_parallel_size: 4
sequence_parallel: true
"""


def test_megatrons_adapters_are_on_each_expert(tmp_path: Path) -> None:
    """mcore-bridge has an adapter for each expert, and experts are not split over tensor ranks (4 x 2 do not
    divide 4 GPUs of a stage, 2 x 1 do).
    """
    experiment = read_text(tmp_path, MEGATRON, model=None)
    lora = there(experiment.training.lora)
    assert (lora.rank, lora.alpha, lora.dropout, lora.share_expert_adapters) == (8, 32, 0.05, False)
    table = of_kind(experiment.strategy, MegatronTable)
    assert (table.moe_grouped_gemm, table.moe_router_dtype) == (True, "fp32")
    parallelism = there(experiment.parallelism)
    assert (parallelism.expert, parallelism.expert_tensor, parallelism.dispatcher) == (2, 1, "all-to-all")
    assert experiment.training.gradient_accumulation_steps == 1
    job = resolve(experiment)
    names = [name for name, weight in job.model.named_parameters() if weight.trainable]
    assert len(names) > 4 * 48
    assert all(".lora_" in name for name in names)


def test_adapters_are_on_megatrons_layers(tmp_path: Path) -> None:
    text = MEGATRON + "target_modules: [q_proj]\n"
    with pytest.raises(InputError, match=r"target_modules: found .*expected Megatron's layers: all-linear"):
        read_text(tmp_path, text, model=None)
    named = read_text(tmp_path, MEGATRON + "target_modules: [linear_qkv]\n", model=None)
    assert there(named.training.lora).targets == ("linear_qkv",)


def test_a_gate_behind_attention_hides_no_product(tmp_path: Path) -> None:
    """Qwen3-Next's attention is gated, and latent attention has several products before it: the product
    behind both is linear_proj, and all-linear takes those before.
    """
    text = MEGATRON.replace("Qwen/Qwen3-30B-A3B", "{}")
    gated = read_job(tmp_path, text.format("Qwen/Qwen3-Next-80B-A3B-Instruct"), model=None)
    names = {name.split(".lora_")[0] for name, _ in gated.model.named_parameters() if ".lora_" in name}
    assert {"model.layers.3.self_attn.linear_proj", "model.layers.0.linear_attn.linear_proj"} <= names
    assert not any(name.endswith("gate") for name in names)
    latent = read_text(tmp_path, text.format("deepseek-ai/DeepSeek-V2-Lite"), model=None)
    targets = there(there(latent.training.lora).targets)
    assert {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "linear_proj"} < {*targets}


def test_a_tower_is_frozen_under_all_of_its_names(tmp_path: Path) -> None:
    """Gemma 4's table of positions is registered by the module around it."""
    text = FULL.replace("Qwen/Qwen2-7B-Instruct", "google/gemma-4-26b-a4b").replace("zero3", "zero2")
    frozen = [name for name, weight in read_job(tmp_path, text, model=None).model.named_parameters()
              if not weight.trainable]  # fmt: skip
    assert "model.vision_tower.patch_embedder.position_embedding_table" in frozen


def test_checkpoints_are_reentrant_but_for_ddp(tmp_path: Path) -> None:
    """`_fix_gradient_checkpointing` of trainers/mixin.py."""
    assert read_text(tmp_path, FULL).training.checkpoint_is_reentrant
    assert not read_text(tmp_path, LORA).training.checkpoint_is_reentrant
    said = FULL + "gradient_checkpointing_kwargs: {use_reentrant: false}\n"
    assert not read_text(tmp_path, said).training.checkpoint_is_reentrant


def test_functions_of_rewards_are_grpos_and_plugins_beside_another_job_are_named(tmp_path: Path) -> None:
    text = LORA + "external_plugins: [reward.py]\nmax_completion_length: 4096\n"
    found = read_text(tmp_path, text + "reward_funcs: [mine]\n")
    assert "rlhf_type: taken as grpo" in notes_of(found)
    assert "external_plugins" not in notes_of(found)
    assert found.training.sequence_length == 4096 + 2048
    assert "external_plugins: code of one's own is left out" in notes_of(read_text(tmp_path, text))


def test_kto_is_three_forwards_without_gradients(tmp_path: Path) -> None:
    training = read_text(tmp_path, LORA + "rlhf_type: kto\n").training
    assert (training.reference, training.reference_forwards, training.micro_batch_size) == ("base", 3, 1)


@pytest.mark.parametrize(
    "ranks", ["list(range(0, 4))", "4", "[0, 1, 2, 3]", "list(range(4))", "list(range(0, 8, 2))"]
)
def test_ray_gives_training_the_gpus_of_its_group(tmp_path: Path, ranks: str) -> None:
    groups = "use_ray: true\ndevice_groups:\n  nproc_per_node: 2\n"
    group = f"  default: {{device: GPU, ranks: '{ranks}', workers: [default]}}\n"
    if ranks.startswith("["):
        group = group.replace("'", "")
    file = read_text(tmp_path, LORA + groups + group, changes={"cluster": "dgx-h100"})
    assert (file.nodes, file.gpus) == (2, 4)
    assert "device_groups" not in notes_of(file)
    with pytest.raises(InputError, match=r"device_groups\.default\.ranks: found 'all', expected a number"):
        read_text(tmp_path, LORA + groups + group.replace(ranks, "all").replace("ranks: all", "ranks: 'all'"))
