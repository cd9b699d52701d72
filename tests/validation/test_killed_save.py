"""A rank that is killed in the middle of a save or of a step: what is lost is what the model of a run
loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real saves need torch")

from validation.checkpoints.killed import Killing, train
from validation.launch import run, run_outcomes

STEPS, EVERY = 6, 2
FUNCTION = f"{train.__module__}:{train.__name__}"
# No test waits for these: they end ranks that hang, however busy the machine is.
PATIENCE: dict[str, Any] = {"timeout": 3600.0, "collective_timeout": 3000.0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """By rank, the digest at the end of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return [rank["digest"] for rank in run(FUNCTION, 2, (str(folder), STEPS, EVERY), **PATIENCE)]


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
    ids=str,
)
def test_a_killed_rank_costs_the_steps_since_the_last_commit_and_nothing_else(
    killing: Killing, kept: int, tmp_path: Path, undisturbed: list[str]
) -> None:
    """A checkpoint exists from its commit on: training begins again behind it and ends with the very numbers
    of a run that nothing happened to. Ranks are started twice; the exit codes are those of the first time, in
    which one was killed and the other noticed, the values those of the second."""
    outcomes = run_outcomes(FUNCTION, 2, (str(tmp_path), STEPS, EVERY, killing), rounds=2, **PATIENCE)
    assert outcomes[0].exit_code not in (0, None)
    assert outcomes[1].exit_code == -9
    assert [outcome.value["begun"] for outcome in outcomes] == [kept, kept]
    assert [outcome.value["digest"] for outcome in outcomes] == undisturbed
