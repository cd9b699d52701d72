"""torchtune's YAML: full, LoRA and QLoRA recipes, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.expect import of_kind, there
from tests.programs.reading import notes_of, read_job, read_text
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.ddp.settings import DdpTable
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.plan.memory.tensors import device_peaks
from zsim.specs.experiment.resolve import resolve
from zsim.specs.strategy.training import losses

FULL = """
output_dir: out
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: tokenizer.model
  max_seq_len: 4096
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: nowhere/Meta-Llama-3.1-8B-Instruct/
  output_dir: ${output_dir}
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: True
batch_size: 2
batch_size_val: ${batch_size}
gradient_accumulation_steps: 4
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 2e-5
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
clip_grad_norm: null
compile: False
enable_activation_checkpointing: True
dtype: bf16
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""
LORA = FULL.replace(
    "_component_: torchtune.models.llama3_1.llama3_1_8b",
    "_component_: torchtune.models.llama3_1.qlora_llama3_1_8b\n  lora_attn_modules: ['q_proj', "
    "'v_proj', 'output_proj']"
    "\n  apply_lora_to_mlp: True\n  lora_rank: 16\n  lora_alpha: 32\n  lora_dropout: 0.0",
)


def test_everything_is_bf16(tmp_path: Path) -> None:
    """An eighth of 8,030,261,248 parameters, of 2 bytes, on each of 8 GPUs."""
    experiment = read_text(tmp_path, FULL, model=None)
    training, strategy = experiment.training, of_kind(experiment.strategy, Fsdp2Table)
    assert (experiment.model, experiment.program) == ("llama-3.1-8b", "torchtune")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.sequence_length, training.activation_checkpointing) == (4096, "full")
    assert (training.stored_dtype, training.cross_entropy, training.gradient_clipping) == (
        "bf16",
        "fused_linear",
        0.0,
    )
    assert (strategy.param_dtype, strategy.reduce_dtype, strategy.reshard_after_forward) == (
        "bf16",
        "bf16",
        True,
    )
    peaks = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]
    assert peaks["parameters"] == pytest.approx(2 * 8_030_261_248 / 8, rel=1e-3)
    assert "not read" not in notes_of(experiment)


def test_qlora_adapts_what_the_file_names(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, LORA, name="8B_qlora_single_device.yaml", model=None)
    lora = there(experiment.training.lora)
    assert (lora.rank, lora.alpha, lora.dtype) == (16, 32, "bf16")
    assert lora.targets == ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (lora.quantized, lora.double_quantization, lora.preparation) == ("nf4", True, "none")
    assert (experiment.strategy.kind, experiment.gpus, experiment.training.stored_dtype) == ("ddp", 1, "bf16")


def test_lora_has_weights_in_16_bits(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, LORA.replace("qlora_", "lora_"))
    assert there(experiment.training.lora).quantized is None
    assert experiment.strategy.kind == "fsdp2"


def test_its_phi_has_products_of_its_own(tmp_path: Path) -> None:
    """torchtune's own Phi-3 has q, k and v apart, transformers' has `qkv_proj`. Both have 3,821,079,552."""
    text = LORA.replace("llama3_1.qlora_llama3_1_8b", "phi3.lora_phi3_mini")
    job = read_job(tmp_path, text, model=None)
    names = {module.name for block in job.model.unique_blocks for module in block.modules}
    assert {"self_attn.q_proj.lora_A.default", "self_attn.v_proj.lora_A.default"} <= names
    assert "self_attn.qkv_proj" not in names
    adapters = job.model.trainable_numel
    assert job.model.numel - adapters == 3_821_079_552


def test_every_second_block_may_be_checkpointed(tmp_path: Path) -> None:
    training = read_text(tmp_path, FULL + "ac_mode: selective\nac_option: 2\n").training
    assert (training.activation_checkpointing, training.checkpoint_every) == ("full", 2)


