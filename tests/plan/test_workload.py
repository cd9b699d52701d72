"""What one rank computes: segments, shared work, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import make_workload
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Linear


def test_segments_are_before_the_blocks_and_after(toys: Any) -> None:
    workload = make_workload(toys.transformer(2), toys.training())
    assert [segment.name for segment in workload.segments] == [
        "before",
        "model.layers.0",
        "model.layers.1",
        "after",
    ]
    assert [segment.kind for segment in workload.segments] == ["before", "block", "block", "after"]
    assert [segment.numel for segment in workload.segments] == [1600, 3072, 3072, 1632]


def test_module_calls_have_full_names_and_know_their_segment(toys: Any) -> None:
    workload = make_workload(toys.transformer(2), toys.training())
    call = workload.segments[2].calls[0]
    assert (call.name, call.segment, call.numel) == ("model.layers.1.attn.qkv", "model.layers.1", 768)


def test_work_is_derived_once_per_shape(toys: Any) -> None:
    """Equal blocks are the same object, so their calls share one ModuleWork."""
    workload = make_workload(toys.transformer(3), toys.training())
    _before, *blocks, _after = workload.segments
    for first, other in zip(blocks[0].calls, blocks[2].calls, strict=True):
        assert first.work is other.work


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_only_full_checkpointing_keeps_block_inputs(toys: Any, checkpointing: str) -> None:
    """6 tokens x 16 wide x 2 bytes."""
    workload = make_workload(toys.transformer(), toys.training(activation_checkpointing=checkpointing))
    kept = {segment.checkpoint_bytes for segment in workload.segments if segment.kind == "block"}
    assert kept == ({192} if checkpointing == "full" else {0})
    assert not workload.segments[0].is_checkpointed
    assert not workload.segments[-1].is_checkpointed


def test_selective_checkpointing_moves_bytes_from_saved_to_recomputed(toys: Any) -> None:
    plain = make_workload(toys.transformer(), toys.training())
    selective = make_workload(toys.transformer(), toys.training(activation_checkpointing="selective"))
    for before, after in zip(plain.segments[1].calls, selective.segments[1].calls, strict=True):
        assert after.work.saved_bytes + after.work.recomputed_bytes == before.work.saved_bytes
        assert (after.work.recompute is not None) == (after.name.endswith("attn.core"))


def test_a_tied_head_borrows_the_embeddings_weight(toys: Any) -> None:
    tied = make_workload(toys.transformer(is_tied=True), toys.training())
    free = make_workload(toys.transformer(), toys.training())
    calls = [call for segment in tied.segments for call in segment.calls]
    borrowed = {call.name: call.borrowed_numel for call in calls if call.borrowed_numel}
    assert borrowed == {"lm_head": 1600}
    assert not any(call.borrowed_numel for s in free.segments for call in s.calls)
    assert tied.numel == free.numel - 1600


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2-xl", "llama-3.2-1b"])
def test_parameters_of_all_calls_are_the_model(toys: Any, name: str) -> None:
    """Tied weights counted once; products of all linears are 2 numel per token, tied heads included."""
    model = load_model(name)
    training = toys.training(sequence_length=128, micro_batch_size=1)
    workload = make_workload(model, training)
    calls = [call for segment in workload.segments for call in segment.calls]
    assert sum(call.numel for call in calls) == model.numel == workload.numel
    for call in calls:
        if isinstance(call.module.op_spec, Linear):
            weights = call.borrowed_numel or call.module.parameters[0].numel
            flops = sum(kernel.flops for kernel in kernels_of(call.work.forward).kernels)
            assert flops == 2 * 128 * weights


def test_launches_are_those_of_the_kernels(toys: Any) -> None:
    workload = make_workload(toys.transformer(), toys.training())
    for segment in workload.segments:
        for call in segment.calls:
            assert call.work.forward_launches == sum(
                k.launches for k in kernels_of(call.work.forward).kernels
            )
            assert call.work.backward_launches == sum(
                k.launches for k in kernels_of(call.work.backward).kernels
            )
