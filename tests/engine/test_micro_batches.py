"""Steps of which only some micro-batches are simulated are as those simulated whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim import Experiment
from zsim.api import Result, simulate
from zsim.engine import micro_batches
from zsim.engine.micro_batches import SimulatedStep, simulate_step
from zsim.engine.simulate import Outcome, simulate_job
from zsim.report.views.html.timeline import report_timeline
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

MODEL = {"extends": "gpt2", "n_layer": 3}  # blocks: the first, the last, and one between them


def step_of(sequences: int, micro_batches: int, *, whole: bool) -> SimulatedStep:
    """GPT-2 under nanotron's ZeRO-1 on 8 H100, where the host takes 54 ms for a micro-batch."""
    training: dict[str, Any] = {
        "sequence_length": 1024, "micro_batch_size": sequences,
        "gradient_accumulation_steps": micro_batches, "liger": True,
    }  # fmt: skip
    strategy = {"kind": "megatron", "engine": "nanotron", "distributed_optimizer": True}
    simulation = {"every_micro_batch": whole}
    experiment = Experiment(
        model="gpt2", cluster="dgx-h100", nodes=1, training=training, strategy=strategy, simulation=simulation
    )
    return simulate_step(resolve(experiment))


@pytest.mark.parametrize(("sequences", "simulated"), [(1, 3), (3, 6)])
def test_a_gpu_that_catches_up_with_its_host_does_not_hide_the_hosts_pace(
    sequences: int, simulated: int
) -> None:
    """With three sequences the GPU has a backlog from the step's beginning, so that steps of three and of two
    micro-batches differ by 52.7 ms and later ones by the host's 53.4 ms."""
    few, whole = (step_of(sequences, 12, whole=whole) for whole in (False, True))
    assert (few.outcome_micro_batches, whole.outcome_micro_batches) == (simulated, 12)
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-5)


def test_a_shorter_step_that_is_short_of_memory_is_no_measure() -> None:
    """A step of two that waits as long as a third micro-batch takes would make the others free."""
    job = resolve(
        Experiment(
            model="gpt2", cluster="dgx-h100", nodes=1, strategy={"kind": "fsdp1"},
            training={"sequence_length": 1024, "micro_batch_size": 4, "gradient_accumulation_steps": 8},
            simulation={"every_micro_batch": False},
        )
    )  # fmt: skip

    def short_of_memory(job: Job) -> Outcome:
        if job.training.gradient_accumulation_steps != 2:
            return simulate_job(job)
        three = replace(job, training=replace(job.training, gradient_accumulation_steps=3))
        outcome = simulate_job(three)
        assert outcome.allocation is not None
        counts = replace(outcome.allocation.counts, retries=1)
        return replace(outcome, allocation=replace(outcome.allocation, counts=counts))

    few = simulate_step(job, simulate=short_of_memory)
    assert few.seconds == pytest.approx(simulate_step(job).seconds, rel=0.01)


def test_the_terms_of_a_step_add_up_to_its_seconds() -> None:
    step = step_of(3, 12, whole=False)
    total = sum(times * outcome.trace.step_seconds for times, outcome in step.terms)
    assert total == pytest.approx(step.seconds, rel=1e-12)


def looped_job(strategy: dict[str, Any], micro_batches: int = 18, **data: Any) -> Experiment:
    """GPT-2 of three blocks on two nodes of 8 H100, with micro-batches of 256 tokens."""
    training = {"sequence_length": 256, "micro_batch_size": 1, "gradient_accumulation_steps": micro_batches}
    return Experiment(model=MODEL, cluster="dgx-h100", nodes=2, training=training, strategy=strategy, **data)


