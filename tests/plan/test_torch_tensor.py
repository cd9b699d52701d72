"""Tensor parallelism as torchtitan has it: bytes of its collectives per layer, what runs beneath what, and
what is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.plan.titan import Question, plan_for, question, workloads_of
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, Kernels, PointToPoint
from zsim.plan.workload.issued_work import backward_of
from zsim.specs.model.spec import Linear

TOKENS, WIDTH = 32, 64
X = 2 * TOKENS * WIDTH  # bytes of all tokens' activations


def moved(kind: str, size: int, ranks: int) -> float:
    """Bytes that a rank sends in a ring."""
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size


def bytes_per_layer(asked: Question, **changes: Any) -> float:
    """Of the first layer, forward and backward."""
    return sum(
        moved(op.work.kind, op.work.bytes, asked["tp"])
        for op in plan_for(asked, **changes).program_on(0).ops
        if isinstance(op.work, Collective)
        and op.work.group == "tensor"
        and op.module.startswith("model.layers.0.")
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("is_sequence", [True, False])
def test_a_layer_moves_eight_activations(ranks: int, is_sequence: bool) -> None:
    """8 q X with q = (t - 1) / t: two all-gathers and two reduce-scatters each way, or two all-reduces each
    way; Megatron's sequence parallelism gathers twice more."""
    shape = {"hidden": WIDTH, "heads": 4, "kv_heads": 4, "head": 16, "ffn": 96, "vocab": 128}
    asked = question(tp=ranks, sequence_parallel=is_sequence, shape=shape)
    assert bytes_per_layer(asked) == 8 * (ranks - 1) / ranks * X


@pytest.mark.parametrize(
    ("is_sequence", "compiles", "moved"), [(True, False, 14), (True, True, 11), (False, True, 14)]
)
def test_products_that_gather_each(is_sequence: bool, compiles: bool, moved: int) -> None:
    """q, k, v, gate and up gather their input and scatter its gradient each, o and down once each way: 7 + 7
    of q X, of which compiled graphs leave out three that gather the same again (torch 2.13, CommDebugMode and
    AOTAutograd's graphs); without sequence parallelism 5 + 2 all-reduces of 2 q X."""
    shape = {"hidden": WIDTH, "heads": 4, "kv_heads": 4, "head": 16, "ffn": 96, "vocab": 128}
    asked = question(tp=2, sequence_parallel=is_sequence, shape=shape, gather_per_product=True)
    assert bytes_per_layer(asked, compile=compiles) == moved * X / 2


@pytest.mark.parametrize(("policy", "more"), [("full", 3), ("selective-op", 2)])
def test_recomputation_gathers_again(policy: str, more: int) -> None:
    """Both all-gathers, and the reduce-scatter of attention unless it is kept; the MLP's is not needed."""
    assert bytes_per_layer(question(checkpointing=policy)) == (8 + more) * X / 2


@pytest.mark.parametrize(("sequences", "copies"), [(1, 0), (4, 8)])
def test_of_several_sequences_what_is_gathered_and_scattered_is_copied(sequences: int, copies: int) -> None:
    """NCCL's order is that of ranks, a DTensor's that of sequences: the four gathers and four scatters of a
    layer each read and write the whole tensor once more."""
    ops = plan_for(question(), micro_batch_size=sequences).program_on(0).ops
    beside = [
        op.work.kernels[0].hbm_bytes
        for op in ops
        if isinstance(op.work, Kernels)
        and op.module.startswith("model.layers.0.")
        and op.name.endswith(
            ("all_gather", "reduce_scatter", "all_gather backward", "reduce_scatter backward")
        )
    ]
    assert beside == [2 * sequences * X] * copies


def test_nothing_overlaps_without_compile() -> None:
    """All collectives of the tensor-parallel group are on the compute stream."""
    ops = plan_for(question(), compile=False).program_on(0).ops
    streams = {op.stream for op in ops if isinstance(op.work, Collective) and op.work.group == "tensor"}
    assert streams == {COMPUTE}


