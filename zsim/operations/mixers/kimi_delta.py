"""Kimi delta attention (Kimi-Linear, Ling 3.0)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zsim.cost.kernels.kernel import ScanKind
from zsim.cost.kernels.shapes import WorkOptions
from zsim.operations.mixers.mixer import ElementwiseWork, LinearMixer, Scan
from zsim.operations.sharding import FeatureCut

_FP32, _MASK = 4, 1
_EAGER_GATE = 64, 75  # bytes per channel forward and backward, see `KimiDelta`


@dataclass(frozen=True, slots=True)
class KimiDelta(LinearMixer):
    """The gated delta rule with a decay for every channel of a key, `num_heads` heads of `head_dim`.

    Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692), in fla's chunks (bc3b101d ops/kda/chunk.py): FLOPs as of
    Gated DeltaNet, with the decay in fp32 for every channel (2 of its tensors summed up, one read by each
    kernel), and two matrices of a chunk, which are kept.

    transformers 5.24 makes the decays before, in fp32 (modeling_kimi_linear.py `KimiLinearForgetGate`): a
    cast, the bias, softplus as exp, sum, log, comparison and choice, and a factor. Uncompiled, that is 64
    bytes a channel, and 75 in backward. Autograd keeps exp, the sum, the mask and softplus, and fla's
    function the decays and their sums over a chunk. Megatron-Bridge's layer (0.6.0
    models/kimi/kimi_k3_ops.py) has fla make them, which keeps the product alone.
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
        is_eager = self._has_eager_gate(options)
        channel = _EAGER_GATE[0] if is_eager else options.activation_bytes + _FP32
        moved = self.output_elements * channel + self.num_heads * 3 * _FP32
        return ElementwiseWork(moved, 9 if is_eager else 3)

    def backward_passes(self, options: WorkOptions) -> ElementwiseWork:
        is_eager = self._has_eager_gate(options)
        channel = _EAGER_GATE[1] if is_eager else 2 * options.activation_bytes + _FP32
        moved = self.output_elements * channel + self.num_heads * 5 * _FP32
        return ElementwiseWork(moved, 11 if is_eager else 6)

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """Queries and keys, normalised, values, what the decays are made of, two matrices of each chunk, and
        of a head two norms in fp32 and beta.
        """
        e, width = options.activation_bytes, self.output_elements
        chunks, heads = self.num_heads * self.chunk * e, float(self.num_heads)
        if options.layers.gates_in_kernel:
            decays, beta = [width * e], _FP32
        elif self._has_eager_gate(options):
            decays, beta = [width * size for size in (_FP32, _FP32, _MASK, _FP32, _FP32, _FP32)], e
        else:  # compiled: the product, the decays, and their sums
            decays, beta = [width * e, width * _FP32, width * _FP32], e
        return (*(width * e,) * 3, *decays, chunks, chunks, heads * (2 * _FP32 + beta))

    def _has_eager_gate(self, options: WorkOptions) -> bool:
        return not (options.compile or options.layers.gates_in_kernel)

    def state_bytes(self) -> float:
        return 2 * self.num_heads * self.head_dim**2 / self.chunk
