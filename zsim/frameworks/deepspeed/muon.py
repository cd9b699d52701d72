"""Muon under ZeRO: unsharded gradients are orthogonalised before the norm is taken, once per step.

DeepSpeed 0.19.8. Stages 1 and 2 (runtime/zero/stage_1_and_2.py `get_flat_partition`): every rank does that
for the matrices that its partition overlaps. Two ranks that share a matrix both do it. Momentum is of whole
matrices, in the gradients' type, and a second buffer of its size takes the momentum of the step. Stage 3
(runtime/zero/stage3.py `_apply_muon_to_accumulated_grads`, `_muon_update_sub_group`): gradients, then
momenta, are gathered, up to `reduce_bucket_size` elements at a time. Of as many matrices as there are ranks
every rank takes one. Then the updates and momenta are gathered, padded to the largest where shapes differ.

# [Note: heads]
With `per_head_muon` each head of attention's projections is a separate matrix. `__init__.py`
(`_classify_leaf`, `_geometry_candidates`, `_confirm`, `resolve_per_head_muon_after_sharding`): by the last
part of their module's name, where their rows are as many as heads of the width that the config says. Fused
projections and multi-head latent attention's down ones are left whole. `original_muon.py`
`_per_head_orthogonalize`: heads are one batch of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import cast_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.deepspeed.muon_kernels import matrix_kernels, products_flops, step_kernels
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import ZeroParameter
from zsim.frameworks.deepspeed.stage12.partition_owners import FlatGroup
from zsim.operations.operation import operations_of
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.specs.model.spec import Attention, ModelSpec

_QUERIES = ("q_proj", "query", "wq", "q_b_proj")
_KEYS, _VALUES = ("k_proj", "key", "wk"), ("v_proj", "value", "wv")
_LATENT = "kv_b_proj"
_UNSPLIT = (
    "qkv_proj", "query_key_value", "c_attn", "in_proj_qkv", "wqkv",
    "q_a_proj", "kv_a_proj", "kv_a_proj_with_mqa",
)  # fmt: skip

Shape = tuple[int, ...]


def momentum_dtype(config: DeepSpeedConfig) -> str:
    """The type of momenta: in stage 2 that of `param.grad`, in stage 1 of accumulated gradients, in stage 3
    of communication."""
    if config.stage == 3:
        return config.communication_dtype
    return config.param_dtype if config.stage == 2 else config.grad_accum_dtype


def momentum_bytes(flat: FlatGroup, config: DeepSpeedConfig) -> int:
    """Bytes of the momenta on the fullest rank, in stages 1 and 2."""
    return flat.largest_overlap_numel() * DTYPE_BYTES[momentum_dtype(config)]


def muon_shapes(model: ModelSpec, config: DeepSpeedConfig) -> dict[str, Shape]:
    """The shape of every parameter, as Muon takes it: with `per_head_muon` projections of attention are a
    batch of matrices. Raises InputError for `per_head_muon` of a model that has none of these."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if not config.optimizer.by_head:
        return shapes
    head_shapes = head_matrices(model)
    if not head_shapes:
        raise InputError(
            f"{config.name}: optimizer.params.per_head_muon: found true with '{model.name}', in which "
            "DeepSpeed finds no heads ('no attention projection could be tagged'); expected false"
        )
    return shapes | head_shapes


def orthogonalise_partition(
    builder: PlanBuilder, config: DeepSpeedConfig, flat: FlatGroup, shapes: Mapping[str, Shape]
) -> None:
    """Orthogonalise the matrices of stages 1 and 2, on the rank whose matrices take most FLOPs. The committed
    momentum is copied first.
    """
    method, dtype = config.optimizer.orthogonalisation, momentum_dtype(config)
    work = {name: products_flops(shapes[name], method) for name in flat.numels}
    flops_per_rank = flat.overlap_per_rank(work)
    names = flat.overlapping_parameters(flops_per_rank.index(max(flops_per_rank)))
    size = sum(flat.numels[name] for name in names) * DTYPE_BYTES[dtype]
    builder.kernels("stage momentum", move_kernels(size, size))
    for name in names:
        builder.kernels(f"orthogonalise {name}", matrix_kernels(shapes[name], dtype, method))


def step_matrices(builder: PlanBuilder, config: DeepSpeedConfig, numel: int, name: str) -> None:
    """`MuonWithAuxAdam.step` of a flat partition, and the cast of its weights."""
    stored = config.master_weights_dtype
    kernels: tuple[Kernel, ...] = step_kernels(numel, stored, stored)
    if config.precision != "fp32":
        kernels = (*kernels, *cast_kernels(numel, stored, "bf16"))
    builder.kernels(name, kernels, overhead="optimizer_step")


