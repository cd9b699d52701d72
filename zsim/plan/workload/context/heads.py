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

from zsim.cost.kernels.attention import fused_backward, fused_forward
from zsim.cost.kernels.context import SharedAttention
from zsim.cost.kernels.rotary import rotary_backward, rotary_forward
from zsim.plan.workload.context.streams import CONTEXT, HEADS, RING, arrived, beside, computed, in_line
from zsim.plan.workload.context.te_ring import steps_backward, steps_forward
from zsim.plan.workload.work_part import WorkPart

_POSITION_BYTES = 8  # int64
Tensors = Sequence[tuple[str, int]]


def forward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the forward, the rotary embedding first."""
    rotary = rotary_forward(shared.work, shared.shape, shared.options)
    whole = shared.with_whole_sequences()
    if whole.ranks == 1:
        core = [computed("", fused_forward(whole.work, whole.shape, whole.options))]
    else:
        core = steps_forward(whole, RING)
    return (
        *([computed("rotary", *rotary)] if rotary else []),
        *(_positions(shared) if shared.share.library == "deepspeed" else []),
        *_exchanged(shared, _inputs(whole, "q", "k", "v")),
        *core,
        *_exchanged(shared, [("output", shared.output_bytes)]),
    )


def backward(shared: SharedAttention) -> tuple[WorkPart, ...]:
    """Parts of the backward, the rotary embedding's last."""
    rotary = rotary_backward(shared.work, shared.shape, shared.options)
    whole = shared.with_whole_sequences()
    if whole.ranks == 1:
        core = [computed("", fused_backward(whole.work, whole.shape, whole.options))]
    else:
        core = steps_backward(whole, RING)
    return (
        *_exchanged(shared, [("output's gradient", shared.output_bytes)]),
        *core,
        *_exchanged(shared, _inputs(whole, "dq", "dk", "dv")),
        *([computed("rotary", *rotary)] if rotary else []),
    )


def _inputs(whole: SharedAttention, q: str, k: str, v: str) -> Tensors:
    """Names and bytes of the exchanged tensors. With fewer heads of K and V than ranks, they are those of the
    repeated heads.
    """
    return [(q, whole.query_bytes), (k, whole.key_bytes), (v, whole.value_bytes)]


def _positions(shared: SharedAttention) -> list[WorkPart]:
    """DeepSpeed gathers the token's positions in every layer."""
    size = shared.sequences * shared.length * _POSITION_BYTES
    return [in_line("all_gather", size, "int64", "positions"), computed("positions", shared.moved(2 * size))]


def _exchanged(shared: SharedAttention, tensors: Tensors) -> list[WorkPart]:
    """The all-to-alls of some tensors, each between two copies that order it by ranks and by tokens."""
    dtype = shared.options.kernel_dtype
    group = CONTEXT if shared.share.method == "all-to-all" else HEADS
    is_in_line = shared.share.library == "deepspeed"
    parts: list[WorkPart] = []
    before: list[WorkPart] = []
    for name, size in tensors:
        parts.append(computed(f"{name} by ranks", shared.moved(2 * size)))
        ordered = computed(f"{name} by tokens", shared.moved(2 * size))
        if is_in_line:
            parts += [in_line("all_to_all", size, dtype, name, group), ordered]
            continue
        parts += [arrived()] if before else []
        parts += [beside("all_to_all", size, dtype, name, group), *before]
        before = [ordered]
    return parts if is_in_line else [*parts, arrived(), *before]
