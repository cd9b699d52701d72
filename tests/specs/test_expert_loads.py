"""Loads of routed experts where nothing is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.expect import there
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError
from zsim.explain.report_of import report_of
from zsim.explain.variants import routing_range, step_variants
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.experts import (
    assumed_load,
    expected_maximum,
    kept_fraction,
    load_expert_spreads,
    rank_loads,
)

TINY: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 512, "moe_intermediate_size": 2048,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1024, "num_experts": 64, "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
MEGATRON = {"kind": "megatron", "moe_grouped_gemm": True, "moe_permute_fusion": True}


def job_of(**parallelism: Any) -> Job:
    data: dict[str, Any] = {"model": TINY, "cluster": "dgx-h100", "gpus": 8}
    table = {"expert": 8, "dispatcher": "all-to-all", **parallelism}
    return resolve(
        Experiment(**data, training={"sequence_length": 4096}, strategy=MEGATRON, parallelism=table)
    )


def test_the_deviation_is_the_measured_one_and_between_two_of_them_by_the_logarithm() -> None:
    """0.053 of 8 experts, 0.26 of 64, 0.30 of 128; 16 are a third of the way from 8 to 64."""
    spreads = load_expert_spreads()
    assert [spreads.interpolate_deviation(count) for count in (8, 64, 128)] == pytest.approx(
        [0.053, 0.26, 0.30]
    )
    assert spreads.interpolate_deviation(16) == pytest.approx(0.053 + (0.26 - 0.053) / 3)
    assert spreads.interpolate_deviation(4) == 0.053
    assert (
        spreads.interpolate_deviation(64, "low")
        < spreads.interpolate_deviation(64)
        < spreads.interpolate_deviation(64, "high")
    )


def test_the_largest_of_normal_numbers_is_blooms_score() -> None:
    """1.424 of 8 and 2.342 of 64, from 20,000 draws each."""
    draws = np.random.default_rng(1)
    for count in (8, 64):
        drawn = draws.standard_normal((20_000, count)).max(axis=1).mean()
        assert expected_maximum(count) == pytest.approx(drawn, rel=0.02)
    assert expected_maximum(1) == 0


@pytest.mark.parametrize("capacity", [None, 1.0, 1.25])
def test_the_fullest_rank_and_what_is_kept_are_those_of_drawn_loads(capacity: float | None) -> None:
    """64 experts with loads of standard deviation 0.26 on 8 ranks, 20,000 times."""
    loads = 1 + 0.26 * np.random.default_rng(2).standard_normal((20_000, 8, 8))
    taken = loads if capacity is None else np.minimum(loads, capacity)
    fullest = taken.mean(axis=2).max(axis=1).mean()
    assert assumed_load(8, 64, 0.26, capacity) == pytest.approx(fullest, rel=0.01)
    if capacity is not None:
        assert kept_fraction(capacity, 0.26) == pytest.approx(taken.mean(), rel=0.005)


def test_without_a_deviation_the_smaller_of_room_and_rows_is_kept() -> None:
    assert [kept_fraction(capacity, 0.0) for capacity in (0.75, 1.25)] == [0.75, 1.0]


def test_ranks_have_the_rows_of_the_fullest_where_nothing_is_said() -> None:
    """1 + 0.26 x 1.434 / sqrt(8 experts a rank) = 1.132; every rank the same, so that they stay folded."""
    split = job_of().parallelism.experts
    assert split.loads == pytest.approx((1.132,), abs=1e-3)
    assert (split.imbalance, split.exchanged_fraction) == pytest.approx((1.132, 1.132), abs=1e-3)
    assert job_of(expert_imbalance=1).parallelism.experts.exchanged_fraction == 1.0
    assert job_of(expert=1).parallelism.experts.loads == (1.0,)


def test_the_report_says_what_is_taken_of_the_router() -> None:
    found = [note for note in job_of().notes if "the router is taken" in note]
    assert ["1.13 times the mean rows (1.01 to 1.22 were seen)" in note for note in found] == [True]
    assert not [note for note in job_of(expert_imbalance=1).notes if "the router is taken" in note]


def test_the_range_is_wider_by_the_spread_of_routing() -> None:
    """The ends add to the interval's like sides of a right angle; where loads are said nothing is added."""
    outcome = simulate_job(job_of())
    seconds = routing_range(outcome)
    assert seconds is not None
    fast, slow = (end / outcome.trace.step_seconds for end in seconds)
    assert fast < 1 < slow
    plain = there(report_of(outcome, 0.0).validation)
    variants = replace(step_variants(outcome), hosts=None)  # a host's speed widens it too
    wide = there(report_of(outcome, 0.0, variants).validation)
    assert wide.high == pytest.approx(np.exp(np.hypot(np.log(plain.high), np.log(slow))), rel=1e-9)
    assert wide.low < plain.low
    assert routing_range(simulate_job(job_of(expert_imbalance=1))) is None


def test_padding_goes_to_the_same_experts_of_few_ranks() -> None:
    """Two experts of four, on two ranks: both on one rank with probability 1/3, so that the fullest has 4/3
    of them in the mean and 4/3 times the mean rows. Of half the tokens that is 1 + 1/3 / 2."""
    full = rank_loads("padding:1", 2, 4, 2, 64)
    assert full == pytest.approx((4 / 3, 2 / 3), rel=0.01)
    assert rank_loads("padding:0.5", 2, 4, 2, 64) == pytest.approx((7 / 6, 5 / 6), rel=0.01)
    assert rank_loads("padding:0", 2, 4, 2, 64) == (1.0,)
    assert rank_loads("padding:0.9", 1, 4, 2, 64) == (1.0,)


@pytest.mark.parametrize("text", ["padding:", "padding:much", "padding:1.5", "padding:nan"])
def test_a_fraction_of_padding_that_is_none_is_refused(text: str) -> None:
    message = there(f"found '{text}', expected a number from 0 to 1 behind 'padding:'")
    with pytest.raises(InputError, match=message):
        rank_loads(text, 2, 4, 2, 64)
