"""The bucket of gradients that ZeRO-3 collects for its next reduction."""

from __future__ import annotations

from dataclasses import field

from zsim.dataclass import dataclass


@dataclass(slots=True)
class GradientBucket:
    """Gradients collected for the next reduction. `elements` in all; `shard_elements`: of the padded shards;
    `loose_bytes`: of gradients outside of the flat buffer; `parameters`: numbers of the parameters;
    `belongs_to`: the kind of ranks that have them, "" for all."""

    elements: int = 0
    shard_elements: int = 0
    loose_bytes: int = 0
    parameters: list[int] = field(default_factory=list)
    belongs_to: str = ""

    @property
    def num_tensors(self) -> int:
        return len(self.parameters)
