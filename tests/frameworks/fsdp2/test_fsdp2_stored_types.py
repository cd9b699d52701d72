"""FSDP2 with weights that are kept in bf16 (torchtitan's `training.dtype`): shards, gradients and states."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Plan
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

RANKS = 8
# 2 blocks of 16,777,216 and two tables of 8,192 x 1,024; all dimensions divide by 8.
MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
NUMEL = 2 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 1024 + 2 * 8192 * 1024


def plan(strategy: dict[str, Any] | None = None, **training: Any) -> Plan:
    table = {"sequence_length": 512, "precision": "bf16", "stored_dtype": "bf16", **training}
    given = {"kind": "fsdp2", **(strategy or {})}
    return make_plan(
        resolve(Experiment(model=MODEL, cluster="dgx-h100", gpus=RANKS, training=table, strategy=given))
    )


def kept(found: Plan, category: str) -> int:
    return sum(one.bytes for one in found.programs[0].resident if one.category == category)


def most(found: Plan, category: str) -> int:
    """The most that is allocated of a category in a step."""
    level = highest = 0
    for change in found.programs[0].memory:
        if change.category == category:
            level += change.bytes
            highest = max(highest, level)
    return highest


@pytest.mark.parametrize(("dtype", "each"), [("bf16", 2), ("fp32", 4)])
def test_shards_states_and_gradients_have_the_type(dtype: str, each: int) -> None:
    """torch's AdamW makes both moments like the parameter; the sharded gradient has its type too
    (`foreach_reduce` casts to `orig_dtype`)."""
    found = plan(stored_dtype=dtype)
    shard = NUMEL // RANKS
    assert kept(found, "parameters") == each * shard
    assert kept(found, "optimizer_states") == 2 * each * shard
    assert most(found, "gradients") == each * shard


def test_nothing_is_cast_before_the_gather() -> None:
    """What is gathered is the same; a copy-in has one kernel and not two."""
    calls = []
    for dtype in ("fp32", "bf16"):
        ops = plan(stored_dtype=dtype).programs[0].ops
        calls.append(Counter((op.work.kind, op.work.bytes) for op in ops if isinstance(op.work, Collective)))
        launches = [op.launches for op in ops if op.name.startswith("all_gather_copy_in")]
        assert set(launches) == {2 if dtype == "fp32" else 1}
    assert calls[0] == calls[1]


@pytest.mark.parametrize(("reduce_dtype", "each"), [("bf16", 2), ("fp32", 4)])
def test_gradients_are_reduced_in_their_own_type(reduce_dtype: str, each: int) -> None:
    """In fp32 by default, and cast afterwards; in bf16 the reduced shard is the gradient itself."""
    found = plan({"reduce_dtype": reduce_dtype})
    works = [op.work for op in found.programs[0].ops if isinstance(op.work, Collective)]
    assert sum(work.bytes for work in works if work.kind == "reduce_scatter") == each * NUMEL
    casts = [op for op in found.programs[0].ops if op.name.startswith("accumulate gradient shard")]
    assert bool(casts) == (reduce_dtype == "fp32")
    assert most(found, "gradients") == 2 * NUMEL // RANKS


def test_torchaos_optimizer_rounds_stochastically() -> None:
    """8-bit moments: a byte each, 4 for 256 of them and a map of 1 KiB for every shard of 4,096 and more."""
    found = plan(optimizer="adamw-8bit-torchao", stochastic_rounding=True)
    norms = 5 * 1024 // RANKS
    large = (NUMEL - 5 * 1024) // RANKS
    assert kept(found, "optimizer_states") == 2 * (large + large // 256 * 4 + 16 * 1024 + 2 * norms)


@pytest.mark.parametrize(
    ("strategy", "training", "error", "message"),
    [
        ({}, {"optimizer": "muon"}, NotSimulatedError, "optimizer 'muon' under FSDP2.*expected 'fp32'"),
        ({}, {"lora": {"rank": 8}}, NotSimulatedError, "training.lora under FSDP2"),
        ({"cpu_offload": True}, {}, NotSimulatedError, "strategy.cpu_offload under FSDP2"),
        ({}, {"precision": "fp16"}, InputError, "found 'bf16' with precision fp16"),
        ({}, {"optimizer": "lion"}, InputError, "of a DTensor.*is 0; expected 'adamw'"),
    ],
)
def test_what_is_refused(
    strategy: dict[str, Any], training: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(strategy, **training)
