"""Lightning attention (MiniMax-Text-01, MiniMax-M1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zsim.cost.kernels.kernel import ScanKind
from zsim.cost.kernels.shapes import WorkOptions
from zsim.operations.mixers.mixer import LinearMixer, Scan
from zsim.operations.sharding import FeatureCut


@dataclass(frozen=True, slots=True)
class Lightning(LinearMixer):
    """Linear attention with a fixed decay, `num_heads` heads of width D, in blocks of B tokens.

    Qin et al. 2024, "Lightning Attention-2" (arXiv 2401.04658), section 3: per token and head 4BD within a
    block, 2DD for the block's state and 2DD for the product with what came before. Backward takes the
    gradients of three inputs: 10BD within a block and 8DD across. The states are read and written once per
    block, and q, k and v are read for each of both parts.
    """

    num_heads: int
    head_dim: int
    block: int = 256

    title: ClassVar[str] = "lightning attention"
    scan_kind: ClassVar[ScanKind] = "lightning_scan"

    @property
    def chunk_tokens(self) -> int:
        return self.block

    @property
    def split_counts(self) -> tuple[tuple[str, int], ...]:
        return (("heads of lightning attention", self.num_heads),)

    @property
    def output_elements(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def input_elements(self) -> int:
        return 3 * self.output_elements

    def cut_features(self, cut: FeatureCut) -> Lightning:
        return replace(self, num_heads=cut.features(self.num_heads))

    def forward_scan(self, element: int) -> Scan:
        b, d = self.block, self.head_dim
        flops, elements = 4 * b * d + 4 * d * d, 7 * d + 2 * d * d / b
        return Scan(self.num_heads * flops, self.num_heads * elements * element, 2)

    def backward_scan(self, element: int) -> Scan:
        b, d = self.block, self.head_dim
        flops, elements = 10 * b * d + 8 * d * d, 14 * d + 4 * d * d / b
        return Scan(self.num_heads * flops, self.num_heads * elements * element, 4, walks=2)

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """Queries, keys and values."""
        return (self.output_elements * options.activation_bytes,) * 3

    def state_bytes(self) -> float:
        return 2 * self.num_heads * self.head_dim**2 / self.block
