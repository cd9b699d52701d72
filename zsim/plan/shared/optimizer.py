"""The end of every framework's step: gradient clipping and the optimizer's kernels."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import cast_kernels, norm_kernels, scale_kernels
from zsim.cost.memory import quantisation_bytes, stored_bytes
from zsim.cost.optimizers import UpdatedTensor, state_tensors, update_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Copy, Memory
from zsim.plan.workload.workload import Workload
from zsim.specs.model.spec import Parameter
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.specs.strategy.training import TrainingConfig

UPDATE = "optimizer step"
_MIN_PAGED_NUMEL = 100_000  # elements of a state; bitsandbytes 0.50.2 `get_state_buffer`


def lazy_states(training: TrainingConfig, tensors: Sequence[UpdatedTensor]) -> Memory:
    """Optimizer states of this rank's part of each tensor, without those in `paged_states`. torch.optim's
    first step allocates them tensor by tensor (`_init_group` in torch/optim/adamw.py, 2.13). composer's
    DecoupledAdamW does the same.

    FSDP1's tensors are the flat parameters, also with `use_orig_params`, where torch has slices of them.
    """
    unpaged = [tensor for tensor in tensors if not _is_paged(training, tensor)]
    sizes = state_tensors(training.optimizer, unpaged, training.stored_dtype)
    return Memory("optimizer_states", sum(sizes), lazy_tensors=sizes)


def paged_states(training: TrainingConfig, tensors: Sequence[UpdatedTensor]) -> list[Memory]:
    """States in unified memory that is on the host between steps: see [Note: paged states] of
    `zsim.plan.make`."""
    paged_tensors = [tensor for tensor in tensors if _is_paged(training, tensor)]
    return (
        [Memory("optimizer_states", _state_bytes(training, paged_tensors), "host")] if paged_tensors else []
    )


def parameter_bytes(workload: Workload, dtype: str) -> int:
    """Bytes of all parameters, each in its own type or else in `dtype`, and of the scales of 4-bit ones."""
    parameters = [parameter for _, parameter in workload.model.named_parameters()]
    if all(not parameter.stored_dtype for parameter in parameters):
        return workload.numel * DTYPE_BYTES[dtype]
    return sum(stored_bytes(parameter, dtype) + quantisation_bytes(parameter) for parameter in parameters)


def frozen_bytes(workload: Workload, dtype: str) -> int:
    """Bytes of the parameters that are not trained, as `parameter_bytes` counts them."""
    frozen = (parameter for _, parameter in workload.model.named_parameters() if not parameter.trainable)
    return sum(stored_bytes(parameter, dtype) + quantisation_bytes(parameter) for parameter in frozen)


def optimizer_tensors(
    workload: Workload, shards: Sequence[tuple[Parameter, tuple[int, ...]]]
) -> list[UpdatedTensor]:
    """The rank's shards as the optimizer sees them, from pairs of a parameter and its shard's shape. Weights
    of the blocks' products are the matrices that Muon treats separately.
    """
    blocks = (call for segment in workload.segments if segment.kind == "block" for call in segment.calls)
    linear_calls = (call for call in blocks if call.module.role is Role.PRODUCT)
    matrices = {
        id(parameter) for call in linear_calls for parameter in call.parameters if len(parameter.shape) == 2
    }
    return [UpdatedTensor(shape, parameter.shape, id(parameter) in matrices) for parameter, shape in shards]


def partition_states(training: TrainingConfig, numel: int, dtype: str) -> tuple[int, ...]:
    """Bytes of each state of a flat partition of `numel` elements, by a framework that keeps moments in
    `dtype`."""
    moments = optimizer_of(training.optimizer).moments
    if moments is not None:
        return (numel * DTYPE_BYTES[dtype],) * moments
    return state_tensors(training.optimizer, [UpdatedTensor((numel,))], "fp32")


def _is_paged(training: TrainingConfig, tensor: UpdatedTensor) -> bool:
    is_requested = optimizer_of(training.optimizer).is_paged and training.paged_states == "host"
    return is_requested and tensor.numel >= _MIN_PAGED_NUMEL


def _state_bytes(training: TrainingConfig, tensors: Sequence[UpdatedTensor]) -> int:
    return sum(state_tensors(training.optimizer, tensors, training.stored_dtype))


def group_by_type(tensors: Sequence[UpdatedTensor], dtype: str) -> dict[str, list[UpdatedTensor]]:
    """Tensors by their type, of which `dtype` is that of tensors without one of their own."""
    tensors_of: dict[str, list[UpdatedTensor]] = {}
    for tensor in tensors:
        tensors_of.setdefault(tensor.dtype or dtype, []).append(tensor)
    return tensors_of


def clip_gradients(
    builder: PlanBuilder,
    training: TrainingConfig,
    numels: Sequence[int],
    sums: Sequence[tuple[str, int]] = (),
    *,
    dtype: str = "fp32",
) -> None:
    """Issue `clip_grad_norm_` of this rank's elements of each tensor: read all gradients, reduce the norm,
    scale the gradients.

    The squares are summed over the ranks of each group in `sums`, in order, as an all-reduce of so many bytes
    (4 per norm, and DTensors reduce one norm per tensor). Groups that the plan lacks have one rank.
    """
    if training.gradient_clipping <= 0:
        return
    numel, num_tensors = sum(numels), len(numels)
    builder.kernels("gradient norm", norm_kernels(numel, dtype, num_tensors))
    for name, size in sums:
        if name in builder.groups and builder.groups[name].size > 1:
            builder.collective(
                "all_reduce", size, "fp32", name, stream=COMPUTE, name="all_reduce gradient norm"
            )
    builder.kernels("clip gradients", scale_kernels(numel, dtype, num_tensors))


def update(
    builder: PlanBuilder,
    training: TrainingConfig,
    tensors: Sequence[UpdatedTensor],
    *,
    gradient_dtype: str | None = None,
    state_dtype: str | None = None,
    low_precision_copy: bool = False,
    name: str = UPDATE,
    overhead: str | None = "optimizer_step",
) -> None:
    """Issue the update of this rank's part of each tensor. Types default to the tensor's own, or else to
    `stored_dtype`: tensors of one type are updated together (`_group_tensors_by_device_and_dtype`).

    `foreach` Adam allocates the square roots of all second moments at once (`_foreach_sqrt`). bitsandbytes
    waits for the GPU after every tensor.
    """
    tensors_of = group_by_type(tensors, training.stored_dtype)
    if len(tensors_of) > 1:
        for same_type in tensors_of.values():
            update(
                builder, training, same_type, gradient_dtype=gradient_dtype, state_dtype=state_dtype,
                low_precision_copy=low_precision_copy, name=name, overhead=overhead,
            )  # fmt: skip
            overhead = None
        return
    dtype = next(iter(tensors_of), training.stored_dtype)
    stored, gradient = state_dtype or dtype, gradient_dtype or dtype
    implementation = training.optimizer_implementation
    optimizer = optimizer_of(training.optimizer)
    if optimizer.waits_per_tensor:
        for tensor in tensors:
            _update_one(builder, training, tensor, gradient, stored, name, overhead)
            overhead = None
        if low_precision_copy:
            builder.kernels(f"{name}: cast", cast_kernels(_numel(tensors), stored, "bf16"))
        return
    kernels = update_kernels(
        training.optimizer,
        tensors,
        implementation,
        gradient_dtype=gradient,
        stored_dtype=stored,
        low_precision_copy=low_precision_copy,
    )
    tensor_bytes = tuple(tensor.numel * DTYPE_BYTES[stored] for tensor in tensors)
    roots = tensor_bytes if implementation == "foreach" and training.optimizer in ("adam", "adamw") else ()
    builder.allocate("buffers", sum(roots), owner=name, tensors=roots)
    builder.kernels(name, kernels, overhead=overhead)
    builder.free("buffers", sum(roots), owner=name)


def _update_one(
    builder: PlanBuilder,
    training: TrainingConfig,
    tensor: UpdatedTensor,
    gradient_dtype: str,
    stored_dtype: str,
    name: str,
    overhead: str | None,
) -> None:
    """bitsandbytes' step of one tensor: paged states come over PCIe and go back, then the host waits
    (0.50.2 optim/optimizer.py `step`: prefetch, update, synchronize)."""
    kernels = update_kernels(
        training.optimizer, [tensor], gradient_dtype=gradient_dtype, stored_dtype=stored_dtype
    )
    if not kernels:
        return
    paged_bytes = _state_bytes(training, [tensor]) if _is_paged(training, tensor) else 0
    if paged_bytes:
        builder.allocate("buffers", paged_bytes, owner=name)
        builder.copy(f"{name}: states in", Copy("h2d", paged_bytes, True), stream=COMPUTE)
    event = builder.kernels(name, kernels, overhead=overhead)
    if paged_bytes:
        event = builder.copy(f"{name}: states out", Copy("d2h", paged_bytes, True), stream=COMPUTE)
        builder.free("buffers", paged_bytes, owner=name)
    builder.host_wait(event)


def _numel(tensors: Sequence[UpdatedTensor]) -> int:
    return sum(tensor.numel for tensor in tensors)
