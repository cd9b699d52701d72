"""Transformer Engine's context parallelism: K and V go round a ring, or are gathered at once.

# [Note: ring]
K and V go from rank to rank while attention works on those that have come. Forward has c - 1 hops to the next
rank, each of K and V of s/c tokens. Backward has c hops to the previous rank, the first of K and V, the last
of their gradients, those between of both. A hop runs beneath the attention of its step
(`AttnFuncWithCPAndKVP2P`, TransformerEngine 2.17.1 pytorch/attention/dot_product_attention/
context_parallel.py).

# [Note: one stream of steps]
Transformer Engine issues every other step of forward to a second stream, so that the last blocks of one
step's kernel run beside the first of the next. Here all are on the compute stream. A hop waits for the step
two before its own, as it does there.

# [Note: all-gather]
K and V of all ranks are gathered before attention. Both directions gather K and V, one after the other in
line, and put their chunks in order. Attention is one call for each of the rank's two chunks of queries, on
the keys up to its end. Backward reduce-scatters the gradients of K and V (`AttnFuncWithCPAndKVAllGather`,
TransformerEngine 2.17.1). The two calls, on two streams there, follow each other here.
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.operations.attention.context import SharedAttention
from zsim.operations.attention.kernels import (
    block_backward,
    block_forward,
)
from zsim.operations.attention.rotary import rotary_backward, rotary_forward
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Message, PointToPoint
from zsim.plan.workload.work_part import CONTEXT, WorkPart, compute_part, inline_collective, wait_for_stream


def ring_forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the forward, the rotary embedding first."""
    rotary = rotary_forward(shared.work, shared.shape, shared.options)
    return (compute_part("", *rotary, _concatenate_keys_and_values(shared)), *steps_forward(shared))


def steps_forward(shared: SharedAttention, group: str = CONTEXT) -> list[WorkPart]:
    """The steps of the ring, and the correction of their outputs to one softmax."""
    last = shared.ranks - 1
    work_parts: list[WorkPart] = []
    for step in range(shared.ranks):
        if step:
            work_parts.append(wait_for_stream())
        if step < last:
            hop = _hop(shared, shared.key_value_bytes, 1, group)
            work_parts.append(WorkPart(hop, f"hop {step}", CONTEXT, "" if step else COMPUTE))
            work_parts.append(WorkPart(None, stream=CONTEXT, follows=COMPUTE))
        block = block_forward(shared.work, shared.sequences, shared.ring_block(step), shared.options)
        passes = 3 if step else 2
        corrected = shared.elementwise_kernel(passes * shared.logsumexp_bytes * _query_fraction(shared, step))
        work_parts.append(compute_part(f"step {step}", block, corrected))
    corrections = (
        shared.elementwise_kernel((3 if step else 2) * shared.output_bytes * _query_fraction(shared, step))
        for step in range(shared.ranks)
    )
    work_parts.append(compute_part("correction", *corrections))
    return work_parts


def ring_backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the backward, the rotary embedding's last."""
    rotary = rotary_backward(shared.work, shared.shape, shared.options)
    return (*steps_backward(shared), *([compute_part("rotary", *rotary)] if rotary else []))


def steps_backward(shared: SharedAttention, group: str = CONTEXT) -> list[WorkPart]:
    """The steps of the ring in reverse."""
    last = shared.ranks - 1
    work_parts = [compute_part("", _concatenate_keys_and_values(shared))]
    for number in range(shared.ranks):
        step = last - number
        tensors = 1 if number in (0, last) else 2
        hop = _hop(shared, tensors * shared.key_value_bytes, -1, group)
        work_parts.append(WorkPart(hop, f"hop {number}", CONTEXT, COMPUTE))
        block = block_backward(shared.work, shared.sequences, shared.ring_block(step), shared.options)
        passes = 3 if number else 2
        queries = shared.elementwise_kernel(passes * shared.query_bytes * _query_fraction(shared, step))
        work_parts.append(compute_part(f"step {step}", block, queries))
        work_parts.append(wait_for_stream())
        keys = 0.5 if step and shared.sees_all_queries(step) else 1.0
        work_parts.append(
            compute_part(
                "sum of dK, dV", shared.elementwise_kernel(passes * shared.key_value_bytes * keys, 2)
            )
        )
    return work_parts


def _query_fraction(shared: SharedAttention, step: int) -> float:
    """The part of the rank's queries that a step works on."""
    return 1.0 if shared.sees_all_queries(step) else 0.5


def _concatenate_keys_and_values(shared: SharedAttention) -> Kernel:
    """K and V copied into one buffer."""
    return shared.elementwise_kernel(2 * shared.key_value_bytes)


def _hop(shared: SharedAttention, num_bytes: int, shift: int, group: str) -> PointToPoint:
    messages = (Message("send", num_bytes, shift), Message("recv", num_bytes, -shift))
    return PointToPoint(messages, shared.options.kernel_dtype, group)


def gather_forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
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


def gather_backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
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
