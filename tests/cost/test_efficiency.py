"""The efficiency curves against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from zsim.cost.kernels.kernel import Kernel, Layout, elementwise
from zsim.cost.kernels.kernel import gemm as product
from zsim.cost.rates.efficiency import (
    attention_fraction,
    cached_fraction,
    contiguous,
    gemm_fraction,
    hbm_fraction,
    occupied_fraction,
)
from zsim.cost.rates.gpu import arithmetic_seconds, hbm_seconds, kernel_seconds
from zsim.specs.cluster.files import load_gpu
from zsim.specs.cluster.gpu import (
    AttentionBlocks,
    AttentionEfficiency,
    CacheRates,
    GemmEfficiency,
    select_attention_variant,
)

_ORIGIN: dict[str, Any] = {"source": "made up for this test", "evidence": "assumed"}


def gemm(**changes: Any) -> GemmEfficiency:
    values = {"max_fraction": 0.8, "k_half": 0.0, "tile_m": 128, "tile_n": 256, "half_tile_fraction": 0.5}
    return GemmEfficiency.model_validate({**_ORIGIN, **values, **changes})


def fraction(m: int, n: int, k: int, curve: GemmEfficiency, *, batch: int = 1, sm_count: int = 100) -> float:
    return gemm_fraction(m, n, k, batch, "bf16", curve, sm_count)


def test_whole_waves_of_whole_tiles_reach_the_maximum() -> None:
    """1280 x 2560 is 10 x 10 tiles of 128 x 256: one full wave on 100 SMs, so f = F = 0.8."""
    assert fraction(1280, 2560, 4096, gemm()) == pytest.approx(0.8)


def test_a_last_wave_with_few_tiles_wastes_the_rest_of_it() -> None:
    """1408 x 2560 is 11 x 10 = 110 tiles: two waves, 110 of 200 slots, f = 0.8 x 0.55. Half the tile fills
    220 of 300 slots but at half the rate; splitting k in two would need more than two waves."""
    assert fraction(1408, 2560, 4096, gemm()) == pytest.approx(0.44)


def test_tiles_that_hang_over_the_edge_are_wasted_work() -> None:
    """m = 64 fills half of a tile 128 high: w = 1/2. A tile 64 high keeps 0.5^3 of the rate: no gain."""
    assert fraction(64, 25600, 4096, gemm()) == pytest.approx(0.8 * 0.5)


def test_a_cheap_smaller_tile_is_taken() -> None:
    """m = 64, c = 0.99: the tile is halved to 128 x 128, 128 x 64 and 64 x 64, where nothing hangs over:
    400 tiles in four waves, f = 0.8 x 0.99^3."""
    assert fraction(64, 25600, 4096, gemm(half_tile_fraction=0.99)) == pytest.approx(0.8 * 0.99**3)


def test_half_of_the_maximum_at_k_half() -> None:
    """f = F k / (k + K) = 0.8 x 256 / 512. Splitting k would lose more."""
    assert fraction(1280, 2560, 256, gemm(k_half=256)) == pytest.approx(0.4)


def test_few_tiles_with_a_long_inner_dimension_are_split_along_it() -> None:
    """10 tiles on 100 SMs, k = 65536: 16 splits give 160 slots of 200 in two waves, w = 0.8; 8 splits 80 of
    100, the same. K = 0, so f = 0.8 x 0.8."""
    assert fraction(1280, 256, 65536, gemm()) == pytest.approx(0.64)


def test_a_batch_of_products_fills_the_waves_together() -> None:
    """100 products of one tile each: one full wave."""
    assert fraction(128, 256, 4096, gemm(), batch=100) == pytest.approx(0.8)


def test_a_type_of_its_own_replaces_the_maximum() -> None:
    curve = gemm(by_dtype={"fp8": 0.6})
    assert gemm_fraction(1280, 2560, 4096, 1, "fp8", curve, 100) == pytest.approx(0.6)
    assert gemm_fraction(1280, 2560, 4096, 1, "bf16", curve, 100) == pytest.approx(0.8)


def test_products_of_transformer_engine_have_a_ratio_of_their_own() -> None:
    """f = 0.8 x 1.05, in fp8 0.6 x 1.05; torch's products keep 0.8, and so do all where no ratio is known."""
    curve = gemm(by_dtype={"fp8": 0.6}, transformer_engine_ratio=1.05)
    found = {
        (dtype, by_engine): gemm_fraction(
            1280, 2560, 4096, 1, dtype, curve, 100, is_transformer_engine=by_engine
        )
        for dtype in ("bf16", "fp8")
        for by_engine in (True, False)
    }
    assert found == {
        ("bf16", True): pytest.approx(0.84),
        ("bf16", False): pytest.approx(0.8),
        ("fp8", True): pytest.approx(0.63),
        ("fp8", False): pytest.approx(0.6),
    }
    assert gemm_fraction(
        1280, 2560, 4096, 1, "bf16", gemm(), 100, is_transformer_engine=True
    ) == pytest.approx(0.8)


