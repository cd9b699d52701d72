"""How far rates may be from their files, by their evidence."""

from __future__ import annotations

import pytest

from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.spreads import load_spreads, scale_offload_rates


def test_the_weaker_the_evidence_the_wider_the_spread() -> None:
    spreads = load_spreads()
    widths = [
        spreads.factor(grade, "fast") / spreads.factor(grade, "slow")
        for grade in ("measured", "calibrated", "data sheet", "assumed")
    ]
    assert widths == sorted(widths)
    assert widths[0] == pytest.approx(1.05 / 0.95)
    assert widths[-1] == pytest.approx(4.0)


def test_each_table_moves_by_its_own_grade() -> None:
    """DGX-2: PCIe and drives are assumed (half, twice), the CPU is measured (5 %), but for its optimizer,
    whose measurements differ and are said by the file."""
    cluster = load_cluster("dgx-2")
    assert cluster.nvme is not None
    assert (cluster.pcie.evidence, cluster.offload.evidence, cluster.nvme.evidence) == (
        "assumed", "measured", "assumed",
    )  # fmt: skip
    for end, half, little in (("slow", 0.5, 0.95), ("fast", 2.0, 1.05)):
        moved = scale_offload_rates(cluster, end, load_spreads())  # type: ignore[arg-type]
        assert moved.pcie.bandwidth == cluster.pcie.bandwidth * half
        assert moved.nvme is not None
        assert moved.nvme.read_bandwidth == cluster.nvme.read_bandwidth * half
        assert moved.offload.copy_fraction == pytest.approx(cluster.offload.copy_fraction * little)
        assert moved.offload.optimizer_fraction == (0.177 if end == "slow" else 0.426)
        assert moved.offload.dma_fraction <= 1
