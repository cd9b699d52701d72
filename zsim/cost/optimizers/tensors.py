"""The tensors that an optimizer updates, as one rank has them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Self

from zsim.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Updated:
    """A tensor's part on a rank: `shape` (flat parts are vectors), and `whole`, the shape of the whole
    tensor. `is_matrix`: a weight of a hidden layer, for optimizers that treat those apart (Muon): two
    dimensions, and neither an embedding nor the head."""

    shape: tuple[int, ...]
    whole: tuple[int, ...] = ()
    is_matrix: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @classmethod
    def flat(cls, numels: Iterable[int]) -> list[Self]:
        """Vectors of `numels` elements, as flattening frameworks give them to the optimizer."""
        return [cls((numel,)) for numel in numels]