@given(
    m=st.integers(1, 20_000),
    n=st.integers(1, 20_000),
    k=st.integers(1, 20_000),
    batch=st.integers(1, 64),
    k_half=st.floats(0, 1000),
)
def test_the_fraction_is_above_zero_and_never_above_the_maximum(
    m: int, n: int, k: int, batch: int, k_half: float
) -> None:
    value = fraction(m, n, k, gemm(k_half=k_half), batch=batch, sm_count=132)
    assert 0 < value <= 0.8 * (1 + 1e-12)


@pytest.mark.parametrize(("layout", "expected"), [("nt", (5, 5, 3)), ("nn", (5, 3, 3)), ("tn", (2, 3, 3))])
def test_the_rows_of_a_product_are_those_that_lie_in_memory(
    layout: Layout, expected: tuple[int, int, int]
) -> None:
    """m, n, k = 2, 3, 5: x W^T reads rows of 5 and 5, dy W of 5 and 3, dy^T x of 2 and 3; all write of 3."""
    assert contiguous(2, 3, 5, layout) == expected


@given(
    tokens=st.integers(1, 20_000),
    inputs=st.integers(1, 5_000),
    outputs=st.integers(1, 5_000),
    dtype=st.sampled_from([("bf16", 8), ("fp16", 8), ("fp32", 4), ("tf32", 4)]),
)
def test_a_linears_products_are_aligned_by_its_features_alone(
    tokens: int, inputs: int, outputs: int, dtype: tuple[str, int]
) -> None:
    name, elements = dtype
    products: list[tuple[int, int, int, Layout]] = [
        (tokens, outputs, inputs, "nt"),
        (tokens, inputs, outputs, "nn"),
        (outputs, inputs, tokens, "tn"),
    ]
    left = 1.0 if inputs % elements == 0 and outputs % elements == 0 else 0.4
    for m, n, k, layout in products:
        odd, even = (
            gemm_fraction(m, n, k, 1, name, gemm(k_half=100, unaligned_fraction=u), 108, layout)
            for u in (0.4, 1.0)
        )
        assert odd == pytest.approx(left * even)


def test_rows_on_four_bytes_lose_less_than_odd_ones() -> None:
    """Heads of 108 in 16 bits begin on multiples of 8 bytes, of 107 on multiples of 2; of 128 on 16."""
    curve = gemm(unaligned_fraction=0.3, four_byte_fraction=0.7)
    plain = gemm()
    for width, left in ((128, 1.0), (108, 0.7), (110, 0.7), (107, 0.3)):
        rate = gemm_fraction(2048, 2048, width, 64, "fp16", curve, 108)
        assert rate == pytest.approx(left * gemm_fraction(2048, 2048, width, 64, "fp16", plain, 108))


def test_batched_products_have_a_rate_and_a_half_of_their_own() -> None:
    """F = 0.8 x 0.5 and K = 64: 0.4 x 192 / 256. One product of the same curve: 0.8 x 192 / (192 + 448)."""
    curve = gemm(k_half=448, batched={"ratio": 0.5, "k_half": 64})
    rates = [
        gemm_fraction(
            1280, 2560, 192, 1, "bf16", curve, 100, single_call=curve.batched if is_batched else None
        )
        for is_batched in (True, False)
    ]
    assert rates == pytest.approx([0.3, 0.24])


