"""The bucket of gradients that ZeRO-3 collects for its next reduction, and that reduction in one call.

`reduce_scatter_coalesced` is transcribed from DeepSpeed 0.19.8 `runtime/comm/coalesced_collectives.py`.
Python slices each gradient into every rank's part. The parts are joined rank by rank, except for a single
tensor that divides evenly, which is reduced in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zsim.cost.kernels.update import cat_launches
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import PlanBuilder


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


def reduce_scatter_coalesced(
    builder: PlanBuilder,
    *,
    elements: int,
    shard_elements: int,
    num_tensors: int,
    dtype: str,
    group: str,
    stream: str,
    parameter_name: str = "",
) -> int:
    """Reduce-scatter `num_tensors` gradients (`elements` in all), padded to `shard_elements` on each rank of
    `group`. Returns the bytes of the temporary joined copy. `parameter_name` is given if there is only one.
    """
    ranks = builder.groups[group].size
    size, num_parts = shard_elements * ranks * DTYPE_BYTES[dtype], num_tensors * ranks
    is_joined = num_tensors > 1 or elements % ranks > 0
    label, overhead = parameter_name or "bucket", "deepspeed_part"
    if is_joined:
        builder.allocate("buffers", size)
        launches = cat_launches(num_parts)
        builder.move(
            f"flatten {label}", size, size, launches, stream=stream, overhead=overhead, events=num_parts
        )
        builder.move(f"average {label}", size, size, stream=stream)
    else:
        builder.move(f"average {label}", size, size, stream=stream, overhead=overhead, events=num_parts)
    name = f"reduce_scatter {parameter_name}" if parameter_name else ""
    builder.collective("reduce_scatter", size, dtype, group, stream=stream, name=name, module=parameter_name)
    return size if is_joined else 0
