"""torch's context parallelism: the steps of a ring, on K and V gathered at once or passed on hop by hop.

Forward: K and V are copied into one tensor in every step but the last. "all-gather" gathers the first of them
beneath step 0. "p2p" passes them on in every step, by an all-to-all in which each rank sends to the next one
only. Backward does the same with K and V. Their gradients are summed up in fp32 and passed on hop by hop with
either method, c times, each hop but the last beneath the next step. Outputs are merged in fp32 (torch 2.13
distributed/tensor/experimental/_context_parallel/_attention.py `_templated_ring_attention`,
`_templated_ring_attention_backward`, `_SDPAMerger`, `_AllToAllRotater`, `_AllGatherRotater`).

# [Note: FlexAttention]
FlexAttention is the only one of torch's attentions that knows a mask. K and V are made contiguous, gathered
one after the other in line, and their ranks' parts copied into one tensor along the sequence. One kernel
takes all the rank's queries to the keys that its block mask names. Backward copies the gradients of all
ranks' K and V apart and reduce-scatters each in line. The gathered tensors of forward are kept (torch 2.13
distributed/tensor/experimental/_context_parallel/_attention.py `_ContextParallel`, _cp_custom_ops.py
`flex_cp_allgather`; distributed/_functional_collectives.py `all_gather_single`, `reduce_scatter_single`). The
kernel is taken to be as fast as the fused one that the cluster's rates are of.
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.operations.attention.context import SharedAttention
from zsim.operations.attention.kernels import (
    block_backward,
    block_forward,
    blocks_backward,
    blocks_forward,
)
from zsim.operations.attention.rotary import rotary_backward, rotary_forward
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective
from zsim.plan.workload.work_part import (
    CONTEXT,
    GRADIENTS,
    WorkPart,
    compute_part,
    concurrent_collective,
    inline_collective,
    wait_for_stream,
)


def ring_forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the forward, the rotary embedding first."""
    rotary = rotary_forward(shared.work, shared.shape, shared.options)
    work_parts = [compute_part("rotary", *rotary)] if rotary else []
    for step in range(shared.ranks):
        work_parts += _keys_and_values(shared, step)
        block = block_forward(shared.work, shared.sequences, shared.ring_block(step), shared.options)
        work_parts.append(compute_part(f"step {step}", block, *_merge_kernels(shared, step)))
    size = shared.output_bytes // shared.options.activation_bytes
    work_parts.append(
        compute_part("output", shared.elementwise_kernel(size * (4 + shared.options.activation_bytes)))
    )
    return tuple(work_parts)


def ring_backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the backward, the rotary embedding's last."""
    e = shared.options.activation_bytes
    queries, keys = shared.query_bytes // e, shared.key_value_bytes // e
    work_parts = [
        compute_part("zeros", shared.elementwise_kernel(4 * queries), shared.elementwise_kernel(4 * keys, 2))
    ]
    for step in range(shared.ranks):
        work_parts += _keys_and_values(shared, step)
        block = block_backward(shared.work, shared.sequences, shared.ring_block(step), shared.options)
        work_parts.append(compute_part(f"step {step}", block))
        if step:
            work_parts.append(wait_for_stream(GRADIENTS))
        halves = bool(step) and shared.sees_all_queries(step)
        work_parts.append(
            compute_part(
                "sum of dK, dV",
                *_accumulate_kernels(shared, keys, 2, halves=halves),
                shared.elementwise_kernel(8 * keys),
            )
        )
        hop = _send_to_next(shared, 4 * keys, "fp32")
        work_parts.append(WorkPart(hop, f"dK, dV hop {step}", GRADIENTS, COMPUTE))
        work_parts.append(
            compute_part(
                "sum of dQ",
                *_accumulate_kernels(shared, queries, 1, halves=not shared.sees_all_queries(step)),
            )
        )
    work_parts.append(compute_part("dQ", shared.elementwise_kernel((4 + e) * queries)))
    work_parts.append(wait_for_stream(GRADIENTS))
    work_parts.append(compute_part("dK, dV", shared.elementwise_kernel((4 + e) * keys)))
    rotary = rotary_backward(shared.work, shared.shape, shared.options)
    return (*work_parts, *([compute_part("rotary", *rotary)] if rotary else []))