def test_a_short_product_takes_the_time_of_writing_its_result_too() -> None:
    """K = 512, and E of F x 200 = 160 at F = 0.8. At k = 16 and 512 E is left, at 1,024 half of K, at 2,048
    all of it. Sixteen products have all of it at any k: 0.8 x 128 / 640."""
    curve = gemm(k_half=512)
    rates = {
        k: gemm_fraction(1280, 2560, k, 1, "bf16", curve, 100, write_k=200) for k in (16, 512, 1024, 2048)
    }
    assert rates == pytest.approx({
        16: 0.8 * 16 / 176, 512: 0.8 * 512 / 672, 1024: 0.8 * 1024 / 1280, 2048: 0.8 * 2048 / 2560,
    })  # fmt: skip
    assert gemm_fraction(1280, 2560, 128, 16, "bf16", curve, 100, write_k=200) == pytest.approx(0.16)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "mi300x-192gb"])
def test_a_product_takes_longer_with_its_inner_dimension_and_without_a_jump(name: str, dtype: Any) -> None:
    """With its arithmetic at the most: a half more of k is at most half of the time more."""
    if name == "a100-sxm-80gb" and dtype == "fp8":
        pytest.skip("A100 has no fp8")
    gpu = load_gpu(name)
    seconds = {k: kernel_seconds(product(4096, 4096, k, 2, dtype), gpu) for k in range(16, 4096, 16)}
    for before, after in pairwise(seconds):
        assert 1.0 <= seconds[after] / seconds[before] <= after / before + 1e-9, after


# Microseconds of 4,096 x 4,096 in bf16 by inner dimension, the median of three engines (AIConfigurator
# 095f58a5, NVIDIA, Apache-2.0, table gemm).
_MICROSECONDS = {
    "a100-sxm-80gb": {32: 31.8, 64: 36.7, 128: 50.2, 256: 51.0, 512: 83.4, 1024: 151.4, 8192: 1071.0},
    "h100-sxm-80gb": {32: 15.8, 64: 14.8, 128: 18.1, 256: 22.0, 512: 32.1, 1024: 51.3, 8192: 341.1},
    "h200-sxm-141gb": {32: 14.7, 64: 13.7, 128: 16.1, 256: 21.4, 512: 31.0, 1024: 53.1, 8192: 335.7},
    "b200-sxm-180gb": {32: 8.3, 64: 8.1, 128: 10.9, 256: 10.9, 512: 14.2, 1024: 24.3, 8192: 190.8},
}


@pytest.mark.parametrize("name", _MICROSECONDS)
def test_short_products_take_the_time_that_was_measured(name: str) -> None:
    """Within a quarter up to 128, where memory bounds them. Beyond, in relation to 8,192, as the table is of
    bursts, in which products run faster than in a step."""
    gpu, timed = load_gpu(name), _MICROSECONDS[name]
    ratios = {k: kernel_seconds(product(4096, 4096, k, 2, "bf16"), gpu) * 1e6 / timed[k] for k in timed}
    for k, ratio in ratios.items():
        assert 0.8 < (ratio if k <= 128 else ratio / ratios[8192]) < 1.25, k


@pytest.mark.parametrize(("columns", "microseconds"), [(1024, 5.7), (4096, 13.9), (14336, 45.0)])
def test_adapters_products_take_the_time_that_was_measured(columns: int, microseconds: float) -> None:
    """traces/h100-80gb-hbm3, hf_llama-3-8b_lora-16: the second product of adapters, of 4,096 tokens."""
    gpu = load_gpu("h100-sxm-80gb")
    seconds = kernel_seconds(product(4096, columns, 16, 2, "bf16"), gpu)
    assert seconds == pytest.approx(microseconds * 1e-6, rel=0.06)


def test_rows_that_a_router_draws_end_anywhere_in_a_tile() -> None:
    """Of 50 products of 256 x 512 each has 2 x 2 tiles, 200 on 100 SMs: two full waves. With 256 rows in the
    mean it has 2.5 x 2, 250 in all, which take three waves: 2/3 of the rate. With 64 in the mean it has one
    tile, as with 64.
    """
    curve = gemm(half_tile_fraction=0.01)
    for rows, left in ((256, 2 / 3), (64, 1.0)):
        even, uneven = (
            gemm_fraction(rows, 512, 4096, 50, "bf16", curve, 100, has_uneven_rows=word)
            for word in (False, True)
        )
        assert uneven == pytest.approx(left * even)


