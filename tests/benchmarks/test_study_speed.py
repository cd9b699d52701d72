"""Speed of studies, as ratios measured in one run: points against raw SimPy timeouts, a sweep against its
simulations, known points against new ones."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

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
