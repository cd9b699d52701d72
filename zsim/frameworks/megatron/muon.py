"""Which parameters Megatron's Muon treats as matrices, who owns them, and the update of one.

Read from Megatron-Core 0.16.1 core/optimizer/muon.py and layer_wise_optimizer.py (`shard_params`), and 0.18.2
core/optimizer/layer_wise_optimizer.py (`_compute_per_buffer_param_layout`).

Matrices are all parameters of two dimensions except the word embedding and the output layer. Routers, gates
of shared experts and learned positions are matrices too, and every routed expert has its own. A column is cut
along its rows, a row along its columns. Transformer Engine marks experts' products, whose communication is
Megatron's, as cut along their rows, both of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

from zsim.cost.kernels.kernel import Kernel
from zsim.errors import NotSimulatedError
from zsim.frameworks.megatron.buffer import Bucket, BufferLayout
from zsim.frameworks.megatron.muon_kernels import MuonMatrix, muon_calls, muon_flops, transient_bytes
from zsim.frameworks.megatron.settings.muon import MegatronMuon, MuonOrthogonalization
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.model.fusion import QKV
from zsim.specs.model.spec import Attention, Embedding, Linear, Parameter
from zsim.specs.strategy.mesh import EXPERT_TENSOR, TENSOR

_TENSOR_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128  # elements
_MIN_FILL_FRACTION = 0.9  # PADDING_FLOOR
_CORES = (Role.MIXER, Role.ACTIVATION)


@dataclass(frozen=True, slots=True)
class MuonTensor:
    """A parameter as Megatron has it."""

    name: str
    numel: int
    matrix: MuonMatrix | None
    """None for a parameter that is no matrix."""
    group: str = TENSOR
    """Its tensor-parallel ranks."""
    is_experts: bool = False
    """Whether ranks other than those of data parallelism have it."""


def muon_tensors(
    stage: Stage, named: Mapping[str, Parameter], muon: MegatronMuon
) -> dict[str, list[MuonTensor]]:
    """The trained parameters `named` of a stage, in their order: each as one tensor, or one of every expert.

    Raises NotSimulatedError where tensor-parallel ranks' parts of a matrix are not known.
    """
    model = stage.workload.model
    vocabulary = model.vocab_size // stage.parallelism.tensor
    matrices: dict[str, MuonMatrix] = {}
    for segment in stage.workload.segments:
        for call, is_row, reader in _calls_with_roles(segment):
            for parameter in call.parameters:
                if (matrix := _matrix(call, parameter, is_row, reader, vocabulary, muon)) is not None:
                    matrices[call.parameter_name(parameter)] = matrix
    if muon.orthogonalization.mode != "blockwise" and stage.parallelism.tensor > 1:
        _check_cut_dimensions(stage)
    return {name: list(_tensors(name, parameter, matrices.get(name))) for name, parameter in named.items()}


def _tensors(name: str, parameter: Parameter, matrix: MuonMatrix | None) -> Iterator[MuonTensor]:
    is_expert = bool(parameter.rank_kind)
    is_stacked = len(parameter.shape) == 3 and matrix is not None
    count = parameter.shape[0] if is_stacked else 1
    for number in range(count):
        tensor_name = f"{name}.{number}" if is_stacked else name
        group = EXPERT_TENSOR if is_stacked else TENSOR
        yield MuonTensor(tensor_name, prod(parameter.shape) // count, matrix, group, is_expert)


def _calls_with_roles(segment: Segment) -> Iterator[tuple[ModuleCall, bool, Attention | None]]:
    """Calls with whether their product is a row (after attention or an activation), and the attention that
    reads a product's output.
    """
    is_row = False
    for number, call in enumerate(segment.calls):
        if call.module.role in _CORES:
            is_row = True
        later_modules = (later_call.module for later_call in segment.calls[number + 1 :])
        readers = (*_CORES, Role.PRODUCT)
        reader = next((module.op_spec for module in later_modules if module.role in readers), None)
        yield call, is_row, reader if isinstance(reader, Attention) else None
        if call.module.role in (Role.PRODUCT, Role.EXPERT_PRODUCT):
            is_row = False


def _matrix(
    call: ModuleCall,
    parameter: Parameter,
    is_row: bool,
    reader: Attention | None,
    vocabulary: int,
    muon: MegatronMuon,
) -> MuonMatrix | None:
    work = call.module.op_spec
    if isinstance(work, GroupedLinear) and len(parameter.shape) == 3:
        return MuonMatrix(parameter.shape[1], parameter.shape[2], sharded_dimension=0)
    if len(parameter.shape) != 2 or isinstance(work, GroupedLinear):
        return None
    if isinstance(work, Embedding):
        return None if work.rows == vocabulary else MuonMatrix(*parameter.shape)
    if not isinstance(work, Linear) or work.out_features == 1:
        return MuonMatrix(*parameter.shape)
    if call.segment == "after" and work.out_features == vocabulary:
        return None
    widths: tuple[int, ...] = ()
    if muon.splits_qkv and reader is not None and call.name.rpartition(".")[2] == QKV:
        keys = reader.num_kv_heads * reader.qk_head_dim
        widths = (reader.num_heads * reader.qk_head_dim, keys, reader.num_kv_heads * reader.v_head_dim)
        if sum(widths) != work.out_features:
            raise NotSimulatedError(
                f"strategy.muon_split_qkv: the {work.out_features} rows of {call.name} on a rank are not "
                f"{' + '.join(map(str, widths))} of its heads; expected false, or fewer tensor-parallel ranks"
            )
    return MuonMatrix(work.out_features, work.in_features, widths, 1 if is_row else 0)


def _check_cut_dimensions(stage: Stage) -> None:
    op_specs = [call.module.op_spec for segment in stage.workload.segments for call in segment.calls]
    is_latent = any(op_spec.is_latent for op_spec in op_specs)
    if is_latent or stage.workload.model.trainable_numel < stage.workload.model.numel:
        subject = "multi-head latent attention" if is_latent else "adapters or frozen weights"
        raise NotSimulatedError(
            f"strategy.muon_tp_mode: which dimension is cut is not known of {subject}; expected 'blockwise'"
        )


# -- owners ---------------------------------------------------------------------------------------------


def assign_by_size(tensors: Sequence[MuonTensor], ranks: int) -> list[list[MuonTensor]]:
    """The tensors that each rank owns: the smallest first, to the ranks up and down (`shard_params`).
    Matrices come before all else of their size.
    """
    rank_cycle = [*range(ranks), *reversed(range(ranks))]
    owned_tensors: list[list[MuonTensor]] = [[] for _ in range(ranks)]
    for number, tensor in enumerate(
        sorted(tensors, key=lambda tensor: (tensor.numel, tensor.matrix is None))
    ):
        owned_tensors[rank_cycle[number % len(rank_cycle)]].append(tensor)
    return owned_tensors


def make_whole_tensor_layout(
    tensors: Mapping[str, Sequence[MuonTensor]], bucket_size: int | None, ranks: int, first: int
) -> tuple[BufferLayout, list[list[MuonTensor]]]:
    """A buffer whose tensors are not cut between ranks, and the tensors that each rank owns. `tensors` are by
    parameter, whose experts are not split over buckets here. `first` is the number of its first bucket.

    Buckets are in the order of backward, up to `bucket_size` elements, or 0.9 of the size that `ranks` of its
    largest tensor would take. In each, the largest tensor goes first, to the rank that has least. All ranks'
    parts are as long as the longest.
    """
    divisor = lcm(_TENSOR_ALIGNMENT, lcm(ranks, _BUCKET_ALIGNMENT) // ranks)
    owned_tensors: list[list[MuonTensor]] = [[] for _ in range(ranks)]
    ranges: dict[str, tuple[int, int]] = {}
    buckets: list[Bucket] = []
    names: list[str] = []
    end = 0

    def close() -> int:
        shards: list[list[MuonTensor]] = [[] for _ in range(ranks)]
        ends = [0] * ranks
        chunk = [tensor for name in names for tensor in tensors[name]]
        for tensor in sorted(chunk, key=lambda tensor: -tensor.numel):
            rank = ends.index(min(ends))
            shards[rank].append(tensor)
            ends[rank] = _aligned(ends[rank], _TENSOR_ALIGNMENT) + tensor.numel
        size = _aligned(max(ends), divisor)
        for rank, shard in enumerate(shards):
            start = end + rank * size
            for tensor in shard:
                start = _aligned(start, _TENSOR_ALIGNMENT)
                ranges[tensor.name] = start, start + tensor.numel
                start += tensor.numel
            owned_tensors[rank] += shard
        buckets.append(Bucket(first + len(buckets), end, end + ranks * size, tuple(names)))
        names.clear()
        return end + ranks * size

    total_numel = largest = 0
    for name in reversed(list(tensors)):
        names.append(name)
        total_numel += sum(tensor.numel for tensor in tensors[name])
        largest = max(largest, *(tensor.numel for tensor in tensors[name]))
        if bucket_size is not None and total_numel >= max(
            bucket_size, int(ranks * largest * _MIN_FILL_FRACTION)
        ):
            end, total_numel, largest = close(), 0, 0
    if names:
        end = close()
    return BufferLayout(tuple(buckets), ranges), owned_tensors


def fullest_rank_tensors(
    owned_tensors: Sequence[Sequence[MuonTensor]], weight: Callable[[MuonTensor], float]
) -> Sequence[MuonTensor]:
    """The tensors of the rank with the largest sum of `weight`."""
    return max(owned_tensors, key=lambda tensors: sum(map(weight, tensors)), default=())


def flops(tensor: MuonTensor, work: MuonOrthogonalization, builder: PlanBuilder) -> float:
    """FLOPs of a matrix's products, 0 for a tensor that is no matrix."""
    return muon_flops(tensor.matrix, work, _ranks(builder, tensor.group)) if tensor.matrix else 0.0


# -- update ---------------------------------------------------------------------------------------------


def update_matrix(builder: PlanBuilder, tensor: MuonTensor, work: MuonOrthogonalization) -> None:
    """Issue the update of one matrix, in line: kernels up to every collective are one op."""
    assert tensor.matrix is not None
    ranks = _ranks(builder, tensor.group)
    temporary_bytes = transient_bytes(tensor.matrix, work, ranks)
    name, kernels = f"muon {tensor.name}", list[Kernel]()
    builder.allocate("buffers", temporary_bytes, owner=name)
    for call in muon_calls(tensor.matrix, work, ranks):
        kernels += call.kernels
        if call.collective and ranks > 1:
            builder.kernels(name, kernels)
            kernels = []
            builder.collective(
                call.collective, call.bytes, call.dtype, tensor.group, stream=COMPUTE,
                name=f"{call.collective} {call.name} of {tensor.name}",
            )  # fmt: skip
    builder.kernels(name, kernels)
    builder.free("buffers", temporary_bytes, owner=name)


def _ranks(builder: PlanBuilder, group: str) -> int:
    return builder.groups[group].size if group in builder.groups else 1


def _aligned(position: int, multiple: int) -> int:
    return -(-position // multiple) * multiple
