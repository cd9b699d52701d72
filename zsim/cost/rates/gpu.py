"""Seconds of kernels on an idle GPU: a roofline under measured ceilings."""

from __future__ import annotations

from zsim.cost.kernels.kernel import SCAN_KINDS, Kernel
from zsim.cost.kernels.score_blocks import ScoreBlock
from zsim.cost.rates import deterministic
from zsim.cost.rates.efficiency import (
    attention_fraction,
    cached_fraction,
    gemm_fraction,
    hbm_fraction,
    occupied_fraction,
)
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.operations.attention.kernels import SCORE_BYTES
from zsim.specs.cluster.gpu import Gpu

# The field of `memory_bound` that bounds a kernel's HBM traffic; `elementwise_fraction` for all other kinds.
_HBM_FRACTION = {"optimizer": "optimizer_fraction", "copy": "copy_fraction"}

# The fields of `mixers` that bound products, and passes over memory.
_PRODUCTS = {"sparse_attention": "sparse_fraction", "indexer": "indexer_fraction"}
_PASSES = {"convolution": "convolution_fraction", "top_k": "top_k_fraction"}


def kernel_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Seconds of a `Kernel`, all its launches included.

        t = max(W / (P f), Q / (B g), E x + S y) + L c + D l

    W: FLOPs. P: peak FLOP/s of the type. f: fraction of it by shape (`gemm_fraction`, `attention_fraction`;
    kernels without matrix products compute at fp32 peak). Q: HBM bytes. B: HBM bandwidth. g: fraction of it
    (`hbm_fraction` of the bytes of one of the sequential launches). L: launches one after the other,
    `sequential_launches`. c: ramp-up, tail and gap of one kernel. D: dependent loads. l: seconds of one load.
    E: indexed elements. x: seconds of one element, on all of the GPU. S and y: the same of strided elements.
    The roofline is Williams, Waterman and Patterson 2009. For deterministic attention see
    `zsim.cost.rates.deterministic`.
    """
    waiting = kernel.sequential_launches * gpu.launch.seconds_per_kernel
    waiting += kernel.dependent_loads * gpu.launch.seconds_per_load
    if is_deterministic(kernel, gpu):
        waiting += deterministic.extra_seconds(kernel, gpu)
    if kernel.kind == "attention_backward" and gpu.attention.writes_scores:
        scores = kernel.shape[0] * _pairs(kernel)
        waiting += deterministic.scores_seconds(scores * SCORE_BYTES, gpu)
    return max(arithmetic_seconds(kernel, gpu), hbm_seconds(kernel, gpu)) + waiting


def is_deterministic(kernel: Kernel, gpu: Gpu) -> bool:
    """Whether it is the backward of fused attention on a GPU that runs it in deterministic mode."""
    return kernel.kind == "attention_backward" and gpu.attention.is_deterministic


def arithmetic_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Seconds that the arithmetic units need. 0 for a kernel without FLOPs."""
    if kernel.flops <= 0:
        return 0.0
    if kernel.kind == "gemm":
        m, n, k = kernel.shape
        batch = max(1, round(kernel.flops / (2.0 * m * n * k * kernel.sequential_launches)))
        single_call = (
            gpu.gemm.batched if kernel.is_batched else gpu.gemm.grouped if kernel.is_grouped else None
        )
        element_bytes = max(2, DTYPE_BYTES.get(kernel.dtype, 2))  # a result has 16 bits or more
        flops_per_byte = peak_flops_per_second(gpu, kernel.dtype) / gpu.memory.bandwidth
        fraction = gemm_fraction(
            m, n, k, batch, kernel.dtype, gpu.gemm, gpu.sm_count, kernel.layout,
            write_k=flops_per_byte / gpu.memory_bound.elementwise_fraction * element_bytes / 2,
            single_call=single_call, is_transformer_engine=kernel.is_transformer_engine,
            has_uneven_rows=kernel.has_uneven_rows,
        )  # fmt: skip
    elif kernel.kind in ("attention_forward", "attention_backward"):
        fraction = _attention_fraction(kernel, gpu)
    elif kernel.kind in SCAN_KINDS:
        return _chunk_seconds(kernel, gpu)
    elif kernel.kind in _PRODUCTS:
        fraction = getattr(gpu.mixers, _PRODUCTS[kernel.kind]) * gpu.mixers.sustained_fraction
    else:
        # Norms, softmaxes and optimizers compute in fp32 on the vector units, whatever type they store.
        return kernel.flops / gpu.peak.fp32
    return kernel.flops / (peak_flops_per_second(gpu, kernel.dtype) * fraction)


