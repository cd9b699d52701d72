"""Steps of reinforcement learning in studies: sweeps, scaling, sensitivity and tuning take every key."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.workflows.test_loop import experiment, simulator
from zsim.errors import InputError
from zsim.specs.experiment.load import change_experiment
from zsim.study.rollouts import (
    RolloutCandidate,
    RolloutTuning,
    _rank,
    changed_numbers,
    resize_rollout,
    rollout_columns,
    tune_rollout,
    turned_numbers,
)
from zsim.study.scaling.scaling import run_scaling
from zsim.study.sensitivity.result import sensitivity
from zsim.study.sensitivity.sensitivity import rollout_variations
from zsim.study.sweep.records import point_record
from zsim.workflows.rl.result import simulate_rl


@cache
def tuned() -> RolloutTuning:
    return tune_rollout(experiment(rollout={"gpus": 4}, placement="split"), simulator=simulator())


def test_a_point_of_a_sweep_is_the_whole_step() -> None:
    changed = change_experiment(experiment(), {"rl.placement": "async", "rl.rollout.gpus": 2})
    record = point_record("x", changed, simulator())
    result = simulate_rl(changed, simulator())
    assert record["error"] is None
    row = record["row"]
    assert row["step_seconds"] == result.step.seconds
    assert (row["gpus"], row["rl.rollout_gpus"], row["rl.training_gpus"]) == (8, 2, 6)
    assert row["rl.training_seconds"] == result.phases_seconds["training"]
    assert row["mfu_fraction"] is None


def test_a_row_has_the_memory_of_the_phase_nearest_to_its_capacity() -> None:
    """OpenRLHF's engine takes 0.95 of its GPU, more than a trainer may use, and fits."""
    result = simulate_rl(experiment(framework="openrlhf", placement="split"), simulator())
    row, content = rollout_columns(result), result.to_dict()
    assert row["fits"]
    assert row["gpu_capacity_bytes"] == content["capacity_bytes_by_phase"]["rollout"]
    assert content["capacity_bytes"] < row["gpu_peak_bytes"] <= row["gpu_capacity_bytes"]
    assert row["gpu_peak_bytes"] == content["peak_bytes_by_phase"]["rollout"]["total"]


def test_a_point_that_is_no_step_says_why() -> None:
    changed = change_experiment(experiment(), {"rl.rollout.tensor": 3})
    record = point_record("x", changed, simulator())
    assert record["status"] == "error"
    assert "a divisor" in record["error"]


def test_weak_scaling_keeps_the_samples_of_a_gpu_and_strong_those_of_the_step() -> None:
    split = experiment(placement="split", rollout={"gpus": 4})
    weak, strong = (resize_rollout(split, 16, mode).rl for mode in ("weak", "strong"))
    assert weak is not None
    assert strong is not None
    assert (weak.prompts_per_step, weak.mini_batch_samples, weak.rollout.gpus) == (32, 128, 8)
    assert (strong.prompts_per_step, strong.mini_batch_samples, strong.rollout.gpus) == (16, 64, 8)
    with pytest.raises(InputError, match="micro-batches are packed"):
        resize_rollout(split, 16, "fill")


def test_scaling_says_which_phase_costs_more(tmp_path: Path) -> None:
    scaling = run_scaling(experiment(), [8, 16], "strong", tmp_path, is_quiet=True)
    assert [point.error for point in scaling.points] == [None, None]
    first, second = scaling.runs
    assert second.step_seconds < first.step_seconds < 2 * second.step_seconds
    assert scaling.changes()[0].cause in ("rollout", "other", "weight sync", "offload")


def test_every_number_that_the_file_states_is_turned() -> None:
    table = experiment(rollout={"gpu_memory_utilization": 0.7, "max_num_seqs": 64}).rl
    assert table is not None
    assert {key for key, _, _ in turned_numbers(table)} == {
        "rl.prompts_per_step", "rl.samples_per_prompt", "rl.mini_batch_samples", "rl.lengths.prompt.mean",
        "rl.lengths.response.mean", "rl.lengths.response.sigma", "rl.lengths.max_response",
        "rl.rollout.gpu_memory_utilization", "rl.rollout.max_num_seqs",
    }  # fmt: skip
    for variation in rollout_variations(table, 0.2):
        for changes in variation.overrides:
            assert simulate_rl(change_experiment(experiment(), changes), simulator()).step.seconds > 0


