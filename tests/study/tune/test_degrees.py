"""The search of degrees: the global batch stays, and a budget of simulations says what it left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import zsim
from tests.study.tune.conftest import tiny, tune
from zsim.errors import InputError
from zsim.study.tune.axes import (
    ORDER,
    PIPELINE,
    Candidate,
    base_of,
    candidates,
    choices_of,
    degrees,
    replicas_of,
    schedules_of,
    value_of,
)
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.explain import TuningStep, explain
from zsim.study.tune.framework import RECOMPUTED, tuning_of
from zsim.study.tune.goals import simulate_start
from zsim.study.tune.result import TuneResult, tuning_files

Tiny = Callable[..., zsim.Experiment]
MEGATRON = {"kind": "megatron", "distributed_optimizer": True}


def with_degrees(experiment: zsim.Experiment, **degrees: Any) -> zsim.Experiment:
    data = experiment.model_dump(exclude_defaults=True)
    return zsim.Experiment.model_validate({**data, "parallelism": degrees})


@pytest.fixture(scope="module")
def given() -> zsim.Experiment:
    """8 GPUs, tensor 4: 2 replicas with 8 sequences each."""
    return with_degrees(tiny(MEGATRON, nodes=1, num_layers=4, gradient_accumulation_steps=8), tensor=4)


@pytest.fixture(scope="module")
def tuned(given: zsim.Experiment) -> TuneResult:
    return tune(given, simulations=4, top=2)


def sequences(measured: CandidateResult) -> int:
    """Sequences of all replicas in a step."""
    base, overrides = measured.candidate.base, measured.candidate.overrides
    size, steps = (
        value_of(base, overrides, f"training.{key}")
        for key in ("micro_batch_size", "gradient_accumulation_steps")
    )
    return int(size * steps * replicas_of(base, overrides))


@pytest.fixture(scope="module")
def steps(given: zsim.Experiment) -> list[TuningStep]:
    """To data parallelism alone: 8 replicas with one micro-batch of 2 sequences each."""
    base, evaluator = base_of(given), Evaluator()
    wanted = "Megatron, data parallel, distributed optimizer, checkpointing none, micro-batch 2"
    best = next(one for one in candidates([base]) if one.label == wanted)
    start = Candidate(base, {}, -1)
    return explain(evaluator, start, simulate_start(evaluator, start)[0], best, budget=6)


def test_every_step_of_what_to_change_has_the_given_global_batch(steps: list[TuningStep]) -> None:
    """16 sequences, whatever the degrees; each step begins where the one before ended."""
    assert len(steps) > 1
    assert {sequences(step.after) for step in steps} == {16}
    assert all(before.after is after.before for before, after in pairwise(steps))


def test_megatron_recomputes_what_its_own_flags_can_say(given: zsim.Experiment) -> None:
    """4 layers: half of them without a pipeline, the one of each stage's two behind it. Modules came with
    Megatron-Core 0.12."""

    def kept(version: str) -> dict[tuple[Any, ...], str]:
        newer = given.model_dump(exclude_defaults=True)
        newer["strategy"]["version"] = version
        found = candidates([base_of(zsim.Experiment.model_validate(newer))])
        keys = (PIPELINE, "training.activation_checkpointing", *RECOMPUTED)
        return {tuple(str(one.overrides[key]) for key in keys): one.label for one in found}

    alone = ("1", "none", "None", "None", "None"), ("1", "full", "None", "None", "None")
    assert {key for key in kept("0.11") if key[0] == "1"} == {*alone, ("1", "full", "None", "block", "2")}
    assert ("2", "full", "None", "block", "1") in kept("0.16")
    assert "recomputing mlp" in kept("0.16")["1", "selective", "['mlp']", "None", "None"]


def test_steps_name_the_micro_batches_that_change_with_the_degrees(steps: list[TuningStep]) -> None:
    """4 times the replicas have a quarter of the sequences each: 2 micro-batches of one."""
    (degrees,) = (step for step in steps if any("tensor" in one.key for one in step.changes))
    changes = {change.key: (change.before, change.after) for change in degrees.changes}
    assert changes["parallelism.tensor"] == (4, 1)
    assert changes["training.gradient_accumulation_steps"] == (8, 2)


def test_a_budget_ends_the_search_and_says_what_it_left(tuned: TuneResult) -> None:
    found = tuned.search
    assert found.num_simulated == 4
    assert found.num_left > 0
    assert tuned.largest_possible_gain is not None
    assert 0 < tuned.largest_possible_gain < 1
    parts = found.num_too_large, found.num_too_slow, found.num_refused, found.num_simulated, found.num_left
    assert sum(parts) == found.num_candidates
    text = " ".join(" ".join(tuned.lines()).split())
    share = f"{tuned.largest_possible_gain * 100:.1f} %"
    assert f"the {found.num_left:,} left could be at most {share} faster by their bounds" in text
    json = tuned.to_dict()
    assert json["simulations_budget"] == 4
    assert json["left"] == found.num_left
    assert json["left_at_most_better_fraction"] == tuned.largest_possible_gain


def test_what_is_left_keeps_its_promise(tuned: TuneResult, given: zsim.Experiment) -> None:
    """A search with three times the budget finds nothing that beats what the small one said."""
    more = tune(given, simulations=12, top=2)
    least = tuned.best[0].seconds * (1 - (tuned.largest_possible_gain or 0.0))
    assert least <= more.best[0].seconds <= tuned.best[0].seconds


def test_without_degrees_there_is_no_budget(make_tiny: Tiny) -> None:
    tuned = tune(make_tiny(MEGATRON), top=1)
    assert tuned.budget is None
    assert tuned.search.num_left == 0
    assert "left" not in tuned.to_dict()


def test_lines_stay_within_80_columns(tuned: TuneResult) -> None:
    assert max(len(line) for line in tuned.lines()) <= 80


def test_degrees_of_a_strategy_without_them_are_refused(make_tiny: Tiny) -> None:
    with pytest.raises(InputError, match="--parallelism: found ddp, whose degrees"):
        tune(make_tiny({"kind": "ddp"}), parallelism=True)


def test_the_files_of_a_result_have_its_degrees(tuned: TuneResult) -> None:
    files = tuning_files(tuned)
    tensor = value_of(tuned.base, tuned.best[0].candidate.overrides, "parallelism.tensor")
    assert f"--tensor-model-parallel-size {tensor}" in files["best/megatron.sh"]


@pytest.mark.parametrize(
    ("kind", "virtual", "expected"),
    [
        ("megatron", 1, ["1f1b"]),
        ("megatron", 2, ["interleaved-1f1b"]),
        ("fsdp2", 1, ["1f1b", "gpipe"]),
        ("fsdp2", 4, ["interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"]),
    ],
)
def test_schedules_are_all_of_the_framework(kind: str, virtual: int, expected: list[str]) -> None:
    """For two stages on a rank torch has those in the shape of a V as well."""
    assert schedules_of(kind, virtual) == expected
    assert set(schedules_of("fsdp2", 2)) - set(schedules_of("fsdp2", 4)) == {"zbv-zero-bubble", "dualpipe-v"}


def test_labels_name_schedules_that_are_not_the_usual(make_tiny: Tiny) -> None:
    """4 layers on 8 GPUs; one pass is 8 micro-batches."""
    made = make_tiny({"kind": "fsdp2"}, nodes=1, num_layers=4, gradient_accumulation_steps=8)
    labels = {label for label, _ in degrees(base_of(with_degrees(made, tensor=2)))}
    assert {"PP 2", "PP 2 gpipe", "PP 2 x 2 stages", "PP 2 x 2 stages looped-bfs"} <= labels
    assert {"PP 2 x 2 stages zbv-zero-bubble", "TP 2 PP 4 gpipe"} <= labels


def test_the_order_of_the_mesh_is_a_detail_of_pipelines(make_tiny: Tiny) -> None:
    """4 pipeline ranks are neighbours, or the 2 data-parallel ranks."""
    made = make_tiny(MEGATRON, nodes=1, num_layers=4, gradient_accumulation_steps=8)
    order = next(axis for axis in tuning_of("megatron").details if axis.name == "order")
    base = base_of(with_degrees(made, pipeline=4))
    assert [choice.overrides for choice in choices_of(order, base, {})] == [
        {ORDER: None},
        {ORDER: "tp-cp-pp-dp"},
    ]
    assert choices_of(order, base, {PIPELINE: 1}) == []
    assert choices_of(order, base_of(with_degrees(made, pipeline=4, tensor=2)), {}) == []
    assert choices_of(order, base_of(made), {PIPELINE: 4}) == []
