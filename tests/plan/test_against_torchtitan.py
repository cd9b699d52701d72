"""FSDP2 by tensor and pipeline parallelism against torch's own calls, parallelized as torchtitan does it: the
collectives and messages of a whole step, call by call, with their bytes, types, ranks and order."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.plan.titan import WIDE, ask, calls_of, plan_for, question, workloads_of, world_of
from zsim.specs.model.spec import Norm

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

FOUR: dict[str, Any] = {"pp": 2, "layers_per_stage": [1, 1, 1, 1], "micro_batches": 4}
QUESTIONS: dict[str, Any] = {
    "tensor": question(),
    "no sequence parallelism": question(sequence_parallel=False),
    "two micro-batches": question(micro_batches=2),
    "one FSDP rank": question(fsdp=1),
    "HSDP": question(dp_replicate=2, fsdp=2),
    "full checkpointing": question(checkpointing="full"),
    "kept reduce-scatters": question(checkpointing="selective-op"),
    "recomputed all-reduces": question(checkpointing="selective-op", sequence_parallel=False),
    "1f1b": question(pp=2, layers_per_stage=[1, 1], micro_batches=4, ranks=[1, 5]),
    "1f1b, resharded": question(
        pp=2, layers_per_stage=[1, 1], micro_batches=3, ranks=[1, 5], reshards=True, checkpointing="full"
    ),
    "pipeline alone": question(pp=2, tp=1, layers_per_stage=[2, 1], micro_batches=2, ranks=[0, 3]),
    "gpipe": question(pp=4, layers_per_stage=[1] * 4, schedule="gpipe", micro_batches=3, ranks=[0, 4, 12]),
    "interleaved-1f1b": question(**FOUR, schedule="interleaved-1f1b", ranks=[0, 5]),
    "looped-bfs": question(**FOUR, schedule="looped-bfs", ranks=[0, 5], reshards=True),
    "interleaved-zero-bubble": question(**FOUR, schedule="interleaved-zero-bubble", ranks=[0, 5]),
    "zbv-zero-bubble": question(**FOUR, schedule="zbv-zero-bubble", dp_replicate=2, ranks=[0, 13]),
    "dualpipe-v": question(**FOUR, schedule="dualpipe-v", ranks=[0, 5]),
    "16 stages": question(
        pp=4, layers_per_stage=[1] * 16, schedule="interleaved-1f1b", micro_batches=4, ranks=[5], fsdp=1
    ),
    "1,024 ranks": question(
        pp=4, tp=8, fsdp=32, shape=WIDE, layers_per_stage=[1] * 4, micro_batches=4, ranks=[0, 1023]
    ),
    "1,024 ranks of HSDP": question(
        pp=4, tp=4, fsdp=8, dp_replicate=8, shape=WIDE, layers_per_stage=[1] * 8, micro_batches=8,
        schedule="interleaved-1f1b", ranks=[517],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", name="answers")
def _answers() -> dict[str, Any]:
    return dict(zip(QUESTIONS, ask(list(QUESTIONS.values())), strict=True))


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_plan_has_torch_s_calls(answers: dict[str, Any], name: str) -> None:
    plan = plan_for(QUESTIONS[name])
    for rank, answer in answers[name].items():
        assert answer["calls"]
        assert calls_of(plan, int(rank)) == answer["calls"], f"rank {rank}"


@pytest.mark.parametrize("name", [name for name, asked in QUESTIONS.items() if asked["pp"] > 1])
def test_stages_keep_torch_s_buffers(answers: dict[str, Any], name: str) -> None:
    """Of every stage, for the inputs and for the gradients of all micro-batches; none at the model's ends.
    (Stages of a rank that are neighbours have each other's tensors in place of buffers.)"""
    asked = QUESTIONS[name]
    plan = plan_for(asked)
    for rank, answer in answers[name].items():
        program = plan.program_on(int(rank))
        kept: dict[str, int] = {}
        for change in program.memory:
            if change.op <= 1 and "buffers for" in change.owner:
                kept[change.owner] = kept.get(change.owner, 0) + change.bytes
        assert sorted(kept.values()) == sorted(size for size in answer["buffers"] if size)


@pytest.mark.parametrize("name", ["tensor", "one FSDP rank", "no sequence parallelism"])
def test_forward_keeps_torch_s_tensors(answers: dict[str, Any], name: str) -> None:
    """Tensor by tensor: with sequence parallelism attention and the MLP keep their gathered inputs whole, and
    heads and features in between are halves. Norms apart, of which torch keeps other things on CPUs: two
    tensors in fp32 and the statistics."""
    asked = QUESTIONS[name]
    rank = 32 * 64 // (2 if asked["sequence_parallel"] else 1)
    norms = 2 * sum(asked["layers_per_stage"]) + 1
    statistics = 4 * rank // 64
    kept = list(answers[name]["0"]["saved"])
    for size in (4 * rank, 4 * rank, statistics):
        for _ in range(norms):
            kept.remove(size)
    kept.remove(4)  # the loss's number of tokens
    calls = [call for segment in workloads_of(asked)[0].segments for call in segment.calls]
    own = [call.work.tensors.saved for call in calls if not isinstance(call.module.op_spec, Norm)]
    assert sorted(size for sizes in own for size in sizes) == kept


REAL: dict[str, Any] = {
    "FSDP by tensor on 4 CPUs": question(ranks=[0, 1, 2, 3]),
    "a pipeline of them on 8": question(
        pp=2, layers_per_stage=[1, 1], micro_batches=4, ranks=list(range(8)), checkpointing="full"
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_ranks_make_the_same_calls(name: str, tmp_path: Path) -> None:
    """Each rank in a process of its own, with gloo."""
    asked = REAL[name] | {"is_real": True, "file": str(tmp_path / "store")}
    (answers,) = ask([asked])
    plan = plan_for(asked)
    assert len(answers) == world_of(asked)
    for rank, answer in answers.items():
        assert calls_of(plan, int(rank)) == answer["calls"], f"rank {rank}"