def test_one_token_less_costs_what_its_waves_cost_and_no_alignment() -> None:
    """8,191 tokens fill the same 64 rows of tiles as 8,192: 8191/8192 of the rate."""
    curve = gemm(unaligned_fraction=0.43)
    rates = [gemm_fraction(tokens, 2560, 4096, 1, "bf16", curve, 100) for tokens in (8191, 8192)]
    assert rates[0] == pytest.approx(rates[1] * 8191 / 8192)


def test_attention_saturates_with_length_and_width() -> None:
    """f = F s/(s+H) d/(d+D): 0.7 x 512/(512+512) x 64/(64+64) = 0.175 forward; backward has F = 0.6."""
    curve = AttentionEfficiency.model_validate(
        {
            **_ORIGIN,
            "forward_fraction": 0.7,
            "backward_fraction": 0.6,
            "sequence_half": 512,
            "head_dim_half": 64,
        }
    )
    assert attention_fraction(512, 64, curve, is_backward=False) == pytest.approx(0.175)
    assert attention_fraction(512, 64, curve, is_backward=True) == pytest.approx(0.15)


def with_narrow_kernels(kernels: dict[str, Any]) -> AttentionEfficiency:
    return AttentionEfficiency.model_validate(
        {
            **_ORIGIN,
            "forward_fraction": 0.7,
            "backward_fraction": 0.6,
            "sequence_half": 0,
            "by_head_dim": kernels,
        }
    )


@pytest.mark.parametrize(
    ("head_dim", "forward", "backward"), [(32, 0.9, 0.3), (33, 0.35, 0.66), (64, 0.35, 0.66), (65, 0.7, 0.6)]
)
def test_a_head_runs_on_the_narrowest_kernel_that_takes_it(
    head_dim: int, forward: float, backward: float
) -> None:
    curve = with_narrow_kernels(
        {
            "64": {"forward_ratio": 0.5, "backward_ratio": 1.1},
            "32": {"forward_ratio": 9 / 7, "backward_ratio": 0.5},
        }
    )
    assert attention_fraction(512, head_dim, curve, is_backward=False) == pytest.approx(forward)
    assert attention_fraction(512, head_dim, curve, is_backward=True) == pytest.approx(backward)


def test_no_narrow_kernel_exceeds_the_peak() -> None:
    curve = with_narrow_kernels({"64": {"forward_ratio": 2.0, "backward_ratio": 1.0}})
    assert attention_fraction(512, 64, curve, is_backward=False) == 1.0


def test_a_narrow_kernel_takes_heads_of_at_least_one() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        with_narrow_kernels({"0": {"forward_ratio": 1.0, "backward_ratio": 1.0}})


def test_attention_without_half_lengths_is_constant() -> None:
    curve = AttentionEfficiency.model_validate(
        {**_ORIGIN, "forward_fraction": 0.7, "backward_fraction": 0.6, "sequence_half": 0}
    )
    assert attention_fraction(16, 8, curve, is_backward=False) == pytest.approx(0.7)


def test_hbm_reaches_half_of_its_fraction_at_bytes_half() -> None:
    """f = F b/(b+B): 0.9 x 2/(2+2)."""
    assert hbm_fraction(2e6, 0.9, 2e6) == pytest.approx(0.45)
    assert hbm_fraction(2e6, 0.9, 0) == pytest.approx(0.9)


def test_elementwise_kernels_of_tensors_that_fit_run_at_the_caches_rate() -> None:
    """A cache of 60 MB and 4 TB/s before a memory of 1 TB/s, of which kernels reach 0.8: up to 60 MB 4 TB/s,
    from 80 on 0.8; at 70 half of the bytes are there: 1 / (0.5 / 0.8 + 0.5 / 4) = 1.333."""
    cache = CacheRates.model_validate({**_ORIGIN, "capacity": "60 MB", "bandwidth": "4 TB/s"})
    fractions = [cached_fraction(size * 1e6, 0.8, 1e12, cache) for size in (1, 60, 70, 80, 500)]
    assert fractions == pytest.approx([4.0, 4.0, 4 / 3, 0.8, 0.8])
    assert cached_fraction(1e6, 0.8, 6e12, cache) == 0.8  # the memory is faster


