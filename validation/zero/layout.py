"""The position of each parameter in its unit's flat tensor, and the piece of that tensor that a rank owns.

# [Note: flat partitions]
ZeRO shards bytes, not tensors (Rajbhandari et al. 2020, section 5). A unit's parameters are laid end to end
in one flat tensor, padded to a multiple of the number of ranks, and rank r owns the r-th of N equal pieces.
A piece may begin in the middle of one parameter and end in the middle of another: that is what makes the
pieces equal, and the collectives one call.

        | embed.weight        | norm.weight | head.weight      |pad|
        |  rank 0     |  rank 1     |  rank 2     |  rank 3        |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat tensor: elements `start` to `stop`."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of `slot` in a rank's shard: elements `start` to `stop` of the *shard*."""

    slot: Slot
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """A flat tensor of `numel` elements, cut into `world_size` pieces. [Note: flat partitions]"""

    slots: tuple[Slot, ...]
    world_size: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int) -> Layout:
        """Lay (name, shape) end to end."""
        slots, start = [], 0
        for name, shape in shapes:
            slots.append(Slot(name, shape, start))
            start = slots[-1].stop
        return cls(tuple(slots), world_size)

    @property
    def numel(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    def shard_of(self, rank: int) -> slice:
        """The elements that `rank` owns, padding included."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def filled(self, rank: int) -> int:
        """The number of elements of the rank's shard that are parameters; the rest is padding."""
        return max(0, min(self.shard_numel, self.numel - rank * self.shard_numel))

    def pieces(self, owned: slice) -> Iterator[Piece]:
        """The parts of parameters inside `owned`, in order."""
        for slot in self.slots:
            start, stop = max(slot.start, owned.start), min(slot.stop, owned.stop)
            if start < stop:
                yield Piece(slot, start - owned.start, stop - owned.start)
