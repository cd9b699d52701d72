"""axolotl's YAML: the job that it starts, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zsim
from tests.expect import of_kind, there
from tests.programs.reading import notes_of, read_job, read_text
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.operations.experts import Experts
from zsim.specs.experiment.resolve import resolve

FULL = """
base_model: NousResearch/Meta-Llama-3-8B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_8bit
bf16: auto
gradient_checkpointing: true
wandb_project:
val_set_size: 0.05
"""
QLORA = """
base_model: meta-llama/Llama-2-7b-hf
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 1
optimizer: adamw_bnb_8bit
"""


def test_a_full_training_keeps_everything_in_bf16(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, FULL, model=None)
    training = experiment.training
    assert (experiment.model, experiment.program, experiment.strategy.kind) == (
        "llama-3-8b",
        "axolotl",
        "ddp",
    )
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.sequence_length, training.activation_checkpointing) == (4096, "full")
    assert (training.precision, training.stored_dtype) == ("bf16", "bf16")
    assert (training.optimizer, training.gradient_clipping, training.lora) == ("paged-adamw-8bit", 1.0, None)
    assert "not read" not in notes_of(experiment)


def test_qlora_has_frozen_weights_in_4_bits(tmp_path: Path) -> None:
    """Llama-2-7B's blocks have 32 x 202,375,168 = 6,476,005,376 weights in 4 bits, 3,238,002,688 bytes. A
    scale of 8 bits is for 64 of them (101,187,584), and one of 32 bits for 256 scales (1,581,056). Embedding,
    head and norms are 2 x 131,072,000 + 266,240 in bf16, 524,820,480 bytes. Adapters of rank 32 are
    79,953,920 in fp32, 319,815,680 bytes.
    """
    experiment = read_text(tmp_path, QLORA, model=None)
    lora = there(experiment.training.lora)
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (32, 16, 0.05, "all-linear")
    assert (lora.quantized, lora.double_quantization, lora.preparation) == ("nf4", True, "none")
    assert (experiment.training.optimizer, experiment.training.stored_dtype) == ("adamw-8bit", "fp32")
    parameters = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]["parameters"]
    assert parameters == pytest.approx(3_238_002_688 + 102_768_640 + 524_820_480 + 319_815_680, rel=0.001)


def test_what_is_left_out_is_axolotls(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, "base_model: meta-llama/Llama-2-7b-hf\ndatasets: []\n")
    training = experiment.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (1, 1)
    assert (training.sequence_length, training.activation_checkpointing) == (512, "none")
    assert "as axolotl 067b021c has it: micro_batch_size 1, sequence_len 512, bf16 auto" in notes_of(
        experiment
    )


@pytest.mark.parametrize(
    ("lines", "kind", "reshard"),
    [
        (
            "fsdp_version: 2\nfsdp_config:\n  offload_params: false\n  reshard_after_forward: true\n",
            "fsdp2",
            True,
        ),
        ("fsdp_config:\n  fsdp_version: 2\n  reshard_after_forward: false\n", "fsdp2", False),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config:\n  fsdp_version: 2\n", "fsdp2", True),
    ],
)
def test_fsdp_config_means_fsdp_with_and_without_fsdp(
    tmp_path: Path, lines: str, kind: str, reshard: bool
) -> None:
    text = FULL.replace("paged_adamw_8bit", "adamw_torch_fused")
    strategy = of_kind(read_text(tmp_path, text + lines).strategy, Fsdp2Table)
    assert (strategy.kind, strategy.reshard_after_forward, strategy.param_dtype) == (kind, reshard, "bf16")


def test_fsdp_is_version_1_where_nothing_says_more(tmp_path: Path) -> None:
    text = FULL.replace("paged_adamw_8bit", "adamw_torch_fused") + "fsdp_config:\n  offload_params: false\n"
    assert read_text(tmp_path, text).strategy.kind == "fsdp1"


def test_weights_that_are_dequantised_as_they_are_loaded_are_16_bits(tmp_path: Path) -> None:
    lines = "model_quantization_config: Mxfp4Config\n"
    with pytest.raises(NotSimulatedError, match="weights that stay quantised"):
        read_text(tmp_path, FULL + lines)
    lines += "model_quantization_config_kwargs:\n  dequantize: true\n"
    assert read_text(tmp_path, FULL + lines).training.stored_dtype == "bf16"


def test_fsdp_in_words_is_version_1(tmp_path: Path) -> None:
    lines = "fsdp:\n  - full_shard\n  - auto_wrap\nfsdp_config:\n  fsdp_offload_params: true\n"
    lines += "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_sharding_strategy: FULL_SHARD\n"
    strategy = of_kind(
        read_text(tmp_path, FULL.replace("paged_adamw_8bit", "adamw_torch") + lines).strategy, Fsdp1Table
    )
    assert (strategy.sharding_strategy, strategy.cpu_offload) == ("FULL_SHARD", True)


def test_adapters_under_fsdp1_are_wrapped_as_peft_says(tmp_path: Path) -> None:
    """The Trainer puts PEFT's wrapping in place of the file's; a model that is trained whole keeps the
    default, transformers' blocks. (axolotl's examples/llama-2/qlora-fsdp.yml.)"""
    lines = "fsdp: [full_shard, auto_wrap]\nfsdp_config:\n  fsdp_offload_params: true\n"
    adapted = read_text(tmp_path, QLORA.replace("adamw_bnb_8bit", "adamw_torch_fused") + lines)
    strategy = of_kind(adapted.strategy, Fsdp1Table)
    assert (strategy.wrapping, strategy.cpu_offload) == ("peft", True)
    whole = read_text(tmp_path, FULL.replace("paged_adamw_8bit", "adamw_torch_fused") + lines)
    assert of_kind(whole.strategy, Fsdp1Table).wrapping is None


def test_a_json_is_looked_for_from_the_repositorys_root(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "deepspeed_configs").mkdir()
    (tmp_path / "examples" / "llama-3").mkdir(parents=True)
    config = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    text = FULL + "deepspeed: deepspeed_configs/mine.json\n"
    folder = tmp_path / "examples" / "llama-3"
    with pytest.raises(InputError, match=r"deepspeed_configs/mine\.json': no such file") as missing:
        read_text(folder, text)
    assert str(folder / "deepspeed_configs/mine.json") in str(missing.value)
    assert str(tmp_path / "deepspeed_configs/mine.json") in str(missing.value)
    (tmp_path / "deepspeed_configs" / "mine.json").write_text(json.dumps(config))
    job = read_job(folder, text)
    strategy = of_kind(job.strategy, DeepSpeedConfig)
    assert (strategy.stage, strategy.batch.micro_batch_size, strategy.optimizer.allows_untested) == (
        3,
        2,
        True,
    )
    assert job.training.optimizer == "paged-adamw-8bit"


@pytest.mark.parametrize(
    ("lines", "loss", "liger"),
    [
        (
            "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n",
            "fused_linear",
            False,
        ),
        (
            "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rms_norm: true\n"
            "liger_fused_linear_cross_entropy: true\n",
            "fused_linear",
            True,
        ),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_glu_activation: true\n", "eager", True),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_cross_entropy: true\n", "liger", False),
    ],
)
def test_plugins_choose_the_loss(tmp_path: Path, lines: str, loss: str, liger: bool) -> None:
    training = read_text(tmp_path, FULL + lines).training
    assert (training.cross_entropy, training.liger) == (loss, liger)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("rl: grpo\n", "rl 'grpo': is of axolotl"),
        ("rl: gdpo\n", "rl 'gdpo': is of axolotl"),
        ("load_in_8bit: true\n", "quantised weights without an adapter"),
        ("relora: true\n", "ReLoRA"),
        ("lisa_n_layers: 4\n", "LISA"),
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read_text(tmp_path, FULL + lines)


@pytest.mark.parametrize("lines", ["gradient_checkpointing: offload", "activation_offloading: true"])
def test_all_activations_on_the_host_are_refused_with_adapters(tmp_path: Path, lines: str) -> None:
    """axolotl recomputes nothing there, and without adapters keeps the inputs of blocks alone."""
    with pytest.raises(NotSimulatedError, match="all activations on the host"):
        read_text(tmp_path, QLORA + f"gradient_checkpointing: true\n{lines}\n")


@pytest.mark.parametrize(("word", "copies"), [("offload", "stream"), ("unsloth", "pinned")])
def test_checkpointing_says_where_checkpoints_are(tmp_path: Path, word: str, copies: str) -> None:
    text = FULL.replace("gradient_checkpointing: true", f"gradient_checkpointing: {word}")
    training = read_text(tmp_path, text).training
    assert (training.activation_checkpointing, training.checkpoint_offload) == ("full", copies)


@pytest.mark.parametrize(
    ("word", "copies"), [("legacy", "pinned"), ("hidden_states", "stream"), ("true", "stream")]
)
def test_checkpoints_alone_are_kept_on_the_host(tmp_path: Path, word: str, copies: str) -> None:
    training = read_text(tmp_path, FULL + f"activation_offloading: {word}\n").training
    assert (training.activation_checkpointing, training.checkpoint_offload) == ("full", copies)


def test_optimizers_are_refused_by_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(NotSimulatedError, match=r"optimizer 'galore_adamw': .*GaLore"):
        read_text(tmp_path, FULL.replace("paged_adamw_8bit", "galore_adamw"))
    with pytest.raises(InputError, match="did you mean 'adamw_torch'"):
        read_text(tmp_path, FULL.replace("paged_adamw_8bit", "adamw_tork"))


def test_what_matters_is_named_and_what_does_not_is_silent(tmp_path: Path) -> None:
    lines = "lora_mlp_kernel: true\ntiled_mlp: true\nquux: 3\nmicro_batchsize: 2\nhub_model_id: me/mine\n"
    lines += "seed: 42\n"
    notes = notes_of(read_text(tmp_path, FULL + lines))
    assert "lora_mlp_kernel (axolotl's fused adapters)" in notes
    assert "tiled_mlp (MLPs in tiles)" in notes
    assert "not read: micro_batchsize (did you mean 'micro_batch_size'?), quux" in notes
    assert "hub_model_id" not in notes
    assert "seed" not in notes


def test_ranks_that_share_a_sequence_need_fsdp2(tmp_path: Path) -> None:
    text = FULL.replace("paged_adamw_8bit", "adamw_torch_fused") + "context_parallel_size: 2\n"
    with pytest.raises(InputError, match="with FSDP2 only"):
        read_text(tmp_path, text)
    experiment = read_text(tmp_path, text + "fsdp_version: 2\nfsdp_config:\n  offload_params: false\n")
    assert (experiment.parallelism.context, experiment.parallelism.context_method) == (2, "all-gather")


def test_a_model_that_is_not_here_says_what_mends_it(tmp_path: Path) -> None:
    text = FULL.replace("NousResearch/Meta-Llama-3-8B", "acme/rocket-12B")
    with pytest.raises(InputError, match=r"base_model: unknown model 'acme/rocket.*--model NAME"):
        read_text(tmp_path, text, model=None)


def test_weights_that_are_stored_quantised_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSimulatedError, match="stored quantised"):
        read_text(tmp_path, FULL.replace("NousResearch/Meta-Llama-3-8B", "TheBloke/Llama-2-7B-GPTQ"))


@pytest.mark.parametrize(
    ("lines", "reference"),
    [("rl: dpo\n", "copy"), ("rl: orpo\n", None), ("rl: ipo\nprecompute_ref_log_probs: true\n", None)],
)
def test_a_preference_is_two_sequences_and_dpo_asks_a_reference(
    tmp_path: Path, lines: str, reference: str | None
) -> None:
    training = read_text(tmp_path, FULL.replace("sample_packing: true\n", "") + lines).training
    assert (training.micro_batch_size, training.reference, training.cross_entropy) == (4, reference, "eager")


def test_kto_is_three_forwards_without_gradients(tmp_path: Path) -> None:
    training = read_text(tmp_path, FULL + "rl: kto\n").training
    assert (training.micro_batch_size, training.reference, training.reference_forwards) == (2, "copy", 3)


def test_with_an_adapter_the_reference_is_its_base(tmp_path: Path) -> None:
    assert read_text(tmp_path, QLORA + "rl: dpo\n").training.reference == "base"


def test_optimizer_states_on_the_host_are_deepspeeds_cpu_adams(tmp_path: Path) -> None:
    """Accelerate replaces whatever optimizer the file names (`map_pytorch_optim_to_deepspeed`)."""
    (tmp_path / "zero2.json").write_text(
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, '
        '"bf16": {"enabled": true}}'
    )
    experiment = read_text(tmp_path, FULL + "deepspeed: zero2.json\n")
    assert experiment.training.optimizer == "adam"
    assert "'paged-adamw-8bit' becomes DeepSpeedCPUAdam" in notes_of(experiment)
    assert zsim.simulate(experiment).report.to_dict()["peak_bytes"]["host"]["optimizer_states"] > 0


def test_eight_bits_are_llm_int8(tmp_path: Path) -> None:
    """The blocks of Llama-2-7B have 6,476,005,376 weights in bytes, and an fp32 scale for each of their rows:
    32 x (4 x 4096 + 2 x 11008 + 4096) = 1,359,872. What is not quantised is as in 4 bits.
    """
    lines = QLORA.replace("adapter: qlora\nload_in_4bit", "adapter: lora\nload_in_8bit")
    experiment = read_text(tmp_path, lines, model=None, changes={"gpus": 1})
    assert there(experiment.training.lora).quantized == "int8"
    parameters = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]["parameters"]
    assert parameters == 6_476_005_376 + 4 * 1_359_872 + 524_820_480 + 319_815_680
    with pytest.raises(InputError, match="load_in_8bit: found True, expected false beside qlora"):
        read_text(tmp_path, QLORA + "load_in_8bit: true\n")


def test_a_reward_model_has_one_output(tmp_path: Path) -> None:
    training = read_text(tmp_path, FULL + "reward_model: true\n").training
    assert (training.labels, training.micro_batch_size) == (1, 4)


MIXTURE = QLORA.replace("qlora", "lora").replace("load_in_4bit: true\n", "")


def test_all_linear_layers_of_a_mixture_are_those_that_are_modules(tmp_path: Path) -> None:
    """find_all_linear_names lists nn.Linear alone. Qwen3's experts are stacked weights and its router is a
    class of its own, so attention alone gets adapters, where PEFT's "all-linear" adapts experts and router.
    """
    text = MIXTURE.replace("meta-llama/Llama-2-7b-hf", "Qwen/Qwen3-30B-A3B")
    experiment = read_text(tmp_path, text, model=None)
    assert there(experiment.training.lora).targets == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_experts_are_adapted_without_dropout_where_shared_experts_have_their_names(tmp_path: Path) -> None:
    """PEFT takes gate_proj, up_proj and down_proj of DeepSeek's shared experts for the stacked weights too,
    and axolotl leaves the dropout of 0.05 out there. PEFT alone refuses it.
    """
    text = MIXTURE.replace("meta-llama/Llama-2-7b-hf", "deepseek-ai/DeepSeek-V2-Lite")
    job = read_job(tmp_path, text, model=None)
    operations = {module.name: module.op_spec for block in job.model.blocks for module in block.modules}
    assert there(of_kind(operations["mlp.experts"], Experts).adapters).kind == "merged"
    assert "mlp.gate.lora_sum" not in operations
    with pytest.raises(InputError, match="has no input to drop out"):
        read_job(tmp_path, text, model=None, changes={"training.lora.stacked_dropout": None})


@pytest.mark.parametrize(
    ("lines", "epochs"), [("num_epochs: 4", 4), ("", 1), ("num_epochs: 4\nmax_steps: 1000", 1)]
)
def test_epochs_count_where_the_size_of_the_data_set_is_known(
    tmp_path: Path, lines: str, epochs: float
) -> None:
    """1 is axolotl's default, and the experiment's own where steps say how far a run goes."""
    experiment = read_text(tmp_path, f"{FULL}{lines}\n", changes={"cost.samples": 10_000})
    assert there(experiment.cost).epochs == epochs
    assert read_text(tmp_path, f"{FULL}{lines}\n").cost is None
    given = {"cost.samples": 10_000, "cost.epochs": 2}
    assert there(read_text(tmp_path, f"{FULL}{lines}\n", changes=given).cost).epochs == 2


def test_checkpoints_are_reentrant_where_nothing_says_more(tmp_path: Path) -> None:
    """`normalize_config` writes it, except with `rl` and for Gemma 4, which cannot be reentrant."""
    assert read_text(tmp_path, FULL).training.checkpoint_is_reentrant
    assert not read_text(tmp_path, FULL + "rl: orpo\n").training.checkpoint_is_reentrant
    said = "gradient_checkpointing_kwargs: {use_reentrant: false}\n"
    assert not read_text(tmp_path, FULL + said).training.checkpoint_is_reentrant
    gemma = FULL.replace("NousResearch/Meta-Llama-3-8B", "google/gemma-4-31B")
    assert not read_text(tmp_path, gemma, model=None).training.checkpoint_is_reentrant
    without = FULL.replace("gradient_checkpointing: true", "")
    assert not read_text(tmp_path, without).training.checkpoint_is_reentrant


def test_rays_workers_are_gpus(tmp_path: Path) -> None:
    assert read_text(tmp_path, FULL + "use_ray: true\nray_num_workers: 4\n").gpus == 4
    assert read_text(tmp_path, FULL + "ray_num_workers: 4\n").gpus is None


def test_fused_adapters_that_axolotl_switches_on_are_named(tmp_path: Path) -> None:
    assert "lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel: axolotl" in notes_of(read_text(tmp_path, QLORA))
    for line in ("lora_mlp_kernel: false", "trust_remote_code: true", "rl: orpo"):
        assert "fused adapters on" not in notes_of(read_text(tmp_path, f"{QLORA}{line}\n"))


def test_loss_and_experts_are_of_one_release(tmp_path: Path) -> None:
    """Without a named loss, transformers 5 shifts labels and stacks experts. Megatron runs neither."""
    experiment = read_text(tmp_path, FULL, model="mixtral-8x7b")
    assert experiment.training.software == "transformers 5.23"
    assert resolve(experiment).training.cross_entropy == "eager-shifted-labels"
    older = read_text(tmp_path, FULL, changes={"training.software": "transformers 4.44"})
    assert resolve(older).training.cross_entropy == "eager"
    megatron = read_text(tmp_path, FULL, changes={"strategy.kind": "megatron"})
    assert megatron.training.software is None


def test_towers_are_frozen_where_a_file_says(tmp_path: Path) -> None:
    lines = FULL.replace("NousResearch/Meta-Llama-3-8B", "Qwen/Qwen2-VL-2B-Instruct")
    assert read_text(tmp_path, lines, model=None).training.frozen == ()
    frozen = read_text(tmp_path, lines + "freeze_mm_modules: true\n", model=None).training.frozen
    assert "model.visual.blocks" in frozen
    unfrozen = "unfrozen_parameters: [{}]\n"
    for patterns in ("model.language_model.*, lm_head, embed_tokens", "^model.language_model.*, ^lm_head.*"):
        text = lines + unfrozen.format(patterns)
        assert read_text(tmp_path, text, model=None).training.frozen == frozen


@pytest.mark.parametrize(
    ("model", "patterns"),
    [
        ("NousResearch/Meta-Llama-3-8B", "^lm_head.weight$"),
        ("NousResearch/Meta-Llama-3-8B", "model.language_model.*"),
        ("Qwen/Qwen2-VL-2B-Instruct", "model.language_model.layers.27.*"),
        ("Qwen/Qwen2-VL-2B-Instruct", "lm_head.*, model.embed_tokens"),
        ("Qwen/Qwen2-VL-2B-Instruct", "'model.language_model.*[:32000]'"),
    ],
)
def test_a_part_of_the_language_model_is_refused(tmp_path: Path, model: str, patterns: str) -> None:
    text = FULL.replace("NousResearch/Meta-Llama-3-8B", model)
    with pytest.raises(NotSimulatedError, match="unfrozen_parameters"):
        read_text(tmp_path, f"{text}unfrozen_parameters: [{patterns}]\n", model=None)


def test_a_json_of_rows_leaves_pairs_to_the_file(tmp_path: Path) -> None:
    """Both count rows, of which DPO makes two sequences each. A JSON of another number is refused."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    (tmp_path / "zero2.json").write_text(json.dumps(config))
    text = FULL + "rl: dpo\ndeepspeed: zero2.json\nmicro_batch_size: 2\n"
    job = read_job(tmp_path, text)
    assert job.training.micro_batch_size == 4
    with pytest.raises(InputError, match=r"found 2, but micro_batch_size of .* is 3"):
        read_text(tmp_path, text.replace("micro_batch_size: 2\n", "micro_batch_size: 3\n"))


