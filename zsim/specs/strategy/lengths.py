"""The tokens of micro-batches whose documents differ in length."""

from __future__ import annotations

from zsim.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """A mean micro-batch of drawn documents. `length`: tokens of a sequence of the slowest rank, padding
    included; `span`: tokens that a mean token of it may attend to, all before the mask: the sum of s^2 over
    the sum of s, for documents of s tokens. `real_tokens`: without padding, of a mean rank's micro-batch;
    `mean_tokens`: with it. `slowest_over_mean`: FLOPs of the slowest rank over those of the mean one.
    `by_document`: the mask has a block per document, else one per sequence."""

    length: int
    span: float
    real_tokens: float
    mean_tokens: float
    slowest_over_mean: float
    by_document: bool

    @property
    def padding_fraction(self) -> float:
        """The part of a mean rank's tokens that is padding."""
        return 1.0 - self.real_tokens / self.mean_tokens
