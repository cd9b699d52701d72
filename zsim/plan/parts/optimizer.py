"""The end of every framework's step: gradient clipping and the optimizer's kernels."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels import modules as work
from zsim.cost.kernels.update import OPTIMIZER_STATES
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Memory
from zsim.specs.strategy.training import Training

UPDATE = "optimizer step"


def lazy_states(training: Training, numels: Sequence[int]) -> Memory:
    """Optimizer states of this rank's elements of each tensor, which torch.optim's first step allocates
    tensor by tensor (`_init_group` in torch/optim/adamw.py, 2.13; composer's DecoupledAdamW likewise).

    FSDP1's tensors are the flat parameters, also with `use_orig_params`, where torch has slices of them.
    """
    size = DTYPE_BYTES[training.stored_dtype]
    tensors = tuple(size * numel for numel in numels for _ in range(OPTIMIZER_STATES[training.optimizer]))
    return Memory("optimizer_states", sum(tensors), lazy_tensors=tensors)


def clip_gradients(
    builder: PlanBuilder,
    training: Training,
    numels: Sequence[int],
    sums: Sequence[tuple[str, int]] = (),
    *,
    dtype: str = "fp32",
) -> None:
    """`clip_grad_norm_` of this rank's elements of each tensor: read all gradients, sum the squares over the
    ranks of each group in `sums`, in order, as an all-reduce of so many bytes (4 per norm; DTensors reduce
    one per tensor), and scale the gradients. Groups that the plan lacks have one rank."""
    if training.gradient_clipping <= 0:
        return
    numel, num_tensors = sum(numels), len(numels)
    builder.kernels("gradient norm", work.norm_kernels(numel, dtype, num_tensors))
    for name, size in sums:
        if name in builder.groups and builder.groups[name].size > 1:
            builder.collective(
                "all_reduce", size, "fp32", name, stream=COMPUTE, name="all_reduce gradient norm"
            )
    builder.kernels("clip gradients", work.scale_kernels(numel, dtype, num_tensors))


def update(
    builder: PlanBuilder,
    training: Training,
    numels: Sequence[int],
    *,
    gradient_dtype: str | None = None,
    state_dtype: str | None = None,
    low_precision_copy: bool = False,
    name: str = UPDATE,
    overhead: str | None = "optimizer_step",
) -> None:
    """Issue the update of this rank's elements of each tensor; types default to `stored_dtype`.

    `foreach` Adam allocates the square roots of all second moments at once (`_foreach_sqrt`).
    """
    state_dtype = state_dtype or training.stored_dtype
    implementation = training.optimizer_implementation
    kernels = work.optimizer_kernels(
        sum(numels),
        training.optimizer,
        implementation,
        num_tensors=len(numels),
        gradient_dtype=gradient_dtype or training.stored_dtype,
        state_dtype=state_dtype,
        low_precision_copy=low_precision_copy,
    )
    makes_roots = implementation == "foreach" and training.optimizer in ("adam", "adamw")
    roots = tuple(numel * DTYPE_BYTES[state_dtype] for numel in numels) if makes_roots else ()
    builder.allocate("buffers", sum(roots), owner=name, tensors=roots)
    builder.kernels(name, kernels, overhead=overhead)
    builder.free("buffers", sum(roots), owner=name)
