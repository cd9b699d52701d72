"""The images and sounds of micro-batches, as towers and the language model see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# The rows that a module of a vision tower sees: patches of images that see one another, the same with
# attention inside windows, or the tokens that the language model gets. Those of an audio tower in the same
# order.
SampleRows = Literal["", "patches", "windows", "merged", "frames", "frame windows", "merged frames"]
SOUND_ROWS = ("frames", "frame windows", "merged frames")


@dataclass(frozen=True, slots=True)
class ImageSize:
    """An image as a tower sees it: in one grid of patches, or in several tiles of equal size. Of images of
    several sizes the mean. A sound is one of frames, or several pieces of it.
    """

    tiles: float
    """Grids of patches that don't see each other."""
    patches: float
    """Rows of the tower in each of them, a class token included."""
    tokens: float
    """Tokens that the language model sees of the image."""
    window: float = 0
    """Patches that a patch sees in layers with windows, itself included. 0 for all of its tile."""

    @property
    def rows(self) -> float:
        """Rows of the tower in all tiles."""
        return self.tiles * self.patches


def average_size(sizes: Sequence[ImageSize], weights: Sequence[float]) -> ImageSize:
    """The mean image of so many of each size, whose rows see as many others as a mean row does."""
    if len(sizes) == 1:
        return sizes[0]
    total, images = list(zip(sizes, weights, strict=True)), sum(weights)
    rows = sum(weight * size.rows for size, weight in total)
    patches = sum(weight * size.rows * size.patches for size, weight in total) / rows
    window = sum(weight * size.rows * size.window for size, weight in total) / rows
    tokens = sum(weight * size.tokens for size, weight in total)
    return ImageSize(rows / images / patches, patches, tokens / images, window)


@dataclass(frozen=True, slots=True)
class SampledImages:
    """The images or sounds of a mean micro-batch, whose number is drawn."""

    size: ImageSize
    per_sequence: float
    """Images of a sequence on the rank whose micro-batch has the most."""
    mean_per_sequence: float
    """Images of a sequence of a mean rank."""
    are_dummies: bool = False
    """No sample has an image, and the trainer gives the tower a smallest one in each micro-batch."""

    def rows(self, kind: SampleRows, sequences: int) -> tuple[float, float]:
        """(rows of all images of so many sequences, rows that see each other) for the modules of a kind."""
        size, images = self.size, round(self.per_sequence * sequences, 9)
        if kind in ("merged", "merged frames"):
            return images * size.tokens, size.tokens
        has_windows = kind in ("windows", "frame windows") and size.window
        span = size.window if has_windows else size.patches
        return images * size.tiles * size.patches, min(span, size.patches)

    def mean_rows(self, kind: SampleRows) -> float:
        """Rows for each sequence of a mean rank."""
        return self.rows(kind, 1)[0] * (self.mean_per_sequence / self.per_sequence)

    @property
    def slowest_over_mean(self) -> float:
        """Images of the slowest rank over those of the mean rank."""
        return self.per_sequence / self.mean_per_sequence


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
    documents: float
    """Documents of a micro-batch of the rank with the most. One that is cut counts twice."""

    @property
    def padding_fraction(self) -> float:
        """The part of a mean rank's tokens that is padding."""
        return 1.0 - self.real_tokens / self.mean_tokens
