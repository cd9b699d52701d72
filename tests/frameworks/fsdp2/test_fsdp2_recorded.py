"""FSDP2 plans against what torch 2.13 itself did on fake ranks (traces/oracle, recorded by
validation.oracle)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.steps import plan_step
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

ORACLE = Path(__file__).parents[3] / "traces" / "oracle"


def unfold(rows: list[Any]) -> list[tuple[Any, ...]]:
    """Calls (kind, bytes, dtype, group size, group stride) of a recorded answer."""
    calls: list[tuple[Any, ...]] = []
    for row in rows:
        calls += unfold(row["calls"]) * row["times"] if isinstance(row, dict) else [tuple(row[:5])]
    return calls


def recorded_cases() -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted(ORACLE.glob("*_w*_reshard*.json"))]


def job_of(case: dict[str, Any]) -> Job:
    training = {
        key: case[key]
        for key in (
            "sequence_length", "micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing",
            "gradient_clipping",
        )
    }  # fmt: skip
    strategy = {
        key: case[key]
        for key in ("wrapping", "replicate", "reshard_after_forward", "param_dtype", "reduce_dtype")
    }
    return resolve(
        Experiment(
            model=case["model"],
            cluster="dgx-h100",
            gpus=case["world_size"],
            training={"precision": "bf16", **training},
            strategy={"kind": "fsdp2", **strategy},
        )
    )


@pytest.mark.parametrize("path", recorded_cases())
def test_the_plan_is_what_torch_did(path: Path, toys: Any) -> None:
    """Collectives one by one, and the peak of each category that FSDP2 itself fills, byte for byte.

    Recorded by validation/oracle with torch 2.13 on fake ranks. Two peaks differ by their labels: torch's
    AdamW states hold a step counter of 4 bytes per tensor, and where the head is a unit of its own the
    reduction's output (1/64 of 2.1 GB) counts as a buffer at the peak until it becomes the gradient.
    """
    answer = json.loads(path.read_text())
    job = job_of(answer["case"])
    plan = plan_step(make_workload(job.model, job.training), job.strategy, job.world_size)
    issued = [
        (work.kind, work.bytes, work.dtype, plan.groups[work.group].size, plan.groups[work.group].stride)
        for work in toys.collectives_of(plan)
    ]
    assert issued == unfold(answer["calls"])
    peaks, recorded = toys.host_peaks(plan), answer["peak_bytes"]
    assert peaks["parameters"] == recorded["parameters"]
    assert peaks["gradients"] == recorded["gradients"]
    assert 0 <= recorded["optimizer_states"] - peaks["optimizer_states"] < 4 * 1000
    is_head_alone = answer["case"]["wrapping"] == "torchtitan" and answer["case"]["model"] == "llama-3-8b"
    assert peaks["buffers"] == pytest.approx(recorded["buffers"], rel=0.01 if is_head_alone else 0)
