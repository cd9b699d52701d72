"""SuperOffload: what its worker does when, and the link between a Grace and its GPU.

GPT-2 XL has N = 1,557,611,200 parameters. Its sub-groups of 400 million elements close with a parameter that
reaches the size: four of them on one GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.make import make_plan
from zsim.plan.ops import HostWork, Op
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.resolve import resolve
from zsim.specs.topology.topology import Topology

N = 1_557_611_200


def experiment_of(
    clipping: float = 0.0, *, cluster: Any = "gh200", version: str = "0.19.8", stage: int = 3, **offload: Any
) -> zsim.Experiment:
    block = {"device": "cpu", "pin_memory": True, "super_offload": True, **offload}
    zero = {"stage": stage, "sub_group_size": 400_000_000, "offload_optimizer": block}
    config = {"bf16": {"enabled": True}, "gradient_clipping": clipping, "zero_optimization": zero}
    return zsim.Experiment(
        model="gpt2-xl",
        cluster=cluster,
        nodes=1,
        training={"sequence_length": 1024, "micro_batch_size": 4},
        strategy={"kind": "deepspeed", "version": version, "config": config},
    )


def host_ops(experiment: zsim.Experiment) -> list[Op]:
    ops = make_plan(resolve(experiment)).programs[0].ops
    return [op for op in ops if isinstance(op.work, HostWork)]


def by_phase(experiment: zsim.Experiment, phase: str) -> int:
    """Bytes that the CPUs move in a phase."""
    works = [op.work for op in host_ops(experiment) if op.phase == phase]
    return sum(work.bytes for work in works if isinstance(work, HostWork))


def test_the_worker_updates_during_backward() -> None:
    """Per element 8 bytes of gradients copied, 28 of Adam, 8 of masters copied; then 8 scaled, 6 cast."""
    assert by_phase(experiment_of(), "backward") == 44 * N
    assert by_phase(experiment_of(), "optimizer") == 14 * N
    assert by_phase(experiment_of(super_offload=False), "backward") == 0
    assert by_phase(experiment_of(super_offload=False), "optimizer") == (28 + 14) * N


def test_clipping_keeps_the_update_behind_the_norm() -> None:
    """DeepSpeed 0.19.8 `partition_grads` queues nothing then, and the worker's copies remain."""
    clipped = experiment_of(1.0)
    assert by_phase(clipped, "backward") == 0
    assert by_phase(clipped, "optimizer") == (44 + 14) * N
    assert any("gradient_clipping 1, since the norm comes first" in note for note in notes(clipped))
    seconds = [zsim.simulate(experiment_of(clip)).trace.step_seconds for clip in (0.0, 1.0)]
    plain = zsim.simulate(experiment_of(1.0, super_offload=False)).trace.step_seconds
    assert seconds[0] < plain < seconds[1]


def notes(experiment: zsim.Experiment) -> tuple[str, ...]:
    strategy = resolve(experiment).strategy
    assert isinstance(strategy, DeepSpeedConfig)
    return strategy.notes


def test_each_sub_group_is_queued_when_its_last_gradient_is_there() -> None:
    """Backward runs from the last parameter: sub-group 3, the last one, is complete first."""
    queued = [op.name for op in host_ops(experiment_of()) if op.name.startswith("optimizer step")]
    assert queued == [f"optimizer step of sub-group {group}" for group in (3, 2, 1, 0)]


def test_the_gpu_keeps_its_part_of_the_sub_groups() -> None:
    """ratio 0.5: int(0.5 x 4) sub-groups stay on the GPU, and the worker takes the other two."""
    steps = [op.name for op in host_ops(experiment_of(ratio=0.5)) if op.name.startswith("optimizer step")]
    assert steps == ["optimizer step of sub-group 3", "optimizer step of sub-group 2"]


def test_the_worker_has_a_pinned_buffer_of_the_largest_sub_group() -> None:
    peaks = [
        zsim.simulate(experiment_of(super_offload=flag)).report.to_dict()["peak_bytes"]["host"]["buffers"]
        for flag in (True, False)
    ]
    assert 4 * 400_000_000 <= peaks[0] - peaks[1] < 4 * 500_000_000


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": "0.18.8"}, NotSimulatedError, "SuperOffload before 0.18.9"),
        ({"version": "0.17.6"}, InputError, "does not know it; it came with 0.18.0"),
        ({"device": "nvme", "nvme_path": "/n"}, NotSimulatedError, "only with device 'cpu'"),
    ],
)
def test_refusals_name_the_way_out(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(experiment_of(**change))


def test_other_stages_do_without() -> None:
    assert any("no effect outside stage 3" in note for note in notes(experiment_of(stage=2)))


def test_copies_take_the_c2c_link_and_cards_take_pcie() -> None:
    """450 GB/s x 0.79 to the GPU and x 0.658 from it: 355.5 and 296.1 GB/s, pinned or not."""
    topology = Topology(load_cluster("gh200"), 2, 1)
    assert topology.classes["c2c_down"].capacity == pytest.approx(355.5e9)
    assert topology.classes["c2c_up"].capacity == pytest.approx(296.1e9)
    tiers = {topology.class_of(link).tier for link in topology.route(0, 1)}
    assert "pcie" in tiers
    assert "c2c" not in tiers
    outcome = simulate_job(resolve(experiment_of(pin_memory=False)))
    carried = {row.name: row.per_rank for row in outcome.devices}
    assert carried["c2c_up"] == pytest.approx(6 * N)  # 2 bytes of sums and 4 of fp32 gradients
    assert carried["c2c_down"] == pytest.approx(4 * N)  # 2 of sums back and 2 of weights
    assert "pcie_up" not in carried


def test_zero_offload_is_faster_over_c2c_than_over_pcie() -> None:
    """The same superchip with its host memory behind PCIe 5.0."""
    pcie = {"extends": "gh200", "name": "gh200 over PCIe", "c2c": None}
    seconds = [
        zsim.simulate(experiment_of(cluster=cluster, super_offload=False)).trace.step_seconds
        for cluster in ("gh200", pcie)
    ]
    assert seconds[0] < 0.9 * seconds[1]
