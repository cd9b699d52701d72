"""FSDP2 with weights that are kept in bf16 (torchtitan's `training.dtype`): shards, gradients and states."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zsim.cost.kernels.update import update_bytes
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Copy, HostWork, Plan
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


def test_adapters_of_the_stored_type_keep_moments_of_it() -> None:
    """The frozen weights are in bf16 either way. Adapters in bf16 have two moments of 2 bytes, not of 4."""
    lora = {"rank": 8, "targets": "all-linear", "dtype": "bf16"}
    stored, default = plan(lora=lora), plan(lora=lora, stored_dtype="fp32")
    assert kept(stored, "parameters") == kept(default, "parameters")
    assert 2 * kept(stored, "optimizer_states") == kept(default, "optimizer_states") > 0


@pytest.mark.parametrize(
    ("strategy", "training", "error", "message"),
    [
        ({}, {"optimizer": "muon"}, NotSimulatedError, "optimizer 'muon' under FSDP2.*expected 'fp32'"),
        (
            {},
            {"lora": {"rank": 8}},
            NotSimulatedError,
            r"training\.lora of another dtype .* dtype = \"bf16\" there",
        ),
        ({}, {"precision": "fp16"}, InputError, "found 'bf16' with precision fp16"),
        ({}, {"optimizer": "lion"}, InputError, "of a DTensor.*is 0; expected 'adamw'"),
    ],
)
def test_what_is_refused(
    strategy: dict[str, Any], training: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(strategy, **training)


@pytest.mark.parametrize("reduce_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_offloaded_shards_cross_in_the_type_that_they_are_kept_in(
    reduce_dtype: str, micro_batches: int
) -> None:
    """Two bytes an element up for every gather, down for every micro-batch's gradient, which FSDP2 casts to
    `orig_dtype` before the copy; states of 4 bytes an element, gradients of 2, on the host. Nothing of either
    stays on the GPU."""
    strategy = {"cpu_offload": True, "reduce_dtype": reduce_dtype}
    offloaded = plan(strategy, gradient_accumulation_steps=micro_batches)
    program, shard = offloaded.programs[0], NUMEL // RANKS
    copies = [op.work for op in program.ops if isinstance(op.work, Copy)]
    assert sum(copy.bytes for copy in copies if copy.direction == "d2h") == 2 * shard * micro_batches
    updates = [op.work for op in program.ops if isinstance(op.work, HostWork) and op.work.kind == "optimizer"]
    assert [work.bytes for work in updates] == [update_bytes(shard, "adamw", "fused", "bf16", "bf16")]
    levels: Counter[tuple[str, str]] = Counter()
    for memory in program.resident:
        levels[memory.category, memory.device] += memory.bytes
    assert levels["parameters", "host"] == 2 * shard
    assert levels["optimizer_states", "host"] == 4 * shard
    assert levels["optimizer_states", "gpu"] == levels["parameters", "gpu"] == 0
    held: Counter[tuple[str, str]] = Counter()
    peak = 0
    for change in program.memory:
        held[change.category, change.device] += change.bytes
        peak = max(peak, held["gradients", "host"])
    assert peak == 2 * shard
    assert not any(held.values())


def test_in_16_bits_half_of_the_offloaded_bytes_cross() -> None:
    def crossed(dtype: str) -> int:
        program = plan({"cpu_offload": True}, stored_dtype=dtype).programs[0]
        return sum(op.work.bytes for op in program.ops if isinstance(op.work, Copy))

    assert crossed("fp32") == 2 * crossed("bf16")