@pytest.mark.parametrize("compiles", [False, True])
def test_the_host_wraps_dtensors(compiles: bool) -> None:
    """Two layers of seven products, two norms and two inputs each, and embedding, norm, head and the head's
    input; of compiled blocks nothing is left."""
    ops = plan_for(question(), compile=compiles).program_on(0).ops
    layers = 0 if compiles else 2
    for suffix in ("", "_backward"):
        events = Counter(op.overhead for op in ops)
        assert events[f"dtensor_product{suffix}"] == 7 * layers + 2
        assert events[f"dtensor_norm{suffix}"] == 2 * layers + 1
        assert events[f"dtensor_input{suffix}"] == 2 * layers + 1


def asynchronous(**changes: Any) -> Any:
    asked = question(async_tensor=True, **changes)
    return plan_for(asked, compile=True).program_on(0)


def test_asynchronous_products_gather_and_scatter_in_pieces() -> None:
    """Per layer: one step of the ring beneath q and gate in forward, beneath the input's gradient of o and
    down in backward, and one piece of o's and down's output beneath the other, before the sum. The columns'
    gradients are scattered whole, two per layer."""
    program = asynchronous()
    inside = [op for op in program.ops if op.module.startswith("model.layers.0.")]
    copies = [op for op in inside if isinstance(op.work, PointToPoint)]
    ring = [op.module for op in copies if op.name.endswith("ring step")]
    names = {
        "q": "self_attn.q_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "down": "mlp.down_proj",
    }
    assert ring == [f"model.layers.0.{names[key]}" for key in ("q", "gate", "down", "o")]
    pieces = [op for op in inside if isinstance(op.work, Collective) and op.work.group == "tensor"]
    scattered = [(op.stream, op.work.bytes) for op in copies if op.name.endswith("scatter piece")]
    assert scattered == [("tensor", 2 * X // 2)] * 2  # sent and received
    sums = [op.work.kernels for op in inside if op.name.endswith("sum") and isinstance(op.work, Kernels)]
    assert [[kernel.hbm_bytes for kernel in kernels] for kernels in sums] == [[3 * X // 2]] * 2
    assert all(op.work.by_copy_engine for op in copies)
    exposed = [op.work.kind for op in pieces if op.stream == COMPUTE]
    assert exposed == ["reduce_scatter"] * 2


@pytest.mark.parametrize(("sequences", "copied"), [(1, 0), (2, 1)])
def test_what_is_gathered_of_several_sequences_is_copied_for_the_weights_gradient(
    sequences: int, copied: int
) -> None:
    """Pieces come rank by rank, each with all sequences: q and gate read their input, o and down their
    output's gradient sequence by sequence. Each reads and writes all tokens' activations once."""
    shape = BatchShape(sequences, TOKENS)
    block = workloads_of(question(async_tensor=True), compile=True)[0].model.blocks[0]
    products = [module for module in block.modules if isinstance(module.op_spec, Linear)]
    copies: list[float] = []
    for module in products:
        parts = backward_of(module, shape, WorkOptions())
        work = parts if isinstance(parts, Kernels) else parts[-1].work
        assert isinstance(work, Kernels)
        copies += [kernel.hbm_bytes for kernel in work.kernels if kernel.kind == "copy"]
    assert copies == [2 * X * sequences] * 4 * copied


def test_a_product_that_scatters_is_kept_by_selective_checkpoints() -> None:
    """o, every second product, would run again; what it scattered is kept, half the tokens."""
    segment = workloads_of(question(async_tensor=True, checkpointing="selective-op"), compile=True)[
        0
    ].segments[1]
    kept = {call.name: call.work.kept_outputs for call in segment.calls if call.work.kept_outputs}
    assert kept["model.layers.0.self_attn.o_proj"] == (X // 2,)
    again = {call.name: call.work for call in segment.recomputed}
    assert again["model.layers.0.self_attn.o_proj"].forward_launches == 0
    gathers = [
        call.name.rpartition(".")[2]
        for call in segment.recomputed
        if not isinstance(call.work.forward, Kernels)
        for part in call.work.forward
        if isinstance(part.work, Collective) and part.work.kind == "all_gather"
    ]
    assert gathers == ["q_proj", "gate_proj"]  # kept, but their weights' gradients read the whole input
