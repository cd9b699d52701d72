"""Lists of calls as short JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.comparison.calls import Call, fold, unfold
from zsim.errors import InputError

calls = st.builds(
    Call,
    st.sampled_from(["all_gather", "reduce_scatter"]),
    st.integers(1, 3),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from([8, 64]),
    st.sampled_from([None, 1]),
    st.sampled_from(["", "comm"]),
    st.sampled_from(["", "root", "blocks.*.mlp"]),
)


@given(st.lists(calls, max_size=30))
def test_unfolding_gives_back_what_was_folded(given_calls: list[Call]) -> None:
    assert unfold(fold(given_calls), "here") == given_calls


def test_a_step_of_many_blocks_is_a_few_rows() -> None:
    """80 blocks, each gathered and then reduced: one repeat, and the numbers of blocks are gone."""
    step = [
        Call(kind, 10, "bf16", 8, 1, "", f"blocks.{block}")
        for block in range(80)
        for kind in ("all_gather", "reduce_scatter")
    ]
    assert fold(step) == [
        {
            "times": 80,
            "calls": [
                ["all_gather", 10, "bf16", 8, 1, "blocks.*"],
                ["reduce_scatter", 10, "bf16", 8, 1, "blocks.*"],
            ],
        }
    ]


@pytest.mark.parametrize("wrong", [3, [3], [["all_gather"]], [{"times": 2}], [["a", "x", "y", 1, 1, ""]]])
def test_anything_else_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(InputError, match=r"run\.json: calls: found something else than calls"):
        unfold(wrong, "run.json: calls")
