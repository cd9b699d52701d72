"""Speed of studies, as ratios measured in one run: points against raw SimPy timeouts, a sweep against its
simulations, known points against new ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from zsim.arrays import Ints
from zsim.engine.pools import PoolEvents, PoolRuns
from zsim.engine.simulator import Simulator
from zsim.plan import plans
from zsim.plan.make import PlanBasis, plan_of
from zsim.plan.ops import Plan
from zsim.plan.workload.workload import Workloads
from zsim.specs.experiment.tables import Experiment
from zsim.study.sweep.points import study_points
from zsim.study.sweep.records import point_record
from zsim.study.sweep.study_file import Study, load_study
from zsim.study.sweep.sweep import run_sweep

STUDY = """
[base]
model = "llama-3-8b"
cluster = "dgx-h100"
gpus = 1024
[axes]
training.micro_batch_size = [1, 2]
training.sequence_length = [2048, 8192]
training.activation_checkpointing = ["none", "full"]
strategy = [{kind = "fsdp2"}, {kind = "fsdp2", replicate = 64}, {kind = "ddp"}, {stage = 1}, {stage = 3}]
"""
TIMEOUTS = 200_000


def study(folder: Path) -> Study:
    path = folder / "study.toml"
    path.write_text(STUDY)
    return load_study(path)


def raw_timeout_seconds() -> float:
    import simpy

    def process(env: simpy.Environment) -> Generator[simpy.Event, Any, Any]:
        for _ in range(TIMEOUTS):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(process(env))
    began = time.process_time()
    env.run()
    return (time.process_time() - began) / TIMEOUTS


@pytest.mark.speed
def test_a_thousand_points_of_1024_gpus_take_minutes_on_two_cores(tmp_path: Path) -> None:
    """40 points of processor time; a point under 360,000 timeouts, 0.24 s at 1.5 million a second, so that
    1,000 points on two cores are under two minutes."""
    loaded = study(tmp_path)
    raw = min(raw_timeout_seconds() for _ in range(5))
    began = time.process_time()
    done = run_sweep(loaded, tmp_path / "out", jobs=1, is_quiet=True)
    per_point = (time.process_time() - began) / done.done
    print(f"\n{1 / per_point:.1f} points/s of one core = {per_point / raw:,.0f} raw timeouts a point")
    assert (done.done, done.failed) == (40, 0)
    assert per_point / raw < 360_000


@pytest.mark.speed
def test_a_sweep_costs_little_more_than_its_simulations(tmp_path: Path) -> None:
    loaded = study(tmp_path)
    points = study_points(loaded)

    def simulated() -> float:
        began = time.process_time()
        for point in points:
            assert point.experiment is not None
            point_record("", point.experiment)
        return time.process_time() - began

    def swept(number: int) -> float:
        began = time.process_time()
        run_sweep(loaded, tmp_path / str(number), jobs=1, is_quiet=True)
        return time.process_time() - began

    alone = min(simulated() for _ in range(2))
    ratio = min(swept(number) for number in range(2)) / alone
    again = min(swept(1) for _ in range(2)) / alone
    print(f"\na sweep costs {ratio:.2f} times its simulations; where all is known {again:.3f} times")
    assert ratio < 1.25
    assert again < 0.1


def cards(bandwidth: int) -> dict[str, Any]:
    """DGX H100 with other network cards."""
    return {"extends": "dgx-h100", "nic": {"bandwidth": f"{bandwidth} GB/s"}}


def hardware_point(
    strategy: dict[str, Any],
    cluster: str | dict[str, Any],
    *,
    is_large: bool = False,
    nodes: int | None = None,
) -> Experiment:
    """Llama-3-8B on 2 nodes, or GPT-3 175B on 128."""
    if is_large:
        training = {"activation_checkpointing": "full"}
        return Experiment(
            model="gpt-3-175b", cluster=cluster, nodes=nodes or 128, strategy=strategy, training=training
        )
    return Experiment(model="llama-3-8b", cluster=cluster, nodes=nodes or 2, strategy=strategy)


@pytest.mark.speed
@pytest.mark.parametrize(
    ("strategy", "is_large", "least"),
    [
        ({"kind": "fsdp2"}, False, 4.2),
        ({"kind": "ddp"}, False, 2.4),
        ({"stage": 3}, False, 2.6),
        ({"stage": 3}, True, 2.7),
    ],
    ids=str,
)
def test_a_point_with_other_network_cards_costs_a_part_of_the_first(
    strategy: dict[str, Any], is_large: bool, least: float
) -> None:
    """Medians of processor time: 4.8 to 5.3, 2.7 to 3.05, 3.1 to 3.4 and 3.3 to 3.4; the goal is 3. What is
    left is the run itself, half of it or more, and its report; under ZeRO-3 also the pools of torch's
    allocator with blocks that other streams still use, which depend on the order of the run. DDP's tensors do
    not fit: without an allocator to settle its first point costs half, and a later one as much as before."""
    turns = [
        [hardware_point(strategy, cards(20 + 7 * number + turn), is_large=is_large) for number in range(4)]
        for turn in range(7)
    ]
    assert first_over_later(turns) > least


@pytest.mark.speed
@pytest.mark.parametrize(
    ("strategy", "is_large", "least"),
    [({"kind": "fsdp2"}, False, 2.9), ({"stage": 3}, False, 1.8), ({"stage": 3}, True, 2.3)],
    ids=str,
)
def test_a_point_with_other_gpus_costs_a_part_of_the_first(
    strategy: dict[str, Any], is_large: bool, least: float
) -> None:
    """As with other cards; the GPU's type also changes what is read from files and which published runs are
    like it: 3.5 to 3.9, 2.6 to 2.7 and 3.1 to 3.4. The goal of 3 is missed by Llama under ZeRO-3, whose
    grouped heads have a plan of their own on A100. GPT-3 on A100 costs more than the first point: the host is
    further ahead there, so that freed blocks stay protected for longer and the allocator runs short. It is
    settled whole, in passes until it reserves no more, and the step is run again with its waits."""
    clusters = ("dgx-h100", "dgx-a100-80gb", "hgx-h200", "hgx-b200")
    turns = [[hardware_point(strategy, cluster, is_large=is_large) for cluster in clusters]] * 7
    assert first_over_later(turns) > least


@pytest.mark.speed
@pytest.mark.parametrize(
    ("strategy", "is_large", "least"),
    [
        ({"kind": "fsdp2"}, False, 0.85),
        ({"kind": "ddp"}, False, 1.4),
        ({"stage": 3}, False, 0.85),
        ({"stage": 3}, True, 0.85),
    ],
    ids=str,
)
def test_a_point_with_other_nodes_costs_no_more_than_the_first(
    strategy: dict[str, Any], is_large: bool, least: float
) -> None:
    """DDP's step is the same for any number of ranks and is planned once: 2.0. Elsewhere another number of
    ranks has other shards: the step is planned, priced and its pools are settled again; files, the model's
    workload and ZeRO-3's order of modules are shared. The first costs 1.12 to 1.26 times a later point. The
    goal of 3 is missed: a later point of GPT-3 takes 147 ms where the first takes 172; run, report and pools,
    which no cache of plans spares, with what else a point with other cards needs are 63. With plans, prices
    and the pairing of tensors for nothing the ratio would be 2.7."""
    sizes = (128, 96, 192, 256) if is_large else (2, 4, 3, 8)
    turns = [[hardware_point(strategy, "dgx-h100", is_large=is_large, nodes=nodes) for nodes in sizes]] * 7
    assert first_over_later(turns) > least


def first_over_later(turns: Sequence[Sequence[Experiment]]) -> float:
    """How many times as long as a later point the first takes, when points differ only in the hardware; each
    turn is a study of its own."""
    firsts: list[float] = []
    laters: list[float] = []
    for experiments in turns:
        simulator = Simulator()
        for number, experiment in enumerate(experiments):
            began = time.process_time()
            assert point_record("", experiment, simulator)["status"] == "ok"
            (laters if number else firsts).append(time.process_time() - began)
    ratio = statistics.median(firsts) / statistics.median(laters)
    print(f"\nthe first point costs {ratio:.2f} times a later one")
    return ratio


@pytest.mark.parametrize(
    ("is_large", "clusters"),
    [(False, (cards(20), cards(30), "hgx-h200")), (True, ("dgx-h100", "dgx-a100-80gb", "mi300x-x8"))],
    ids=["other cards", "a GPU of another make"],
)
def test_points_that_change_only_the_hardware_are_planned_once(
    is_large: bool, clusters: Sequence[str | dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans made, not seconds. GPT-3's attention has no grouped heads, so that its backward takes as much
    memory in all kernels."""
    made: list[PlanBasis] = []

    def counted(basis: PlanBasis, workloads: Workloads) -> Plan:
        made.append(basis)
        return plan_of(basis, workloads)

    monkeypatch.setattr(plans, "plan_of", counted)
    simulator = Simulator()
    for cluster in clusters:
        point = hardware_point({"kind": "fsdp2"}, cluster, is_large=is_large)
        assert point_record("", point, simulator)["status"] == "ok"
    assert len(made) == 1


def test_the_allocators_pools_are_settled_once_for_gpus_of_any_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes through the program, not seconds: FSDP2 protects no block, so that no pool depends on times."""
    numbers: list[int] = []
    run = PoolRuns._run

    def counted(self: PoolRuns, run_input: tuple[PoolEvents, Ints, int]) -> None:
        numbers.append(len(run_input[0]))
        run(self, run_input)

    monkeypatch.setattr(PoolRuns, "_run", counted)
    simulator = Simulator()
    passes = []
    for cluster in ("dgx-h100", "hgx-h200", "hgx-b200"):
        assert point_record("", hardware_point({"kind": "fsdp2"}, cluster), simulator)["status"] == "ok"
        passes.append(sum(number > 0 for number in numbers))
    assert passes[0] > 0
    assert passes == passes[:1] * 3
