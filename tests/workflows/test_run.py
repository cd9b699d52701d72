"""Whole runs of days made of whole steps of reinforcement learning."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from tests.workflows.test_loop import LENGTHS, experiment, simulator
from zsim.errors import InputError, NotSimulatedError
from zsim.goodput.prepared import prepare
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.rl import GrowthTable
from zsim.workflows.rl.result import simulate_rl
from zsim.workflows.rl.run import prepare_rl_run

NO_STOPS: dict[str, Any] = {
    "run.checkpoint.mode": "none",
    "run.failures.per_1000_node_days": 0.0,
    "run.seeds": 2,
}


def run_of(changes: dict[str, Any], **rl: Any) -> zsim.Experiment:
    return change_experiment(experiment(**rl), {**NO_STOPS, **changes})


def test_a_run_without_stops_is_its_steps() -> None:
    """On the GPUs of both sides, of which the trainer has half."""
    asked = run_of({"run.steps": 50}, placement="split", rollout={"gpus": 4})
    step = simulate_rl(asked, simulator())
    run = zsim.simulate_run(asked, compares=False, jobs=1)
    assert run.ideal_days * 86_400 == pytest.approx(50 * step.step.seconds)
    assert run.expected_days == pytest.approx(run.ideal_days)
    assert (run.gpus, run.prepared.first.nodes) == (8, 1)
    assert run.verdict == step.verdict
    assert run.to_dict()["step_seconds_range"] == [*step.step_seconds_range]
    assert "4 of the rollout" in run.headline()
    assert "The first step lies between" in "\n".join(run.lines())


def test_tokens_and_samples_say_how_far() -> None:
    """128 samples a step: 300 of them are three steps, as are two and a half steps of tokens."""
    tokens = simulate_rl(experiment(), simulator()).tokens
    by_tokens = prepare_rl_run(run_of({"run.tokens": 2.5 * tokens}))
    by_samples = prepare_rl_run(run_of({"cost.samples": 300}))
    assert [phase.steps for phase in (*by_tokens.phases, *by_samples.phases)] == [3, 3]
    with pytest.raises(InputError, match="how far does it go"):
        prepare_rl_run(run_of({}))


def test_growth_is_from_the_first_mean_to_the_last() -> None:
    linear = GrowthTable(mean=900, steps=100)
    assert [linear.mean_at(step, 300) for step in (0, 50, 100, 1000)] == [300, 600, 900, 900]
    assert GrowthTable(mean=1200, steps=100, law="exponential").mean_at(50, 300) == 600


def test_responses_grow_over_the_run_without_new_starts() -> None:
    """60 steps in six parts, and 40 at the end's length. No part begins with a start of the job."""
    lengths = {**LENGTHS, "growth": {"mean": 900, "steps": 60}}
    prepared = prepare_rl_run(run_of({"run.steps": 100}, lengths=lengths))
    assert [phase.steps for phase in prepared.phases] == [10] * 6 + [40]
    seconds = [phase.step_seconds for phase in prepared.phases]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1.05 * seconds[0]
    scenario = prepared.scenario(3600.0)
    assert [phase.starts_anew for phase in scenario.phases] == [True] + [False] * 6
    run = zsim.simulate_run(run_of({"run.steps": 100}, lengths=lengths), compares=False, jobs=1)
    assert run.ideal_days * 86_400 == pytest.approx(10 * sum(seconds[:-1]) + 40 * seconds[-1])
    assert run.expected_days == pytest.approx(run.ideal_days)
    short = prepare_rl_run(run_of({"run.steps": 15}, lengths=lengths))
    assert [phase.steps for phase in short.phases] == [10, 5]


@pytest.mark.parametrize(
    ("changes", "rl", "error", "words"),
    [
        ({"run.phases": [{"tokens": 1e6}]}, {}, NotSimulatedError, "run.phases: is not simulated with"),
        (
            {"run.steps": 5, "run.recovery.policy": "shrink"}, {}, NotSimulatedError,
            "run.recovery.policy 'shrink': is not simulated",
        ),
        (
            {"run.steps": 5},
            {"lengths": {**LENGTHS, "response": {"median": 200}, "growth": {"mean": 900, "steps": 60}}},
            InputError, "found without rl.lengths.response.mean",
        ),
    ],
)  # fmt: skip
def test_what_a_run_of_rl_has_not_is_refused(
    changes: dict[str, Any], rl: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        prepare_rl_run(run_of(changes, **rl))


def test_the_update_alone_is_no_run() -> None:
    with pytest.raises(InputError, match=r"found \[rl\]; expected none here"):
        prepare(run_of({"run.steps": 5}))
