"""Products of experts that others timed on B200 and A100 against what zsim says of them.

    python -m validation.curves.grouped

`grouped.csv`: Transformer Engine's `general_grouped_gemm` in bf16, forward, for the rows' gradient and for
the weights', which is added up in `gradient`'s type: the mean of 40 calls without a wait between them
(MooreThreads/SimuMax@4dcaae51 simu_tools/efficency_test/test_grouped_gemm_efficiency.py; configs/system,
`group_matmul`, whose times are efficiencies of 2250 and 312 TFLOP/s there; its `fp8_group_matmul` is empty).
The host launches a product per expert, so a call takes no less than that. Prints the ratio of predicted to
measured seconds by GPU and product: of all calls together, the median and the middle 80 %; then, of B200's
calls of at least 80 experts forward and for the rows' gradient, the seconds per expert of the quickest tenth,
which is what the host's launches take.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from zsim.cost.kernels.kernel import Kernel, Layout
from zsim.cost.rates.gpu import kernel_seconds
from zsim.dtypes import DTYPE_BYTES
from zsim.operations.grouped_linear import STREAMS
from zsim.specs.cluster.files import load_gpu

GROUPED = Path(__file__).with_name("grouped.csv")
_MANY = 80


class Timed(NamedTuple):
    """One call: the products of `experts` with `rows` rows each."""

    gpu: str
    experts: int
    rows: int
    out_features: int
    in_features: int
    product: str
    gradient: str
    seconds: float

    @property
    def kernel(self) -> Kernel:
        """The call as zsim prices it, with what it reads and writes of the gradients' buffer."""
        m, n, k = self.rows, self.out_features, self.in_features
        shapes: dict[str, tuple[tuple[int, int, int], Layout]] = {
            "forward": ((m, n, k), "nt"),
            "input": ((m, k, n), "nn"),
            "weight": ((n, k, m), "tn"),
        }
        shape, layout = shapes[self.product]
        each = 2 * DTYPE_BYTES[self.gradient] if self.product == "weight" else 2
        moved = float(self.experts * (2 * m * (n + k) + each * n * k))
        flops = 2.0 * self.experts * m * n * k
        return Kernel(
            "gemm", flops, moved, "bf16", shape, self.experts, layout=layout, concurrent_launches=STREAMS
        )


def read_grouped(path: Path = GROUPED) -> Iterator[Timed]:
    """The rows of the table."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            experts, rows, n, k = (
                int(row[name]) for name in ("experts", "rows", "out_features", "in_features")
            )
            seconds = float(row["microseconds"]) * 1e-6
            yield Timed(row["gpu"], experts, rows, n, k, row["product"], row["gradient"], seconds)


def host_seconds_per_expert(calls: list[Timed]) -> float:
    """Seconds per expert that calls of many experts come down to: the quickest tenth's median. Calls for the
    weights' gradients, which HBM bounds, are left out."""
    each = sorted(
        one.seconds / one.experts for one in calls if one.experts >= _MANY and one.product != "weight"
    )
    return median(each[: max(1, len(each) // 10)])


def main() -> None:
    """Print the table."""
    found: dict[tuple[str, str, str], list[Timed]] = defaultdict(list)
    calls = list(read_grouped())
    for timed in calls:
        found[timed.gpu, timed.product, timed.gradient if timed.product == "weight" else ""].append(timed)
    print("gpu             product  gradient  number  together  median  10 to 90 %")
    for (name, product, gradient), own in found.items():
        gpu = load_gpu(name)
        predicted = [kernel_seconds(one.kernel, gpu) for one in own]
        ratios = sorted(said / one.seconds for said, one in zip(predicted, own, strict=True))
        low, high = (ratios[round(part * (len(ratios) - 1))] for part in (0.1, 0.9))
        together = sum(predicted) / sum(one.seconds for one in own)
        print(
            f"{name:15s} {product:8s} {gradient:8s} {len(own):7d} {together:9.2f} {median(ratios):7.2f}  "
            f"{low:.2f}-{high:.2f}"
        )
    host = host_seconds_per_expert([one for one in calls if one.gpu.startswith("b200")])
    print(f"host, b200-sxm-180gb: {host * 1e6:.1f} us per expert")


if __name__ == "__main__":
    main()