def test_a_cache_counts_for_elementwise_kernels_alone() -> None:
    """Two launches of 40 MB each on L40S (96 MiB, 2.6 TB/s; ramp of 1 MB): 2 x 41 MB / 2.6 TB/s. Copies of
    buckets, as large, read what nothing has just written."""
    gpu = load_gpu("l40s-48gb")
    chain = elementwise(80e6, "bf16", 2)
    assert hbm_seconds(chain, gpu) == pytest.approx(82e6 / 2.6e12)
    copies = replace(chain, kind="copy")
    assert hbm_seconds(copies, gpu) > 2 * hbm_seconds(chain, gpu)
    without = gpu.model_copy(update={"cache": None})
    assert hbm_seconds(chain, without) == pytest.approx(82e6 / (864e9 * 0.9))


@pytest.mark.parametrize(
    ("heads", "length", "mean", "expected"),
    [
        (10, 1280, 1.0, 1.0 / 1.5),  # 100 blocks on 100 SMs: one round, and half a block's time after it
        (10, 1280, 0.5, 0.5),  # half of the work, but the longest block takes as long
        (1, 128, 1.0, 0.01),  # one block
        (200, 1280, 0.5, 10 / 10.5),
    ],
)
def test_few_heads_leave_sms_idle(heads: int, length: int, mean: float, expected: float) -> None:
    """x / max(1, x + T) with T = 1/2 and blocks of 128 rows on 100 SMs."""
    blocks = AttentionBlocks(rows=128, tail=0.5)
    assert occupied_fraction(heads, length, mean, 100, blocks) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("heads", "expected", "causal"),
    [
        (64, 192 / 376, 192 / 376),
        (32, 192 / 376, 192 / 376),
        (256, 256 / 376, 256 / 376),
        (1, 128 / 188, 64 / 188),  # a block for each of 64 keys, of which the longest takes twice the mean
    ],
)
def test_blocks_of_a_bounded_number_run_in_rounds(heads: int, expected: float, causal: float) -> None:
    """200 // 64 is 3 blocks a head, 192 on 188 SMs, of which 4 are alone in a second round. More heads than
    200 have one each, and one head no more than 128 of 64 keys. Blocks that the bound makes are equally long
    under a causal mask too.
    """
    blocks = AttentionBlocks(rows=64, tail=0, limit=200)
    assert occupied_fraction(heads, 8192, 1.0, 188, blocks) == pytest.approx(expected)
    assert occupied_fraction(heads, 8192, 0.5, 188, blocks) == pytest.approx(causal)


