"""The search against simulating everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import zsim
from tests.study.tune.conftest import tune
from zsim.engine.micro_batches import NUM_SAMPLED, limit_micro_batches
from zsim.errors import InputError, ZsimError
from zsim.study.tune.axes import Candidate, base_of, candidates
from zsim.study.tune.evaluate import CandidateResult, Evaluator, memory_of
from zsim.study.tune.framework import ACCUMULATION, MICRO_BATCH, tuning_of
from zsim.study.tune.search import cheapest, fastest, search

Tiny = Callable[..., zsim.Experiment]
# (strategy, axes that stay): spaces of 20 to 60 configurations.
SPACES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "deepspeed": ({"kind": "deepspeed", "stage": 3}, ("checkpointing", "micro-batch", "cross-entropy")),
    "fsdp2": ({"kind": "fsdp2"}, ("checkpointing", "offload", "cross-entropy")),
    "fsdp1": ({"kind": "fsdp1"}, ("micro-batch", "no_sync", "cross-entropy")),
    "ddp": ({"kind": "ddp"}, ("micro-batch",)),
    "megatron": ({"kind": "megatron"}, ("micro-batch", "cross-entropy")),
}
# GPUs on which some of a space does not fit; else 1.9 GB.
TIGHT = {"ddp": "1.78 GB", "fsdp1": "1.65 GB", "megatron": "1.65 GB"}


def everything(space: list[Candidate]) -> list[tuple[float, int, int]]:
    """(seconds, number, GPU bytes) of every configuration that fits, the fastest by the odds that it fits
    first; those for which torch's allocator may find no room last."""
    found = []
    for candidate in space:
        try:
            report = zsim.simulate(candidate.experiment()).report
        except ZsimError:
            continue
        if report.fits:
            is_risky = report.allocator is not None and report.allocator.may_run_out
            value = report.step_seconds / min(1.0, report.verdict.probability / 0.9)
            row = report.step_seconds, candidate.number, report.peaks["gpu"].total
            found.append((is_risky, value, *row))
    return [row[2:] for row in sorted(found)]


@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("name", SPACES)
def test_the_best_is_that_of_simulating_everything(make_tiny: Tiny, name: str, is_tight: bool) -> None:
    """With 40 GB everything fits, with 1.9 GB (1.39 GB of them framework) some does not."""
    strategy, keep = SPACES[name]
    memory = TIGHT.get(name, "1.9 GB") if is_tight else "40 GB"
    space = candidates([base_of(make_tiny(strategy, memory=memory))], keep=keep)
    exhaustive = everything(space)
    evaluator = Evaluator()
    found = search(evaluator, space, count=3)
    assert (len(exhaustive) < len(space)) == (is_tight or bool(evaluator.refused))
    assert found.best[0].seconds == pytest.approx(exhaustive[0][0], rel=1e-9)
    assert found.best[0].candidate.number == exhaustive[0][1]
    fitting = {number: size for _, number, size in exhaustive}
    for measured in found.measured:
        assert measured.gpu_bytes == fitting[measured.candidate.number]


def test_what_torch_may_have_no_room_for_comes_last(make_tiny: Tiny) -> None:
    evaluator = Evaluator()
    space = candidates([base_of(make_tiny({"kind": "ddp"}))])
    safe = next(m for m in evaluator.simulate(space) if m is not None)
    risky = replace(safe, row={**safe.row, "step_seconds": safe.seconds / 2, "allocator_failures": 3})
    assert not safe.may_run_out
    assert risky.seconds < safe.seconds
    assert min([risky, safe], key=lambda m: m.objective_value(fastest)) is safe


def test_a_risky_configuration_is_first_only_where_it_gains_more_than_its_odds_lose(make_tiny: Tiny) -> None:
    """At 45 % it counts twice as long as at 90 %."""
    evaluator = Evaluator()
    space = candidates([base_of(make_tiny({"kind": "ddp"}))])
    safe = next(m for m in evaluator.simulate(space) if m is not None)

    def doubtful(speedup: float) -> CandidateResult:
        row = {"verdict": "likely does not fit", "fits_probability": 0.45}
        return replace(safe, row={**safe.row, **row, "step_seconds": safe.seconds / speedup})

    for speedup, is_first in ((1.9, False), (2.1, True)):
        risky = doubtful(speedup)
        best = min([safe, risky], key=lambda m: m.objective_value(fastest))
        assert (best is risky) == is_first


