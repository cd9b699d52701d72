"""The tree of the user's mistakes, and the nearest right name."""

from __future__ import annotations

import pytest

from zsim.errors import (
    InputError,
    NotSimulatedError,
    StuckError,
    ZsimError,
    did_you_mean,
    expected_text,
    format_options,
    nearest,
)


@pytest.mark.parametrize("kind", [InputError, NotSimulatedError, StuckError])
def test_every_mistake_of_the_user_is_a_zsim_error(kind: type[Exception]) -> None:
    assert issubclass(kind, ZsimError)


def test_the_nearest_name_ignores_case_and_keeps_the_options_spelling() -> None:
    assert nearest("BANDWITH", ["bandwidth", "latency"]) == "bandwidth"
    assert nearest("full_shard", ["FULL_SHARD", "NO_SHARD"]) == "FULL_SHARD"


def test_a_name_that_goes_on_as_given_is_nearer_than_one_that_is_spelt_alike() -> None:
    """The shortest of them; one or two letters are the beginning of too much."""
    clusters = ["dgx-1", "dgx-2", "dgx-a100-80gb-long", "dgx-a100-40gb"]
    assert nearest("DGX-a10", clusters) == "dgx-a100-40gb"
    assert nearest("dgx-1", clusters) == "dgx-1"
    assert nearest("dg", clusters) is None


def test_nothing_is_suggested_when_nothing_is_close() -> None:
    assert nearest("colour", ["bandwidth", "latency"]) is None
    assert did_you_mean("colour", ["bandwidth"]) == ""
    assert did_you_mean("colour", []) == ""


def test_a_suggestion_ends_the_sentence() -> None:
    assert did_you_mean("bandwith", ["bandwidth"]) == "; did you mean 'bandwidth'?"


def test_many_options_are_the_nearest_and_their_number_and_where_all_stand() -> None:
    """400 options of eight characters are more than a sentence holds; five of eight letters of one are not
    near enough to be meant, and nearer than those of the others."""
    many = [f"option{number:02}" for number in range(100)] + ["activate"]
    said = format_options("activxyz", many, "zsim explain table")
    assert said.startswith("one of 101, such as activate, ")
    assert said.endswith(" (`zsim explain table` lists them)")
    assert said.count(", ") == 6
    assert format_options("x", ["a", "b"]) == "one of a, b"
    assert expected_text("bandwith", ["bandwidth"]) == "; did you mean 'bandwidth'?"
    assert expected_text("colour", ["a", "b"]) == "; expected one of a, b"
    assert expected_text("colour", []) == ""
