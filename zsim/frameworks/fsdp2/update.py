"""The update of FSDP2's shards, which are DTensors. Python unwraps them before torch works on them, once per
list of tensors, or for every operator in an optimizer that loops over tensors.

# [Note: Muon]
The products of torch's Muon become collectives. torch 2.13 optim/_muon.py knows nothing of shards: the
products of `zsim.cost.optimizers` run on DTensors, and DTensor moves operands where a product needs
them. For every product it takes the cheapest of the placements that
`torch/distributed/tensor/_ops/_matrix_ops.py` lists, by the costs of
`torch/distributed/tensor/_collective_utils.py` (a ring with 87.7 GB/s, or 22 % of it and more latency if the
mesh is larger than a node). X is sharded by rows, or by columns if the weight is tall, whose transpose it is.

# [Note: the three products]
X X^T is free by columns: a partial sum. By rows either X^T is gathered, or X and X^T change to columns by an
all-to-all each. A partial sum A is all-reduced for A A, of which it makes a partial sum again. For X + B X by
columns B is all-reduced. By rows B is reduce-scattered and X gathered, unless two all-to-alls and an
all-reduce, which leave X by columns, are cheaper. `tests/frameworks/fsdp2/test_muon.py` has torch's
own calls.

# [Note: scales]
Weights that FSDP2 gathers in fp8 have scales: maxima of sharded tensors, over all ranks that shard. Read in
torchao 0.15 float8/fsdp_utils.py: `WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather` and
`precompute_float8_dynamic_scale_for_fsdp`.

# [Note: states on the host]
prime-rl wraps the optimizer (559b4477 trainer/optim/state_offload.py `CPUOffloadOptimizer`): all states are
copied from pinned memory before the update and back behind it. The copies back go to pageable memory, which
the host waits for, and from there into pages that are pinned (`pin_memory`, which reads and writes every
byte).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import norm_kernels
from zsim.cost.optimizers import STEPS, UpdatedTensor, elementwise_kernels, product
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.fsdp2.param_groups import MeshInfo, ParamGroup
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import CollectiveKind
from zsim.plan.shared.host_side import HostSide
from zsim.plan.shared.optimizer import clip_gradients, lazy_states, update
from zsim.plan.stage import Stage
from zsim.specs.strategy.parallelism import EXPERT, EXPERT_TENSOR, PIPELINE, TENSOR
from zsim.specs.strategy.training import TrainingConfig

_ELEMENT_BYTES = 2  # bf16
_BANDWIDTH = 87.7 * 2**30 / 1e6  # bytes per microsecond, as _collective_utils.py counts (GiB per GB/s)


def update_param_groups(
    stage: Stage,
    strategy: Fsdp2Config,
    meshes: tuple[MeshInfo, MeshInfo | None],
    groups: Sequence[ParamGroup],
    updated: Sequence[UpdatedTensor],
) -> None:
    """Clip the gradients of `groups` and update the tensors `updated`. `meshes` is as in `norm_sums`."""
    builder, training, mesh = stage.builder, stage.training, meshes[0]
    numels = [shard for group in groups for shard in group.trainable_shards]
    if training.gradient_clipping > 0:
        builder.host("norm of DTensors", "dtensor_in_list", events=len(numels))
    clip_gradients(builder, training, numels, norm_sums(meshes, groups))
    is_loop = training.optimizer_implementation == "for_loop"
    cost = "dtensor_update" if is_loop else "dtensor_in_list"
    builder.host("update of DTensors", cost, events=len(numels))
    if training.optimizer == "muon" and mesh.shard.size > 1:
        _update_matrices(stage, strategy, mesh, [tensor for tensor in updated if tensor.is_matrix])
        updated = [tensor for tensor in updated if not tensor.is_matrix]
    if strategy.offload_states:
        _update_brought(builder, training, updated)
    else:
        update(builder, training, updated)
    _precompute_scales(builder, strategy, groups)
    builder.free("gradients", DTYPE_BYTES[training.stored_dtype] * sum(numels))


def _update_brought(builder: PlanBuilder, training: TrainingConfig, updated: Sequence[UpdatedTensor]) -> None:
    """Update with optimizer states that wait in host memory, see [Note: states on the host]."""
    size, host = lazy_states(training, updated).bytes, HostSide(builder)
    builder.allocate("optimizer_states", size)
    host.copy("optimizer states to the GPU", "h2d", size, COMPUTE)
    update(builder, training, updated)
    host.copy("optimizer states to host", "d2h", size, COMPUTE, is_pinned=False)
    host.fill("pin optimizer states", 2 * size)
    builder.free("optimizer_states", size)


def norm_sums(
    meshes: tuple[MeshInfo, MeshInfo | None], groups: Sequence[ParamGroup]
) -> list[tuple[str, int]]:
    """(group, bytes) of the all-reduces of a gradient norm, in order. `meshes` are the mesh of the dense
    parameters and that of the experts, if they have one.

    The norm of a DTensor is summed over each dimension of its mesh, one number per tensor, and torchtitan
    sums the results over the pipeline (v0.2.2 distributed/utils.py `clip_grad_norm_`).
    """
    mesh, experts = meshes
    is_inner = [group.calls is not None or group.is_plain for group in groups]
    expert_bytes = 4 * sum(
        len(group.parameters) for group, inner in zip(groups, is_inner, strict=True) if inner
    )
    size = 4 * sum(len(group.trainable_shards) for group in groups) - expert_bytes
    sums = [(mesh.shard.name, size), (TENSOR, size), (PIPELINE, 4)]
    if experts is not None:
        expert_groups = [experts.shard.name, EXPERT, EXPERT_TENSOR]
        sums[-1:-1] = [(name, expert_bytes) for name in expert_groups]
    return sums


def _update_matrices(
    stage: Stage, strategy: Fsdp2Config, mesh: MeshInfo, matrices: Sequence[UpdatedTensor]
) -> None:
    """Issue Muon's update, which moves matrices between ranks. Their states and gradients are fp32."""
    shard = mesh.shard
    costs = DTensorCosts(shard.size, stage.ranks <= strategy.gpus_per_node)
    for matrix in matrices:
        update_matrix(stage.builder, matrix, shard.name, costs, stored_dtype="fp32", gradient_dtype="fp32")


