"""The step without overlap: for which jobs it is told, and what it is."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.api import simulate
from zsim.engine.simulate import simulate_job
from zsim.report.report import Report
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.units import format_seconds


def experiment(strategy: dict[str, Any], nodes: int = 2, **tables: Any) -> Experiment:
    training = {"micro_batch_size": 1, "sequence_length": 1024}
    return Experiment(
        model="llama-2-7b",
        cluster="dgx-a100-80gb",
        nodes=nodes,
        training=training,
        strategy=strategy,
        **tables,
    )


def report(strategy: dict[str, Any], nodes: int = 2, **tables: Any) -> Report:
    return simulate(experiment(strategy, nodes, **tables)).report


def deepspeed(stage: int, **zero: Any) -> dict[str, Any]:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}
    return {"kind": "deepspeed", "config": config}


def test_deepspeed_over_several_nodes_is_told_its_step_without_overlap() -> None:
    """With `overlap_comm` off only reductions are on the stream of kernels: gathers issued ahead still run
    beside them, so that such a step lies between the two."""
    found = report(deepspeed(3))
    without = found.step_seconds_without_overlap
    assert without is not None
    assert without > 1.1 * found.step_seconds
    assert found.step_seconds < report(deepspeed(3, overlap_comm=False)).step_seconds < without
    assert (
        f"Without overlap the step would take {format_seconds(without)}; most published runs" in found.limit
    )
    assert found.to_dict()["step_seconds_without_overlap"] == without


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_is_the_step_of_a_simulation_of_its_own(stage: int) -> None:
    """To the last digit, though plan, classes and the empty allocator are those of the step with overlap."""
    apart = simulate_job(resolve(experiment(deepspeed(stage))), is_serial=True)
    assert report(deepspeed(stage)).step_seconds_without_overlap == apart.trace.step_seconds


def test_a_step_that_hides_nothing_is_told_nothing() -> None:
    found = report(deepspeed(1, overlap_comm=False))
    assert found.step_seconds_without_overlap == pytest.approx(found.step_seconds, rel=1e-9)
    assert "were hidden" not in found.limit


@pytest.mark.parametrize(
    ("strategy", "nodes", "tables"),
    [
        (deepspeed(3), 1, {}),
        ({"kind": "fsdp2"}, 2, {}),
        ({"kind": "ddp"}, 2, {}),
        (deepspeed(3), 2, {"jitter": {"seed": 1, "steps": 2, "kernel_sigma": 0.01}}),
    ],
    ids=["one node", "FSDP2", "DDP", "jitter"],
)
def test_others_are_not(strategy: dict[str, Any], nodes: int, tables: dict[str, Any]) -> None:
    found = report(strategy, nodes, **tables)
    assert found.step_seconds_without_overlap is None
    assert "were hidden" not in found.limit


def mixture(**bf16: Any) -> Experiment:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = {"bf16": {"enabled": True, **bf16}, "zero_optimization": zero}
    return Experiment(
        model={"extends": "mixtral-8x7b", "num_hidden_layers": 2},
        cluster="dgx-h100",
        gpus=8,
        training={"micro_batch_size": 1, "sequence_length": 1024},
        strategy={"kind": "deepspeed", "config": config},
    )


def test_the_step_with_the_other_release_of_routed_experts_is_told() -> None:
    """A job that says neither release runs stacked experts, and the note has the step of the older releases,
    which is that of a job that says both."""
    asked = mixture()
    older = {"training.transformers": "4.57", "strategy.version": "0.17.6"}
    seconds = simulate(change_experiment(asked, older)).report.step_seconds
    found = simulate(asked).report
    assert found.step_seconds < seconds
    expected = f'several times as long: training.transformers = "4.57"; {format_seconds(seconds)} a step with'
    assert sum(expected in note for note in found.notes) == 1
    assert sum(expected in note for note in found.input_notes) == 1


def test_a_job_that_older_releases_refuse_has_the_plain_note() -> None:
    """DeepSpeed has bf16 masters from 0.18.3 on, so that 0.17.6 refuses them."""
    found = simulate(mixture(bf16_master_weights_and_grads=True)).report
    notes = [note for note in found.notes if "assumed to be stacked" in note]
    assert [note.endswith('several times as long: training.transformers = "4.57"') for note in notes] == [
        True
    ]
