"""Muon's collectives under FSDP2, against torch's own."""

from __future__ import annotations

from collections import Counter

import pytest

from zsim.frameworks.fsdp2.update import DTensorCosts, muon_calls

# Calls that torch 2.13's Muon makes for a DTensor sharded by rows over a fake group of 8 and of 64 ranks
# (TorchDispatchMode below DTensor, mesh larger than a node): by shape, their number, and what the second is.
_OF_8 = {
    (4096, 4096): (26, "all_to_all"),
    (1024, 4096): (16, "all_to_all"),
    (14336, 4096): (11, "all_reduce"),
    (4096, 14336): (16, "all_to_all"),
    (512, 2048): (26, "all_to_all"),
    (8192, 2048): (11, "all_reduce"),
    (768, 3072): (16, "all_to_all"),
}
_OF_64 = {
    (4096, 4096): (26, "all_to_all"),
    (1024, 4096): (26, "all_to_all"),
    (4096, 14336): (16, "all_to_all"),
    (512, 2048): (16, "all_gather"),
    (768, 768): (16, "all_gather"),
    (768, 3072): (26, "all_to_all"),
}
_ALL = [(8, *pair) for pair in _OF_8.items()] + [(64, *pair) for pair in _OF_64.items()]


@pytest.mark.parametrize(("ranks", "shape", "expected"), _ALL)
def test_collectives_are_those_of_torch(
    ranks: int, shape: tuple[int, int], expected: tuple[int, str]
) -> None:
    calls = [call for call in muon_calls(*shape, DTensorCosts(ranks, is_inside_node=False)) if call.kind]
    assert (len(calls), calls[1].kind) == expected


def test_a_wide_matrix_turns_to_columns_once() -> None:
    """A 4096 x 14336 weight on 8 ranks: four all-to-alls turn it, one turns it back; ten all-reduces of the
    Gram matrix, and one of the norm."""
    calls = [call for call in muon_calls(4096, 14336, DTensorCosts(8, False)) if call.kind]
    assert Counter((call.kind, call.numel) for call in calls) == {
        ("all_reduce", 1): 1,
        ("all_reduce", 4096**2): 10,
        ("all_to_all", 4096 * 14336): 5,
    }
