"""RWKV-7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zsim.cost.kernels.kernel import ScanKind
from zsim.cost.kernels.shapes import WorkOptions
from zsim.operations.mixers.mixer import ElementwiseWork, LinearMixer, Scan

_FP32 = 4


@dataclass(frozen=True, slots=True)
class GeneralizedDelta(LinearMixer):
    """The delta rule of `num_heads` heads of `head_dim`, with a vector for what is removed and one for what
    replaces it, and a decay for every channel.

    Peng et al. 2025, "RWKV-7" (arXiv 2503.14456), in fla's chunks of C tokens (0315a70e
    ops/generalized_delta_rule/dplr/chunk.py and the kernels that it calls, layers/rwkv7.py). Per token and
    head of K channels, forward computes

        four matrices of a chunk 8CK, an inverse 2/3 C^2, w and u 2CK + 4CK, states 6K^2, output 2K^2 + 4CK

    and backward all but the output again, and 48CK + 22K^2 + 4C^2 in all. Matrices with the inverse are fp32,
    as are the decay's two sums. Nobody has published times of these kernels: they run at the rates of the
    other delta rule with a decay for every channel. Before the rule tokens are shifted and mixed six ways,
    and the output is normalised by head, corrected by a product of r, k and v, and gated.
    """

    num_heads: int
    head_dim: int
    reads_values: bool = True
    """Values are moved towards those of the first layer."""
    chunk: int = 16

    title: ClassVar[str] = "RWKV-7's recurrence"
    scan_kind: ClassVar[ScanKind] = "channel_delta_scan"

    @property
    def chunk_tokens(self) -> int:
        return self.chunk

    @property
    def output_elements(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def input_elements(self) -> int:
        return 6 * self.output_elements

    def forward_scan(self, element: int) -> Scan:
        c, k = self.chunk, self.head_dim
        flops = 18 * c * k + 8 * k * k + 2 / 3 * c * c
        moved = (23 * k + 4 * c + 2 * k * k / c) * element + (5 * k + 4 * c) * _FP32
        return Scan(self.num_heads * flops, self.num_heads * moved, 6)

    def backward_scan(self, element: int) -> Scan:
        c, k = self.chunk, self.head_dim
        flops = 48 * c * k + 22 * k * k + 4 * c * c
        moved = (60 * k + 8 * c + 4 * k * k / c) * element + (12 * k + 6 * c) * _FP32
        return Scan(self.num_heads * flops, self.num_heads * moved, 13, walks=2)

    def forward_passes(self, options: WorkOptions) -> ElementwiseWork:
        """Shift (2 tensors) and mixes (8), two sigmoids and a product (6), keys by their factor, normalised,
        negated and times a (9), the update of k (3), the correction with its gate (6), and values (6).
        """
        tensors, launches = (40, 13) if self.reads_values else (34, 11)
        return ElementwiseWork(tensors * self.output_elements * options.activation_bytes, launches)

    def backward_passes(self, options: WorkOptions) -> ElementwiseWork:
        """About two tensors read and one written for each that forward writes."""
        tensors, launches = (72, 26) if self.reads_values else (62, 22)
        return ElementwiseWork(tensors * self.output_elements * options.activation_bytes, launches)

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """The rule's six inputs. Of what makes them, tokens and their shifts, k, its normalised product with
        a vector, the sigmoids of w and a, and where the first layer's values are read, values and their
        sigmoid. Of the correction, the normalised output and the gate. By `save_for_backward` of fla bc3b101d
        ops/rwkv7/fused_addcmul.py, fused_k_update.py, gate_output_correction.py, modules/l2norm.py and
        ops/generalized_delta_rule/dplr/chunk.py, and what torch keeps for `sigmoid` and `lerp`.
        """
        tensors = 6 + 6 + (2 if self.reads_values else 0) + 2
        return (float(self.output_elements * options.activation_bytes),) * tensors

    def state_bytes(self) -> float:
        return 2 * self.num_heads * self.head_dim**2 / self.chunk