@pytest.mark.parametrize(("width", "is_bounded"), [(64, False), (128, True)])
def test_narrow_heads_of_the_memory_efficient_kernel_have_no_bound(width: int, is_bounded: bool) -> None:
    gpu = select_attention_variant(load_gpu("rtx-4090"), "efficient")
    free = gpu.model_copy(update={"attention": gpu.attention.model_copy(update={"backward_blocks": None})})
    kernel = Kernel("attention_backward", 1e12, 0.0, "bf16", (64, 8192, 8192, width), is_causal=False)
    slower = arithmetic_seconds(kernel, gpu) / arithmetic_seconds(kernel, free)
    assert slower == pytest.approx(256 / 192 if is_bounded else 1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "is_causal", "window", "seen", "mean", "blocks"),
    [
        ((8, 4096, 4096, 128), True, 0, 4096, 0.5, 256),
        ((8, 4096, 4096, 128), True, 1024, 1792, 0.875, 256),  # w s - w^2/2 pairs: 1 - w/2s of w keys
        ((8, 4096, 4096, 128), False, 1025, 2 * (1025 - 512 * 513 / 4096), 1 - 512 * 513 / 4096 / 1025, 256),
        ((8, 512, 4096, 128), True, 1024, 2048, 1.0, 32),  # all of the last queries see a whole window
    ],
)
def test_a_window_makes_blocks_more_alike_and_shorter(
    shape: tuple[int, int, int, int], is_causal: bool, window: int, seen: float, mean: float, blocks: int
) -> None:
    """As many blocks of 128 queries as without it; the longest passes over w keys. H = 500 keys, T = 1/2, 64
    SMs: f = F s/(s + H) x/max(1, x + T), x = mean blocks / 64."""
    curve = AttentionEfficiency.model_validate(
        {**_ORIGIN, "forward_fraction": 0.8, "backward_fraction": 0.6, "sequence_half": 500,
         "forward_blocks": {"rows": 128, "tail": 0.5}}
    )  # fmt: skip
    board = load_gpu("a100-sxm-80gb").model_copy(update={"attention": curve, "sm_count": 64})
    kernel = Kernel("attention_forward", 1e12, 0.0, "bf16", shape, is_causal=is_causal, window=window)
    work = mean * blocks / 64
    expected = 0.8 * seen / (seen + 500) * work / max(1.0, work + 0.5)
    assert board.peak.bf16 is not None
    assert 1e12 / (board.peak.bf16 * arithmetic_seconds(kernel, board)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gpu", "variant", "kind", "measured"),
    [
        ("a100-sxm-80gb", None, "attention_forward", {64: 1.187, 32: 1.118, 16: 0.988, 8: 0.786, 4: 0.514}),
        ("a100-sxm-80gb", None, "attention_backward", {64: 1.005, 32: 0.966, 16: 0.888, 8: 0.76, 4: 0.675}),
        ("b200-sxm-180gb", "cudnn", "attention_forward", {64: 0.872, 32: 0.732, 16: 0.578, 8: 0.31}),
        ("b200-sxm-180gb", "cudnn", "attention_backward", {64: 0.729, 32: 0.796, 16: 0.755, 8: 0.659}),
    ],
)
def test_attention_of_few_heads_is_as_much_slower_as_was_timed(
    gpu: str, variant: str | None, kind: Any, measured: dict[int, float]
) -> None:
    """4,096 tokens, causal, heads 128 wide, four to 64 of them (MooreThreads/SimuMax@4dcaae51
    configs/system/a100_pcie.json and b200_bf16_ceperm.json, sdp_fwd and sdp_bwd): relative to their mean
    within 15 %."""
    board = load_gpu(gpu)
    board = select_attention_variant(board, variant) if variant else board
    rates = {
        heads: heads
        / arithmetic_seconds(Kernel(kind, 1e9 * heads, 0.0, "bf16", (heads, 4096, 4096, 128)), board)
        for heads in measured
    }
    scale = sum(measured.values()) / sum(rates.values())
    for heads, rate in rates.items():
        assert rate * scale == pytest.approx(measured[heads], rel=0.15), heads


def test_backward_may_reach_half_of_its_rate_at_a_length_of_its_own() -> None:
    """F s/(s + H) at 1,024 tokens: H = 1,024 forward and 3,072 backward, or as forward if not said."""
    said = {**_ORIGIN, "forward_fraction": 0.8, "backward_fraction": 0.8, "sequence_half": 1024}
    own = AttentionEfficiency.model_validate({**said, "backward_sequence_half": 3072})
    shared = AttentionEfficiency.model_validate(said)
    reached = [
        attention_fraction(1024, 128, curve, is_backward=is_backward)
        for curve in (own, shared)
        for is_backward in (False, True)
    ]
    assert reached == pytest.approx([0.4, 0.2, 0.4, 0.4])


def test_blocks_of_scores_are_as_efficient_as_the_causal_sequence_of_as_many_keys_a_query() -> None:
    """All of 512 queries see 512 keys: as a causal sequence of 1024 tokens, whose queries see 512 in the
    mean; the last 512 queries of 1024 keys see 768."""
    board = load_gpu("h100-sxm-80gb")
    gpu = board.model_copy(update={"attention": board.attention.model_copy(update={"forward_blocks": None})})
    square = Kernel("attention_forward", 1e12, 0.0, "bf16", (1, 512, 512, 128), is_causal=False)
    late = Kernel("attention_forward", 1e12, 0.0, "bf16", (1, 512, 1024, 128))
    for kernel, tokens in ((square, 1024), (late, 1536)):
        causal = Kernel("attention_forward", 1e12, 0.0, "bf16", (1, tokens, tokens, 128))
        assert arithmetic_seconds(kernel, gpu) == arithmetic_seconds(causal, gpu)
    assert arithmetic_seconds(replace(square, is_causal=True), gpu) > arithmetic_seconds(square, gpu)
