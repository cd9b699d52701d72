"""Jitter: the law of the factors, the seed, and one lane for the slowest of many."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import zsim
from zsim.cost.kernels.kernel import Kernel
from zsim.engine.jitter.segments import lognormal, op_seconds, rank_factors, sigma_of_sum
from zsim.engine.simulate import Outcome, simulate_job
from zsim.errors import InputError
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Collective, Group, Kernels, Plan
from zsim.specs.experiment.jitter import JitterConfig, JitterTable, resolve_jitter, slowest_gpu_factor
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

SHORT_LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def experiment(nodes: int = 3, strategy: dict[str, Any] | None = None, **jitter: Any) -> Experiment:
    return Experiment(
        model=SHORT_LLAMA,
        cluster="dgx-h100",
        nodes=nodes,
        training={"sequence_length": 4096, "micro_batch_size": 2},
        strategy=strategy or {"kind": "fsdp2"},
        jitter=jitter,
    )


def simulate(unfold: bool = False, plan: Plan | None = None, **options: Any) -> Outcome:
    return simulate_job(resolve(experiment(**options)), unfold=unfold, plan=plan)


def lengths(outcome: Outcome) -> list[float]:
    assert outcome.jitter_run is not None
    return [step.step_seconds for step in outcome.jitter_run.steps]


# -- the law ------------------------------------------------------------------------------------------------


def test_factors_have_mean_one_and_their_sigma() -> None:
    factors = lognormal(np.random.default_rng(0).standard_normal(400_000), 0.2)
    assert factors.mean() == pytest.approx(1.0, abs=2e-3)
    assert np.log(factors).std() == pytest.approx(0.2, rel=5e-3)


def test_a_sum_of_equal_kernels_spreads_by_the_root_of_their_number() -> None:
    """16 launches: a quarter, to second order in sigma; one: all of it."""
    assert sigma_of_sum(0.01, np.array([1 / 16, 1.0])) == pytest.approx([0.0025, 0.01], rel=1e-4)


def test_a_ranks_draws_depend_on_its_number_the_step_and_the_seed_only() -> None:
    jitter = JitterConfig(1, 20, 0.1, 0.1, {}, "measured")
    np.testing.assert_array_equal(rank_factors(jitter, 64)[:8], rank_factors(jitter, 8))
    seconds, concentration = [1.0, None, 2.0], np.ones(3)
    one = op_seconds(jitter, 0, 5, seconds, concentration)
    assert one == op_seconds(jitter, 0, 5, seconds, concentration)
    assert one[1] is None
    for step, rank, seed in ((1, 5, 1), (0, 6, 1), (0, 5, 2)):
        other = JitterConfig(seed, 20, 0.1, 0.1, {}, "measured")
        assert op_seconds(other, step, rank, seconds, concentration) != one


def test_defaults_are_published_and_say_so() -> None:
    jitter = resolve_jitter(JitterTable(seed=1))
    assert jitter is not None
    assert (jitter.kernel_sigma, jitter.rank_sigma, jitter.steps) == (0.0084, 0.015, 20)
    assert "arXiv 2208.11035" in jitter.sources["rank"]
    given = resolve_jitter(JitterTable(seed=1, rank_sigma=0.0))
    assert given is not None
    assert given.sources["rank"] == "set by the user"
    assert resolve_jitter(JitterTable()) is None


def test_jitter_without_a_seed_is_refused() -> None:
    with pytest.raises(InputError, match="steps has no effect without a seed"):
        experiment(steps=3)


# -- the seed -----------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_steps_bit_for_bit_and_another_others() -> None:
    one, same, other = (lengths(simulate(seed=seed, steps=3)) for seed in (1, 1, 2))
    assert one == same
    assert not set(one) & set(other)
    assert len(set(one)) == 3


@pytest.mark.parametrize("unfold", [False, True])
def test_jitter_of_nothing_changes_nothing(unfold: bool) -> None:
    outcome = simulate(unfold, seed=1, steps=2, kernel_sigma=0.0, rank_sigma=0.0)
    assert outcome.jitter_run is not None
    assert lengths(outcome) == pytest.approx([outcome.jitter_run.plain_seconds] * 2, rel=1e-9)
    assert simulate(unfold).jitter_run is None


# -- the slowest of many -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "normal"), [(16, 1.766), (64, 2.344), (1024, 3.249)])
def test_gpus_that_are_not_drawn_are_as_slow_as_the_slowest_of_them_is_expected_to_be(
    gpus: int, normal: float
) -> None:
    """The largest of 8 standard normal numbers is expected at 1.4236; GPUs vary by 1.5 %."""
    expected = math.exp(0.015 * (normal - 1.4236))
    assert slowest_gpu_factor(gpus) == pytest.approx(expected, abs=4e-4)
    assert slowest_gpu_factor(1) == slowest_gpu_factor(8) == 1.0


def test_kernels_of_many_gpus_take_as_long_as_on_the_slowest() -> None:
    """The same kernels on one node and on eight: 1.4 % more on these."""

    def kernels(nodes: int) -> float:
        outcome = simulate(plan=row_of_kernels(20, 8 * nodes, meets=True), nodes=nodes)
        rows = outcome.trace.select_rank(0).rows()
        return sum(end - start for _, info, start, end in rows if info.kind == "compute")

    assert (
        kernels(8) / kernels(1)
        == pytest.approx(slowest_gpu_factor(64), rel=1e-6)
        == pytest.approx(1.014, abs=5e-4)
    )


def row_of_kernels(count: int, world: int, *, meets: bool) -> Plan:
    """Equal kernels of about 1 ms, and an all-reduce of 4 bytes after each of them, or after the last."""
    builder = PlanBuilder([Group.regular("world", world)])
    kernel = Kernels((Kernel("gemm", 5e11, 0.0, "bf16", (8192, 8192, 3725)),))
    for number in range(count):
        builder.add(f"kernel {number}", COMPUTE, kernel, launches=1)
        if meets or number == count - 1:
            builder.add("meet", COMPUTE, Collective("all_reduce", 4, "fp32", "world"), launches=1)
    return builder.finish("test", world, [])


@pytest.mark.parametrize(("meets", "expected"), [(True, 3.249), (False, 3.249 / 10)])
def test_the_slowest_of_1024_is_the_expected_maximum(meets: bool, expected: float) -> None:
    """Of 1,024 normal numbers the largest is 3.249 on average (Harter 1961). Ranks that meet after every one
    of 100 kernels lose that many sigmas each time; ranks that meet at the end lose it of their sums, a tenth
    as much. 10 steps; the mean of 1,000 maxima is known to 0.011, of ten to 0.11 / 10."""
    sigma = 0.01
    plan = row_of_kernels(100, 1024, meets=meets)
    outcome = simulate(plan=plan, nodes=128, seed=1, steps=10, kernel_sigma=sigma, rank_sigma=0.0)
    assert outcome.jitter_run is not None
    kernels = sum(e - s for _, info, s, e in outcome.trace.select_rank(0).rows() if info.kind == "compute")
    late = (np.mean(lengths(outcome)) - outcome.jitter_run.plain_seconds) / kernels / sigma
    assert late == pytest.approx(expected, abs=0.05)


def test_the_persistently_slowest_rank_sets_the_step() -> None:
    """Kernels that do not vary on GPUs that do: the step is as long as the largest factor makes it."""
    plan = row_of_kernels(20, 64, meets=True)
    outcome = simulate(plan=plan, nodes=8, seed=3, steps=1, kernel_sigma=0.0, rank_sigma=0.05)
    jittered = outcome.jitter_run
    assert jittered is not None
    slowest = float(rank_factors(jittered.jitter, 64).max())
    plain = simulate(plan=plan, nodes=8)
    kernels = sum(e - s for _, info, s, e in plain.trace.select_rank(0).rows() if info.kind == "compute")
    typical = kernels / slowest_gpu_factor(64)
    assert lengths(outcome)[0] - jittered.plain_seconds == pytest.approx((slowest - 1) * typical, rel=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [{"kind": "fsdp2"}, {"kind": "fsdp2", "replicate": 3}, {"kind": "ddp"}, {"stage": 3}],
    ids=["fsdp2", "hsdp", "ddp", "zero3"],
)
def test_one_lane_for_the_slowest_is_as_slow_as_all_of_them(strategy: dict[str, Any]) -> None:
    """24 ranks, kernels and GPUs varying by 3 % and 1 %: the mean of 6 steps within 0.4 % of the step (it is
    3 to 4 % longer than without jitter; the mean itself is known to 0.1 %)."""
    options: dict[str, Any] = {
        "strategy": strategy,
        "seed": 5,
        "steps": 6,
        "kernel_sigma": 0.03,
        "rank_sigma": 0.01,
    }
    folded, unfolded = (simulate(unfold, **options) for unfold in (False, True))
    assert folded.stats.rank_classes == 2
    assert unfolded.stats.rank_classes == 24
    plain = folded.jitter_run.plain_seconds if folded.jitter_run else 0.0
    assert np.mean(lengths(folded)) == pytest.approx(np.mean(lengths(unfolded)), abs=0.004 * plain)
    assert np.mean(lengths(folded)) > 1.005 * plain


def test_a_straggler_and_jitter_go_together() -> None:
    """The straggler draws for itself; the rest have a typical rank and their slowest."""
    whole = experiment(seed=1, steps=2)
    slow = Experiment(**{**whole.model_dump(), "faults": {"slow_gpus": {"7": 1.5}}})
    outcome = simulate_job(resolve(slow))
    assert outcome.classes.sizes.tolist() == [1, 22, 1]
    assert min(lengths(outcome)) > 1.2 * max(lengths(simulate_job(resolve(whole))))


# -- the report ---------------------------------------------------------------------------------------------


def test_the_report_has_percentiles_and_the_median_step() -> None:
    report = zsim.simulate(experiment(seed=1, steps=5)).report.to_dict()
    spread_of = report["jitter"]
    assert set(spread_of) == {
        "seed", "steps", "kernel_sigma", "rank_sigma", "sources", "step_seconds",
        "exposed_communication_seconds", "step_seconds_without",
    }  # fmt: skip
    steps = spread_of["step_seconds"]
    assert spread_of["step_seconds_without"] < steps["p5"] <= steps["p50"] <= steps["p95"]
    assert report["step_seconds"] == steps["p50"]
    assert sum(report["breakdown_seconds"].values()) == pytest.approx(steps["p50"])
    assert report["simulation"]["steps"] == 5
    assert report["evidence"]["jitter"] == "assumed"
    assert zsim.simulate(experiment()).report.to_dict()["jitter"] is None