def test_routed_experts_are_quantised_where_the_file_says(tmp_path: Path) -> None:
    text = QLORA.replace("lora_target_linear: true", "lora_target_modules: [q_proj]")
    more = text + "quantize_moe_experts: true\n"
    lora = there(read_text(tmp_path, more, model="mixtral-8x7b").training.lora)
    assert (lora.quantized, lora.quantize_experts) == ("nf4", True)
    with pytest.raises(InputError, match="lora_target_linear left out"):
        read_text(tmp_path, QLORA + "quantize_moe_experts: true\n", model="mixtral-8x7b")
    in_8_bits = more.replace("load_in_4bit", "load_in_8bit").replace("qlora", "lora")
    with pytest.raises(NotSimulatedError, match="routed experts in 8 bits"):
        read_text(tmp_path, in_8_bits, model="mixtral-8x7b")


def test_pairs_are_not_packed(tmp_path: Path) -> None:
    notes = notes_of(read_text(tmp_path, QLORA + "rl: dpo\nsample_packing: true\n", model=None))
    assert "every sequence is taken at sequence_len" in notes
    assert "attend as one" not in notes


def test_axolotls_own_jsons_are_known_where_they_are_not_here(tmp_path: Path) -> None:
    """zero2.json of 067b021c keeps optimizer states on the host; a file of that name here comes first."""
    text = (
        FULL.replace("paged_adamw_8bit", "adamw_torch")
        + "deepspeed: /opt/axolotl/deepspeed_configs/zero2.json\n"
    )
    assert "is not here, so it is taken as axolotl has it" in notes_of(read_text(tmp_path, text))
    strategy = of_kind(read_job(tmp_path, text).strategy, DeepSpeedConfig)
    assert strategy.stage == 2
    assert strategy.zero.offload_optimizer is not None