@pytest.mark.parametrize("name", SPACES)
def test_memory_and_bounds_are_what_simulation_says(make_tiny: Tiny, name: str) -> None:
    """Peaks from the plan are the report's, on every tier; no step is shorter than its bounds, which is what
    lets the search leave candidates out."""
    strategy, _ = SPACES[name]
    evaluator = Evaluator()
    for candidate in candidates([base_of(make_tiny(strategy, memory="1.9 GB"))])[::5]:
        bound = evaluator.bound(candidate)
        memory = evaluator.memory([candidate])[0]
        if bound is None or memory is None:
            continue
        report = zsim.simulate(candidate.experiment()).report
        peaks = {device: peak.total for device, peak in report.peaks.items()}
        assert {device: peaks[device] for device in memory.peaks} == memory.peaks, candidate.label
        assert memory.fits == report.fits
        assert bound.gpu_bytes <= peaks["gpu"]
        assert bound.seconds <= memory.least_seconds <= report.step_seconds * (1 + 1e-9), candidate.label


@pytest.mark.parametrize("name", SPACES)
def test_long_steps_are_as_their_micro_batches_say(make_tiny: Tiny, name: str) -> None:
    """Nine micro-batches from three and two: time to a thousandth, memory exactly."""
    strategy, _ = SPACES[name]
    experiment = make_tiny(strategy, gradient_accumulation_steps=9)
    candidate = Candidate(base_of(experiment), {}, 0)
    measured = Evaluator().simulate([candidate])[0]
    report = zsim.simulate(experiment).report
    assert measured is not None
    assert measured.seconds == pytest.approx(report.step_seconds, rel=1e-3)
    assert measured.gpu_bytes == report.peaks["gpu"].total
    assert measured.row["tokens_per_second_per_gpu"] == pytest.approx(
        report.tokens_per_second_per_gpu, rel=1e-3
    )
    verified = Evaluator().verify(measured, limit=64)
    assert verified.seconds == pytest.approx(report.step_seconds, rel=1e-9)


def test_memory_is_that_of_any_number_of_micro_batches(make_tiny: Tiny) -> None:
    long = make_tiny({"stage": 2}, gradient_accumulation_steps=9)
    assert limit_micro_batches(long, NUM_SAMPLED).training.gradient_accumulation_steps == NUM_SAMPLED
    few, whole = memory_of(limit_micro_batches(long, NUM_SAMPLED)), memory_of(long)
    assert few.peaks == whole.peaks  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SPACES)
def test_what_is_held_between_steps_does_not_depend_on_the_batch(make_tiny: Tiny, name: str) -> None:
    """So one plan rules a structure out for every cut of the batch and every checkpointing."""
    evaluator = Evaluator()
    space = candidates(
        [base_of(make_tiny(SPACES[name][0], gradient_accumulation_steps=4))], keep=("no_sync",)
    )
    resident: dict[str, Any] = {}
    for candidate in space if len(space) < 60 else space[::3]:
        memory = evaluator.memory([candidate])[0]
        if memory is not None:
            steps = candidate.overrides[ACCUMULATION] > 1
            batch = ("checkpointing", "micro-batch")
            structure = f"{steps} {[c.label for axis, c in candidate.choices.items() if axis not in batch]}"
            assert resident.setdefault(structure, memory.resident) == memory.resident, candidate.label
    assert len(resident) > 1


def test_the_batch_stays_whatever_its_pieces() -> None:
    base = base_of(
        zsim.Experiment(model="gpt2", cluster="dgx-a100-40gb", training={"gradient_accumulation_steps": 12})
    )
    sizes = {(c.overrides[MICRO_BATCH], c.overrides[ACCUMULATION]) for c in candidates([base])}
    assert sizes == {(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)}


