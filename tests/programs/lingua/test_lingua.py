"""lingua's YAML: FSDP2 that keeps its blocks gathered, a model of its own, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.expect import of_kind
from tests.programs.reading import notes_of, read_job, read_text
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp2.settings import Fsdp2Table

PRETRAINING = """
name: run
steps: 1000
grad_acc_steps: 4
optim: {lr: 3e-4, clip: 10.0}
distributed: {fsdp_type: full_shard, compile: true, model_dtype: bf16}
model: {dim: 1024, n_layers: 8, n_heads: 8}
data:
  batch_size: 32
  seq_len: 2048
  tokenizer: {name: bytes}
logging: {freq: 10}
"""


def test_a_file_says_a_whole_job(tmp_path: Path) -> None:
    """The MLP is int(2 x 4096 / 3) = 2730 wide, rounded up to 2816. Of 258 words, embedding and head have
    2 x 258 x 1024, and 8 blocks 4 x 1024^2 + 3 x 1024 x 2816 + 2 x 1024 each, behind them a norm of 1024.
    """
    job = read_job(tmp_path, PRETRAINING, model=None)
    blocks = 8 * (4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024)
    assert job.model.numel == 2 * 258 * 1024 + blocks + 1024
    training = job.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (32, 4)
    assert (training.gradient_clipping, training.compile, training.sequence_length) == (10.0, True, 2048)
    experiment = read_text(tmp_path, PRETRAINING, model=None)
    table = of_kind(experiment.strategy, Fsdp2Table)
    assert (table.reshard_after_forward, table.reduce_dtype, table.no_sync) == (False, "fp32", True)
    assert (experiment.program, "not read" in notes_of(experiment)) == ("lingua", False)


def test_shards_are_groups_with_replicas_between_them(tmp_path: Path) -> None:
    """One shard is lingua's word for one over all ranks; 8 shards and 2 replicas are 16 GPUs."""
    hybrid = PRETRAINING.replace("compile: true", "compile: true, dp_shard: 8, dp_replicate: 2")
    experiment = read_text(tmp_path, hybrid)
    assert (experiment.gpus, of_kind(experiment.strategy, Fsdp2Table).replicate) == (16, 2)


def test_words_of_a_tokenizers_file_are_asked_for(tmp_path: Path) -> None:
    text = PRETRAINING.replace("name: bytes", "name: tiktoken, path: x.tiktoken")
    with pytest.raises(InputError, match=r"model.vocab_size: left out, so the tokenizer's file says it"):
        read_text(tmp_path, text, model=None)
    counted = text.replace("n_heads: 8", "n_heads: 8, vocab_size: 128256")
    assert read_job(tmp_path, counted, model=None).model.vocab_size == 128256


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("full_shard", "no_shard", "'no_shard': zsim does not simulate FSDP2 over single ranks"),
        ("n_heads: 8", "n_heads: 8, state_dim: 128", "other models of lingua's than its transformer"),
        ("compile: true", "selective_activation_checkpointing: true", "checkpointing of the whole model"),
        ("model_dtype: bf16", "model_dtype: int4", "does not simulate 'int4'; expected bf16, fp16, fp32"),
        ("compile: true", "float8_recipe: rowwise", "fp8 of lingua's"),
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(NotSimulatedError, match=message):
        read_text(tmp_path, PRETRAINING.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_size: 32", "batch_size: many", "data.batch_size: found 'many', expected a whole number"),
        ("n_layers: 8", "n_layers: 0", "model.n_layers: found 0, expected a whole number of at least 1"),
        ("compile: true", "compile: true, tp_size: 2", "lingua refuses it beside tp_size 2"),
        (", n_heads: 8", "", "model.n_heads: missing, and head_dim too"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_text(tmp_path, PRETRAINING.replace(old, new))


def test_a_misspelt_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    experiment = read_text(tmp_path, PRETRAINING.replace("seq_len: 2048", "seq_len: 2048\n  batch_sise: 4"))
    assert "data.batch_sise (did you mean 'batch_size'?)" in notes_of(experiment)
