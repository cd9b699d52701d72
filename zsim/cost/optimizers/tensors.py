"""The tensors that an optimizer updates, as one rank has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Self


@dataclass(frozen=True, slots=True)
class UpdatedTensor:
    """A tensor's part on a rank."""

    shape: tuple[int, ...]
    """The shape of the part. Flat parts are vectors."""
    full_shape: tuple[int, ...] = ()
    """The shape of the full tensor."""
    is_matrix: bool = False
    """A weight of a hidden layer, for optimizers that treat those differently (Muon): two dimensions, and
    neither an embedding nor the head.
    """

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @classmethod
    def flat(cls, numels: Iterable[int]) -> list[Self]:
        """Vectors of `numels` elements, as flattening frameworks give them to the optimizer."""
        return [cls((numel,)) for numel in numels]