def unrolled(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The step with every micro-batch simulated."""
    with monkeypatch.context() as patched:
        patched.setattr(micro_batches, "_simulate_loop", lambda *_: None)
        return simulate(experiment)


def close(content: Any) -> Any:
    """The content with floats to be met to nine digits."""
    if isinstance(content, dict):
        return {key: close(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(close(value) for value in content)
    return pytest.approx(content, rel=1e-9, abs=1e-12) if isinstance(content, float) else content


LOOPED = [
    {"kind": "ddp"},
    {"kind": "fsdp1"},
    {"kind": "fsdp2"},
    {"kind": "fsdp2", "replicate": 2},
    {"kind": "fsdp2", "cpu_offload": True},
    {"config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"kind": "megatron", "distributed_optimizer": True, "overlap_grad_reduce": True},
]


@pytest.mark.parametrize("strategy", LOOPED, ids=str)
def test_the_report_of_a_loop_is_that_of_all_its_micro_batches(
    strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of the report but the simulation's own: seconds by cause, calls, traffic, energy, range,
    critical path and memory. Six and seven micro-batches are simulated, and no trace is made of eighteen."""
    looped, whole = simulate(looped_job(strategy)), unrolled(looped_job(strategy), monkeypatch)
    assert looped.step.is_loop
    assert not whole.step.is_loop
    assert looped.step.outcome_micro_batches == 6
    content, expected = looped.report.to_dict(), whole.report.to_dict()
    for simulated in (content, expected):
        del simulated["simulation"]
    assert close(content) == expected


@pytest.mark.parametrize(
    "data",
    [
        {"faults": {"slow_gpus": {"3": 1.3}}},
        {
            "training": {
                "sequence_length": 256, "micro_batch_size": 1, "gradient_accumulation_steps": 18,
                "device_max_connections": 1,
            }
        },
    ],
    ids=["a slow GPU", "one hardware queue"],
)  # fmt: skip
def test_the_report_of_a_loop_whose_ranks_or_streams_wait_is_that_of_all_its_micro_batches(
    data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notes on waits are those of the whole step, and so is the timeline of its page."""
    experiment = Experiment(**(looped_job({"kind": "fsdp2"}).model_dump(exclude_unset=True) | data))
    looped, whole = simulate(experiment), unrolled(experiment, monkeypatch)
    assert looped.step.is_loop
    content, expected = looped.report.to_dict(), whole.report.to_dict()
    for simulated in (content, expected):
        del simulated["simulation"]
    assert close(content) == expected
    timelines = [
        report_timeline(result.report, result.trace.rank_view(result.report.rank)).data
        for result in (looped, whole)
    ]
    assert [len(bars["y"]) for bars in timelines[0]] == [len(bars["y"]) for bars in timelines[1]]


def test_the_plan_and_the_trace_of_a_loop_have_all_micro_batches() -> None:
    looped = simulate(looped_job({"kind": "ddp"}))
    assert sum(action.kind == "B" for _, action in looped.plan.program.actions) == 18
    assert looped.trace.step_seconds == pytest.approx(looped.report.step_seconds, rel=1e-9)
    assert len(looped.trace) == sum(op.work is not None for op in looped.plan.ops)


def test_unfolded_ranks_repeat_as_folded_ones_do() -> None:
    """Eight ranks of one node each with a host and a GPU of its own."""
    experiment = looped_job({"stage": 2}).model_copy(update={"nodes": 1})
    folded, every = simulate(experiment), simulate(experiment, unfold=True)
    assert folded.step.is_loop
    assert every.step.is_loop
    assert every.report.step_seconds == pytest.approx(folded.report.step_seconds, rel=1e-9)
    assert len(set(every.trace.ranks.tolist())) == 8


def test_ranks_that_drift_apart_are_no_loop() -> None:
    """DDP's ranks do not meet before the last micro-batch, so a slow one falls behind by as much in each."""
    slow_rank = {"faults": {"slow_gpus": {"3": 1.5}}, "model": "gpt2-xl"}
    data = looped_job({"kind": "ddp"}).model_dump(exclude_unset=True) | slow_rank
    assert not simulate(Experiment(**data)).step.is_loop
    assert simulate(Experiment(**(data | {"strategy": {"stage": 3}}))).step.is_loop


def test_a_step_that_draws_jitter_is_no_loop() -> None:
    assert not simulate(looped_job({"stage": 1}, jitter={"seed": 1, "steps": 2})).step.is_loop


def test_a_thousand_micro_batches_are_as_many_events_as_twenty() -> None:
    few, many = (simulate(looped_job({"kind": "ddp"}, count)).report for count in (20, 1000))
    assert many.simulation.events == few.simulation.events
    assert many.peaks["gpu"] == few.peaks["gpu"]
    assert [row.count for row in many.collectives] == [row.count for row in few.collectives]  # of the last
    assert many.step_seconds > 40 * few.step_seconds
