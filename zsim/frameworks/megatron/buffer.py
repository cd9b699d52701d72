"""Megatron's contiguous buffer of gradients (with the distributed optimizer: also of parameters), and its
buckets.

Transcribed from Megatron-Core 0.12 `core/distributed/param_and_grad_buffer.py` (`_ParamAndGradBuffer`).

# [Note: placeholders]
Transformer Engine returns other gradients to autograd where the real ones are summed up in place. With
gradients accumulated in the products (`--gradient-accumulation-fusion`, the default) a backward has nothing
to return for a weight, and returns an uninitialised tensor of its shape, for Megatron's hooks to run. From
2.3 on one such tensor of each shape and type is made, and kept to the end (pytorch/module/base.py
`get_dummy_wgrad`, v2.3 to d0067d0d, and linear.py, layernorm_linear.py, grouped_linear.py).

# [Note: fp8 weights]
The weights of fp8 products are quantised copies next to 16-bit parameters, or parameters that are quantised
themselves (`--fp8-param-gather`). Read in Megatron-Core 0.16.1 (core/fp8_utils.py,
core/distributed/param_and_grad_buffer.py) and Transformer Engine 2.17 (pytorch/module/base.py
`quantize_weight`, pytorch/tensor/utils.py `cast_master_weights_to_fp8`). Copies are made in the first
micro-batch of a step and live from then on. Parameters in mxfp8 are gathered in 16 bits, in the buffer of the
gradients, and cast afterwards. Others are gathered in 8 bits, and transposed afterwards. A bucket of both
types counts as one call: Megatron puts 16-bit parameters into a buffer of their own, whose buckets it gathers
with the last of the others (`partition_buckets`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import norm_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Group, Memory
from zsim.specs.model.spec import ModelSpec, Module
from zsim.specs.strategy.training import TrainingConfig

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128  # elements


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `end` of the buffer with padding, and the names of their parameters."""

    number: int
    start: int
    end: int
    names: tuple[str, ...]

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class BufferLayout:
    """The layout of a buffer: its buckets, and the range of each parameter."""

    buckets: tuple[Bucket, ...]
    ranges: Mapping[str, tuple[int, int]]
    """(first element, end) of each parameter, in the order of backward."""

    @property
    def numel(self) -> int:
        return self.buckets[-1].end if self.buckets else 0

    def pieces(self, ranks: int, selected: Collection[str] | None = None) -> list[list[int]]:
        """Elements of each parameter (of the `selected` ones) that each of `ranks` updates. Every bucket is
        cut into equal shards.
        """
        pieces: list[list[int]] = [[] for _ in range(ranks)]
        for bucket in self.buckets:
            shard_numel = bucket.numel // ranks
            for name in bucket.names:
                if selected is not None and name not in selected:
                    continue
                start, end = (bound - bucket.start for bound in self.ranges[name])
                for rank in range(start // shard_numel, -(-end // shard_numel)):
                    pieces[rank].append(min(end, (rank + 1) * shard_numel) - max(start, rank * shard_numel))
        return pieces


@dataclass(frozen=True)
class GroupBuffer:
    """A buffer, and the ranks that share it."""

    layout: BufferLayout
    ranks: int
    """The number of ranks of `shard`."""
    shard: Group
    full_group: Group
    """The ranks of `shard` and `replicate`."""
    replicate: Group | None = None
    """The ranks of other instances of the optimizer."""
    holds_experts: bool = False
    """Whether it holds routed experts that other ranks have."""

    def registration_order(self) -> list[tuple[int, int]]:
        """The ranges of the parameters in the order of registration."""
        return list(self.layout.ranges.values())[::-1]


def owned_numels(numels: Sequence[int], ranks: int) -> list[int]:
    """Elements of the unsharded tensors that each rank owns. Ranks that own none are left out.

    Tensors are assigned in order. The tensor that exceeds 1.01 times a rank's share goes to the next rank
    (InternEvo's ParamBcastSyncHandler, solver/optimizer/utils.py of v0.2.1dev20231121).
    """
    share = sum(numels) // ranks
    owned, rank_numel = [0], 0
    for numel in numels:
        rank_numel += numel
        if rank_numel > 1.01 * share and len(owned) < ranks:
            owned.append(0)
            rank_numel = 0
        owned[-1] += numel
    return [numel for numel in owned if numel]


def make_layout(
    numels: Mapping[str, int], bucket_size: int | None, ranks: int, *, is_sharded: bool, first: int = 0
) -> BufferLayout:
    """The layout of a buffer of parameters that are registered in the order of `numels`, which it holds in
    reverse. `first` is the number of its first bucket.

    A bucket is closed once it holds `bucket_size` elements or more (None: one bucket). If `is_sharded`,
    parameters start at multiples of 64 and buckets end at multiples of 128 and of the number of ranks.
    """
    divisor = lcm(ranks, _BUCKET_ALIGNMENT)
    ranges: dict[str, tuple[int, int]] = {}
    buckets: list[Bucket] = []
    names: list[str] = []
    position = start = 0

    def close() -> int:
        end = -(-position // divisor) * divisor if is_sharded else position
        buckets.append(Bucket(first + len(buckets), start, end, tuple(names)))
        names.clear()
        return end

    for name in reversed(list(numels)):
        if is_sharded:
            position = -(-position // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT
        ranges[name] = position, position + numels[name]
        position += numels[name]
        names.append(name)
        if bucket_size is not None and position - start >= bucket_size:
            position = start = close()
    if names:
        close()
    return BufferLayout(tuple(buckets), ranges)


def placeholders(models: Iterable[ModelSpec], dtype: str) -> list[Memory]:
    """One tensor for each shape that a weight of the layers of a rank's stages has. Experts have one weight
    for each expert, all of one shape.
    """
    modules = (module for model in models for block in model.blocks for module in block.modules)
    shapes = {shape for module in modules for shape in _shapes(module)}
    return [Memory("buffers", prod(shape) * DTYPE_BYTES[dtype]) for shape in sorted(shapes)]


def _shapes(module: Module) -> Iterable[tuple[int, ...]]:
    if module.role not in (Role.PRODUCT, Role.EXPERT_PRODUCT) or not module.trains_weight:
        return ()
    weights = (parameter.shape for parameter in module.parameters if len(parameter.shape) > 1)
    return [shape[-2:] for shape in weights]


class Fp8Weights:
    """The weights of one stage's fp8 products, none without fp8. If `is_primary`, they are the parameters."""

    def __init__(self, model: ModelSpec, training: TrainingConfig, *, is_primary: bool) -> None:
        self.recipe = training.fp8
        self.is_primary = is_primary
        is_fp8 = training.precision == "fp8" and training.fp8.is_transformer_engine
        named = [*model.named_parameters()] if is_fp8 else []
        quantised = [(name, parameter) for name, parameter in named if parameter.in_fp8]
        self.numels = {name: parameter.numel for name, parameter in quantised}
        self.updated_numels = [parameter.numel for _, parameter in quantised if parameter.trainable]
        """Elements of those that have masters: a frozen weight is quantised once, before the first step."""

    @cached_property
    def numel(self) -> int:
        return sum(self.numels.values())

    @property
    def _is_gathered(self) -> bool:
        """Whether they are gathered in 8 bits."""
        return (self.is_primary and self.recipe.has_one_scale) or (
            self.is_primary and self.recipe.recipe == "block"
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes by which the parameters are smaller: those in 8 bits replace 16 bits. mxfp8's are counted as
        copies.
        """
        if not self.is_primary:
            return 0
        return self.numel if self._is_gathered else 2 * self.numel

    @property
    def copy_bytes(self) -> int:
        """Bytes of quantised copies in addition to the parameters."""
        copies = self.recipe.weight_copy_bytes(self.numel)
        return copies - self.numel if self._is_gathered else copies

    def ungathered_bytes(self, names: Iterable[str]) -> int:
        """Bytes less than in 16 bits that an all-gather of the named parameters moves."""
        return sum(self.numels.get(name, 0) for name in names) if self._is_gathered else 0

    def gathered_dtype(self, dtype: str) -> str:
        return "fp8" if self._is_gathered and self.numels else dtype


def quantize_masters(
    builder: PlanBuilder, training: TrainingConfig, stages: Sequence[Fp8Weights], ranks: int, group: str
) -> None:
    """Compute the scales of the fp32 masters of which a rank has its part: each weight's maximum (with blocks
    each block's), all-reduced. The cast is part of the update. Delayed scales are known.
    """
    recipe, count = training.fp8.recipe, sum(len(stage.updated_numels) for stage in stages)
    numel = sum(sum(stage.updated_numels) for stage in stages)
    if not count or recipe not in ("current", "block"):
        return
    scales = count if recipe == "current" else numel // 128**2
    builder.kernels("maxima of fp8 weights", norm_kernels(numel // ranks, "fp32", count))
    if ranks > 1:
        builder.collective(
            "all_reduce", 4 * scales, "fp32", group, stream=COMPUTE, name="all_reduce maxima of fp8 weights"
        )
    builder.kernels("scales of fp8 weights", (Kernel("elementwise", 0.0, float(8 * scales), "fp32"),))
