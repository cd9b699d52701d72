"""nanotron's asynchronous products: the rank's own rows beneath the gather, then those before and behind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.engine.simulate import simulate_job
from zsim.plan.make import make_plan, stages_of
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.plan.workload.workload import ModuleCall, make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

HIDDEN, INNER, VOCAB, LENGTH, BATCH = 1024, 2816, 32768, 2048, 2
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip


def job_of(ranks: int, *, asynchronous: bool = True) -> Job:
    parallelism = {"tensor": ranks, "sequence_parallel": True, "async_tensor": asynchronous}
    training = {"sequence_length": LENGTH, "micro_batch_size": BATCH, "layer_kernels": "nanotron"}
    strategy = {"kind": "megatron", "engine": "nanotron"}
    return resolve(
        zsim.Experiment(
            model=LLAMA, cluster="dgx-h100", gpus=8, parallelism=parallelism, strategy=strategy,
            training=training,
        )
    )  # fmt: skip


def calls(job: Job) -> dict[str, ModuleCall]:
    (stage,) = stages_of(job.model, job.parallelism)
    segments = make_workload(stage, job.training).segments
    return {call.module.name: call for segment in segments[1:] for call in segment.calls}


def order(parts: Any) -> list[str]:
    return [part.name if part.work is not None else f"wait for {part.follows}" for part in parts]


def rows(parts: Any) -> list[int]:
    """Rows of the products, in order."""
    works = [part.work.kernels for part in parts if isinstance(part.work, Kernels)]
    return [kernel.shape[0] for kernels in works for kernel in kernels if kernel.kind == "gemm"]


@pytest.mark.parametrize(
    ("ranks", "pieces"), [(2, [2048, 2048]), (4, [1024, 2048, 1024]), (8, [512, 2048, 1536])]
)
def test_a_column_runs_its_own_rows_beneath_the_gather(ranks: int, pieces: list[int]) -> None:
    """4,096 tokens; rank t/2 has t/2 ranks before it and t/2 - 1 behind: 2 of 2 has none."""
    column = calls(job_of(ranks))["mlp.linear_fc1"]
    behind = ["rows behind"] if ranks > 2 else []
    expected = ["gather", "own rows", "wait for tensor", "rows before", *behind]
    assert order(column.work.forward) == expected
    assert rows(column.work.forward) == pieces
    assert sum(pieces) == LENGTH * BATCH
    assert not isinstance(column.work.forward, Kernels)
    (gather,) = [part.work for part in column.work.forward if isinstance(part.work, Collective)]
    assert gather == Collective("all_gather", LENGTH * BATCH * HIDDEN * 2, "bf16", "tensor")


@pytest.mark.parametrize(
    ("ranks", "pieces"), [(2, [2048, 2048]), (4, [1024, 2048, 1024]), (8, [512, 2048, 1536])]
)
def test_a_row_does_so_in_backward(ranks: int, pieces: list[int]) -> None:
    """The input's gradient in pieces, the weight's in one product of n x k with all tokens between."""
    row = calls(job_of(ranks))["mlp.down_proj"]
    behind = ["rows behind"] if ranks > 2 else []
    expected = ["gather", "own rows", "wait for tensor", "rows before", *behind, "weight"]
    assert order(row.work.backward) == expected
    assert rows(row.work.backward)[:-1] == pieces
    assert isinstance(row.work.forward, Kernels)


def test_the_head_is_a_column_like_any() -> None:
    assert order(calls(job_of(4))["lm_head"].work.forward)[:2] == ["gather", "own rows"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pieces_compute_what_whole_products_do_and_gather_as_often(ranks: int) -> None:
    """Per layer: two columns gather, and gather again in backward, two rows gather a gradient; each scatters
    once. The head is a column, the embedding scatters its output and gathers its gradient."""
    plan = make_plan(job_of(ranks))
    size = LENGTH * BATCH * HIDDEN * 2
    sent = Counter(
        (op.phase, op.work.kind)
        for op in plan.ops
        if isinstance(op.work, Collective) and (op.work.group, op.work.bytes) == ("tensor", size)
    )
    assert sent == {
        ("forward", "all_gather"): 2 * 2 + 1, ("forward", "reduce_scatter"): 2 * 2 + 1,
        ("backward", "all_gather"): 2 * 4 + 1 + 1, ("backward", "reduce_scatter"): 2 * 2 + 1,
    }  # fmt: skip
    whole = make_plan(job_of(ranks, asynchronous=False))
    again = Counter(
        (op.phase, op.work.kind)
        for op in whole.ops
        if isinstance(op.work, Collective) and (op.work.group, op.work.bytes) == ("tensor", size)
    )
    assert again == sent
    assert flops(plan) == pytest.approx(flops(whole), rel=1e-12)


def flops(plan: Plan) -> float:
    works = [op.work for op in plan.ops if isinstance(op.work, Kernels)]
    return sum(kernel.flops for work in works for kernel in work.kernels)


def test_in_line_a_column_gathers_again_before_both_products() -> None:
    """`tp_recompute_allgather`, nanotron's default: the rank's part is kept, with asynchronous communication
    or without."""
    column = calls(job_of(4, asynchronous=False))["mlp.linear_fc1"]
    assert order(column.work.backward) == ["gather input", "", "reduce input's gradient"]
    assert not isinstance(column.work.backward, Kernels)
    assert {part.stream for part in column.work.backward} == {"compute"}
    assert column.work.saved_bytes == LENGTH * BATCH * HIDDEN * 2 // 4


def test_the_gathered_input_is_held_while_the_column_runs() -> None:
    """Behind the rank's part, which is kept: all tokens' input and output."""
    column = calls(job_of(4))["mlp.linear_fc1"]
    gathered = LENGTH * BATCH * HIDDEN * 2
    assert gathered in column.work.tensors.forward
    assert column.work.saved_bytes == gathered // 4


def test_folded_equals_unfolded() -> None:
    job = job_of(4)
    folded, unfolded = simulate_job(job), simulate_job(job, unfold=True)
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
