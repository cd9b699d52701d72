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
from zsim.plan.workload.context.streams import computed, in_line
from zsim.plan.workload.work_part import WorkPart


def forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the forward, the rotary embedding first."""
    blocks = [
        block_forward(shared.work, shared.sequences, block, shared.options)
        for block in shared.gathered_blocks()
    ]
    rotary = rotary_forward(shared.work, shared.shape, shared.options)
    return (
        *([computed("rotary", *rotary)] if rotary else []),
        *_gathered(shared),
        computed("zeros", shared.moved(shared.output_bytes)),
        computed("first chunk", blocks[0], shared.moved(shared.output_bytes)),
        computed("second chunk", blocks[1], shared.moved(shared.output_bytes)),
    )


def backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the backward, the rotary embedding's last."""
    full, dtype = shared.ranks * shared.key_value_bytes, shared.options.kernel_dtype
    parts = [computed("zeros", shared.moved(full, 2)), *_gathered(shared)]
    for name, block in zip(("first chunk", "second chunk"), shared.gathered_blocks(), strict=True):
        kernel = block_backward(shared.work, shared.sequences, block, shared.options)
        added = 3 * full * block.keys / shared.length
        parts.append(computed(name, kernel, shared.moved(shared.query_bytes), shared.moved(added, 2)))
    parts.append(computed("order of chunks", shared.moved(2 * full, 2)))
    for name, size in (("dK", shared.key_bytes), ("dV", shared.value_bytes)):
        parts.append(in_line("reduce_scatter", shared.ranks * size, dtype, name))
    rotary = rotary_backward(shared.work, shared.shape, shared.options)
    return (*parts, *([computed("rotary", *rotary)] if rotary else []))


def _gathered(shared: SharedAttention) -> list[WorkPart]:
    """K and V of all ranks, their chunks put in order."""
    dtype, ranks = shared.options.kernel_dtype, shared.ranks
    return [
        in_line("all_gather", ranks * shared.key_bytes, dtype, "K"),
        in_line("all_gather", ranks * shared.value_bytes, dtype, "V"),
        computed("order of chunks", shared.moved(2 * ranks * shared.key_value_bytes, 2)),
    ]
