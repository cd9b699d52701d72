"""GPU kernels as work: what they compute and move, before any hardware is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["nt", "nn", "tn"]
KernelKind = Literal[
    "gemm",  # matrix product; shape = (m, n, k)
    "attention_forward",  # fused attention; shape = (sequences * heads, queries, keys, head_dim)
    "attention_backward",
    "elementwise",  # norm, activation, residual, rotary, softmax, dropout, cast: bound by HBM
    "embedding",  # row gather or scatter-add
    "loss",  # softmax and cross-entropy over the vocabulary
    "optimizer",  # the fused or foreach update
    "copy",  # device-to-device copy: bucket copies, copy-in, copy-out
]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or `launches` kernels priced together.

    `flops` is what the arithmetic units do; `hbm_bytes` what is read plus what is written; `dtype` the type
    that the arithmetic runs in ("bf16", "fp16", "fp32", "tf32", "fp8"). `dependent_loads`: readings of memory
    that wait for one another because too few threads read, in a row. `indexed_elements`: elements that are
    found by an index each, one thread one element. `layout`: how a product's operands lie in memory, "n" with
    the rows of the formula (m x k, k x n), "t" with its columns: a Linear is "nt" forward (x W^T), "nn" for
    its input's gradient (dy W), "tn" for its weight's (dy^T x).
    """

    kind: KernelKind
    flops: float
    hbm_bytes: float
    dtype: str = "bf16"
    shape: tuple[int, ...] = ()
    launches: int = 1
    dependent_loads: int = 0
    indexed_elements: int = 0
    layout: Layout = "nt"
