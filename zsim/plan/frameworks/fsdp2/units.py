"""The parameters that FSDP2 gathers together, by wrapping preset.

# [Note: a shard that nothing gathers again]
With a number for `reshard_after_forward` a group's shard over the smaller group is dropped once backward has
gathered it (torch 2.13 `FSDPParam.to_unsharded`). Backward does not reach frozen parameters before all
trained ones: their group goes back to its own shard (`to_sharded`), and the other stays until the next
forward puts a new one in its place, and a gather of it that was prefetched is dropped (`finalize_backward`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.memory.adapters import is_packed, stored_bytes
from zsim.dataclass import dataclass
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError, did_you_mean
from zsim.plan.builder import moves
from zsim.plan.ops import Group
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import Segment
from zsim.specs.model.experts import GroupedLinear, Rearrange
from zsim.specs.model.spec import Exchange, Loss, Module, Parameter
from zsim.specs.strategy.frameworks import Fsdp2
from zsim.specs.strategy.mesh import EXPERT

WRAPPINGS = ("torchtitan-0.1", "torchtitan", "huggingface", "none", "blocks:N")
_SEVERAL = re.compile(r"blocks:([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The ranks over which a group of parameters is sharded and, in HSDP, replicated."""

    shard: Group
    replicate: Group | None = None
    post_forward: Group | None = None
    """The smaller group over which it stays sharded between forward and backward, if any."""


