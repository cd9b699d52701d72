"""RWKV-7's time mixing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zsim.cost.kernels.kernel import ScanKind
from zsim.cost.kernels.shapes import WorkOptions
from zsim.operations.mixers.mixer import ElementwiseWork, LinearMixer, Scan
from zsim.operations.sharding import FeatureCut

_FP32 = 4


@dataclass(frozen=True, slots=True)
class GeneralisedDelta(LinearMixer):
    """The generalised delta rule of `num_heads` heads of width K, with a decay for every channel.

    Peng et al. 2025, "RWKV-7" (arXiv 2503.14456), in fla's chunks of C tokens (bc3b101d ops/rwkv7/chunk.py,
    which is ops/generalized_delta_rule/dplr/chunk.py): the transition is diagonal plus low rank, so that a
    chunk has four matrices of C x C (10CK, with the inverse 2/3 C^2), two products with it 4CK, and states of
    6KK with their use. Six inputs (r, w, k, v, a, b) are read by each of three kernels.
    """

    num_heads: int
    head_dim: int
    chunk: int = 16

    title: ClassVar[str] = "RWKV-7"
    scan_kind: ClassVar[ScanKind] = "channel_delta_scan"

    @property
    def chunk_tokens(self) -> int:
        return self.chunk

    @property
    def split_counts(self) -> tuple[tuple[str, int], ...]:
        return (("heads of RWKV-7", self.num_heads),)

    @property
    def output_elements(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def input_elements(self) -> int:
        return 6 * self.output_elements

    def cut_features(self, cut: FeatureCut) -> GeneralisedDelta:
        return replace(self, num_heads=cut.features(self.num_heads))

    def forward_scan(self, element: int) -> Scan:
        c, k = self.chunk, self.head_dim
        flops = 14 * c * k + 8 * k * k + 2 / 3 * c * c
        moved = (18 * k + 8 * c + 2 * k * k / c) * element + 3 * _FP32 * k
        return Scan(self.num_heads * flops, self.num_heads * moved, 6)

    def backward_scan(self, element: int) -> Scan:
        c, k = self.chunk, self.head_dim
        flops = 34 * c * k + 20 * k * k + 4 * c * c
        moved = (42 * k + 16 * c + 4 * k * k / c) * element + 6 * _FP32 * k
        return Scan(self.num_heads * flops, self.num_heads * moved, 12, walks=2)

    def forward_passes(self, options: WorkOptions) -> ElementwiseWork:
        """The mixing of tokens, gates and norms around it: fla's fused kernels read and write the six."""
        return ElementwiseWork(12.0 * self.output_elements * options.activation_bytes, 7)

    def backward_passes(self, options: WorkOptions) -> ElementwiseWork:
        return ElementwiseWork(18.0 * self.output_elements * options.activation_bytes, 12)

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """The six inputs, and the decay's sum in fp32."""
        width = self.output_elements
        return (*(width * options.activation_bytes,) * 6, width * _FP32)

    def state_bytes(self) -> float:
        return 2 * self.num_heads * self.head_dim**2 / self.chunk
