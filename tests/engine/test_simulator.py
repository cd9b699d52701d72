"""A study's simulator shares what its jobs have in common, and every result is that of the job alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.engine.simulate import Outcome, simulate_job
from zsim.engine.simulator import Simulator
from zsim.plan.make import make_plan, plan_basis
from zsim.plan.plans import Plans
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.sweep.records import point_record

MODEL = {"extends": "gpt2", "n_layer": 3}  # blocks: the first, the last, and one between them
NIC = {"bandwidth": "20 GB/s"}
GPU = {"memory": {"capacity": "40 GB", "bandwidth": "1 TB/s"}}
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "slow cards": {"cluster": {"extends": "dgx-h100", "nic": NIC}},
    "slower cards": {"cluster": {"extends": "dgx-h100", "nic": {"bandwidth": "3 GB/s"}}},
    "fewer cards": {"cluster": {"extends": "dgx-h100", "nic": {"per_node": 4}}},
    "another GPU": {"cluster": "dgx-a100-80gb"},
    "a small GPU": {"cluster": {"extends": "dgx-h100", "gpu": GPU}},
    "twice the nodes": {"nodes": 4, "gpus": 32},
    "half a node each": {"nodes": 4, "gpus": 16},
    "a slow GPU": {"faults": {"slow_gpus": {"3": 1.4}}},
    "a degraded card": {"faults": {"dead_nics": ["node1.nic0"]}},
    "jitter": {"jitter": {"kernel_sigma": 0.05, "seed": 3, "steps": 3}},
    "scattered": {"nodes": 2, "placement": {"fabric_nodes": 8, "nodes": [0, 5]}},
    "slow links": {"cluster": {"extends": "dgx-h100", "node_link": {"bandwidth": "50 GB/s"}}},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero3": {"stage": 3},
    "zero2 offloaded": {
        "config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    },
    "fsdp1": {"kind": "fsdp1"},
    "fsdp2": {"kind": "fsdp2"},
    "hsdp": {"kind": "fsdp2", "replicate": 2},
    "ddp": {"kind": "ddp"},
}
TRAINING = {"micro_batch_size": 1, "sequence_length": 256, "gradient_accumulation_steps": 2}


def experiment(strategy: str, change: str, training: Mapping[str, Any] = TRAINING) -> Experiment:
    data = {"model": MODEL, "cluster": "dgx-h100", "nodes": 2, "training": dict(training)}
    return Experiment.model_validate(data | {"strategy": STRATEGIES[strategy]} | CHANGES[change])


def columns(outcome: Outcome) -> Sequence[Any]:
    trace = outcome.trace
    memory = trace.memory
    assert memory is not None
    return [
        trace.ranks, trace.info_indices, trace.issue_seconds, trace.start_seconds, trace.end_seconds,
        memory.host_seconds, memory.stream_seconds, memory.deltas,
    ]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_can_be_simulated(change: str) -> None:
    record = point_record("", experiment("fsdp2", change))
    assert record["status"] == "ok", record["error"]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STRATEGIES)), st.sampled_from(sorted(CHANGES))), min_size=2,
             max_size=4)
)  # fmt: skip
def test_what_is_shared_changes_no_bit_of_a_result(asked: list[tuple[str, str]]) -> None:
    simulator = Simulator()
    for strategy, change in asked:
        job = simulator.job(experiment(strategy, change))
        shared, alone = simulator.outcome(job), simulate_job(resolve(experiment(strategy, change)))
        assert all(map(np.array_equal, columns(shared), columns(alone)))
        assert shared.trace.step_seconds == alone.trace.step_seconds
        assert shared.trace.infos == alone.trace.infos
        assert shared.allocation == alone.allocation
        assert (shared.traffic, shared.sent_bytes, shared.call_limits) == (
            alone.traffic,
            alone.sent_bytes,
            alone.call_limits,
        )
        row, other = (point_record("", experiment(strategy, change), each) for each in (simulator, None))
        assert row == other


@pytest.mark.parametrize(
    ("change", "is_shared"),
    [
        ("slow cards", True), ("another GPU", True), ("a small GPU", True), ("a slow GPU", True),
        ("jitter", True), ("scattered", True), ("half a node each", True), ("twice the nodes", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_jobs_that_differ_in_hardware_alone_have_one_plan(
    strategy: str, change: str, is_shared: bool
) -> None:
    simulator = Simulator()
    plans = [simulator.plan(simulator.job(experiment(strategy, name))) for name in ("as it is", change)]
    assert (plans[0] is plans[1]) == is_shared


def test_a_plan_of_cpu_ranks_is_another_one() -> None:
    """Ranks that are CPUs do in one thread what GPUs do on streams, and gloo reduce-scatters by an all-reduce
    of a copy."""
    jobs = [
        resolve(Experiment(model="gpt2", cluster=name, gpus=1, strategy={"kind": "fsdp2"}))
        for name in ("dgx-h100", "cpu-gloo")
    ]
    first, second = (plan_basis(job) for job in jobs)
    assert (first.is_cpu, first.copies_scatters) == (False, False)
    assert (second.is_cpu, second.copies_scatters) == (True, True)
    assert make_plan(jobs[0]).programs != make_plan(jobs[1]).programs


def test_a_setting_without_effect_gives_the_plan_that_is_known() -> None:
    """Nothing of gpt2 is larger than either bucket."""
    plans = Plans()
    found = [
        plans.of(resolve(Experiment(model="gpt2", cluster="dgx-h100", training=TRAINING, strategy={"config": {
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": size}}})))
        for size in (10**9, 2 * 10**9)
    ]  # fmt: skip
    assert found[0] is found[1]


def test_the_plans_used_last_are_kept() -> None:
    jobs = [resolve(experiment(name, "as it is")) for name in ("ddp", "fsdp2", "hsdp")]
    sizes = [len(make_plan(job).ops) for job in jobs]
    plans = Plans(most_ops=sizes[0] + max(sizes[1:]))
    ddp, fsdp2 = plans.of(jobs[0]), plans.of(jobs[1])
    assert plans.of(jobs[0]) is ddp
    plans.of(jobs[2])
    assert plans.of(jobs[0]) is ddp
    assert plans.of(jobs[1]) is not fsdp2
