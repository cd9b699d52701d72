"""The fraction of a GPU's peak that a kernel reaches, from its shape alone.

The parameters of the curves are data of the GPU file. This module has their equations.
"""

from __future__ import annotations

from math import ceil, inf

from zsim.cost.kernels.kernel import Layout
from zsim.specs.cluster.gpu import (
    AttentionBlocks,
    AttentionCurve,
    CacheRates,
    GemmEfficiency,
    ProductsInOneCall,
)

_MAX_SPLITS = 32
LONG_PRODUCT = 2048  # inner dimension from which on `k_half` describes sustained products
_ALIGNED_ELEMENTS = {"fp32": 4, "tf32": 4, "bf16": 8, "fp16": 8, "fp8": 16, "int8": 16, "fp4": 32}


def gemm_fraction(
    m: int,
    n: int,
    k: int,
    batch: int,
    dtype: str,
    gemm: GemmEfficiency,
    sm_count: int,
    layout: Layout = "nt",
    *,
    write_k: float = inf,
    single_call: ProductsInOneCall | None = None,
    is_transformer_engine: bool = False,
    has_uneven_rows: bool = False,
) -> float:
    """Fraction of peak that `batch` products of m x k by k x n reach.

        f = F * max over (h, s) of  c^h * (k/s) / (k/s + K) * w(h, s)
        w = s b m n / (S t_m t_n ceil(s b ceil(m/t_m) ceil(n/t_n) / S))

    F: `max_fraction` of the type, of "fp8-block" and "int8" that of "fp8" where it has none of its own. K:
    `k_half`, the inner dimension where the pipeline's fill and drain cost as much as its work. S: SMs. b:
    `batch`.

    A library picks the tile and may split the inner dimension: h halvings (up to 3, of the longer side) of
    the tile t_m x t_n, each keeping c = `half_tile_fraction` of the rate, and s = 1, 2, 4 ... splits of k as
    long as all tiles fit in two waves and k/s is not below K. w is the fraction of all SM-tiles of all waves
    that is useful work: idle SMs of the last wave and the overhang of tiles beyond m and n lower it.

    K is from steps in training. A single product of k below 2,048 has less of it, K(k) = max(min(K, F E),
    K k / 2048). E: `write_k`, the k whose arithmetic at the peak takes as long as writing the result, which
    nothing hides. AIConfigurator (095f58a5, table gemm, bf16, m >= 2,048, n >= 1,024) has this shape on A100,
    H100, H200 and B200, where K alone made k = 256 up to 2.9 times too long. On one H100 adapters of rank 16
    take 5.7, 13.9 and 45 us, of 4,096 rows by 1,024, 4,096 and 14,336 columns (traces/h100-80gb-hbm3,
    hf_llama-3-8b_lora-16, 416 kernels).

    Where the rows of a matrix in memory (`contiguous`) are not a multiple of 16 bytes, f is multiplied by
    `four_byte_fraction` (heads of 108), or where they are none of 4 by `unaligned_fraction` (an odd
    vocabulary, 50257). For products in one call (`single_call`) F is multiplied by its `ratio`, and K is its
    `k_half`. For those that Transformer Engine calls F is multiplied by `transformer_engine_ratio`.

    Products with uneven rows (`has_uneven_rows`, m in the mean) end anywhere in a tile, so that each has
    max(1, m/t_m + 1/2) tiles of rows in the mean instead of ceil(m/t_m). Experts of inference engines take
    longer with rows by a power law than with even ones (AIConfigurator 095f58a5, table moe, bf16, all experts
    on one GPU, eight GPUs): in the median 1.15 times at 128 to 256 rows an expert, 1.12 at 256 to 512, 1.06
    at 512 to 1,024 and 1.01 beyond. This says 1.06, 1.08, 1.04 and 1.02 of the same shapes.

    The form of w: NVIDIA, "Matrix Multiplication Background User's Guide", section 4 (tile and wave
    quantisation).
    """
    best = 0.0
    k_half = gemm.k_half
    base = "fp8" if dtype == "int8" else dtype.partition("-")[0]
    peak_fraction = gemm.by_dtype.get(dtype, gemm.by_dtype.get(base, gemm.max_fraction))
    if single_call is not None:
        k_half = single_call.k_half
        peak_fraction *= single_call.ratio
    if is_transformer_engine:
        peak_fraction *= gemm.transformer_engine_ratio
    fill = k_half
    if k < LONG_PRODUCT and batch == 1 and single_call is None:
        fill = max(min(k_half, peak_fraction * write_k), k_half * k / LONG_PRODUCT)
    tile_m, tile_n, tile_fraction = gemm.tile_m, gemm.tile_n, 1.0
    for _ in range(4):
        row_tiles = max(1.0, m / tile_m + 0.5) if has_uneven_rows else ceil(m / tile_m)
        tiles = batch * row_tiles * ceil(n / tile_n)
        splits = 1
        while True:
            waves = ceil(tiles * splits / sm_count)
            useful = batch * m * n * splits / (waves * sm_count * tile_m * tile_n)
            inner = k / splits
            best = max(best, tile_fraction * useful * inner / (inner + fill))
            splits *= 2
            if tiles * splits > 2 * sm_count or splits > _MAX_SPLITS or k < splits * k_half:
                break
        tile_fraction *= gemm.half_tile_fraction
        if tile_n >= tile_m:
            tile_n = max(1, tile_n // 2)
        else:
            tile_m = max(1, tile_m // 2)
    return peak_fraction * best * _alignment(contiguous(m, n, k, layout), dtype, gemm)


def _alignment(rows: tuple[int, int, int], dtype: str, gemm: GemmEfficiency) -> float:
    """The part of the rate that matrices with rows of so many elements keep."""
    per_row = _ALIGNED_ELEMENTS.get(dtype.partition("-")[0], 8)
    if not any(length % per_row for length in rows):
        return 1.0
    if gemm.four_byte_fraction is None or any(length % max(1, per_row // 4) for length in rows):
        return gemm.unaligned_fraction
    return gemm.four_byte_fraction


def contiguous(m: int, n: int, k: int, layout: Layout) -> tuple[int, int, int]:
    """Elements of a row in memory of the left operand, of the right operand, and of the result.

    Only these must be aligned: (op_A = N ? m : k), (op_B = N ? k : n) and m of cuBLAS's column-major matrices
    (NVIDIA, "cuBLAS library", section "Tensor Core Usage"), whose m is the n here. So the number of tokens,
    m of a Linear's forward product and k of its weight gradient's, is never among them.
    """
    left_row = k if layout[0] == "n" else m
    right_row = n if layout[1] == "n" else k
    return left_row, right_row, n


def attention_fraction(keys: float, head_dim: int, attention: AttentionCurve, *, is_backward: bool) -> float:
    """Fraction of peak of fused attention.

        f = F * s / (s + H) * d / (d + D)

    F: `forward_fraction` or `backward_fraction`, for narrow heads times the ratio of their kernel. s: twice
    the keys that a query sees in the mean. H: `sequence_half`, in backward `backward_sequence_half`. d: width
    of a head. D: `head_dim_half`, the width at which the softmax (whose work per score does not depend on d)
    takes as long as the matrix products (whose work does).

    H is backward's own because its row sums and the cast of its fp32 dq go over each token once, however long
    the sequence.

    s is the tokens of a causal sequence, 2 k - q of q queries that end with the last of k keys, 2 k without a
    mask, nearly 2 w with a window w: a block of queries begins and ends once, and passes over the keys that
    it sees in between (Dao 2023, "FlashAttention-2", section 3.1).
    """
    fraction = attention.fraction(head_dim, is_backward=is_backward)
    half = attention.half_length(is_backward=is_backward)
    return fraction * keys / (keys + half) * head_dim / (head_dim + attention.head_dim_half)


def occupied_fraction(heads: int, length: int, mean: float, sm_count: int, blocks: AttentionBlocks) -> float:
    """Part of the time in which fused attention's blocks of threads keep all SMs busy.

        x / max(1, x + T)     x = w b a ceil(l / r) / S
        x / ceil(x)           x = w b a min(ceil(l / r), max(1, floor(L / b a))) / S     with a limit L

    b a: `heads` of all sequences. l: `length`, queries or in backward keys. r: `rows` of a block. w: `mean`
    work of a block by that of the longest, 1/2 under a causal mask, 1 - v / 2 s of s tokens with a window v.
    S: SMs. T: `tail`. x is the time of all work on all SMs, in that of the longest block, which nothing goes
    below. At the end SMs wait for the last block, at most for one of the longest (Graham 1969, "Bounds on
    multiprocessing timing anomalies"). L: `limit` of blocks, which run in rounds. Where it binds, a block
    takes every n-th of a head's pieces of r keys, so that all take about as long and w is 1.
    """
    splits = ceil(length / blocks.rows)
    if blocks.limit is None:
        work = mean * heads * splits / sm_count
        return work / max(1.0, work + blocks.tail)
    bound = max(1, min(splits, blocks.limit // heads))
    work = (1.0 if bound < splits or bound == 1 else mean) * heads * bound / sm_count
    return work / ceil(work)


def hbm_fraction(num_bytes: float, max_fraction: float, bytes_half: float) -> float:
    """Fraction of the data sheet's HBM bandwidth that one kernel moving `num_bytes` reaches.

        f = F * b / (b + B)

    F: the kind's `..._fraction` on large tensors. b: bytes read plus written. B: `bytes_half`, the bytes that
    take as long as ramping up and draining the memory pipeline. What a cache keeps of the last kernel's
    tensors is in F (`cached_fraction`); those of earlier ones are overwritten before a step reads them again.
    """
    return max_fraction * num_bytes / (num_bytes + bytes_half)


def cached_fraction(num_bytes: float, max_fraction: float, bandwidth: float, cache: CacheRates) -> float:
    """Fraction of the data sheet's HBM bandwidth B that elementwise kernels in a row reach on large tensors,
    each moving `num_bytes` b, of which the cache keeps what the one before has written.

        f = 1 / ((1 - h) / F + h B / W)     h = min(1, max(0, 4 - 3 b / C))

    F: `max_fraction`, without the cache. W: the cache's bandwidth. C: its capacity. h: the part that is
    there. Kernels of up to C find everything, of 4/3 C nothing, as lines that are replaced in order are gone
    before they are read. On one H100 of 50 MiB (traces/h100-80gb-hbm3, all elementwise kernels of torch on
    contiguous tensors) adds, products and powers in steps move 17 MB in 4.4 us, 25 in 6.6 and 6.8, 34 in 7.8,
    50 in 12.9 to 14.2, which is 4.2 TB/s after a ramp of 0.5 us, but 67 MB at 3.1 and all larger ones at 2.9
    to 3.1 TB/s. Casts of parameters, which nothing wrote before, take the memory's time at any size.
    `causal_conv1d_fn` again and again on the same tensors (AIConfigurator 095f58a5, table gdn, SGLang) moves
    2.6 TB/s on L40S up to 100 MB of 96 MiB and 0.68 from 130 MB on, on RTX PRO 6000 4.0 up to 130 of 128 MiB
    and 1.45 from 200 on.
    """
    if cache.bandwidth <= max_fraction * bandwidth:
        return max_fraction
    kept = min(1.0, max(0.0, 4 - 3 * num_bytes / cache.capacity))
    return 1 / ((1 - kept) / max_fraction + kept * bandwidth / cache.bandwidth)
