"""The plans of a study, which have programs in common, are those that each job has alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.golden.jobs import JOBS
from zsim.frameworks.deepspeed.stage3 import fetch_trace
from zsim.frameworks.deepspeed.stage3.module_order import HookedModules, hooked_modules
from zsim.plan import plans as plans_module
from zsim.plan.make import PlanBasis, make_plan, plan_of
from zsim.plan.ops import Plan
from zsim.plan.plans import Plans
from zsim.plan.workload import workload as workloads_module
from zsim.plan.workload.workload import Workload, Workloads, make_workloads
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.training import TrainingConfig

OTHER_NODES = sorted(name for name, job in JOBS.items() if not {"placement", "faults", "jobs"} & set(job))


def job(name: str, **changes: Any) -> Job:
    return resolve(Experiment.model_validate(JOBS[name] | changes))


def assert_same(plan: Plan, other: Plan) -> None:
    assert np.array_equal(plan.program_of, other.program_of)
    for program, own in zip(plan.programs, other.programs, strict=True):
        assert program.ops == own.ops
        assert program.memory == own.memory
        assert program == own
    assert list(plan.groups) == list(other.groups)
    assert plan.groups == other.groups
    assert (plan.framework, plan.notes, plan.labels) == (other.framework, other.notes, other.labels)


@pytest.mark.parametrize("name", OTHER_NODES)
def test_plans_for_other_nodes_are_those_made_alone(name: str) -> None:
    """ZeRO++ quantises no shards of 24 GPUs."""
    plans = Plans()
    for nodes in (2, 8 if name == "zero-pp" else 3, 1, 4, 2):
        asked = job(name, nodes=nodes)
        assert_same(plans.of(asked), make_plan(asked))


def test_plans_of_all_jobs_are_those_made_alone() -> None:
    plans = Plans()
    for name in JOBS:
        assert_same(plans.of(job(name)), make_plan(job(name)))


@pytest.mark.parametrize(
    ("strategy", "num_made"),
    [
        ({"kind": "ddp"}, 2),  # one for one rank, which reduces nothing
        ({"kind": "fsdp2"}, 4),
    ],
)
def test_ddps_step_is_planned_once_for_any_number_of_ranks(
    strategy: dict[str, Any], num_made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PlanBasis] = []

    def counted(basis: PlanBasis, workloads: Workloads) -> Plan:
        made.append(basis)
        return plan_of(basis, workloads)

    monkeypatch.setattr(plans_module, "plan_of", counted)
    plans = Plans()
    for gpus in (8, 1, 16, 24):
        asked = job("ddp", strategy=strategy, nodes=None, gpus=gpus)
        assert_same(plans.of(asked), make_plan(asked))
    assert len(made) == num_made


def test_ranks_with_equal_shards_have_one_program() -> None:
    """HSDP over 8 GPUs of a node each: two nodes have 2 replicas, three have 3."""
    plans = Plans()
    two, three = (
        plans.of(job("hsdp", nodes=nodes, strategy={"kind": "fsdp2", "replicate": nodes})) for nodes in (2, 3)
    )
    assert two is not three
    assert two.program is three.program


def test_one_model_under_one_training_is_one_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever shards it; ZeRO-3's modules are walked once for all numbers of ranks."""
    made: list[TrainingConfig] = []
    walked: list[Workload] = []

    def counted(stages: Sequence[ModelSpec], training: TrainingConfig) -> list[Workload]:
        made.append(training)
        return make_workloads(stages, training)

    def hooked(workload: Workload, unit_of: Mapping[str, str]) -> HookedModules:
        walked.append(workload)
        return hooked_modules(workload, unit_of)

    monkeypatch.setattr(workloads_module, "make_workloads", counted)
    monkeypatch.setattr(fetch_trace, "hooked_modules", hooked)
    plans = Plans()
    for nodes in (2, 4, 1):
        for stage in (1, 3):
            plans.of(job("zero-1", nodes=nodes, strategy={"stage": stage}))
    assert (len(made), len(walked)) == (1, 1)
    plans.of(job("zero-3"))  # with activation checkpointing
    assert (len(made), len(walked)) == (2, 2)