def _keys_and_values(shared: SharedAttention, step: int) -> list[WorkPart]:
    """The wait for K and V of a step, and what it sends for the next."""
    size, gathers = shared.key_value_bytes, shared.share.method == "all-gather"
    work_parts = [wait_for_stream()] if step and (step == 1 or not gathers) else []
    if step == shared.ranks - 1:
        return work_parts
    work_parts.append(compute_part("K and V in one", shared.elementwise_kernel(2 * size)))
    if not gathers:
        hop = _send_to_next(shared, size, shared.options.kernel_dtype)
        work_parts.append(WorkPart(hop, f"hop {step}", CONTEXT, COMPUTE))
    elif step == 0:
        work_parts.append(
            concurrent_collective("all_gather", shared.ranks * size, shared.options.kernel_dtype, "K and V")
        )
    return work_parts


def _send_to_next(shared: SharedAttention, num_bytes: int, dtype: str) -> Collective:
    """`permute_tensor`: an all-to-all of `num_bytes` to the next rank and nothing to the others."""
    ranks = range(shared.ranks)
    split_sizes = tuple(
        tuple(num_bytes * (receiver == (sender + 1) % shared.ranks) for receiver in ranks) for sender in ranks
    )
    return Collective.all_to_all(split_sizes, dtype, CONTEXT)


def _merge_kernels(shared: SharedAttention, step: int) -> list[Kernel]:
    """A step's output cast to fp32 and merged: out - sigmoid(lse' - lse) (out - out'), an operator at a time
    unless compiled. A half is put back by a concatenation. The log-sum-exp's six operators are launches of
    few bytes.
    """
    e, half = shared.options.activation_bytes, not shared.sees_all_queries(step)
    elements = shared.output_bytes // e
    size = elements // 2 if half else elements
    cast = [shared.elementwise_kernel(size * (e + 4))]
    if step == 0:
        return cast
    put_back = [shared.elementwise_kernel(8 * elements)] if half else []
    if shared.options.compile:
        return [shared.elementwise_kernel(size * (e + 8)), *put_back]
    statistics = shared.elementwise_kernel(6 * 3 * shared.logsumexp_bytes * size / elements, 6)
    return [*cast, statistics, shared.elementwise_kernel(size * 32, 3), *put_back]


def _accumulate_kernels(
    shared: SharedAttention, elements: int, launches: int, *, halves: bool
) -> list[Kernel]:
    """A gradient added to its fp32 sum. Half of one is put back by a concatenation."""
    e = shared.options.activation_bytes
    if not halves:
        return [shared.elementwise_kernel(elements * (8 + e), launches)]
    return [
        shared.elementwise_kernel(elements / 2 * (8 + e), launches),
        shared.elementwise_kernel(8 * elements, launches),
    ]


def flex_forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the forward, the rotary embedding first."""
    rotary = rotary_forward(shared.work, shared.shape, shared.options)
    local_bytes, gathered_bytes = shared.key_value_bytes, shared.ranks * shared.key_value_bytes
    core = blocks_forward(shared.work, shared.sequences, shared.gathered_blocks(), shared.options)
    gathered = [
        inline_collective("all_gather", shared.ranks * size, shared.options.kernel_dtype, name)
        for name, size in _named_bytes(shared)
    ]
    return (
        *([compute_part("rotary", *rotary)] if rotary else []),
        compute_part("contiguous K, V", shared.elementwise_kernel(2 * local_bytes, 2)),
        *gathered,
        compute_part("K, V of all ranks", shared.elementwise_kernel(2 * gathered_bytes, 2)),
        compute_part("", core),
    )


def flex_backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the backward, the rotary embedding's last."""
    rotary = rotary_backward(shared.work, shared.shape, shared.options)
    core = blocks_backward(shared.work, shared.sequences, shared.gathered_blocks(), shared.options)
    work_parts = [compute_part("", core)]
    for name, size in _named_bytes(shared):
        work_parts.append(
            compute_part(f"d{name} by rank", shared.elementwise_kernel(2 * shared.ranks * size))
        )
        work_parts.append(
            inline_collective("reduce_scatter", shared.ranks * size, shared.options.kernel_dtype, f"d{name}")
        )
    return (*work_parts, *([compute_part("rotary", *rotary)] if rotary else []))


def _named_bytes(shared: SharedAttention) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("K", shared.key_bytes), ("V", shared.value_bytes)
