"""Tensors of attention over split sequences that one rank keeps for backward, and temporary ones.

Sizes are of tensors of a rank's tokens, 1/c of the sequences, unless said otherwise. Kept are q, K and V, and
the log-sum-exp. The output is the next product's input. Where heads are exchanged for tokens, it is also kept
as it was before the exchange. The sources are those of `zsim.plan.workload.context`.
"""

from __future__ import annotations

from zsim.cost.kernels.context import SharedAttention
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.spec import Attention

Sizes = tuple[int, ...]


def saved_tensors(spec: Attention, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor kept from forward to backward."""
    shared = SharedAttention.of(spec, shape, options)
    if shared.share.has_masks:
        local_bytes, ranks = (shared.query_bytes, shared.logsumexp_bytes), shared.ranks
        return local_bytes[0], ranks * shared.key_bytes, ranks * shared.value_bytes, local_bytes[1]
    if not _exchanges_heads(shared):
        return shared.query_bytes, shared.key_bytes, shared.value_bytes, shared.logsumexp_bytes
    exchanged = shared.exchange_heads()
    return (
        exchanged.query_bytes,
        exchanged.key_bytes,
        exchanged.value_bytes,
        exchanged.logsumexp_bytes,
        exchanged.output_bytes,
    )


def forward_tensors(spec: Attention, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during forward only, the output included."""
    shared = SharedAttention.of(spec, shape, options)
    out = shared.output_bytes
    if shared.share.has_masks:
        # K and V made contiguous, and as they were gathered.
        return shared.key_bytes, shared.value_bytes, *_gathered_keys_and_values(shared), out
    if shared.share.library == "torch":
        # The fp32 sum, a step's output in both types, and two temporaries of the merge.
        merge = (out // options.activation_bytes * 4,) * (2 if options.compile else 4)
        return (*_torch_buffers(shared), *merge, out)
    if _exchanges_heads(shared):
        exchanged = shared.exchange_heads()
        inputs = exchanged.query_bytes, exchanged.key_bytes, exchanged.value_bytes
        ring = _ring_forward(exchanged) if exchanged.ranks > 1 else ()
        return (*inputs, *max((inputs, (out, out, out), ring), key=sum))
    if shared.share.method == "all-gather":
        full = shared.ranks * shared.key_value_bytes
        return (full, *max(((full // 2,), (out, out, out)), key=sum))
    return _ring_forward(shared)


def backward_tensors(spec: Attention, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during backward only: gradients of output and inputs, and
    temporaries.
    """
    shared = SharedAttention.of(spec, shape, options)
    e, q, kv, out = options.activation_bytes, shared.query_bytes, shared.key_value_bytes, shared.output_bytes
    in_fp32 = q // e * 4  # dq, as the kernel sums it up
    if shared.share.has_masks:
        # dK and dV of all ranks' tokens, one of them copied by rank
        full = shared.ranks * shared.key_bytes
        return (out, in_fp32, q, *_gathered_keys_and_values(shared), full, kv)
    if shared.share.library == "torch":
        sums = (kv // e * 4,) * 3
        return (out, in_fp32, in_fp32, q, kv, *sums, *_torch_buffers(shared))
    if _exchanges_heads(shared):
        exchanged = shared.exchange_heads()
        gradients = exchanged.query_bytes, exchanged.key_value_bytes
        if exchanged.ranks > 1:
            return (out, out, *gradients, *_ring_backward(exchanged))
        return (out, out, *gradients, *gradients, in_fp32)
    if shared.share.method == "all-gather":
        # dK and dV, K and V, and the gradients of both calls, of all ranks' tokens
        full = shared.ranks * kv
        call_gradient_bytes = sum(block.keys for block in shared.gathered_blocks()) * full // shared.length
        return (out, q, q // 2, in_fp32 // 2, full, full, call_gradient_bytes)
    return (out, *_ring_backward(shared))


def _gathered_keys_and_values(shared: SharedAttention) -> Sizes:
    """Two tensors as large as K and V of all ranks."""
    return shared.ranks * shared.key_bytes, shared.ranks * shared.value_bytes


def _exchanges_heads(shared: SharedAttention) -> bool:
    return shared.share.method in ("all-to-all", "a2a+p2p")


def _ring_forward(shared: SharedAttention) -> Sizes:
    """K and V of every step (the last ones are kept, but the rank's own are there twice), the output and
    log-sum-exp of every step, and the output."""
    query_divisors = [1 if shared.sees_all_queries(step) else 2 for step in range(shared.ranks)]
    steps = [
        size // divisor
        for divisor in query_divisors
        for size in (shared.output_bytes, shared.logsumexp_bytes)
    ]
    return (*(shared.key_value_bytes,) * shared.ranks, *steps, shared.output_bytes)


def _ring_backward(shared: SharedAttention) -> Sizes:
    """dq and its part of one step, also in fp32, two buffers of K, V, dK and dV, and dK and dV of one
    step.
    """
    q, kv = shared.query_bytes, shared.key_value_bytes
    return q, q, q // shared.options.activation_bytes * 4, 2 * kv, 2 * kv, kv


def _torch_buffers(shared: SharedAttention) -> Sizes:
    """K and V copied into one tensor, and those of all ranks or of the next step."""
    kv = shared.key_value_bytes
    return kv, kv * (shared.ranks if shared.share.method == "all-gather" else 1)
