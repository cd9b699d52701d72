"""The bucket of gradients that ZeRO-3 collects for its next reduction."""

from __future__ import annotations

from dataclasses import field

from zsim.dataclass import dataclass


@dataclass(slots=True)
class GradientBucket:
    """Gradients collected for the next reduction."""

    elements: int = 0
    """Elements of all gradients."""
    shard_elements: int = 0
    """Elements of the padded shards."""
    loose_bytes: int = 0
    """Bytes of gradients outside of the flat buffer."""
    parameters: list[int] = field(default_factory=list)
    """The numbers of the parameters."""
    belongs_to: str = ""
    """The kind of ranks that have the parameters, "" for all."""

    @property
    def num_tensors(self) -> int:
        return len(self.parameters)
