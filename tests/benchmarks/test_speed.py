"""Speed as ratios: a simulation's seconds over those of one raw SimPy timeout, measured in the same run.

`make bench` prints the table. A ratio says how many bare timeouts the simulation costs, whatever the machine:
at the 1.5 million timeouts per second of an idle core of the reference machine (2 cores, Zen 4), 450,000 is
0.3 s. The fastest of several rounds counts, because other load only ever makes a round slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import simpy

import zsim
from zsim.api import Result

TIMEOUTS = 200_000


def raw_timeout_seconds() -> float:
    """Seconds of one bare timeout of one process."""

    def process(env: simpy.Environment) -> Any:
        for _ in range(TIMEOUTS):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(process(env))
    began = time.perf_counter()
    env.run()
    return (time.perf_counter() - began) / TIMEOUTS


def gpt3(nodes: int, *, unfold: bool = False) -> Result:
    """GPT-3 175B, ZeRO-3, bf16, full checkpointing; topology, plan, run and report."""
    experiment = zsim.Experiment(
        model="gpt-3-175b",
        cluster="dgx-h100",
        nodes=nodes,
        training={"sequence_length": 2048, "activation_checkpointing": "full"},
        strategy={"stage": 3},
    )
    return zsim.simulate(experiment, unfold=unfold)


def in_timeouts(benchmark: Any, run: Callable[[], Any], rounds: int) -> float:
    """Run, and return the fastest round as a number of raw timeouts."""
    before = min(raw_timeout_seconds() for _ in range(5))
    benchmark.pedantic(run, rounds=rounds, iterations=1, warmup_rounds=min(rounds - 1, 1))
    raw = min(before, *(raw_timeout_seconds() for _ in range(5)))
    ratio = float(benchmark.stats.stats.min / raw)
    benchmark.extra_info["raw_timeouts_per_second"] = round(1 / raw)
    benchmark.extra_info["timeouts"] = round(ratio)
    print(f"\n{benchmark.name}: {benchmark.stats.stats.min:.3f} s = {ratio:,.0f} raw timeouts")
    return ratio


@pytest.mark.speed
@pytest.mark.parametrize("gpus", [64, 512, 1024, 4096, 16384])
def test_folding_makes_the_cost_nearly_independent_of_the_gpu_count(benchmark: Any, gpus: int) -> None:
    """1,024 GPUs under 0.3 s (450,000 timeouts), 16,384 under 1 s (1,500,000)."""
    limit = 450_000 if gpus <= 1024 else 1_500_000
    assert in_timeouts(benchmark, lambda: gpt3(gpus // 8), rounds=7) < limit


@pytest.mark.speed
def test_every_rank_of_1024_is_simulated_in_30_seconds(benchmark: Any) -> None:
    """45,000,000 timeouts, and 2 GB."""
    import resource

    assert in_timeouts(benchmark, lambda: gpt3(128, unfold=True), rounds=1) < 45_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2_000_000  # KiB


def test_the_clock_does_as_much_for_16384_gpus_as_for_1024() -> None:
    """Events, not seconds: the fold is one lane, whatever it stands for. The counts differ a little because
    longer rings change what waits for what."""
    small, large = gpt3(128).report, gpt3(2048).report
    assert small.simulation.rank_classes == large.simulation.rank_classes == 1
    assert large.simulation.events < 1.1 * small.simulation.events
    assert small.simulation.events < 15_000