def test_axes_that_are_kept_stay(make_tiny: Tiny) -> None:
    base = base_of(make_tiny({"kind": "fsdp2"}, activation_checkpointing="full"))
    space = candidates([base], keep=("checkpointing", "cross-entropy", "micro-batch"))
    assert {axis for c in space for axis in c.choices} == {"replicas", "reshard", "offload", "no_sync"}
    assert all(c.experiment().training.activation_checkpointing == "full" for c in space)


def test_headroom_leaves_memory_free(make_tiny: Tiny) -> None:
    space = candidates([base_of(make_tiny({"kind": "fsdp2"}, memory="2.4 GB"))], keep=("offload",))
    free = search(Evaluator(headroom=0.3), space)
    limit = 0.7 * 2.4e9 / 1.05
    assert free.best
    assert max(m.gpu_bytes for m in free.measured) <= limit
    assert max(m.gpu_bytes for m in search(Evaluator(), space).measured) > limit


def test_the_cheapest_is_in_gpu_seconds(make_tiny: Tiny) -> None:
    base = base_of(make_tiny({"kind": "ddp"}))
    space = candidates([base], keep=("checkpointing", "micro-batch"))
    best = search(Evaluator(), space, objective=cheapest).best[0]
    assert cheapest(best.seconds, best.gpus) == 16 * best.seconds


def test_two_processes_find_what_one_finds(make_tiny: Tiny) -> None:
    space = candidates([base_of(make_tiny({"stage": 3}))], keep=("hpZ", "offload", "checkpointing"))
    one, two = search(Evaluator(jobs=1), space), search(Evaluator(jobs=2), space)
    assert [m.candidate.number for m in one.measured] == [m.candidate.number for m in two.measured]
    assert [m.seconds for m in one.best] == [m.seconds for m in two.best]


def test_what_contradicts_itself_is_counted_with_its_reason(make_tiny: Tiny) -> None:
    config = {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0}
    base = base_of(make_tiny({"config": config}, precision="bf16", micro_batch_size=1))
    evaluator = Evaluator()
    found = search(evaluator, candidates([base], keep=("offload", "hpZ", "checkpointing")))
    assert found.num_refused == sum(evaluator.refused.values()) > 0
    assert any("compute_grad_norm" in reason for reason in evaluator.refused)


def test_attention_that_is_written_out_is_not_checkpointed_by_op() -> None:
    """Keeping "fused attention" means nothing on a V100, which has none."""
    for cluster, between in (("dgx-2", "selective"), ("dgx-h100", "selective-op")):
        base = base_of(zsim.Experiment(model="gpt2", cluster=cluster, strategy={"kind": "ddp"}))
        names = {c.overrides["training.activation_checkpointing"] for c in candidates([base])}
        assert names == {"none", between, "full"}


def test_every_axis_has_its_own_name_within_a_kind() -> None:
    for kind in ("deepspeed", "fsdp1", "fsdp2", "ddp"):
        names = [axis.name for axis in tuning_of(kind).structure]
        assert len(names) == len(set(names))


def test_an_experiment_that_cannot_be_is_refused_as_ever() -> None:
    with pytest.raises(InputError, match="unknown model"):
        base_of(zsim.Experiment(model="gpt-none", cluster="dgx-h100"))


@pytest.mark.parametrize("goal", ["fastest", "largest-batch"])
def test_a_batch_given_for_all_gpus_is_searched_like_its_micro_batches(make_tiny: Tiny, goal: Any) -> None:
    """2 nodes x 8 GPUs x 8 micro-batches of 1: of more than a few, a few are looked at, which the batch of
    all refused, and then nothing was said to fit."""
    asked = {"gradient_accumulation_steps": None, "global_batch_size": 128}
    given = make_tiny({"kind": "fsdp2"}, **asked)
    same = make_tiny({"kind": "fsdp2"}, gradient_accumulation_steps=8)
    found, expected = (tune(one, goal=goal, keep=["all"], jobs=1) for one in (given, same))
    assert found.best[0].seconds == expected.best[0].seconds
    assert found.best[0].candidate.overrides == expected.best[0].candidate.overrides
