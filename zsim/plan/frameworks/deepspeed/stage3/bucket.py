"""The gradients that ZeRO-3 collects for its next reduction."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class GradientBucket:
    """Gradients collected for the next reduction: padded shards, elements, and loose gradients' bytes."""

    elements: int = 0
    shard_elements: int = 0
    loose_bytes: int = 0
    parameters: list[int] = field(default_factory=list)

    @property
    def num_tensors(self) -> int:
        return len(self.parameters)
