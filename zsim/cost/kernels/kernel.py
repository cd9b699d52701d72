"""GPU kernels as work: FLOPs, HBM bytes and launches, independent of the hardware, no seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Layout = Literal["nt", "nn", "tn"]
ScanKind = Literal[
    "delta_scan",  # Gated DeltaNet's; shape = (sequences, chunks that follow one another)
    "channel_delta_scan",  # the same with a decay for every channel: Kimi's
    "state_space_scan",  # Mamba-2's
    "selective_scan",  # Mamba's
    "lightning_scan",  # lightning attention's
]
KernelKind = Literal[
    "gemm",  # matrix product; shape = (m, n, k)
    "attention_forward",  # fused attention; shape = (sequences * heads, queries, keys, head_dim)
    "attention_backward",
    "elementwise",  # norm, activation, residual, rotary, softmax, dropout, cast: bound by HBM
    "embedding",  # row gather or scatter-add
    "loss",  # softmax and cross-entropy over the vocabulary
    "optimizer",  # the fused or foreach update
    "copy",  # device-to-device copy: bucket copies, copy-in, copy-out
    "convolution",  # a filter per channel over the last few tokens
    "sparse_attention",  # attention over keys that were chosen for each query
    "indexer",  # scores by which they are chosen
    "top_k",  # their choice
    "delta_scan", "channel_delta_scan", "state_space_scan", "selective_scan", "lightning_scan",
]  # fmt: skip
SCAN_KINDS: tuple[ScanKind, ...] = get_args(ScanKind)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or `launches` kernels priced as one."""

    kind: KernelKind
    flops: float
    """Work of the arithmetic units."""
    hbm_bytes: float
    """Bytes read plus written."""
    dtype: str = "bf16"
    """The type of the arithmetic ("bf16", "fp16", "fp32", "tf32", "fp8")."""
    shape: tuple[int, ...] = ()
    launches: int = 1
    dependent_loads: int = 0
    """Loads that wait for one another in sequence, because few threads read."""
    indexed_elements: int = 0
    """Elements read or written through one index each, one per thread."""
    strided_elements: int = 0
    """Elements of slices of rows, or with a row or a column broadcast over them, one per thread."""
    added_elements: int = 0
    """Elements of rows that are added to rows picked by an index, in units of what a scatter that adds takes
    for one.
    """
    layout: Layout = "nt"
    """Order of a product's operands in memory, "n" by rows of the formula (m x k, k x n), "t" by its columns.
    A Linear is "nt" forward (x W^T), "nn" for the gradient of its input (dy W), "tn" for the gradient of its
    weight (dy^T x).
    """
    is_causal: bool = True
    """The last query of fused attention sees all keys, each one before it one less. Otherwise all queries see
    all keys.
    """
    is_batched: bool = False
    """Many equal products in one call, as of attention that is written out."""
    is_grouped: bool = False
    """Products of experts in one kernel."""
    has_uneven_rows: bool = False
    """The first size of `shape` is the mean of products that each have another, as a router draws them."""
    is_transformer_engine: bool = False
    """A product that Transformer Engine calls."""
    window: int = 0
    """The number of keys that a query sees at most: the last or, without a causal mask, the nearest
    (0: all).
    """
    concurrent_launches: int = 1
    """Launches that run at once, on streams of their own."""

    @property
    def sequential_launches(self) -> int:
        """Launches that run one after the other, each with those that run at the same time."""
        return -(-self.launches // self.concurrent_launches)


def gemm(
    m: int,
    n: int,
    k: int,
    element_bytes: int,
    dtype: str,
    layout: Layout = "nt",
    *,
    extra_bytes: int = 0,
    is_transformer_engine: bool = False,
) -> Kernel:
    """One product of m x k by k x n: 2 m n k FLOPs, (m k + k n + m n) elements."""
    moved_bytes = float((m * k + k * n + m * n) * element_bytes + extra_bytes)
    return Kernel(
        "gemm",
        2.0 * m * n * k,
        moved_bytes,
        dtype,
        (m, n, k),
        layout=layout,
        is_transformer_engine=is_transformer_engine,
    )


def elementwise(hbm_bytes: float, dtype: str, launches: int = 1) -> Kernel:
    """Elementwise kernels that read and write so many bytes in all."""
    return Kernel("elementwise", 0.0, float(hbm_bytes), dtype, (), launches)


def total_flops(kernels: Iterable[Kernel]) -> float:
    """FLOPs of all kernels."""
    return sum(kernel.flops for kernel in kernels)
