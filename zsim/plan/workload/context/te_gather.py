"""Transformer Engine's all-gather: K and V of all ranks are gathered before attention.

Both directions gather K and V, one after the other in line, and put their chunks in order. Attention is one
call for each of the rank's two chunks of queries, on the keys up to its end. Backward reduce-scatters the
gradients of K and V (`AttnFuncWithCPAndKVAllGather`, TransformerEngine 2.17.1). The two calls, on two streams
there, follow each other here.
"""

from __future__ import annotations

from zsim.cost.kernels.attention import (
    block_backward,
    block_forward,
)
from zsim.cost.kernels.context import SharedAttention
from zsim.cost.kernels.rotary import rotary_backward, rotary_forward
from zsim.plan.workload.context.streams import compute_part, inline_collective
from zsim.plan.workload.work_part import WorkPart


def forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the forward, the rotary embedding first."""
    blocks = [
        block_forward(shared.work, shared.sequences, block, shared.options)
        for block in shared.gathered_blocks()
    ]
    rotary = rotary_forward(shared.work, shared.shape, shared.options)
    return (
        *([compute_part("rotary", *rotary)] if rotary else []),
        *_gather_keys_and_values(shared),
        compute_part("zeros", shared.elementwise_kernel(shared.output_bytes)),
        compute_part("first chunk", blocks[0], shared.elementwise_kernel(shared.output_bytes)),
        compute_part("second chunk", blocks[1], shared.elementwise_kernel(shared.output_bytes)),
    )


def backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the backward, the rotary embedding's last."""
    full, dtype = shared.ranks * shared.key_value_bytes, shared.options.kernel_dtype
    work_parts = [compute_part("zeros", shared.elementwise_kernel(full, 2)), *_gather_keys_and_values(shared)]
    for name, block in zip(("first chunk", "second chunk"), shared.gathered_blocks(), strict=True):
        kernel = block_backward(shared.work, shared.sequences, block, shared.options)
        accumulated_bytes = 3 * full * block.keys / shared.length
        work_parts.append(
            compute_part(
                name,
                kernel,
                shared.elementwise_kernel(shared.query_bytes),
                shared.elementwise_kernel(accumulated_bytes, 2),
            )
        )
    work_parts.append(compute_part("order of chunks", shared.elementwise_kernel(2 * full, 2)))
    for name, size in (("dK", shared.key_bytes), ("dV", shared.value_bytes)):
        work_parts.append(inline_collective("reduce_scatter", shared.ranks * size, dtype, name))
    rotary = rotary_backward(shared.work, shared.shape, shared.options)
    return (*work_parts, *([compute_part("rotary", *rotary)] if rotary else []))


def _gather_keys_and_values(shared: SharedAttention) -> list[WorkPart]:
    """K and V of all ranks, their chunks put in order."""
    dtype, ranks = shared.options.kernel_dtype, shared.ranks
    return [
        inline_collective("all_gather", ranks * shared.key_bytes, dtype, "K"),
        inline_collective("all_gather", ranks * shared.value_bytes, dtype, "V"),
        compute_part("order of chunks", shared.elementwise_kernel(2 * ranks * shared.key_value_bytes, 2)),
    ]
