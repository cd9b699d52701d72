"""One word of five and its probability."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from zsim.validated.memory import MAX_PROBABILITY, MemoryErrors
from zsim.validated.verdict import (
    UNCERTAIN_SHARE,
    Verdict,
    mark_meanings,
    verdict_content,
    verdict_of,
    verdict_suffix,
)

# Even from -0.1 to +0.1: the probability at load exp(-x) is 1/2 + 5 x (2.5 % at the ends' middles).
ERRORS = MemoryErrors(np.linspace(-0.1, 0.1, 21), np.full(21, 1 / 21), 21, 5, 0.3, 7)


@pytest.mark.parametrize(
    ("load", "word", "exit_code"),
    [
        (exp(-0.09), "fits", 0),
        (exp(-0.02), "fits barely", 0),
        (exp(0.02), "likely does not fit", 1),
        (exp(0.09), "does not fit", 1),
    ],
)
def test_the_word_is_that_of_the_probability(load: float, word: str, exit_code: int) -> None:
    """At exp(-0.09) 20/21 of the errors less half of one leave room, at exp(-0.02) 12.5/21 of them."""
    found = verdict_of(load, "FSDP", errors=ERRORS)
    assert (found.word, found.exit_code) == (word, exit_code)


@pytest.mark.parametrize(
    ("load", "exact", "equal"),
    [
        (1.1, 0.0, 1.1),
        (1.1, 0.8, 1.5**UNCERTAIN_SHARE),
        (1.1, 0.6, 1.25**UNCERTAIN_SHARE),
        (0.95, 0.9, 0.95),
    ],
)
def test_errors_are_those_of_what_is_no_model_state(load: float, exact: float, equal: float) -> None:
    """Where states are 0.8 of the room and all is 1.1 of it, 0.3 must fit into 0.2: (0.3 / 0.2)^u with the
    uncertain share u. Beside states of 0.6 it is (0.5 / 0.4)^u. A job that has room is judged by all of its
    load."""
    errors = MemoryErrors(np.linspace(-0.5, 0.5, 101), np.full(101, 1 / 101), 101, 9, 0.5, 4)
    found = verdict_of(load, "FSDP", exact=exact, errors=errors).probability
    assert found == pytest.approx(errors.probability(equal), abs=1e-3)


def test_states_that_fill_the_memory_do_not_fit() -> None:
    assert verdict_of(1.8, "FSDP", exact=1.0, errors=ERRORS) == Verdict("does not fit", 1 - MAX_PROBABILITY)


def test_a_job_that_runs_short_is_judged_by_published_jobs_that_did() -> None:
    """Of jobs that run short 30 % ran, so it is likelier to run out of memory, however much room its tensors
    have; one that has none does not fit."""
    found = verdict_of(0.8, "FSDP", is_short=True, errors=ERRORS)
    assert (found.word, found.probability, found.exit_code, found.rows_short) == (
        "likely does not fit",
        0.3,
        1,
        7,
    )
    assert verdict_of(1.2, "FSDP", is_short=True, errors=ERRORS).word == "does not fit"


def test_a_job_that_runs_short_and_likely_fits_has_a_word_of_its_own() -> None:
    errors = MemoryErrors(np.linspace(-0.1, 0.1, 21), np.full(21, 1 / 21), 21, 5, 0.6, 7)
    found = verdict_of(0.8, "FSDP", is_short=True, errors=errors)
    assert (found.word, found.probability, found.exit_code) == ("runs short", 0.6, 0)
    assert (found.is_sure, found.chance) == (False, "probability that it fits 60 %")


def test_a_verdict_is_broken_where_it_is_likelier_not_to_fit() -> None:
    assert [Verdict("fits", 0.95).tone, Verdict("fits barely", 0.6).tone] == ["fits", "tight"]
    assert [Verdict("likely does not fit", 0.4).tone, Verdict("does not fit", 0.05).tone] == [
        "broken",
        "broken",
    ]


def test_marks_and_words_in_tables() -> None:
    barely = Verdict("fits barely", 0.6)
    assert barely.mark == "?"
    assert verdict_suffix(barely) == " (fits barely)"
    assert verdict_suffix(Verdict("fits", 0.99)) == verdict_suffix(None) == ""
    assert [line[:3] for line in mark_meanings({"fits", "runs short", "does not fit"})] == ["~  ", "!  "]


def test_the_content_is_the_word_and_the_probability() -> None:
    assert verdict_content(Verdict("fits", 0.97)) == {"verdict": "fits", "fits_probability": 0.97}
    assert verdict_content(None) == {"verdict": None, "fits_probability": None}