def test_turned_batches_divide() -> None:
    """16 prompts x 8 in updates of 64: a fifth more are 19 prompts, 152 samples, two updates of 76."""
    table = experiment().rl
    assert table is not None
    assert changed_numbers(table, "rl.prompts_per_step", 1.2) == {
        "rl.prompts_per_step": 19, "rl.mini_batch_samples": 76,
    }  # fmt: skip
    assert changed_numbers(table, "rl.mini_batch_samples", 1.2) == {"rl.mini_batch_samples": 64}


def test_a_number_without_others_near_it_is_named(tmp_path: Path) -> None:
    result = sensitivity(experiment(rollout={"tensor": 1}), spread=0.2, jobs=1, cache=tmp_path)
    lines = [" ".join(line.split()) for line in result.lines()]
    for key in ("rl.mini_batch_samples", "rl.rollout.tensor"):
        assert f"{key}: not varied: no other whole number near" in lines


def test_the_best_layout_is_the_fastest_of_those_simulated() -> None:
    """And no layout is simulated twice."""
    layouts = [
        (
            one.placement,
            job.rollout_gpus,
            job.model.layout.gpus,
            job.limits,
            job.micro_batch_room,
            job.transport,
        )
        for one in tuned().candidates
        for job in [one.result.job]
    ]
    assert len(set(layouts)) == len(layouts)
    fitting = [one.seconds for one in tuned().candidates if one.result.fits]
    assert tuned().best.seconds == min(fitting)
    assert {one.placement for one in tuned().candidates} == {"colocated", "split", "async"}


def test_a_hybrid_engine_that_fits_nowhere_names_what_helps_first() -> None:
    """It has no part of the memory to try, and "utilization" keeps nothing."""
    asked = experiment(framework="deepspeed-chat", algorithm="ppo", rollout={"max_num_seqs": 2000})
    with pytest.raises(InputError, match=r"^no layout fits; rollout needs .*max_num_seqs") as raised:
        tune_rollout(asked, keep=("engine",), simulator=simulator())
    assert "utilization" not in str(raised.value)


def test_the_text_fits_a_terminal() -> None:
    lines = list(tuned().lines())
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).endswith(f"The options for it: {tuned().best.settings}")


def test_the_options_of_the_best_lead_to_it() -> None:
    best = tuned().best
    again = simulate_rl(
        change_experiment(experiment(rollout={"gpus": 4}, placement="split"), best.changes), simulator()
    )
    assert again.step.seconds == best.seconds
    assert all(f"{key}={value}" in best.settings for key, value in best.changes.items() if value is not None)


def test_a_change_without_effect_is_not_recommended() -> None:
    """Of layouts that differ by rounding the one with fewer changes is the best, and the next axes start
    from the file's.
    """
    search = tuned()
    base = replace(search.best, changes={"rl.placement": "async"})
    times = replace(base.result.step, seconds=base.seconds * (1 - 1e-14))
    same = RolloutCandidate({**base.changes, "rl.rollout.tensor": 1}, replace(base.result, step=times))
    assert same.seconds < base.seconds
    assert min([same, base], key=_rank) is base


def test_another_placement_tries_each_way_of_new_weights_once() -> None:
    """The file's broadcast is of its own placement: a colocated rollout is by ipc, unless it is tried."""
    kept = ("split", "engine", "utilization", "micro-batch")
    stated = experiment(placement="split", sync={"transport": "broadcast"})
    candidates = tune_rollout(stated, keep=kept, simulator=simulator()).candidates
    transports = [one.result.job.transport for one in candidates if one.placement == "colocated"]
    assert len(transports) == len(set(transports))
    assert {"ipc", "broadcast"} <= set(transports)


def test_kept_axes_stay() -> None:
    kept = ("placement", "engine", "utilization", "micro-batch", "sync")
    layouts = tune_rollout(experiment(placement="async"), keep=kept, simulator=simulator())
    assert {one.placement for one in layouts.candidates} == {"async"}
    assert sorted(one.result.job.rollout_gpus for one in layouts.candidates) == [1, 2, 3, 4, 5, 6, 7]
    others = ("placement", "split", "engine", "utilization")
    trainers = tune_rollout(experiment(), keep=others, simulator=simulator()).candidates
    assert {one.result.job.transport for one in trainers} > {"ipc", "reshard"}
    assert {one.result.job.micro_batch_room for one in trainers} == {2048, 4096, 8192}
    with pytest.raises(InputError, match="did you mean 'split'"):
        tune_rollout(experiment(), keep=("splits",))
