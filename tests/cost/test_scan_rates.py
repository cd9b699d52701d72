"""Seconds of recurrences, convolutions and sparse attention: what bounds each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.rates.gpu import kernel_seconds
from zsim.specs.cluster.files import load_gpu
from zsim.specs.cluster.gpu import Gpu, MixerEfficiency
from zsim.specs.presets import gpu_preset_path

SCAN = Kernel("delta_scan", 1e12, 40e9, "bf16", (1, 100), 7)


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    """An H100, 3.35 TB/s and 2 us a launch: 0.63 of the bandwidth for Gated DeltaNet, 3.2 us a chunk."""
    return load_gpu(gpu_preset_path("h100-sxm-80gb"))


def test_many_tokens_are_bound_by_memory(gpu: Gpu) -> None:
    """40 GB at 0.63 of 3.35 TB/s (half of the rate at 2 MB of one of 7 launches), and 7 launches."""
    fraction = 0.63 * (40e9 / 7) / (40e9 / 7 + 2e6)
    assert kernel_seconds(SCAN, gpu) == pytest.approx(40e9 / (3.35e12 * fraction) + 14e-6)


def test_few_heads_wait_for_one_chunk_after_the_other(gpu: Gpu) -> None:
    """1,000 chunks of 3.2 us, whatever they move."""
    short = replace(SCAN, hbm_bytes=1e6, shape=(8, 1000))
    assert kernel_seconds(short, gpu) == pytest.approx(3.2e-3 + 14e-6)


def test_a_kind_without_numbers_runs_like_the_delta_rule(gpu: Gpu) -> None:
    assert gpu.mixers.scan("lightning_scan") == gpu.mixers.scan("delta_scan")


def test_a_gpu_that_nobody_measured_is_in_the_middle() -> None:
    assert load_gpu(gpu_preset_path("a100-sxm-80gb")).mixers == MixerEfficiency()
    assert MixerEfficiency().scan("delta_scan").bandwidth_fraction == 0.46


def test_mambas_scan_computes_at_the_peak_of_fp32(gpu: Gpu) -> None:
    """66.9 TFLOP/s: it has no matrix products."""
    scan = Kernel("selective_scan", 66.9e12, 1e6, "bf16", (1, 4), 1)
    assert kernel_seconds(scan, gpu) == pytest.approx(1 + 2e-6)


def test_sparse_attention_reaches_its_own_part_of_the_peak(gpu: Gpu) -> None:
    """0.597 of 989.4 TFLOP/s, the indexer 0.453."""
    seconds = [
        kernel_seconds(Kernel(kind, 989.4e12, 0.0, "bf16"), gpu) for kind in ("sparse_attention", "indexer")
    ]
    assert seconds == pytest.approx([1 / 0.597 + 2e-6, 1 / 0.453 + 2e-6])


def test_an_unknown_kind_of_scan_is_an_error() -> None:
    with pytest.raises(ValueError, match="did you mean 'delta_scan'"):
        MixerEfficiency.model_validate({"scans": {"delta_scam": {"bandwidth_fraction": 0.5}}})