@pytest.mark.parametrize(("streams", "copies"), [("True", "stream"), ("False", "pinned")])
def test_checkpoints_are_on_the_host(tmp_path: Path, streams: str, copies: str) -> None:
    lines = f"enable_activation_offloading: True\nactivation_offloading_use_streams: {streams}\n"
    assert read_text(tmp_path, FULL + lines).training.checkpoint_offload == copies
    with pytest.raises(InputError, match="enable_activation_checkpointing: True beside it"):
        read_text(tmp_path, FULL + lines + "enable_activation_checkpointing: False\n")


def test_one_gpu_may_update_within_backward(tmp_path: Path) -> None:
    """Which torchtune refuses with accumulation. Two builders have the shapes of a later model."""
    text = FULL.replace("llama3_1.llama3_1_8b", "qwen2.qwen2_0_5b") + "optimizer_in_bwd: True\n"
    once = text.replace("accumulation_steps: 4", "accumulation_steps: 1")
    experiment = read_text(tmp_path, once, name="full_low_memory.yaml", model=None)
    assert (experiment.gpus, experiment.model) == (1, "qwen2.5-0.5b")
    assert of_kind(experiment.strategy, DdpTable).optimizer_in_backward
    peaks = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]
    assert peaks["gradients"] == 2 * 151_936 * 896  # the embedding's
    for other, key in (
        (text, "gradient_accumulation_steps = 4"),
        (once + "clip_grad_norm: 1\n", "clipping = 1"),
    ):
        with pytest.raises(InputError, match=f"optimizer_in_backward: found true with training.*{key}"):
            resolve(read_text(tmp_path, other, name="full_low_memory.yaml", model=None))
    training = experiment.training.model_copy(update={"precision": "fp16", "stored_dtype": "fp32"})
    half = experiment.model_copy(update={"training": training})
    with pytest.raises(InputError, match="'fp16', whose gradients are unscaled after backward"):
        resolve(half)


def test_layers_of_their_own_are_units(tmp_path: Path) -> None:
    strategy = of_kind(read_text(tmp_path, FULL).strategy, Fsdp2Table)
    assert strategy.wrapping == "huggingface"
    text = FULL + "custom_sharded_layers: ['tok_embeddings', 'output']\n"
    assert of_kind(read_text(tmp_path, text).strategy, Fsdp2Table).wrapping == "torchtitan"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("optimizer_in_bwd: True\n", "updates within backward on several GPUs"),
        ("device: mps\n", "devices besides GPUs"),
        ("enable_fp8_training: True\n", "fp8"),
        ("teacher_model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\n", "distillation"),
        (
            "quantizer:\n  _component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer\n",
            "qat",
        ),
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read_text(tmp_path, FULL + lines)


def test_a_loss_of_ones_own_is_refused(tmp_path: Path) -> None:
    text = FULL.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "ranking.Loss")
    with pytest.raises(NotSimulatedError, match="losses of one's own"):
        read_text(tmp_path, text)


def test_other_losses_are_refused_by_name(tmp_path: Path) -> None:
    text = FULL.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.PPOLoss")
    with pytest.raises(NotSimulatedError, match="preference training and reinforcement"):
        read_text(tmp_path, text)


