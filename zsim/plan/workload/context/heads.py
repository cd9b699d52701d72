"""Ulysses: ranks exchange heads for tokens before attention and tokens for heads after it (Jacobs et al.
2023, "DeepSpeed Ulysses", arXiv 2309.14509).

q, k and v are one all-to-all each, the output another. Backward has the same four for the gradients.
Transformer Engine's run beside the copies that order the tensors before and after them
(`flash_attn_a2a_communicate`, `AttnFuncWithCPAndQKVOA2A`, TransformerEngine 2.17.1). DeepSpeed's are in line,
after an all-gather of the positions, and repeat heads of K and V until each rank has one
(`UlyssesSPAttentionHF`, DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py). With "a2a+p2p" the ranks
of a node exchange heads, and K and V go round rings of the ranks at the same index of every node.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.operations.attention.context import SharedAttention
from zsim.operations.attention.kernels import fused_backward, fused_forward
from zsim.operations.attention.rotary import rotary_backward, rotary_forward
from zsim.plan.workload.context.transformer_engine import steps_backward, steps_forward
from zsim.plan.workload.work_part import (
    CONTEXT,
    HEADS,
    RING,
    WorkPart,
    compute_part,
    concurrent_collective,
    inline_collective,
    wait_for_stream,
)

_POSITION_BYTES = 8  # int64
Tensors = Sequence[tuple[str, int]]


def forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the forward, the rotary embedding first."""
    rotary = rotary_forward(shared.work, shared.shape, shared.options)
    exchanged = shared.exchange_heads()
    if exchanged.ranks == 1:
        core = [compute_part("", fused_forward(exchanged.work, exchanged.shape, exchanged.options))]
    else:
        core = steps_forward(exchanged, RING)
    return (
        *([compute_part("rotary", *rotary)] if rotary else []),
        *(_positions(shared) if shared.share.library == "ulysses" else []),
        *_exchange_heads(shared, _inputs(exchanged, "q", "k", "v")),
        *core,
        *_exchange_heads(shared, [("output", shared.output_bytes)]),
    )


def backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the backward, the rotary embedding's last."""
    rotary = rotary_backward(shared.work, shared.shape, shared.options)
    exchanged = shared.exchange_heads()
    if exchanged.ranks == 1:
        core = [compute_part("", fused_backward(exchanged.work, exchanged.shape, exchanged.options))]
    else:
        core = steps_backward(exchanged, RING)
    return (
        *_exchange_heads(shared, [("output's gradient", shared.output_bytes)]),
        *core,
        *_exchange_heads(shared, _inputs(exchanged, "dq", "dk", "dv")),
        *([compute_part("rotary", *rotary)] if rotary else []),
    )


def _inputs(exchanged: SharedAttention, q: str, k: str, v: str) -> Tensors:
    """Names and bytes of the exchanged tensors. With fewer heads of K and V than ranks, they are those of the
    repeated heads.
    """
    return [(q, exchanged.query_bytes), (k, exchanged.key_bytes), (v, exchanged.value_bytes)]


def _positions(shared: SharedAttention) -> list[WorkPart]:
    """DeepSpeed gathers the token's positions in every layer."""
    size = shared.sequences * shared.length * _POSITION_BYTES
    return [
        inline_collective("all_gather", size, "int64", "positions"),
        compute_part("positions", shared.elementwise_kernel(2 * size)),
    ]


def _exchange_heads(shared: SharedAttention, tensors: Tensors) -> list[WorkPart]:
    """The all-to-alls of some tensors, each between two copies that order it by ranks and by tokens."""
    dtype = shared.options.kernel_dtype
    group = CONTEXT if shared.share.method == "all-to-all" else HEADS
    is_in_line = shared.share.library == "ulysses"
    work_parts: list[WorkPart] = []
    pending_copies: list[WorkPart] = []
    for name, size in tensors:
        work_parts.append(compute_part(f"{name} by ranks", shared.elementwise_kernel(2 * size)))
        copy_by_tokens = compute_part(f"{name} by tokens", shared.elementwise_kernel(2 * size))
        if is_in_line:
            work_parts += [inline_collective("all_to_all", size, dtype, name, group), copy_by_tokens]
            continue
        work_parts += [wait_for_stream()] if pending_copies else []
        work_parts += [concurrent_collective("all_to_all", size, dtype, name, group), *pending_copies]
        pending_copies = [copy_by_tokens]
    return work_parts if is_in_line else [*work_parts, wait_for_stream(), *pending_copies]
