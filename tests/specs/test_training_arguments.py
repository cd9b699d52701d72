"""Hugging Face's TrainingArguments in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError, ZsimError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

ARGUMENTS = """
output_dir: out
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
gradient_checkpointing: true
learning_rate: 1.0e-5
block_size: 2048
frobnicate: true
"""


def imported(folder: Path, more: str = "", text: str = ARGUMENTS) -> Experiment:
    path = folder / "args.yaml"
    path.write_text(text + more)
    data = {"model": "llama-3-8b", "cluster": "dgx-h100"}
    return build_experiment(data, {"strategy.config": str(path)}, origin="test")


def test_the_batch_and_the_precision_are_read_and_the_rest_is_named(tmp_path: Path) -> None:
    """Clipping at 1.0 and the fused AdamW are the Trainer's defaults."""
    experiment = imported(tmp_path)
    training = experiment.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.precision, training.activation_checkpointing) == ("bf16", "full")
    assert (training.sequence_length, training.gradient_clipping) == (2048, 1.0)
    assert experiment.strategy.kind == "ddp"
    assert f"{tmp_path / 'args.yaml'}: not read: frobnicate" in (experiment.notes)


def test_fsdp_is_version_2_by_block_unless_it_says_otherwise(tmp_path: Path) -> None:
    text = "fsdp: true\nfsdp_config:\n  reshard_after_forward: false\n"
    strategy = of_kind(imported(tmp_path, text).strategy, Fsdp2Table)
    assert (strategy.kind, strategy.reshard_after_forward, strategy.no_sync) == ("fsdp2", False, True)
    assert (strategy.param_dtype, strategy.reduce_dtype) == ("bf16", "bf16")
    text = 'fsdp: "full_shard auto_wrap"\nfsdp_config:\n  version: 1\n'
    one = of_kind(imported(tmp_path, text).strategy, Fsdp1Table)
    assert (one.kind, one.sharding_strategy, one.backward_prefetch) == ("fsdp1", "FULL_SHARD", "none")
    text = 'fsdp: "shard_grad_op auto_wrap offload"\n'
    old = of_kind(imported(tmp_path, text).strategy, Fsdp2Table)
    assert (old.kind, old.reshard_after_forward, old.cpu_offload) == ("fsdp2", False, True)


def test_an_fsdp_config_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_version": 2, "activation_checkpointing": True}))
    assert imported(tmp_path, "fsdp: true\nfsdp_config: fsdp.json\n").strategy.kind == "fsdp2"


def test_deepspeeds_auto_is_filled_from_the_arguments(tmp_path: Path) -> None:
    """hidden 4,096: buckets of 4,096 x 4,096 elements."""
    config = {
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    job = resolve(imported(tmp_path, "deepspeed: ds.json\n"))
    strategy = of_kind(job.strategy, DeepSpeedConfig)
    assert (strategy.batch.micro_batch_size, strategy.batch.gradient_accumulation_steps) == (2, 4)
    assert (job.training.precision, strategy.zero.reduce_bucket_size) == ("bf16", 4096 * 4096)


def test_what_is_not_simulated_or_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSimulatedError, match=r"optim 'rmsprop': .* it does not simulate RMSprop"):
        imported(tmp_path, "optim: rmsprop\n")
    with pytest.raises(InputError, match="found 'many', expected a number"):
        imported(tmp_path, text="per_device_train_batch_size: many\n")
    with pytest.raises(InputError, match="fsdp: found 'fullshard'"):
        imported(tmp_path, 'fsdp: "fullshard"\n')
    with pytest.raises(InputError, match=r"'hybrid_shard' needs fsdp_config\.version 1"):
        imported(tmp_path, 'fsdp: "hybrid_shard"\n')


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ddp_bucket_cap_mb: large", "ddp_bucket_cap_mb: found 'large', expected a number"),
        ("optim: [adamw]", r"optim: found \['adamw'\], expected one of adamw_torch"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ZsimError, match=words):
        imported(tmp_path, line)


def test_checkpoints_that_are_offloaded_wait_in_pinned_memory(tmp_path: Path) -> None:
    """`offload` of transformers 5.17 is `save_on_cpu(pin_memory=True)` around every checkpoint."""
    experiment = imported(tmp_path, "gradient_checkpointing_kwargs: {offload: true}\n")
    assert experiment.training.checkpoint_offload == "pinned"
    assert imported(tmp_path).training.checkpoint_offload is None
