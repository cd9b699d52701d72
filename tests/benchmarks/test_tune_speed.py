"""What a whole search costs: how much of a space must be simulated, and its time in raw timeouts."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from typing import Any

import pytest

import zsim
from tests.benchmarks.test_speed import in_timeouts, median_timeouts, raw_timeout_seconds
from tests.study.tune.conftest import tune
from validation.published.tune import SETTINGS

pytestmark = pytest.mark.speed


@pytest.mark.parametrize("setting", SETTINGS[1:5], ids=lambda setting: setting.name)
def test_a_whole_search_of_a_published_setting(benchmark: Any, setting: Any) -> None:
    """Bounds and exact memory leave a quarter of the space at most to be simulated; two fifths where
    selective checkpoints make so little again that their bounds reach below the best."""
    tuned = tune(setting.load(), top=1)
    share = 0.4 if "MPT-7B" in setting.name else 0.25
    assert tuned.num_simulated <= share * tuned.search.num_candidates
    ratio = in_timeouts(benchmark, lambda: tune(setting.load(), top=1), rounds=1)
    benchmark.extra_info["simulated"] = tuned.num_simulated
    assert ratio < 2e8


def test_a_thousand_gpus_are_searched_in_a_minute_of_one_core(benchmark: Any) -> None:
    """Llama-3-70B, FSDP2, 1,024 GPUs: 90 million raw timeouts are a minute on the reference machine."""
    experiment = zsim.Experiment(
        model="llama-3-70b", cluster="dgx-h100", nodes=128,
        training={"sequence_length": 8192, "gradient_accumulation_steps": 2}, strategy={"kind": "fsdp2"},
    )  # fmt: skip
    assert in_timeouts(benchmark, lambda: tune(experiment, top=1), rounds=1) < 9e7


def test_an_8b_job_on_16_gpus_is_searched_in_seconds() -> None:
    """`zsim tune` of Llama-3-8B on the terminal, start to finish, DeepSpeed and FSDP2, in up to two
    processes; the processor time of all of them: 3,570,000 timeouts, less than half of the 7,460,000 that it
    took before candidates shared their plans."""
    command = [sys.executable, "-m", "zsim", "tune", "--model", "llama-3-8b", "--cluster", "dgx-h100",
               "--nodes", "2", "--jobs", "2"]  # fmt: skip
    raw = min(raw_timeout_seconds() for _ in range(5))
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    timeouts = statistics.median(seconds) / raw
    print(f"\n{statistics.median(seconds):.2f} s = {timeouts:,.0f} raw timeouts")
    assert timeouts < 3_730_000


def test_what_makes_a_mixture_fit_costs_few_plans() -> None:
    """Qwen3 30B with DeepSpeed's `MoE` layer, 128 experts one after the other in each of 48 blocks: a plan of
    89,000 ops costs 700,000 timeouts or more, the simulation with its advice 4,400,000 to 4,700,000
    (24,000,000 when each switch of the batch was planned, with Python's searches for cycles)."""
    strategy = {"stage": 2, "expert_layer": "moe"}
    experiment = zsim.Experiment(model="qwen3-30b-a3b", cluster="dgx-a100-40gb", nodes=1, strategy=strategy)
    (ratio,) = median_timeouts(lambda: zsim.simulate(experiment), rounds=3)
    print(f"\nadvice on a mixture: {ratio:,.0f} raw timeouts")
    assert ratio < 7_000_000