def orthogonalise_sub_group(
    builder: PlanBuilder,
    config: DeepSpeedConfig,
    parameters: Sequence[ZeroParameter],
    shapes: Mapping[str, Shape],
    group: str,
    ranks: int,
) -> None:
    """Stage 3, one sub-group."""
    for chunk in _chunks(parameters, config.zero.reduce_bucket_size):
        padded = sum(parameter.padded_numel for parameter in chunk)
        size = padded * DTYPE_BYTES[config.communication_dtype]
        temporary_bytes = (
            4 * size if ranks > 1 else 0
        )  # what is gathered, and put in order, of gradients and momenta
        builder.allocate("buffers", temporary_bytes)
        for state in ("gradients", "momenta"):
            _gather(builder, config, f"{state} of matrices", size, group, ranks)
            builder.kernels(f"put {state} in order", move_kernels(size, size, launches=ranks * len(chunk)))
        for start in range(0, len(chunk), ranks):
            _orthogonalise_round(builder, config, chunk[start : start + ranks], shapes, group, ranks)
        shards = sum(parameter.shard_numel for parameter in chunk) * DTYPE_BYTES[config.communication_dtype]
        builder.kernels(
            "keep update and momentum", move_kernels(2 * shards, 2 * shards, launches=2 * len(chunk))
        )
        builder.free("buffers", temporary_bytes)


def _chunks(parameters: Sequence[ZeroParameter], max_numel: int) -> Iterator[list[ZeroParameter]]:
    """Chunks of up to `max_numel` elements, each with at least one matrix."""
    chunk: list[ZeroParameter] = []
    for parameter in parameters:
        if chunk and sum(member.numel for member in chunk) + parameter.numel > max_numel:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk


def _orthogonalise_round(
    builder: PlanBuilder,
    config: DeepSpeedConfig,
    matrices: Sequence[ZeroParameter],
    shapes: Mapping[str, Shape],
    group: str,
    ranks: int,
) -> None:
    """One matrix per rank, of which the slowest counts. Then updates and momenta go to all ranks."""
    method, dtype = config.optimizer.orthogonalisation, config.communication_dtype
    slowest = max(matrices, key=lambda matrix: products_flops(shapes[matrix.name], method))
    builder.kernels(f"orthogonalise {slowest.name}", matrix_kernels(shapes[slowest.name], dtype, method))
    largest = max(matrix.numel for matrix in matrices)
    size = ranks * largest * DTYPE_BYTES[dtype]
    for state in ("updates", "momenta"):
        _gather(builder, config, state, size, group, ranks)


def _gather(
    builder: PlanBuilder, config: DeepSpeedConfig, state: str, size: int, group: str, ranks: int
) -> None:
    if ranks > 1:
        builder.collective(
            "all_gather", size, config.communication_dtype, group, stream=COMPUTE, name=f"all_gather {state}"
        )


def head_matrices(model: ModelSpec) -> dict[str, Shape]:
    """The shape (heads, width, columns) of each projection that is split by heads, by its name."""
    modules = [module for block in model.unique_blocks for module in block.modules]
    attentions = operations_of(modules, Attention)
    shapes: dict[str, Shape] = {}
    for name, parameter in model.named_parameters():
        components = name.split(".")
        leaf = components[-2].lower() if len(components) > 1 else ""
        if len(parameter.shape) != 2 or leaf.startswith(_UNSPLIT):
            continue
        counts = {
            heads
            for work in attentions
            for heads, width in _heads_of(leaf, work)
            if heads * width == parameter.shape[0]
        }
        if len(counts) == 1:
            heads = counts.pop()
            shapes[name] = (heads, parameter.shape[0] // heads, parameter.shape[1])
    return shapes


def _heads_of(leaf: str, work: Attention) -> list[tuple[int, int]]:
    """(heads, width of each) that a projection of this name may have."""
    if leaf.startswith(_LATENT):
        return [(work.num_heads, _unrotated(work) + work.v_head_dim)] if work.is_latent else []
    if leaf.startswith(_KEYS):
        return [(work.num_kv_heads, work.qk_head_dim)]
    if leaf.startswith(_VALUES):
        return [(work.num_kv_heads, work.v_head_dim)]
    return [(work.num_heads, work.qk_head_dim)] if leaf.startswith(_QUERIES) else []


def _unrotated(work: Attention) -> int:
    return work.qk_head_dim - (work.rotary_width or 0)
