"""The tree of the user's mistakes, and the nearest right name."""

from __future__ import annotations

import pytest

from zsim.errors import InputError, NotSimulatedError, StuckError, ZsimError, did_you_mean, nearest


@pytest.mark.parametrize("kind", [InputError, NotSimulatedError, StuckError])
def test_every_mistake_of_the_user_is_a_zsim_error(kind: type[Exception]) -> None:
    assert issubclass(kind, ZsimError)


def test_the_nearest_name_ignores_case_and_keeps_the_options_spelling() -> None:
    assert nearest("BANDWITH", ["bandwidth", "latency"]) == "bandwidth"
    assert nearest("full_shard", ["FULL_SHARD", "NO_SHARD"]) == "FULL_SHARD"


def test_nothing_is_suggested_when_nothing_is_close() -> None:
    assert nearest("colour", ["bandwidth", "latency"]) is None
    assert did_you_mean("colour", ["bandwidth"]) == ""
    assert did_you_mean("colour", []) == ""


def test_a_suggestion_ends_the_sentence() -> None:
    assert did_you_mean("bandwith", ["bandwidth"]) == "; did you mean 'bandwidth'?"