@dataclass(frozen=True, slots=True)
class MuonCall:
    """Either a collective of `numel` bf16 elements, or a product."""

    kind: CollectiveKind | None = None
    numel: int = 0
    kernel: Kernel | None = None


@dataclass(frozen=True, slots=True)
class DTensorCosts:
    """DTensor's estimates, in microseconds, for `ranks` ranks of one mesh dimension."""

    ranks: int
    is_inside_node: bool

    def gather(self, size: float) -> float:
        """An all-gather to `size` bytes, or a reduce-scatter of them."""
        return self._ring(size, self.ranks - 1)

    def reduce(self, size: float) -> float:
        """An all-reduce."""
        return self._ring(size, 2 * (self.ranks - 1))

    def exchange(self, size: float) -> float:
        """An all-to-all of a tensor of `size` bytes, of which a rank has its part. A microsecond is added "to
        favor allgather".
        """
        return self.gather(size / self.ranks) + 1.0

    def _ring(self, size: float, hops: int) -> float:
        slow, latency = (1.0, 0.6) if self.is_inside_node else (0.22, 2.7)
        return 6.6 + hops * latency + size * hops / self.ranks / (_BANDWIDTH * slow)


def muon_calls(rows: int, columns: int, costs: DTensorCosts) -> Iterator[MuonCall]:
    """The products and collectives of one matrix, in order. See [Note: the three products]."""
    ranks, is_tall = costs.ranks, rows > columns
    short, long = (columns, rows) if is_tall else (rows, columns)
    gram, matrix_numel = short * short, short * long
    is_row_sharded = not is_tall
    yield MuonCall("all_reduce", 1)  # the norm
    for _ in range(STEPS):
        gathers = is_row_sharded and costs.gather(_ELEMENT_BYTES * matrix_numel) <= 2 * costs.exchange(
            _ELEMENT_BYTES * matrix_numel
        )
        if gathers:
            yield MuonCall("all_gather", matrix_numel)
            yield MuonCall(kernel=product(short // ranks, short, long, 0))
            yield MuonCall("all_gather", gram)
            yield MuonCall(kernel=product(short // ranks, short, short, gram // ranks))
            yield MuonCall("all_gather", matrix_numel)
            yield MuonCall(kernel=product(short // ranks, long, short, matrix_numel // ranks))
            continue
        if is_row_sharded:
            yield MuonCall("all_to_all", matrix_numel)
            yield MuonCall("all_to_all", matrix_numel)
        yield MuonCall(kernel=product(short, short, long // ranks, 0))
        yield MuonCall("all_reduce", gram)
        yield MuonCall(kernel=product(short, short, short, gram))
        row_cost = costs.gather(_ELEMENT_BYTES * gram) + costs.gather(_ELEMENT_BYTES * matrix_numel)
        column_cost = costs.reduce(_ELEMENT_BYTES * gram) + 2 * costs.exchange(_ELEMENT_BYTES * matrix_numel)
        if is_row_sharded and row_cost <= column_cost:
            yield MuonCall("reduce_scatter", gram)
            yield MuonCall("all_gather", matrix_numel)
            yield MuonCall(kernel=product(short // ranks, long, short, matrix_numel // ranks))
            continue
        yield MuonCall("all_reduce", gram)
        if is_row_sharded:
            yield MuonCall("all_to_all", matrix_numel)
            yield MuonCall("all_to_all", matrix_numel)
            is_row_sharded = False
        yield MuonCall(kernel=product(short, long // ranks, short, matrix_numel // ranks))
    if not is_tall and not is_row_sharded:
        yield MuonCall("all_to_all", matrix_numel)


def update_matrix(
    builder: PlanBuilder,
    tensor: UpdatedTensor,
    group: str,
    costs: DTensorCosts,
    *,
    stored_dtype: str,
    gradient_dtype: str,
) -> None:
    """Issue Muon's update of one sharded matrix, on the compute stream, which waits for every collective."""
    momentum_kernels = elementwise_kernels(tensor.numel, stored_dtype, gradient_dtype)
    builder.kernels("muon momentum", momentum_kernels, overhead="optimizer_step")
    for call in muon_calls(tensor.full_shape[0], tensor.full_shape[1], costs):
        if call.kind is not None:
            size = call.numel * _ELEMENT_BYTES
            builder.collective(call.kind, size, "bf16", group, stream=COMPUTE, name=f"{call.kind} muon")
        elif call.kernel is not None:
            builder.kernels("muon product", (call.kernel,))


def gathers_fp8(strategy: Fsdp2Config) -> bool:
    """Whether the weights of fp8 products are gathered in fp8."""
    return strategy.param_dtype == "fp8"


def reduce_scales(builder: PlanBuilder, strategy: Fsdp2Config, group: ParamGroup, stream: str) -> int:
    """Sum up each weight's maximum before it is cast, unless scales are computed beforehand. Returns the
    bytes of fp32 shards that are read for the maxima.
    """
    if strategy.precomputes_scales or not gathers_fp8(strategy):
        return 0
    for _ in range(group.num_in_fp8):
        builder.collective(
            "all_reduce", 4, "fp32", group.mesh.shard.name, stream=stream,
            name=f"all_reduce maximum of {group.name}", module=group.name,
        )  # fmt: skip
    return 4 * group.fp8_numel // group.shard_size


def _precompute_scales(builder: PlanBuilder, strategy: Fsdp2Config, groups: Sequence[ParamGroup]) -> None:
    """After the update: the maxima of all weights, then one all-reduce of all of them."""
    count = sum(group.num_in_fp8 for group in groups)
    if not (strategy.precomputes_scales and gathers_fp8(strategy) and count):
        return
    numel = sum(group.fp8_numel // group.shard_size for group in groups)
    builder.kernels("maxima of fp8 weights", norm_kernels(numel, "fp32", count))
    shard = groups[0].mesh.shard
    if shard.size > 1:
        builder.collective(
            "all_reduce",
            4 * count,
            "fp32",
            shard.name,
            stream=COMPUTE,
            name="all_reduce maxima of fp8 weights",
        )
