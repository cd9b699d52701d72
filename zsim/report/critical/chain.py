"""A chain of work, link by link."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints

# In place of an op number: the host issuing work; a wait whose cause is not in this trace; the host in
# torch's allocator, which has run short and gets memory from the driver and gives it back.
HOST, OTHERS, ALLOCATOR = -1, -2, -3


class Link(NamedTuple):
    """One link of the chain: an op of the plan on a rank, or the rank's host (`HOST`, `ALLOCATOR`), or a wait
    of unknown cause (`OTHERS`)."""

    rank: int
    op: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class Chain:
    """Links in order, as columns with one entry per link."""

    def __init__(self, ranks: Ints, ops: Ints, starts: Floats, ends: Floats) -> None:
        self.ranks, self.ops, self.starts, self.ends = ranks, ops, starts, ends

    @staticmethod
    def of(links: Iterable[Link]) -> Chain:
        """The links as columns."""
        rows = np.fromiter(itertools.chain.from_iterable(links), np.float64).reshape(-1, len(Link._fields))
        ranks, ops, starts, ends = rows.T
        return Chain(ranks.astype(np.int64), ops.astype(np.int64), starts, ends)

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Link]:
        columns = self.ranks, self.ops, self.starts, self.ends
        return map(Link._make, zip(*(column.tolist() for column in columns), strict=True))

    def __getitem__(self, index: int) -> Link:
        return Link(
            int(self.ranks[index]), int(self.ops[index]), float(self.starts[index]), float(self.ends[index])
        )
