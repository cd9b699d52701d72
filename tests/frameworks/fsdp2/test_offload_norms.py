"""The gradient norm of FSDP2 with CPU offload: hosts sum it over the groups in which GPUs sum theirs."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.engine.simulate import simulate_job
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Program
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

NORM = "all_reduce gradient norm"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def job_of(degrees: dict[str, int], *, offloads: bool = True, clipping: float = 1.0, gpus: int = 16) -> Job:
    strategy = {"kind": "fsdp2", "cpu_offload": offloads}
    training = {
        "sequence_length": 512, "gradient_clipping": clipping,
        "gradient_accumulation_steps": 2 * degrees.get("pipeline", 1),
    }  # fmt: skip
    experiment = zsim.Experiment(
        model=LLAMA, cluster="dgx-h100", gpus=gpus, parallelism=degrees, strategy=strategy, training=training
    )
    return resolve(experiment)


def norms(program: Program) -> list[tuple[str, int]]:
    """(group, bytes) of the all-reduces of the norm, in order."""
    ops = [op for op in program.ops if op.name == NORM]
    return [(op.work.group, op.work.bytes) for op in ops if isinstance(op.work, Collective)]


@pytest.mark.parametrize(
    "degrees", [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"context": 2, "tensor": 4}]
)
def test_hosts_sum_the_norm_in_the_groups_of_the_gpus(degrees: dict[str, int]) -> None:
    """GPUs' calls are held to torchtitan's own in test_against_torchtitan: a number per tensor over each
    dimension of the mesh, one over the pipeline."""
    here, there = (make_plan(job_of(degrees, offloads=offloads)) for offloads in (True, False))
    assert norms(here.programs[0])
    for own, theirs in zip(here.programs, there.programs, strict=True):
        assert norms(own) == norms(theirs)
        assert {op.stream for op in own.ops if op.name == NORM} == {"cpu"}
        assert {op.stream for op in theirs.ops if op.name == NORM} == {"compute"}


def test_gloo_s_ring_has_two_rounds_per_rank() -> None:
    """16 GPUs on 2 nodes, tensor 2: 8 data-parallel ranks, 14 rounds of which 4 are between nodes; 2 rounds
    of 2 tensor-parallel ranks."""
    program = make_plan(job_of({"tensor": 2})).program
    rounds = [(op.overhead, op.events) for op in program.ops if (op.overhead or "").startswith("gloo_round")]
    assert rounds == [("gloo_round", 10), ("gloo_round_between_nodes", 4), ("gloo_round", 2)]
    assert sum(op.overhead == "gloo_call" for op in program.ops) == 2


def test_the_norm_costs_its_rounds() -> None:
    """8 ranks of a node: the start and 14 rounds, 0.25 ms + 14 x 60 us, beside work that takes as long
    whatever the number of ranks."""
    clipped, free = (
        simulate_job(job_of({}, clipping=clipping, gpus=8)).trace.step_seconds for clipping in (1.0, 0.0)
    )
    assert clipped - free > 0.25e-3 + 14 * 60e-6
    assert not norms(make_plan(job_of({}, clipping=0.0)).program)


def test_folded_equals_unfolded() -> None:
    job = job_of({"tensor": 2, "pipeline": 2})
    folded, unfolded = simulate_job(job), simulate_job(job, unfold=True)
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
