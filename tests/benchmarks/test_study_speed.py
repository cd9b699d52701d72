"""Speed of studies, as ratios measured in one run: points against raw SimPy timeouts, a sweep against its
simulations, known points against new ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from zsim.engine.simulator import Simulator
from zsim.plan import plans
from zsim.plan.make import PlanBasis, plan_of
from zsim.plan.ops import Plan
from zsim.specs.experiment.tables import Experiment
from zsim.study.sweep.points import study_points
from zsim.study.sweep.row import point_record
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


def hardware_point(strategy: dict[str, Any], bandwidth: int, *, is_large: bool = False) -> Experiment:
    """Llama-3-8B on 16 GPUs, or GPT-3 175B on 1,024, with other network cards."""
    cluster = {"extends": "dgx-h100", "nic": {"bandwidth": f"{bandwidth} GB/s"}}
    if is_large:
        training = {"activation_checkpointing": "full"}
        return Experiment(
            model="gpt-3-175b", cluster=cluster, nodes=128, strategy=strategy, training=training
        )
    return Experiment(model="llama-3-8b", cluster=cluster, nodes=2, strategy=strategy)


@pytest.mark.speed
@pytest.mark.parametrize(
    ("strategy", "is_large", "least"),
    [
        ({"kind": "fsdp2"}, False, 4.0),
        ({"kind": "ddp"}, False, 3.5),
        ({"stage": 3}, False, 2.6),
        ({"stage": 3}, True, 2.5),
    ],
    ids=str,
)
def test_a_point_that_changes_only_the_hardware_costs_a_part_of_the_first(
    strategy: dict[str, Any], is_large: bool, least: float
) -> None:
    """Medians of processor time. What is left is the run itself and its report; under ZeRO-3 also the pools
    of torch's allocator with blocks that other streams still use, which depend on the order of the run."""
    firsts: list[float] = []
    laters: list[float] = []
    for turn in range(7):
        simulator = Simulator()
        for number in range(4):
            experiment = hardware_point(strategy, 20 + 7 * number + turn, is_large=is_large)
            began = time.process_time()
            assert point_record("", experiment, simulator)["status"] == "ok"
            (laters if number else firsts).append(time.process_time() - began)
    ratio = statistics.median(firsts) / statistics.median(laters)
    print(f"\nthe first point costs {ratio:.2f} times a later one")
    assert ratio > least


def test_points_that_change_only_the_hardware_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans made, not seconds."""
    made: list[PlanBasis] = []

    def counted(basis: PlanBasis) -> Plan:
        made.append(basis)
        return plan_of(basis)

    monkeypatch.setattr(plans, "plan_of", counted)
    simulator = Simulator()
    for bandwidth in (20, 30, 40):
        assert point_record("", hardware_point({"kind": "fsdp2"}, bandwidth), simulator)["status"] == "ok"
    assert len(made) == 1
