"""The step without overlap: for which jobs it is told, and what it is."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.api import simulate
from zsim.report.report import Report
from zsim.specs.experiment.tables import Experiment


def report(strategy: dict[str, Any], nodes: int = 2, **tables: Any) -> Report:
    training = {"micro_batch_size": 1, "sequence_length": 1024}
    return simulate(
        Experiment(
            model="llama-2-7b", cluster="dgx-a100-80gb", nodes=nodes, training=training, strategy=strategy,
            **tables,
        )
    ).report  # fmt: skip


def deepspeed(stage: int, **zero: Any) -> dict[str, Any]:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}
    return {"kind": "deepspeed", "config": config}


def test_deepspeed_over_several_nodes_is_told_its_step_without_overlap() -> None:
    """Kernels and collectives in one line take what they take with `overlap_comm` off, where all are on one
    stream (within the 1 % by which kernels are slower beside a collective that is not beside them now)."""
    found = report(deepspeed(3))
    without = found.step_seconds_without_overlap
    assert without is not None
    assert without > 1.1 * found.step_seconds
    assert without == pytest.approx(report(deepspeed(3, overlap_comm=False)).step_seconds, rel=0.01)
    assert found.limit.endswith("of DeepSpeed over several nodes are nearer, the step would be 578.48 ms.")
    assert found.to_dict()["step_seconds_without_overlap"] == without


def test_a_step_that_hides_nothing_is_told_nothing() -> None:
    found = report(deepspeed(3, overlap_comm=False))
    assert found.step_seconds_without_overlap == pytest.approx(found.step_seconds, rel=1e-9)
    assert "nothing hidden" not in found.limit


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
    assert "nothing hidden" not in found.limit