@pytest.mark.parametrize(
    ("compiles", "loss", "said", "measured"),
    [
        ("True", "torchtune-chunked-fused", 8192 * 128_256 * (2 + 2 / 8), 9.1e9),
        ("False", "torchtune-chunked", 8192 * 128_256 * (2 + 4 + 4 / 8), None),
    ],
)
def test_a_loss_over_chunks_of_logits_has_an_eighth_of_its_temporaries(
    tmp_path: Path, compiles: str, loss: str, said: float, measured: float | None
) -> None:
    """All 16-bit logits exist. Compiled, backward has the gradient of a chunk. Eager, all fp32
    log-probabilities are kept, and forward has the fp32 logits of a chunk. torchtune's README (0.4) measured
    8.5 GiB of a Llama 3.2 3B with adapters, 8,192 tokens, checkpoints in host memory and compilation."""
    text = LORA.replace("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")
    training = read_text(tmp_path, f"{text}compile: {compiles}\n").training
    assert training.cross_entropy == loss
    kernels = losses()[loss]
    logits = 8192 * 128_256
    peaks = (
        sum(kernels.kept_sizes(logits, 2)) + sum(kernels.temporary_sizes(logits, 2, is_backward=is_backward))
        for is_backward in (False, True)
    )
    assert max(peaks) == said
    if measured is not None:
        changes: dict[str, Any] = {
            "sequence_length": 4096, "micro_batch_size": 2, "stored_dtype": "bf16", "compile": True,
            "activation_checkpointing": "full", "checkpoint_offload": "pinned", "cross_entropy": loss,
            "lora": {"rank": 8}, "checkpoint_is_reentrant": False, "checkpoint_stops_early": True,
        }  # fmt: skip
        plan = zsim.make_plan(
            zsim.Experiment(
                model="llama-3.2-3b",
                cluster="dgx-a100-80gb",
                gpus=1,
                training=changes,
                strategy={"kind": "ddp"},
            )
        )
        assert device_peaks(plan.program)["gpu"] == pytest.approx(measured, rel=0.05)


def test_dpo_asks_the_base_of_its_adapters(tmp_path: Path) -> None:
    text = LORA.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss")
    training = read_text(tmp_path, text, name="8B_lora_dpo_single_device.yaml").training
    assert (training.micro_batch_size, training.reference, training.cross_entropy) == (4, "base", "eager")


def test_a_file_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    text = (
        "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\ntasks: [truthfulqa]\nbatch_size: 8\n"
    )
    with pytest.raises(InputError, match="torchtune's, but trains nothing"):
        read_text(tmp_path, text)


def test_a_builder_without_a_preset_says_what_mends_it(tmp_path: Path) -> None:
    text = FULL.replace("llama3_1.llama3_1_8b", "acme.rocket_12b").replace(
        "Meta-Llama-3.1-8B-Instruct", "Rocket"
    )
    with pytest.raises(InputError, match=r"rocket_12b' is no preset.*--model config\.json"):
        read_text(tmp_path, text, model=None)


def test_the_builder_wins_over_the_folder_of_the_checkpoint(tmp_path: Path) -> None:
    """torchtune builds `model._component_`, and only loads weights from the folder."""
    experiment = read_text(tmp_path, FULL.replace("llama3_1_8b", "llama3_1_70b"), model=None)
    assert experiment.model == "llama-3.1-70b"
    assert (
        "builds llama-3.1-70b, which is simulated, while checkpointer.checkpoint_dir names llama-3.1-8b"
        in (notes_of(experiment))
    )
    assert "_component_ builds" not in notes_of(read_text(tmp_path, FULL, model=None))


def test_a_builder_that_there_is_not_is_refused_though_the_folder_is_known(tmp_path: Path) -> None:
    text = FULL.replace("llama3_1_8b", "llama3_1_9b")
    with pytest.raises(InputError, match=r"llama3_1_9b' is no preset.*--model llama-3\.1-8b"):
        read_text(tmp_path, text, model=None)
    assert read_text(tmp_path, text, model="llama-3-8b").model == "llama-3-8b"


def test_older_files_say_the_length_of_documents_and_ran_fsdp1(tmp_path: Path) -> None:
    text = FULL.replace("  max_seq_len: 4096\n", "").replace("  packed: True", "  max_seq_len: 1536")
    text = text.replace("torchtune.training.FullModel", "torchtune.utils.FullModel")
    experiment = read_text(tmp_path, text, model=None)
    assert experiment.training.sequence_length == 1536
    assert "releases before 0.3, whose recipes mostly ran FSDP1" in notes_of(experiment)
