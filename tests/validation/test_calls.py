"""Lists of collective calls as short text."""

from __future__ import annotations

from zsim.comparison.plan_check import Call, fold, unfold

GATHER = Call("all_gather", 800, "bf16", 8, 1, module="layers.0")
REDUCE = Call("reduce_scatter", 1600, "fp32", 8, 1, module="layers.0")
ROOT_GATHER = Call("all_gather", 100, "bf16", 8, 1, module="root")


def test_repeats_of_one_and_of_two_calls_are_folded() -> None:
    """A root gather, 5 block gathers, then 3 pairs: three entries, 5 and 3 times."""
    calls = [ROOT_GATHER, *[GATHER] * 5, *[REDUCE, ROOT_GATHER] * 3]
    folded = fold(calls)
    assert [entry["times"] for entry in folded if isinstance(entry, dict)] == [5, 3]
    assert len(folded) == 3


def test_blocks_of_the_same_shape_fold_although_their_names_differ() -> None:
    calls = [Call("all_gather", 800, "bf16", 8, 1, module=f"layers.{i}.mlp") for i in range(12)]
    assert fold(calls) == [{"times": 12, "calls": [["all_gather", 800, "bf16", 8, 1, "layers.*.mlp"]]}]


def test_unfold_gives_the_calls_back_in_order() -> None:
    calls = [ROOT_GATHER, *[GATHER] * 7, *[REDUCE, GATHER] * 4, REDUCE, *[ROOT_GATHER] * 2]
    assert unfold(fold(calls)) == [call.generic for call in calls]


def test_a_list_without_repeats_stays_as_it_is() -> None:
    assert unfold(fold([GATHER, REDUCE, ROOT_GATHER])) == [c.generic for c in (GATHER, REDUCE, ROOT_GATHER)]
    assert fold([]) == []
