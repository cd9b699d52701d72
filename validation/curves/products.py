"""Matrix products that others timed on A100 and V100 against what zsim says of them.

    python -m validation.curves.products

Prints the ratio of predicted to measured seconds by GPU, kind and alignment: its median, and the middle 80 %
around that. Predictions are of training, where products run within the board's power for hours; each product
here ran alone, so that a median a few per cent above 1 is what to expect. Kernels below 0.1 ms are left out,
in which the measuring loop's own wait for the device shows.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

from zsim.cost.kernels.kernel import Kernel, Layout
from zsim.cost.rates.efficiency import contiguous
from zsim.cost.rates.gpu import kernel_seconds
from zsim.specs.cluster.files import load_gpu
from zsim.specs.cluster.gpu import Gpu

PRODUCTS = Path(__file__).with_name("products.csv")
_LEAST_SECONDS = 1e-4
_ELEMENT_BYTES = 2  # all are fp16


class Timed(NamedTuple):
    """One product, or `batch` of them in one call: m x k by k x n in `seconds`."""

    gpu: str
    batch: int
    m: int
    n: int
    k: int
    layout: Layout
    seconds: float

    @property
    def kernel(self) -> Kernel:
        """The product as zsim prices it."""
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        flops = 2.0 * self.batch * self.m * self.n * self.k
        num_bytes = float(self.batch * elements * _ELEMENT_BYTES)
        shape = (self.m, self.n, self.k)
        is_batched = self.batch > 1
        return Kernel("gemm", flops, num_bytes, "fp16", shape, layout=self.layout, is_batched=is_batched)

    @property
    def row_bytes(self) -> int:
        """The largest of 16, 4 and 2 bytes on whose multiples all rows of the matrices begin."""
        rows = contiguous(self.m, self.n, self.k, self.layout)
        return next(size for size in (16, 4, 2) if not any(row * _ELEMENT_BYTES % size for row in rows))


def read_products(path: Path = PRODUCTS) -> Iterator[Timed]:
    """The rows of the table that took long enough to be told from the loop around them."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            batch, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
            seconds = 2.0 * batch * m * n * k / (float(row["teraflops"]) * 1e12)
            if seconds >= _LEAST_SECONDS:
                yield Timed(row["gpu"], batch, m, n, k, cast(Layout, row["layout"]), seconds)


def ratios(path: Path = PRODUCTS) -> Mapping[tuple[str, str, int], list[float]]:
    """Predicted by measured seconds, sorted, by GPU, "one" or "batched", and `Timed.row_bytes`."""
    gpus: dict[str, Gpu] = {}
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for timed in read_products(path):
        gpu = gpus.setdefault(timed.gpu, load_gpu(timed.gpu))
        kind = "batched" if timed.batch > 1 else "one"
        found[timed.gpu, kind, timed.row_bytes].append(kernel_seconds(timed.kernel, gpu) / timed.seconds)
    return {key: sorted(values) for key, values in sorted(found.items())}


def main() -> None:
    """Print the table."""
    print("gpu             products   rows on   number   median  10 to 90 %")
    for (gpu, kind, row_bytes), values in ratios().items():
        low, high = (values[round(part * (len(values) - 1))] for part in (0.1, 0.9))
        middle = median(values)
        print(
            f"{gpu:15s} {kind:9s} {row_bytes:2d} bytes {len(values):8d} {middle:8.3f}  {low:.2f}-{high:.2f}"
        )


if __name__ == "__main__":
    main()
