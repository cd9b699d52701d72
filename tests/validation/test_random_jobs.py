"""Jobs drawn at random keep the laws that every job keeps, and each law sees a wrong answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from validation import random_jobs
from validation.random_jobs import LAWS, broken_laws, check, draw

PLAIN: dict[str, Any] = {
    "model": "gpt2",
    "cluster": "dgx-h100",
    "gpus": 2,
    "training": {"sequence_length": 128},
    "strategy": {"kind": "fsdp2"},
}


@pytest.mark.parametrize("seed", range(6))
def test_jobs_at_random_keep_every_law(seed: int) -> None:
    broken, simulated = broken_laws(seed, jobs=30)
    assert [one.text() for one in broken] == []
    assert simulated >= 10


def test_the_same_seed_draws_the_same_jobs() -> None:
    assert [draw(random.Random(3)) for _ in range(2)] == [draw(random.Random(3))] * 2


def test_a_refused_job_breaks_no_law() -> None:
    assert list(check({**PLAIN, "training": {"sequence_length": -1}})) == []


Change = Callable[[dict[str, Any]], Any]
WRONG: dict[str, tuple[str, Change]] = {
    "a negative number": (
        "numbers are finite, none is negative",
        lambda content: content["breakdown_seconds"].update(compute=-1.0),
    ),
    "a part that is missing": (
        "the parts of a step sum to it",
        lambda content: content["breakdown_seconds"].update(compute=0.0),
    ),
    "a total above its parts": (
        "peaks are of their parts",
        lambda content: content["peak_bytes"]["gpu"].update(total=10**15),
    ),
    "a range beside the step": (
        "the range holds the step",
        lambda content: content.update(step_seconds_range=[1.0, 2.0]),
    ),
    "a link beyond its capacity": (
        "rates are possible",
        lambda content: content["traffic"][0].update(utilisation_fraction=1.1),
    ),
    "another step than every rank's": (
        "folded is unfolded",
        lambda content: content.update(step_seconds=content["step_seconds"] * 1.001),
    ),
    "a second answer": ("the same twice", lambda content: content.update(limit="")),
    "an export of another job": (
        "what is exported is read back",
        lambda content: content["model"].update(parameters=1),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_law_sees_a_wrong_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a plain job keeps every law; changed, it breaks the one about what was changed."""
    law, change = WRONG[name]
    law_of = LAWS[law]

    def changed(experiment: Any, result: Any, content: dict[str, Any]) -> Any:
        change(content)
        return law_of(experiment, result, content)

    assert list(check(PLAIN)) == []
    monkeypatch.setattr(random_jobs, "LAWS", {law: changed})
    assert {one.law for one in check(PLAIN)} == {law}