@dataclass
class ParamGroup:
    """One group of parameters that is unsharded and reduced as a whole: torch's FSDPParamGroup.

    Every parameter is cut on a dimension into one chunk of ceil(dim / ranks) rows per sharding rank of
    `mesh`, and the last chunks are padded.
    """

    name: str
    segments: tuple[str, ...]
    """The model's segments that use it, in forward order."""
    parameters: tuple[Parameter, ...]
    mesh: MeshInfo
    is_root: bool = False
    reshards_after_forward: bool = True
    post_forward: Group | None = None
    has_differentiable_input: bool = True
    ends_before_loss: bool = False
    """Whether its output is the logits, so that its backward begins after the loss's."""
    calls: tuple[str, str] | None = None
    """The first and the last module that it is for, if it is a group inside a block."""
    shard_dimension: int = 0
    forward_prefetch: tuple[str, ...] | None = None
    """Names of the groups that are unsharded with it (`set_modules_to_forward_prefetch`)."""
    backward_prefetch: tuple[str, ...] | None = None
    """The same in backward. None prefetches the next group in backward by itself."""
    stored: str = "fp32"
    """The type of the shards, unless a parameter has its own."""
    has_backward: bool = True
    """Whether backward reaches it. It does not reach frozen parameters before all trained ones."""
    _gathered: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by type

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
        ranks = self.shard_size
        return tuple(numel // ranks for numel in self.padded_numels(ranks))

    @cached_property
    def trainable(self) -> tuple[Parameter, ...]:
        return tuple(one for one in self.parameters if one.trainable)

    @cached_property
    def trainable_numel(self) -> int:
        return sum(one.numel for one in self.trainable)

    @cached_property
    def reduced_numel(self) -> int:
        """Elements of the gradients with padding."""
        return sum(_padded(one, self.shard_size, self.shard_dimension) for one in self.trainable)

    def gathered_bytes(self, dtype: str) -> tuple[int, ...]:
        """Bytes of each gathered parameter with padding: in `dtype`, but for 4-bit weights, which stay so."""
        found = self._gathered.get(dtype)
        if found is None:
            found = self._gathered[dtype] = tuple(
                stored_bytes(one, dtype, numel) if is_packed(one) else numel * _element_bytes(one, dtype)
                for one, numel in zip(self.parameters, self.padded_numels(self.shard_size), strict=True)
            )
        return found

    def post_forward_shard_bytes(self, dtype: str) -> int:
        """Bytes of the shard over the smaller group that stays after forward."""
        assert self.post_forward is not None
        return sum(self.gathered_bytes(dtype)) // self.post_forward.size

    def left_shard_bytes(self, dtype: str) -> int:
        """Bytes of that shard between steps. See [Note: a shard that nothing gathers again]."""
        is_left = self.post_forward is not None and self.post_forward.size > 1 and not self.has_backward
        return self.post_forward_shard_bytes(dtype) if is_left else 0

    def cast_bytes(self, dtype: str) -> tuple[int, ...]:
        """Bytes of each shard that is cast to `dtype` before the gather: those kept in another type."""
        shards = zip(self.parameters, self.parameter_shards, strict=True)
        return tuple(
            numel * _element_bytes(one, dtype)
            for one, numel in shards
            if not is_packed(one) and (one.stored or self.stored) != dtype
        )

    def copies_out(self, size: int) -> tuple[Kernel, ...]:
        """The split of the gathered tensor. Chunks of a later dimension are joined by another copy."""
        passes = 2 if self.shard_dimension else 1
        return moves(passes * size, passes * size)

    def own_copies(self, dtype: str, size: int) -> tuple[Kernel, ...]:
        """Kernels of a single rank, which gathers nothing: a cast of every parameter that is kept in another
        type than `dtype`, and a copy of each (`wait_for_unshard`, world size 1).
        """
        casts = self.cast_bytes(dtype)
        copies = moves(size, size, launches=len(self.parameters))
        read = sum(casts) * 4 // DTYPE_BYTES[dtype]
        return (*moves(read, sum(casts), launches=len(casts)), *copies) if casts else copies

    @cached_property
    def stored_shard_bytes(self) -> int:
        """Bytes of rank 0's shards as they are kept."""
        shards = zip(self.parameters, self.parameter_shards, strict=True)
        return sum(stored_bytes(one, self.stored, numel) for one, numel in shards)

    @cached_property
    def trainable_shards(self) -> tuple[int, ...]:
        """Elements of rank 0's shard of each parameter that is trained."""
        shards = zip(self.parameters, self.parameter_shards, strict=True)
        return tuple(numel for one, numel in shards if one.trainable)

    @cached_property
    def parameter_parts(self) -> tuple[tuple[Parameter, tuple[int, ...]], ...]:
        """Each parameter that is trained with the shape of rank 0's shard."""
        ranks, cut = self.shard_size, self.shard_dimension
        return tuple(
            (one, (*one.shape[:cut], -(-_rows(one, cut) // ranks), *one.shape[cut + 1 :]))
            for one in self.trainable
        )

    @cached_property
    def shard_numel(self) -> int:
        return sum(self.parameter_shards)

    def padded_numels(self, num_ranks: int) -> tuple[int, ...]:
        """Elements of each parameter, padded for `num_ranks` shards."""
        return tuple(_padded(parameter, num_ranks, self.shard_dimension) for parameter in self.parameters)

    @property
    def num_in_fp8(self) -> int:
        """The number of parameters that fp8 products read."""
        return sum(parameter.in_fp8 for parameter in self.parameters)

    @property
    def fp8_numel(self) -> int:
        """Their elements, padded."""
        numels = self.padded_numels(self.shard_size)
        return sum(numel for numel, one in zip(numels, self.parameters, strict=True) if one.in_fp8)


_MUCH_PADDED = 1.5  # times the parameters


def _rows(parameter: Parameter, dimension: int = 0) -> int:
    return parameter.shape[dimension] if parameter.shape else 1


def _padded(parameter: Parameter, num_ranks: int, dimension: int = 0) -> int:
    rows = _rows(parameter, dimension)
    return -(-rows // num_ranks) * num_ranks * (parameter.numel // rows)


def make_param_groups(
    stage: Stage, strategy: Fsdp2, mesh: MeshInfo, experts: MeshInfo | None = None
) -> list[ParamGroup]:
    """FSDP2's groups of parameters in forward order, by preset. Groups without parameters are left out.

    torchtitan-0.1: each block, the last not resharded after forward. The root holds embedding, norm and head.
    torchtitan (0.2 and later): the embedding, each block, and norm with head, not resharded. Tied weights
    make one group of embedding, norm and head, and so do modules between the blocks of a captured model.
    huggingface: each block resharded. The root holds the others. none: the root holds all parameters.
    blocks:N: as torchtitan, with N consecutive blocks in one group (`fully_shard([...])`: pre-hooks on the
    first block, post-hooks on the last). A pipeline's stages are resharded after forward only if asked for,
    torchtitan's norm and head with them ("always", while "default" is not to). `experts` is the mesh of
    routed experts, which are then a group of their own inside their block. Source: torchtitan
    models/llama3/infra/parallelize.py (0.1, v0.2.2) and distributed/fsdp.py (0.3.0), accelerate 1.15.0
    utils/fsdp_utils.py.
    """
    several = _SEVERAL.fullmatch(strategy.wrapping)
    if strategy.wrapping not in WRAPPINGS[:-1] and several is None:
        raise InputError(
            f"strategy.wrapping: unknown preset '{strategy.wrapping}'"
            f"{did_you_mean(strategy.wrapping, WRAPPINGS)}; known: {', '.join(WRAPPINGS)}"
        )
    is_pipeline = stage.parallelism.pipeline > 1
    groups = _param_groups(stage, strategy, mesh, is_pipeline, several, experts)
    units = [unit for unit in groups if unit.parameters]
    for unit in units:
        unit.has_differentiable_input &= _takes_gradient(stage, unit)
        unit.stored = stage.training.stored_dtype
        own = [one for one in stage.workload.segments if one.name in unit.segments]
        unit.has_backward = not own or any(one.has_backward for one in own)
    stage.builder.notes += _padding_notes(units)
    return units


def _padding_notes(units: Sequence[ParamGroup]) -> list[str]:
    """One note, if padding makes the gathered parameters half as large again."""
    whole, padded = sum(unit.numel for unit in units), sum(unit.unsharded_numel for unit in units)
    if padded < _MUCH_PADDED * whole:
        return []
    worst = max(
        ((one, unit) for unit in units for one in unit.parameters),
        key=lambda pair: _padded(pair[0], pair[1].shard_size, pair[1].shard_dimension) - pair[0].numel,
    )
    parameter, unit = worst
    ranks, cut = unit.shard_size, unit.shard_dimension
    rows, times = _rows(parameter, cut), padded / whole
    return [
        f"FSDP2 cuts dimension {cut} of a parameter into as many rows as there are ranks: the {rows:,} of a "
        f"{parameter.name} in {unit.name} are padded to {-(-rows // ranks) * ranks:,}, and {times:.3g} "
        "times the parameters are gathered and kept; fewer ranks to a shard (strategy.replicate) or, of "
        "experts, parallelism.expert, for which torchtitan cuts dimension 1, avoid it"
    ]


def _takes_gradient(stage: Stage, unit: ParamGroup) -> bool:
    """Whether the input of a group's first segment needs a gradient. Otherwise FSDP2 has no hook there."""
    if not unit.segments:  # routed experts, a group inside their block
        return True
    segment = next(one for one in stage.workload.segments if one.name == unit.segments[0])
    return not segment.calls or segment.kind == "before" or segment.calls[0].module.input_gradient


def _param_groups(
    stage: Stage,
    strategy: Fsdp2,
    mesh: MeshInfo,
    is_pipeline: bool,
    several: re.Match[str] | None,
    experts_mesh: MeshInfo | None,
) -> list[ParamGroup]:
    workload = stage.workload
    before, *inner, after = workload.segments
    blocks = [segment for segment in inner if segment.kind == "block"]
    between = [segment for segment in inner if segment.kind == "between" and segment.parameters]
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
            tuple(p for segment in part for p in segment.parameters if not p.belongs_to), mesh,
            reshards_after_forward=reshards, post_forward=smaller,
        )
        for part in parts
    ]  # fmt: skip
    is_titan = strategy.wrapping == "torchtitan" or several is not None
    has_loss = workload.model.captured is None or any(
        isinstance(call.module.work, Loss) for call in after.calls
    )
    if is_titan and not workload.model.is_tied and not between:
        embedding = ParamGroup(
            "tok_embeddings", (before.name,), before.parameters, mesh,
            reshards_after_forward=reshards, post_forward=smaller, has_differentiable_input=False,
        )  # fmt: skip
        head = ParamGroup(
            "norm, output", (after.name,), after.parameters, mesh,
            reshards_after_forward=is_pipeline and reshards, ends_before_loss=has_loss,
        )  # fmt: skip
        if experts_mesh is not None:
            return _with_experts(stage, [embedding], units, [head], experts_mesh)
        return [embedding, *units, head]
    if strategy.wrapping == "torchtitan-0.1" and units:
        units[-1].reshards_after_forward, units[-1].post_forward = False, None
    rest = (before, *between, after)
    root = ParamGroup(
        "root", tuple(segment.name for segment in rest),
        tuple(parameter for segment in rest for parameter in segment.parameters), mesh,
        is_root=True, reshards_after_forward=False, ends_before_loss=is_titan and has_loss,
    )  # fmt: skip
    return [root, *(units if experts_mesh is None else _with_experts(stage, [], units, [], experts_mesh))]


def _with_experts(
    stage: Stage, before: list[ParamGroup], blocks: list[ParamGroup], after: list[ParamGroup], mesh: MeshInfo
) -> list[ParamGroup]:
    """The groups, with those of routed experts after their blocks. They are cut on dim 1 where there are
    fewer experts than ranks. Every group names the groups that are prefetched with it, since the host waits
    in between (0.2.2 models/llama4/infra/parallelize.py `apply_fsdp`). `first` and `last` are the groups of
    embedding and head, unless the root has these.
    """
    segments = {segment.name: segment for segment in stage.workload.segments}
    of_unit = {
        unit.name: [_experts_of(unit, segments[name], mesh) for name in unit.segments] for unit in blocks
    }
    inner = {name: [one for one in groups if one is not None] for name, groups in of_unit.items()}
    names = {name: [name, *(one.name for one in groups)] for name, groups in inner.items()}
    order = [unit for unit in (*before, *blocks, *after) if unit.parameters]
    found = []
    for number, unit in enumerate(order):
        later = order[number + 1] if number + 1 < len(order) else None
        earlier = order[number - 1] if number else None
        is_end = unit in before, unit in after
        if later is not None:
            ahead = names.get(later.name, [later.name])
            unit.forward_prefetch = tuple(ahead[:1] if is_end[0] else ahead)
        if earlier is not None:
            behind = names.get(earlier.name, [earlier.name])
            unit.backward_prefetch = tuple(behind[:1] if is_end[1] else behind)
        found += [unit, *inner.get(unit.name, ())]
    return found


def _experts_of(block: ParamGroup, segment: Segment, mesh: MeshInfo) -> ParamGroup | None:
    """The group of a block's routed experts: its hooks stand around the dispatch and the combination."""
    calls = segment.calls
    owned = tuple(p for call in calls for p in call.parameters if p.belongs_to)
    if not owned:
        return None
    places = [number for number, call in enumerate(calls) if isinstance(call.module.work, GroupedLinear)]
    first, last = places[0], places[-1]
    while _is_dispatch(calls[first - 1].module):
        first -= 1
    while _is_dispatch(calls[last + 1].module):
        last += 1
    local = owned[0].shape[0]
    return ParamGroup(
        calls[places[0]].name.rpartition(".")[0], (), owned, mesh,
        reshards_after_forward=block.reshards_after_forward, post_forward=None,
        calls=(calls[first].name, calls[last].name), shard_dimension=int(mesh.shard.size > local),
    )  # fmt: skip


def _is_dispatch(module: Module) -> bool:
    """Whether the module brings rows to or from the experts' ranks, or sorts them there."""
    work = module.work
    if isinstance(work, Rearrange):
        return work.kind in ("sort", "unsort")
    return isinstance(work, Exchange) and work.group.startswith(EXPERT)


def _name(part: Sequence[Segment]) -> str:
    """The name of a group of blocks: the block's, or "first-number of the last"."""
    first, last = part[0].name, part[-1].name
    return first if first == last else f"{first}-{last.rpartition('.')[2]}"


def _element_bytes(parameter: Parameter, dtype: str) -> int:
    """Bytes of a gathered element: with "fp8", bf16 but for the weights that fp8 products read."""
    if dtype != "fp8":
        return DTYPE_BYTES[dtype]
    return 1 if parameter.in_fp8 else 2
