"""Paged optimizers: states stay on the GPU while they have room, and cross PCIe in every step if not."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.api import simulate
from zsim.plan.make import make_plan
from zsim.plan.ops import Copy, Plan
from zsim.plan.plans import Plans
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def experiment(gpus: int = 8, nodes: int | None = None, **training: Any) -> Experiment:
    """Llama-2-70B whole in bf16 under FSDP1 with bitsandbytes' PagedAdamW, on A100 of 80 GB."""
    table = {
        "sequence_length": 512,
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
        "stored_dtype": "bf16",
        "optimizer": "paged-adamw",
        **training,
    }
    size: dict[str, Any] = {"gpus": gpus} if nodes is None else {"nodes": nodes}
    return Experiment(
        model="llama-2-70b", cluster="dgx-a100-80gb", **size, training=table, strategy={"kind": "fsdp1"}
    )


def job(**changes: Any) -> Job:
    return resolve(experiment(**changes))


def copied(plan: Plan) -> dict[str, int]:
    """Bytes of a rank's copies, by direction."""
    works = [op.work for op in plan.programs[0].ops if isinstance(op.work, Copy)]
    return {way: sum(work.bytes for work in works if work.direction == way) for way in ("h2d", "d2h")}


def states(plan: Plan) -> dict[str, int]:
    resident = [one for one in plan.programs[0].resident if one.category == "optimizer_states"]
    return {one.device: one.bytes for one in resident if one.bytes}


# 68,976,648,192 parameters on eight GPUs, two fp32 moments of each: 8 bytes a parameter over 8.
STATES = 68_976_648_192


def test_states_that_have_no_room_cross_pcie_both_ways() -> None:
    """A rank has 17.24 GB of weights, as many of gradients, 8.85 of what is gathered and 1.37 of framework:
    44 of 80.9 GB. 68.98 GB of states have no room in 36.5: all of them come and go."""
    plan = make_plan(job())
    assert states(plan) == {"host": STATES}
    assert copied(plan) == {"h2d": STATES, "d2h": STATES}


def test_states_that_have_room_stay() -> None:
    """On sixteen GPUs they are 34.49 GB beside 26 of everything else."""
    plan = make_plan(job(nodes=2))
    assert states(plan) == {"gpu": STATES // 2}
    assert copied(plan) == {"h2d": 0, "d2h": 0}


@pytest.mark.parametrize(("place", "device"), [("gpu", "gpu"), ("host", "host")])
def test_a_place_that_is_asked_for_is_taken(place: str, device: str) -> None:
    assert states(make_plan(job(paged_states=place))) == {device: STATES}


def test_a_study_shares_the_plan_of_the_place_that_is_found() -> None:
    """Both plans, on the GPU and on the host, are kept: the second job makes none."""
    plans = Plans()
    assert plans.of(job()) is plans.of(job())
    assert plans.of(job(paged_states="host")) is plans.of(job())
    assert plans.of(job(paged_states="gpu")) is not plans.of(job())


def test_the_verdict_follows_and_the_report_says_what_moves() -> None:
    """PCIe 4.0 x16 has 31.5 GB/s, at which 138 GB take 4.38 s."""
    report = simulate(experiment()).report
    assert report.fits
    assert report.step_seconds > 4.38 + simulate(experiment(paged_states="gpu")).report.step_seconds
    (note,) = [one for one in report.notes if "paged optimizer" in one]
    assert "68.98 GB of each GPU" in note
    assert "which leaves 36.53 GB" in note
    assert not [one for one in simulate(experiment(nodes=2)).report.notes if "paged optimizer" in one]


def test_other_optimizers_never_page() -> None:
    plan = make_plan(job(optimizer="adamw-8bit"))
    assert copied(plan) == {"h2d": 0, "d2h": 0}
