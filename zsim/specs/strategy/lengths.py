"""The tokens of micro-batches whose documents differ in length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampledLengths:
    """A mean micro-batch of documents whose lengths are drawn."""

    length: int
    """Tokens of a sequence of the slowest rank, padding included."""
    span: float
    """Tokens that a mean token of the slowest rank may attend to, all before the mask: the sum of s^2 over
    the sum of s, for documents of s tokens.
    """
    real_tokens: float
    """Tokens of a mean rank's micro-batch without padding."""
    mean_tokens: float
    """Tokens of a mean rank's micro-batch with padding."""
    slowest_over_mean: float
    """FLOPs of the slowest rank over those of the mean rank."""
    masks_by_document: bool
    """The mask has a block per document. Otherwise it has one per sequence."""

    @property
    def padding_fraction(self) -> float:
        """The part of a mean rank's tokens that is padding."""
        return 1.0 - self.real_tokens / self.mean_tokens
