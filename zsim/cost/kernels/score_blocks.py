"""Blocks of attention's scores, and how many query-key pairs a mask leaves of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ScoreBlock(NamedTuple):
    """The scores of `queries` tokens of a sequence against `keys` of its tokens, in one fused kernel."""

    queries: int
    keys: int
    is_causal: bool
    """The last query sees all keys, every other one key less than the next query."""
    window: int | None = None
    """The number of keys that a query sees at most, the last ones."""

    @property
    def pairs(self) -> float:
        """Query-key pairs: q k, less q^2/2 under a causal mask. Of those a window w leaves w q, less what the
        keys are too few for.
        """
        if not self.is_causal:
            return self.queries * self.keys
        return causal_pairs(self.keys, self.window) - causal_pairs(self.keys - self.queries, self.window)


def causal_pairs(tokens: float, window: int | None) -> float:
    """Query-key pairs of the first tokens of a sequence: t^2/2, or w t - w^2/2 with a window w below t."""
    seen = min(window or tokens, tokens)
    return seen * tokens - seen * seen / 2


def total_size(blocks: Sequence[ScoreBlock]) -> tuple[int, int, float]:
    """Queries, keys and pairs of several blocks."""
    queries, keys = (
        sum(sizes) for sizes in zip(*((block.queries, block.keys) for block in blocks), strict=True)
    )
    return queries, keys, sum(block.pairs for block in blocks)


def window_of(blocks: Sequence[ScoreBlock]) -> int:
    """The window of blocks of one mask. 0 where it is no shorter than all their keys."""
    window = min(block.window or 0 for block in blocks)
    return window if window < max(block.keys for block in blocks) else 0
