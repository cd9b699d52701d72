"""The parameters that FSDP2 gathers together, by wrapping preset, and the meshes over which it shards them.

# [Note: a shard that nothing gathers again]
With a number for `reshard_after_forward` a group's shard over the smaller group is dropped once backward has
gathered it (torch 2.13 `FSDPParam.to_unsharded`). Backward does not reach frozen parameters before all
trained ones: their group goes back to its own shard (`to_sharded`), and the other stays until the next
forward puts a new one in its place, and a gather of it that was prefetched is dropped (`finalize_backward`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.memory import stored_bytes
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError, did_you_mean
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.operations.operation import Role
from zsim.operations.rearrange import Rearrange
from zsim.plan.builder import move_kernels
from zsim.plan.ops import Group
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import Segment
from zsim.specs.model.spec import Exchange, Module, Parameter
from zsim.specs.strategy.parallelism import EXPERT

WRAPPINGS = ("torchtitan-0.1", "torchtitan", "automodel", "huggingface", "none", "blocks:N")
_BLOCKS_PATTERN = re.compile(r"blocks:([1-9]\d*)")


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
    is_plain: bool = False
    """Its parameters are no DTensors, and FSDP2 leaves them and their gradients alone (`ignored_params`)."""
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
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @cached_property
    def trainable_numel(self) -> int:
        return sum(parameter.numel for parameter in self.trainable)

    @cached_property
    def reduced_numel(self) -> int:
        """Elements of the gradients with padding."""
        return sum(_padded(parameter, self.shard_size, self.shard_dimension) for parameter in self.trainable)

    def gathered_bytes(self, dtype: str) -> tuple[int, ...]:
        """Bytes of each gathered parameter with padding: in `dtype`, but for 4-bit weights, which stay so."""
        sizes = self._gathered.get(dtype)
        if sizes is None:
            sizes = self._gathered[dtype] = tuple(
                stored_bytes(weight, dtype, numel)
                if weight.is_packed
                else numel * _element_bytes(weight, dtype)
                for weight, numel in zip(self.parameters, self.padded_numels(self.shard_size), strict=True)
            )
        return sizes

    def post_forward_shard_bytes(self, dtype: str) -> int:
        """Bytes of the shard over the smaller group that stays after forward."""
        assert self.post_forward is not None
        return sum(self.gathered_bytes(dtype)) // self.post_forward.size

    def leftover_shard_bytes(self, dtype: str) -> int:
        """Bytes of that shard between steps. See [Note: a shard that nothing gathers again]."""
        has_leftover = self.post_forward is not None and self.post_forward.size > 1 and not self.has_backward
        return self.post_forward_shard_bytes(dtype) if has_leftover else 0

    def cast_bytes(self, dtype: str) -> tuple[int, ...]:
        """Bytes of each shard that is cast to `dtype` before the gather: those kept in another type."""
        shards = zip(self.parameters, self.parameter_shards, strict=True)
        return tuple(
            numel * _element_bytes(parameter, dtype)
            for parameter, numel in shards
            if not parameter.is_packed and (parameter.stored_dtype or self.stored) != dtype
        )

    def copy_out_kernels(self, size: int) -> tuple[Kernel, ...]:
        """The split of the gathered tensor. Chunks of a later dimension are joined by another copy."""
        passes = 2 if self.shard_dimension else 1
        return move_kernels(passes * size, passes * size)

    def single_rank_copies(self, dtype: str, size: int) -> tuple[Kernel, ...]:
        """Kernels of a single rank, which gathers nothing: a cast of every parameter that is kept in another
        type than `dtype`, and a copy of each (`wait_for_unshard`, world size 1).
        """
        casts = self.cast_bytes(dtype)
        copies = move_kernels(size, size, launches=len(self.parameters))
        read = sum(casts) * 4 // DTYPE_BYTES[dtype]
        return (*move_kernels(read, sum(casts), launches=len(casts)), *copies) if casts else copies

    @cached_property
    def stored_shard_bytes(self) -> int:
        """Bytes of rank 0's shards as they are kept."""
        shards = zip(self.parameters, self.parameter_shards, strict=True)
        return sum(stored_bytes(parameter, self.stored, numel) for parameter, numel in shards)

    @cached_property
    def trainable_shards(self) -> tuple[int, ...]:
        """Elements of rank 0's shard of each parameter that is trained."""
        shards = zip(self.parameters, self.parameter_shards, strict=True)
        return tuple(numel for parameter, numel in shards if parameter.trainable)

    @cached_property
    def shard_shapes(self) -> tuple[tuple[Parameter, tuple[int, ...]], ...]:
        """Each parameter that is trained with the shape of rank 0's shard."""
        ranks, dim = self.shard_size, self.shard_dimension
        return tuple(
            (weight, (*weight.shape[:dim], -(-_rows(weight, dim) // ranks), *weight.shape[dim + 1 :]))
            for weight in self.trainable
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
        return sum(numel for numel, weight in zip(numels, self.parameters, strict=True) if weight.in_fp8)


_PADDING_NOTE_RATIO = 1.5  # times the parameters


def _rows(parameter: Parameter, dimension: int = 0) -> int:
    return parameter.shape[dimension] if parameter.shape else 1


def _padded(parameter: Parameter, num_ranks: int, dimension: int = 0) -> int:
    rows = _rows(parameter, dimension)
    return -(-rows // num_ranks) * num_ranks * (parameter.numel // rows)


def make_param_groups(
    stage: Stage, strategy: Fsdp2Config, mesh: MeshInfo, experts: MeshInfo | None = None
) -> list[ParamGroup]:
    """FSDP2's groups of parameters in forward order, by preset. Groups without parameters are left out.

    torchtitan-0.1: each block, the last not resharded after forward. The root holds embedding, norm and head.
    torchtitan (0.2 and later): the embedding, each block, and norm with head, not resharded. Tied weights
    make one group of embedding, norm and head, and so do modules between the blocks of a captured model.
    huggingface: each block resharded. The root holds the others. none: the root holds all parameters.
    blocks:N: as torchtitan, with N consecutive blocks in one group (`fully_shard([...])`: pre-hooks on the
    first block, post-hooks on the last). automodel: as torchtitan, but nothing is resharded after forward
    unless asked for, the host prefetches nothing, and routed experts of one rank alone are plain tensors
    without offloading (NeMo AutoModel 0.2.0 components/moe/parallelizer.py `apply_fsdp`, whose root has the
    last norm, which is with the head here). A pipeline's stages are resharded only if asked for, torchtitan's
    norm and head with them ("always", while "default" is not to). `experts` is the mesh of routed experts,
    which are then a group of their own inside their block. Source: torchtitan
    models/llama3/infra/parallelize.py (0.1, v0.2.2) and distributed/fsdp.py (0.3.0), accelerate 1.15.0
    utils/fsdp_utils.py.
    """
    blocks_match = _BLOCKS_PATTERN.fullmatch(strategy.wrapping)
    if strategy.wrapping not in WRAPPINGS[:-1] and blocks_match is None:
        raise InputError(
            f"strategy.wrapping: unknown preset '{strategy.wrapping}'"
            f"{did_you_mean(strategy.wrapping, WRAPPINGS)}; known: {', '.join(WRAPPINGS)}"
        )
    is_pipeline = stage.parallelism.pipeline > 1
    candidates = _param_groups(stage, strategy, mesh, is_pipeline, blocks_match, experts)
    groups = [group for group in candidates if group.parameters]
    for group in groups:
        group.has_differentiable_input &= _input_needs_gradient(stage, group)
        group.stored = stage.training.stored_dtype
        group_segments = [segment for segment in stage.workload.segments if segment.name in group.segments]
        group.has_backward = not group_segments or any(segment.has_backward for segment in group_segments)
    stage.builder.notes += _padding_notes(groups)
    return groups


def _padding_notes(groups: Sequence[ParamGroup]) -> list[str]:
    """One note, if padding makes the gathered parameters half as large again."""
    numel, padded = sum(group.numel for group in groups), sum(group.unsharded_numel for group in groups)
    if padded < _PADDING_NOTE_RATIO * numel:
        return []
    worst = max(
        ((parameter, group) for group in groups for parameter in group.parameters),
        key=lambda pair: _padded(pair[0], pair[1].shard_size, pair[1].shard_dimension) - pair[0].numel,
    )
    parameter, group = worst
    ranks, dim = group.shard_size, group.shard_dimension
    rows, ratio = _rows(parameter, dim), padded / numel
    return [
        f"FSDP2 cuts dimension {dim} of a parameter into as many rows as there are ranks: the {rows:,} of a "
        f"{parameter.name} in {group.name} are padded to {-(-rows // ranks) * ranks:,}, and {ratio:.3g} "
        "times the parameters are gathered and kept; fewer ranks to a shard (strategy.replicate) or, of "
        "experts, parallelism.expert, for which torchtitan cuts dimension 1, avoid it"
    ]


def _input_needs_gradient(stage: Stage, group: ParamGroup) -> bool:
    """Whether the input of a group's first segment needs a gradient. Otherwise FSDP2 has no hook there."""
    if not group.segments:  # routed experts, a group inside their block
        return True
    segment = next(segment for segment in stage.workload.segments if segment.name == group.segments[0])
    return not segment.calls or segment.kind == "before" or segment.calls[0].module.input_gradient


def _param_groups(
    stage: Stage,
    strategy: Fsdp2Config,
    mesh: MeshInfo,
    is_pipeline: bool,
    blocks_match: re.Match[str] | None,
    experts_mesh: MeshInfo | None,
) -> list[ParamGroup]:
    workload = stage.workload
    first_segment, *inner_segments, last_segment = workload.segments
    blocks = [segment for segment in inner_segments if segment.kind == "block"]
    between = [segment for segment in inner_segments if segment.kind == "between" and segment.parameters]
    reshard, post_forward = strategy.reshard_after_forward, mesh.post_forward
    is_automodel = strategy.wrapping == "automodel"
    reshards = not (is_pipeline or is_automodel) if reshard is None else bool(reshard)
    if strategy.wrapping == "none":
        names = tuple(segment.name for segment in workload.segments)
        parameters = tuple(p for segment in workload.segments for p in segment.parameters)
        return [ParamGroup("root", names, parameters, mesh, is_root=True, reshards_after_forward=False)]
    blocks_per_group = int(blocks_match[1]) if blocks_match else 1
    is_titan = strategy.wrapping == "torchtitan" or is_automodel or blocks_match is not None
    first_block = sum(len(tower.blocks) for tower in workload.model.towers)
    tower_runs = _tower_runs(blocks[:first_block], between, is_titan=is_titan)
    between = [] if tower_runs and is_titan else between
    block_runs = tower_runs + [
        blocks[first : first + blocks_per_group]
        for first in range(first_block, len(blocks), blocks_per_group)
    ]
    groups = [
        ParamGroup(
            "vision_encoder" if run[-1].kind == "between" else _name(run),
            tuple(segment.name for segment in run),
            tuple(p for segment in run for p in segment.parameters if not p.rank_kind), mesh,
            reshards_after_forward=reshards, post_forward=post_forward,
        )
        for run in block_runs
    ]  # fmt: skip
    has_loss = workload.model.captured is None or any(
        call.module.role is Role.LOSS for call in last_segment.calls
    )
    if is_titan and not workload.model.is_tied and not between:
        embedding = ParamGroup(
            "tok_embeddings", (first_segment.name,), first_segment.parameters, mesh,
            reshards_after_forward=reshards, post_forward=post_forward, has_differentiable_input=False,
        )  # fmt: skip
        head = ParamGroup(
            "norm, output", (last_segment.name,), last_segment.parameters, mesh,
            reshards_after_forward=is_pipeline and reshards, ends_before_loss=has_loss,
        )  # fmt: skip
        if experts_mesh is not None:
            return _add_experts(stage, [embedding], groups, [head], experts_mesh, strategy)
        return [embedding, *groups, head]
    if strategy.wrapping == "torchtitan-0.1" and groups:
        groups[-1].reshards_after_forward, groups[-1].post_forward = False, None
    root_segments = (first_segment, *between, last_segment)
    root = ParamGroup(
        "root", tuple(segment.name for segment in root_segments),
        tuple(parameter for segment in root_segments for parameter in segment.parameters), mesh,
        is_root=True, reshards_after_forward=False, ends_before_loss=is_titan and has_loss,
    )  # fmt: skip
    return [
        root,
        *(groups if experts_mesh is None else _add_experts(stage, [], groups, [], experts_mesh, strategy)),
    ]


def _tower_runs(blocks: Sequence[Segment], between: list[Segment], *, is_titan: bool) -> list[list[Segment]]:
    """The segments of a tower's blocks, each by itself, or with its projector as one (torchtitan b5bcd76c
    models/qwen3_5/parallelize.py `apply_fsdp_to_vision_encoder`).
    """
    return [[*blocks, *between]] if is_titan and blocks else [[block] for block in blocks]


def _add_experts(
    stage: Stage,
    first: list[ParamGroup],
    blocks: list[ParamGroup],
    last: list[ParamGroup],
    mesh: MeshInfo,
    strategy: Fsdp2Config,
) -> list[ParamGroup]:
    """The groups, with those of routed experts after their blocks. They are cut on dim 1 where there are
    fewer experts than ranks. torchtitan's groups name those that are prefetched with them, since the host
    waits in between (0.2.2 models/llama4/infra/parallelize.py `apply_fsdp`). `first` and `last` are the
    groups of embedding and head, unless the root has these.
    """
    segments = {segment.name: segment for segment in stage.workload.segments}
    expert_groups = {
        group.name: [_expert_group(group, segments[name], mesh, strategy) for name in group.segments]
        for group in blocks
    }
    inner = {
        name: [expert_group for expert_group in groups if expert_group is not None]
        for name, groups in expert_groups.items()
    }
    names = {name: [name, *(expert_group.name for expert_group in groups)] for name, groups in inner.items()}
    order = [group for group in (*first, *blocks, *last) if group.parameters]
    ordered_groups = []
    for number, group in enumerate(order):
        next_group = order[number + 1] if number + 1 < len(order) else None
        previous_group = order[number - 1] if number else None
        is_end = group in first, group in last
        if strategy.wrapping == "automodel":
            next_group = previous_group = None
        if next_group is not None:
            next_names = names.get(next_group.name, [next_group.name])
            group.forward_prefetch = tuple(next_names[:1] if is_end[0] else next_names)
        if previous_group is not None:
            previous_names = names.get(previous_group.name, [previous_group.name])
            group.backward_prefetch = tuple(previous_names[:1] if is_end[1] else previous_names)
        ordered_groups += [group, *inner.get(group.name, ())]
    return ordered_groups


def _expert_group(
    block: ParamGroup, segment: Segment, mesh: MeshInfo, strategy: Fsdp2Config
) -> ParamGroup | None:
    """The group of a block's routed experts: its hooks stand around the dispatch and the combination."""
    calls = segment.calls
    parameters = tuple(p for call in calls for p in call.parameters if p.rank_kind)
    if not parameters:
        return None
    indices = [number for number, call in enumerate(calls) if call.module.role is Role.EXPERT_PRODUCT]
    first, last = indices[0], indices[-1]
    while _is_dispatch(calls[first - 1].module):
        first -= 1
    while _is_dispatch(calls[last + 1].module):
        last += 1
    num_local = parameters[0].shape[0]
    is_alone = mesh.shard.size == 1 and mesh.replicate is None and not strategy.cpu_offload
    is_plain = strategy.wrapping == "automodel" and is_alone
    return ParamGroup(
        calls[indices[0]].name.rpartition(".")[0], (), parameters, mesh,
        reshards_after_forward=block.reshards_after_forward, post_forward=None,
        calls=None if is_plain else (calls[first].name, calls[last].name), is_plain=is_plain,
        shard_dimension=int(mesh.shard.size > num_local),
    )  # fmt: skip


def _is_dispatch(module: Module) -> bool:
    """Whether the module brings rows to or from the experts' ranks, or sorts them there."""
    work = module.op_spec
    if isinstance(work, Rearrange):
        return work.kind in ("sort", "unsort")
    return isinstance(work, Exchange) and work.group.startswith(EXPERT)


def _name(blocks: Sequence[Segment]) -> str:
    """The name of a group of blocks: the block's, or "first-number of the last"."""
    first, last = blocks[0].name, blocks[-1].name
    return first if first == last else f"{first}-{last.rpartition('.')[2]}"


def _element_bytes(parameter: Parameter, dtype: str) -> int:
    """Bytes of a gathered element: with "fp8", bf16 but for the weights that fp8 products read."""
    if dtype != "fp8":
        return DTYPE_BYTES[dtype]
    return 1 if parameter.in_fp8 else 2


def experts_mesh(stage: Stage, strategy: Fsdp2Config) -> MeshInfo | None:
    """The mesh of expert-parallel routed experts ("efsdp" of torchtitan). None without expert parallelism."""
    if stage.experts is None:
        return None
    replicas = strategy.replicate
    size = stage.experts.size // replicas
    shard = stage.expert_group(size=size)
    replicate = stage.expert_group("expert_replicate", replicas, size) if replicas > 1 else None
    return MeshInfo(shard, replicate)


def dense_mesh(stage: Stage, strategy: Fsdp2Config) -> MeshInfo:
    """The mesh of all other parameters. Ranks that shard together are consecutive, and replicas are `shard
    size` apart.
    """
    size, reshard = stage.ranks // strategy.replicate, strategy.reshard_after_forward
    shard = stage.group("shard", size)
    replicate = stage.group("replicate", strategy.replicate, size) if strategy.replicate > 1 else None
    is_size = isinstance(reshard, int) and not isinstance(reshard, bool)
    return MeshInfo(shard, replicate, stage.group("post_forward", reshard) if is_size else None)


@dataclass
class ParamGroupState:
    """The state of FSDPParamGroup."""

    is_unsharded: bool = False
    is_sharded_post_forward: bool = False
    all_gather: int | None = None  # its event, while a result is pending
    all_gather_bytes: int = 0
    reshard_event: int | None = None
    post_forward_indices: list[int] = field(default_factory=list)
    """The group's indices in the order of forwards, one per forward whose backward has not run. A backward
    takes the last, which is the newest.
    """

    @property
    def has_event(self) -> bool:
        """Whether an event is waited for."""
        return self.reshard_event is not None or bool(self.all_gather and self.all_gather >= 0)

    @property
    def summary(self) -> Hashable:
        """All but the events."""
        is_pending = self.all_gather is not None
        return (
            self.is_unsharded,
            self.is_sharded_post_forward,
            is_pending,
            tuple(self.post_forward_indices),
        )

    def restore(self, summary: tuple[bool, bool, bool, tuple[int, ...]]) -> None:
        """Go on as from a `summary`, without an event."""
        self.is_unsharded, self.is_sharded_post_forward, is_pending, indices = summary
        self.all_gather, self.all_gather_bytes, self.reshard_event = -1 if is_pending else None, 0, None
        self.post_forward_indices = list(indices)


@dataclass
class ParamGroupGradient:
    """The gradients of one group of parameters."""

    unsharded_bytes: int = 0
    """Bytes computed by autograd in this backward."""
    accumulated_bytes: int = 0
    """Bytes left by earlier micro-batches without reduction."""
    all_reduce_bytes: int = 0
    """Buffer of the all-reduce, kept until the group's next reduction."""
    partial_bytes: int = 0
    """Bytes of the shard's sum over micro-batches, which is not summed over the replicas yet."""
    has_shard: bool = False
    post_reduce_event: int | None = None

    @property
    def has_event(self) -> bool:
        """Whether an event is waited for."""
        return self.post_reduce_event is not None

    @property
    def summary(self) -> Hashable:
        """All but the event."""
        return (
            self.unsharded_bytes,
            self.accumulated_bytes,
            self.all_reduce_bytes,
            self.partial_bytes,
            self.has_shard,
        )

    def restore(self, summary: tuple[int, int, int, int, bool]) -> None:
        """Go on as from a `summary`, without an event."""
        (
            self.unsharded_bytes,
            self.accumulated_bytes,
            self.all_reduce_bytes,
            self.partial_bytes,
            self.has_shard,
        ) = summary
        self.post_reduce_event = None
