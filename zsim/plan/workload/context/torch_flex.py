"""torch's FlexAttention under context parallelism, the only one of its attentions that knows a mask.

K and V are made contiguous, gathered one after the other in line, and their ranks' parts copied into one
tensor along the sequence. One kernel takes all the rank's queries to the keys that its block mask names.
Backward copies the gradients of all ranks' K and V apart and reduce-scatters each in line. The gathered
tensors of forward are kept (torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py
`_ContextParallel`, _cp_custom_ops.py `flex_cp_allgather`; distributed/_functional_collectives.py
`all_gather_single`, `reduce_scatter_single`). The kernel is taken to be as fast as the fused one that the
cluster's rates are of.
"""

from __future__ import annotations

from zsim.cost.kernels.attention import blocks_backward, blocks_forward
from zsim.cost.kernels.context import SharedAttention
from zsim.cost.kernels.rotary import rotary_backward, rotary_forward
from zsim.plan.workload.context.streams import compute_part, inline_collective
from zsim.plan.workload.work_part import WorkPart


def forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the forward, the rotary embedding first."""
    rotary = rotary_forward(shared.work, shared.shape, shared.options)
    local_bytes, gathered_bytes = shared.key_value_bytes, shared.ranks * shared.key_value_bytes
    core = blocks_forward(shared.work, shared.sequences, shared.gathered_blocks(), shared.options)
    gathered = [
        inline_collective("all_gather", shared.ranks * size, shared.options.kernel_dtype, name)
        for name, size in _keys_and_values(shared)
    ]
    return (
        *([compute_part("rotary", *rotary)] if rotary else []),
        compute_part("contiguous K, V", shared.elementwise_kernel(2 * local_bytes, 2)),
        *gathered,
        compute_part("K, V of all ranks", shared.elementwise_kernel(2 * gathered_bytes, 2)),
        compute_part("", core),
    )


def backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the backward, the rotary embedding's last."""
    rotary = rotary_backward(shared.work, shared.shape, shared.options)
    core = blocks_backward(shared.work, shared.sequences, shared.gathered_blocks(), shared.options)
    work_parts = [compute_part("", core)]
    for name, size in _keys_and_values(shared):
        work_parts.append(
            compute_part(f"d{name} by rank", shared.elementwise_kernel(2 * shared.ranks * size))
        )
        work_parts.append(
            inline_collective("reduce_scatter", shared.ranks * size, shared.options.kernel_dtype, f"d{name}")
        )
    return (*work_parts, *([compute_part("rotary", *rotary)] if rotary else []))


def _keys_and_values(shared: SharedAttention) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("K", shared.key_bytes), ("V", shared.value_bytes)
