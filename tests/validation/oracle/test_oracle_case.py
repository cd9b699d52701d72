"""Questions to the oracle."""

from __future__ import annotations

import pytest

from validation.oracle.case import Case
from validation.oracle.recorded import recorded_cases


@pytest.mark.parametrize("group", [3, 1, 8, 16])
def test_a_reshard_size_that_is_no_proper_divisor_is_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"reshard_after_forward: {group} is neither true nor false"):
        Case("llama-tiny", 8, reshard_after_forward=group)


def test_replicas_must_divide_the_world() -> None:
    with pytest.raises(ValueError, match="replicate: 3 does not divide world size 8"):
        Case("llama-tiny", 8, replicate=3)


def test_each_recorded_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in recorded_cases()]
    assert len(names) == len(set(names)) == 59
