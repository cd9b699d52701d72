"""The parameters that FSDP2 gathers together, by wrapping preset."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zsim.errors import InputError, did_you_mean
from zsim.plan.ops import Group
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import Segment
from zsim.specs.model.spec import Parameter
from zsim.specs.strategy.frameworks import Fsdp2

WRAPPINGS = ("torchtitan-0.1", "torchtitan", "huggingface", "none", "blocks:N")
_SEVERAL = re.compile(r"blocks:([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The ranks over which a group of parameters is sharded and, in HSDP, replicated; `post_forward`: the
    smaller group over which it stays sharded between forward and backward, if any."""

    shard: Group
    replicate: Group | None = None
    post_forward: Group | None = None


@dataclass
class ParamGroup:
    """One group of parameters that is unsharded and reduced as a whole: torch's FSDPParamGroup.

    `segments`: the model's segments that use it, in forward order. Every parameter is cut on dim 0 into one
    chunk of ceil(dim0 / ranks) rows per sharding rank of `mesh`, the last chunks padded. `post_forward`: the
    smaller group over which it stays sharded after forward, if any. `ends_before_loss`: the group's output is
    the logits, so its backward begins after the backward of the loss.
    """

    name: str
    segments: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    mesh: MeshInfo
    is_root: bool = False
    reshards_after_forward: bool = True
    post_forward: Group | None = None
    has_differentiable_input: bool = True
    ends_before_loss: bool = False

    @property
    def shard_size(self) -> int:
        return self.mesh.shard.size

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def unsharded_numel(self) -> int:
        """Elements of the gathered parameters with padding, as they are allocated."""
        return sum(self.padded_numels(self.shard_size))

    @cached_property
    def parameter_shards(self) -> tuple[int, ...]:
        """Elements of rank 0's shard of each parameter."""
        return tuple(_padded(parameter, self.shard_size) // self.shard_size for parameter in self.parameters)

    @cached_property
    def shard_numel(self) -> int:
        return sum(self.parameter_shards)

    def padded_numels(self, num_ranks: int) -> tuple[int, ...]:
        """Elements of each parameter, padded for `num_ranks` shards."""
        return tuple(_padded(parameter, num_ranks) for parameter in self.parameters)

    def gathered_bytes(self, element_bytes: int, *, in_fp8: bool) -> tuple[int, ...]:
        """Bytes of each gathered parameter with padding; `in_fp8`: those that fp8 products read are one byte
        an element."""
        return tuple(
            numel * (1 if in_fp8 and parameter.in_fp8 else element_bytes)
            for numel, parameter in zip(self.padded_numels(self.shard_size), self.parameters, strict=True)
        )

    @property
    def num_in_fp8(self) -> int:
        """The number of parameters that fp8 products read."""
        return sum(parameter.in_fp8 for parameter in self.parameters)

    @property
    def fp8_numel(self) -> int:
        """Their elements, padded."""
        numels = self.padded_numels(self.shard_size)
        return sum(numel for numel, one in zip(numels, self.parameters, strict=True) if one.in_fp8)


@dataclass
class Fsdp2UnitGradient:
    """The gradients of one group of parameters.

    `unsharded_bytes`: computed by autograd in this backward; `accumulated_bytes`: left by earlier
    micro-batches without reduction; `all_reduce_bytes`: buffer of the all-reduce, kept until the group's next
    reduction.
    """

    unsharded_bytes: int = 0
    accumulated_bytes: int = 0
    all_reduce_bytes: int = 0
    has_shard: bool = False
    post_reduce_event: int | None = None


def _padded(parameter: Parameter, num_ranks: int) -> int:
    rows = parameter.shape[0] if parameter.shape else 1
    return -(-rows // num_ranks) * num_ranks * (parameter.numel // rows)


def make_param_groups(stage: Stage, strategy: Fsdp2, mesh: MeshInfo) -> list[ParamGroup]:
    """FSDP2's groups of parameters in forward order, by preset; groups without parameters are left out.

    torchtitan-0.1: each block, the last not resharded after forward; the root holds embedding, norm and
    head. torchtitan (0.2 and later): embedding alone; each block; norm and head together, not resharded;
    tied weights make one unit of all three. huggingface: each block resharded; the root holds the rest.
    none: the root holds all parameters. blocks:N: as torchtitan, with N consecutive blocks in one unit
    (`fully_shard([...])`: pre-hooks on the first block, post-hooks on the last). A pipeline's stages are
    resharded after forward only if asked for, torchtitan's norm and head with them ("always"; "default" is
    not to).
    Source: torchtitan models/llama3/infra/parallelize.py (0.1, v0.2.2) and distributed/fsdp.py (0.3.0),
    accelerate 1.15.0 utils/fsdp_utils.py.
    """
    several = _SEVERAL.fullmatch(strategy.wrapping)
    if strategy.wrapping not in WRAPPINGS[:-1] and several is None:
        raise InputError(
            f"strategy.wrapping: unknown preset '{strategy.wrapping}'"
            f"{did_you_mean(strategy.wrapping, WRAPPINGS)}; known: {', '.join(WRAPPINGS)}"
        )
    is_pipeline = stage.parallelism.pipeline > 1
    return [unit for unit in _param_groups(stage, strategy, mesh, is_pipeline, several) if unit.parameters]


def _param_groups(
    stage: Stage, strategy: Fsdp2, mesh: MeshInfo, is_pipeline: bool, several: re.Match[str] | None
) -> list[ParamGroup]:
    workload = stage.workload
    before, *blocks, after = workload.segments
    reshard, smaller = strategy.reshard_after_forward, mesh.post_forward
    reshards = not is_pipeline if reshard is None else bool(reshard)
    if strategy.wrapping == "none":
        names = tuple(segment.name for segment in workload.segments)
        parameters = tuple(p for segment in workload.segments for p in segment.parameters)
        return [ParamGroup("root", names, parameters, mesh, is_root=True, reshards_after_forward=False)]
    per_unit = int(several[1]) if several else 1
    parts = [blocks[first : first + per_unit] for first in range(0, len(blocks), per_unit)]
    units = [
        ParamGroup(
            _name(part), tuple(segment.name for segment in part),
            tuple(parameter for segment in part for parameter in segment.parameters), mesh,
            reshards_after_forward=reshards, post_forward=smaller,
        )
        for part in parts
    ]  # fmt: skip
    is_titan = strategy.wrapping == "torchtitan" or several is not None
    if is_titan and not workload.model.is_tied:
        embedding = ParamGroup(
            "tok_embeddings", (before.name,), before.parameters, mesh,
            reshards_after_forward=reshards, post_forward=smaller, has_differentiable_input=False,
        )  # fmt: skip
        head = ParamGroup(
            "norm, output", (after.name,), after.parameters, mesh,
            reshards_after_forward=is_pipeline and reshards, ends_before_loss=True,
        )  # fmt: skip
        return [embedding, *units, head]
    if strategy.wrapping == "torchtitan-0.1" and units:
        units[-1].reshards_after_forward, units[-1].post_forward = False, None
    root = ParamGroup(
        "root", (before.name, after.name), (*before.parameters, *after.parameters), mesh,
        is_root=True, reshards_after_forward=False, ends_before_loss=is_titan,
    )  # fmt: skip
    return [root, *units]


def _name(part: Sequence[Segment]) -> str:
    """The name of a unit of blocks: the block's, or "first-number of the last"."""
    first, last = part[0].name, part[-1].name
    return first if first == last else f"{first}-{last.rpartition('.')[2]}"
