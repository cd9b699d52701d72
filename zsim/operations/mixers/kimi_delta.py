"""Kimi delta attention (Kimi-Linear, Ling 3.0)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zsim.cost.kernels.kernel import ScanKind
from zsim.cost.kernels.shapes import WorkOptions
from zsim.operations.mixers.mixer import ElementwiseWork, LinearMixer, Scan
from zsim.operations.sharding import FeatureCut

_FP32 = 4


@dataclass(frozen=True, slots=True)
class KimiDelta(LinearMixer):
    """The gated delta rule with a decay for every channel of a key, `num_heads` heads of `head_dim`.

    Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692), in fla's chunks (bc3b101d ops/kda/chunk.py): FLOPs as of
    Gated DeltaNet, with the decay in fp32 for every channel (2 of its tensors summed up, one read by each
    kernel), and two matrices of a chunk, which are kept.
    """

    num_heads: int
    head_dim: int
    chunk: int = 64

    title: ClassVar[str] = "Kimi delta attention"
    scan_kind: ClassVar[ScanKind] = "channel_delta_scan"

    @property
    def chunk_tokens(self) -> int:
        return self.chunk

    @property
    def split_counts(self) -> tuple[tuple[str, int], ...]:
        return (("heads of Kimi delta attention", self.num_heads),)

    @property
    def output_elements(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def input_elements(self) -> int:
        return 4 * self.output_elements

    def cut_features(self, cut: FeatureCut) -> KimiDelta:
        return replace(self, num_heads=cut.features(self.num_heads))

    def forward_scan(self, element: int) -> Scan:
        c, k = self.chunk, self.head_dim
        flops = 10 * c * k + 6 * k * k + 2 / 3 * c * c
        moved = (13 * k + 4 * c + 2 * k * k / c) * element + 6 * _FP32 * k
        return Scan(self.num_heads * flops, self.num_heads * moved, 7)

    def backward_scan(self, element: int) -> Scan:
        c, k = self.chunk, self.head_dim
        flops = 28 * c * k + 16 * k * k + 4 * c * c
        moved = (35 * k + 4 * c + 4 * k * k / c) * element + 10 * _FP32 * k
        return Scan(self.num_heads * flops, self.num_heads * moved, 13, walks=2)

    def forward_passes(self, options: WorkOptions) -> ElementwiseWork:
        """The decay of every channel from its product (reads it, writes fp32), and beta."""
        return ElementwiseWork(
            self.output_elements * (options.activation_bytes + _FP32) + self.num_heads * 3 * _FP32, 3
        )

    def backward_passes(self, options: WorkOptions) -> ElementwiseWork:
        e = options.activation_bytes
        return ElementwiseWork(self.output_elements * (2 * e + _FP32) + self.num_heads * 5 * _FP32, 6)

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """Queries and keys, normalised, values, the product that the decay is made of, its sum in fp32, two
        matrices of each chunk, and fp32 numbers of a head.
        """
        e, width = options.activation_bytes, self.output_elements
        chunks = self.num_heads * self.chunk * e
        return (
            *(width * e,) * 4, width * _FP32, chunks, chunks, 4.0 * _FP32 * self.num_heads,
        )  # fmt: skip

    def state_bytes(self) -> float:
        return 2 * self.num_heads * self.head_dim**2 / self.chunk
