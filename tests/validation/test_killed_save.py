"""A rank that is killed in the middle of a save or of a step: what is lost is what the model of a run
loses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="real saves need torch")

from validation.checkpoints.killed import Killing, last_whole, train
from validation.launch import run, run_outcomes

STEPS, EVERY = 6, 2
FUNCTION = f"{train.__module__}:{train.__name__}"


@pytest.mark.parametrize(
    ("killing", "kept"),
    [
        # The save of step 4 is lost, and with it steps 3 and 4: two intervals' worth is not, one is.
        (Killing("save", 4), 2),
        # In the middle of step 6: the save of step 4 is whole, step 5 is lost.
        (Killing("step", 6), 4),
        # Before the first save everything is lost.
        (Killing("save", 2), 0),
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_last_commit_and_nothing_else(
    killing: Killing, kept: int, tmp_path: Path
) -> None:
    """A checkpoint exists from its commit on: training begins again behind it and ends with the very numbers
    of a run that nothing happened to."""
    outcomes = run_outcomes(FUNCTION, 2, (str(tmp_path), STEPS, EVERY, killing), timeout=120)
    assert outcomes[1].exit_code == -9
    assert all(outcome.error for outcome in outcomes)
    assert last_whole(tmp_path) == kept
    interrupted = run(FUNCTION, 2, (str(tmp_path), STEPS, EVERY), timeout=120)
    undisturbed = run(FUNCTION, 2, (str(tmp_path / "alone"), STEPS, EVERY), timeout=120)
    assert [rank["begun"] for rank in interrupted] == [kept, kept]
    assert [rank["digest"] for rank in interrupted] == [rank["digest"] for rank in undisturbed]
