"""Products that others timed on A100 and V100 against the curves of the GPU files."""

from __future__ import annotations

from statistics import median

from validation.curves.products import ratios


def test_every_kind_of_product_is_priced_near_what_others_timed() -> None:
    """Within 10 % in the median; single aligned products within 15 % for eight of ten. Odd rows are not held:
    these are fp16, and the files' figure is of bf16, in which they were not timed."""
    for (gpu, kind, row_bytes), values in ratios().items():
        if row_bytes == 2:
            continue
        assert abs(median(values) - 1) < 0.1, (gpu, kind, row_bytes)
        if kind == "one" and row_bytes == 16:
            near = sum(abs(value - median(values)) < 0.15 for value in values)
            assert near >= 0.8 * len(values), gpu