def _chunk_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Seconds that the chunks of a sequence take one after the other, however many heads there are. Those of
    all sequences run at once. Mamba's scan has no matrix products, and computes at the peak of fp32.

        t = n l / s     n: chunks, times the kernels that walk through them. l: `seconds_per_chunk`.
                        s: `sustained_fraction`.

    The chunks' products are never what bounds them: at the rates that were measured they reach 3 to 10 % of
    the peak (zsim's own GPU files say where that is from).
    """
    if kernel.kind == "selective_scan":
        return kernel.flops / gpu.peak.fp32
    rate = gpu.mixers.scan(kernel.kind)
    return kernel.shape[1] * rate.seconds_per_chunk / gpu.mixers.sustained_fraction


def _attention_fraction(kernel: Kernel, gpu: Gpu) -> float:
    heads, queries, keys, head_dim = kernel.shape
    pairs = _pairs(kernel)
    is_backward = kernel.kind == "attention_backward"
    fraction = attention_fraction(2 * pairs / queries, head_dim, gpu.attention, is_backward=is_backward)
    if is_deterministic(kernel, gpu):
        return fraction / deterministic.slowdown(kernel, gpu)
    blocks = gpu.attention.backward_blocks if is_backward else gpu.attention.forward_blocks
    if blocks is None or (blocks.limit is not None and head_dim <= blocks.rows):
        return fraction
    length, max_length = (keys, queries) if is_backward else (queries, keys)
    longest = min(max_length, kernel.window or max_length)
    return fraction * occupied_fraction(heads, length, pairs / (length * longest), gpu.sm_count, blocks)


def _pairs(kernel: Kernel) -> float:
    """Query-key pairs of one head that the mask of fused attention leaves. The first and the last queries of
    a window to both sides see one side of it less.
    """
    _, queries, keys, _ = kernel.shape
    if kernel.is_causal:
        return ScoreBlock(queries, keys, is_causal=True, window=kernel.window or None).pairs
    side = kernel.window // 2
    return queries * (kernel.window or keys) - side * (side + 1)


def hbm_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Seconds of HBM traffic or of indexing, whichever is longer. 0 for a kernel that moves no bytes."""
    if kernel.hbm_bytes <= 0:
        return 0.0
    limits = gpu.memory_bound
    max_fraction: float = getattr(limits, _HBM_FRACTION.get(kernel.kind, "elementwise_fraction"))
    if kernel.kind in SCAN_KINDS:
        max_fraction = gpu.mixers.scan(kernel.kind).bandwidth_fraction * gpu.mixers.sustained_fraction
    elif kernel.kind in _PASSES:
        max_fraction = getattr(gpu.mixers, _PASSES[kernel.kind]) * gpu.mixers.sustained_fraction
    bytes_per_launch = kernel.hbm_bytes / kernel.sequential_launches
    if kernel.kind == "elementwise" and gpu.cache is not None:
        max_fraction = cached_fraction(bytes_per_launch, max_fraction, gpu.memory.bandwidth, gpu.cache)
    fraction = hbm_fraction(bytes_per_launch, max_fraction, limits.bytes_half)
    indexing = kernel.indexed_elements * gpu.launch.seconds_per_indexed_element
    indexing += kernel.strided_elements * gpu.launch.seconds_per_strided_element
    indexing += kernel.added_elements * gpu.launch.seconds_per_added_element
    return max(kernel.hbm_bytes / (gpu.memory.bandwidth * fraction), indexing)


def peak_flops_per_second(gpu: Gpu, dtype: str) -> float:
    """The GPU's dense peak in `dtype`, of "fp8-block" that of "fp8", and of "int8" where the file has none:
    NVIDIA's data sheets have the same for both. Raises InputError where it has no such arithmetic.
    """
    base = dtype.partition("-")[0]
    if base == "int8" and gpu.peak.int8 is None and gpu.peak.fp8 is not None:
        base = "fp8"
    require_dtype(gpu, base)
    peak: float = getattr(gpu.peak, base)
    return peak


def require_dtype(gpu: Gpu, precision: str) -> None:
    """Raises InputError when the GPU has no arithmetic in `precision`."""
    if getattr(gpu.peak, precision, None) is None:
        offered = [
            name
            for name in ("fp4", "fp8", "int8", "bf16", "fp16", "tf32", "fp32")
            if getattr(gpu.peak, name) is not None
        ]
        raise InputError(f"GPU '{gpu.name}' has no {precision} arithmetic; it has {', '.join(offered)}")


class KernelPricer:
    """`kernel_seconds` on one GPU, each distinct kernel priced once."""

    __slots__ = ("_seconds", "gpu")

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._seconds: dict[Kernel, float] = {}

    def seconds(self, kernel: Kernel) -> float:
        seconds = self._seconds.get(kernel)
        if seconds is None:
            seconds = self._seconds[kernel] = kernel_seconds(kernel, self.gpu)
        return seconds
