"""Gated DeltaNet (Qwen3-Next, Qwen 3.5 and later, Olmo Hybrid)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zsim.cost.kernels.kernel import ScanKind
from zsim.cost.kernels.shapes import WorkOptions
from zsim.operations.mixers.mixer import ElementwiseWork, LinearMixer, Scan
from zsim.operations.sharding import FeatureCut

_FP32 = 4


@dataclass(frozen=True, slots=True)
class GatedDelta(LinearMixer):
    """The gated delta rule of `value_heads` heads, each with a state of `key_dim` x `value_dim`.

    Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464), in fla's chunks of C tokens (bc3b101d
    ops/gated_delta_rule/chunk.py, wy_fast.py, ops/common/chunk_delta_h.py, chunk_o.py). With K and W the
    widths of a head's keys and values, per token and head, forward computes

        K K^T and its inverse 2CK + 2/3 C^2, w and u 2C(K + W), states 4KW, output 2KW + 2CK + 2CW

    and backward w, u and the states again, and 18CK + 10CW + 16KW + 4C^2 in all. The decay is one number per
    token and head. Before the rule, keys and queries are normalised and repeated to as many heads as values
    have, the decay is -exp(A) softplus(a + bias) in fp32, and beta a sigmoid (transformers 5.24
    models/qwen3_next/modeling_qwen3_next.py, Megatron-LM d98e8a64 core/ssm/gated_delta_net/gdn.py).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk: int = 64

    title: ClassVar[str] = "Gated DeltaNet"
    scan_kind: ClassVar[ScanKind] = "delta_scan"

    @property
    def chunk_tokens(self) -> int:
        return self.chunk

    @property
    def split_counts(self) -> tuple[tuple[str, int], ...]:
        return ("key heads of Gated DeltaNet", self.key_heads), ("value heads", self.value_heads)

    @property
    def keys(self) -> int:
        """Elements of keys, and of queries, per token."""
        return self.key_heads * self.key_dim

    @property
    def output_elements(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def input_elements(self) -> int:
        return 2 * self.value_heads * self.key_dim + self.output_elements

    @property
    def exchanged_inputs(self) -> tuple[int, ...]:
        """One exchange of all that the projection makes (Megatron-LM d98e8a64
        core/ssm/gated_delta_net/gdn.py).
        """
        return (2 * self.keys + 2 * self.output_elements + 2 * self.value_heads,)

    @property
    def exchanged_outputs(self) -> tuple[int, ...]:
        return (self.output_elements,)

    def cut_features(self, cut: FeatureCut) -> GatedDelta:
        return replace(
            self, key_heads=cut.features(self.key_heads), value_heads=cut.features(self.value_heads)
        )

    def forward_scan(self, element: int) -> Scan:
        c, k, w = self.chunk, self.key_dim, self.value_dim
        flops = 6 * c * k + 4 * c * w + 6 * k * w + 2 / 3 * c * c
        elements = 7 * k + 6 * w + 2 * c + 2 * k * w / c
        return Scan(self.value_heads * flops, self.value_heads * (elements * element + 2 * _FP32), 7)

    def backward_scan(self, element: int) -> Scan:
        c, k, w = self.chunk, self.key_dim, self.value_dim
        flops = 18 * c * k + 10 * c * w + 16 * k * w + 4 * c * c
        elements = 20 * k + 15 * w + 2 * c + 4 * k * w / c
        return Scan(self.value_heads * flops, self.value_heads * elements * element, 13, walks=2)

    def forward_passes(self, options: WorkOptions) -> ElementwiseWork:
        """Six kernels of gates, and two that repeat heads."""
        moved, launches = self._repeats(options)
        return ElementwiseWork(36 * self.value_heads + moved, 6 + launches)

    def backward_passes(self, options: WorkOptions) -> ElementwiseWork:
        """The same backwards: the gradients of repeated heads are summed up."""
        moved, launches = self._repeats(options)
        return ElementwiseWork(84 * self.value_heads + moved, 14 + 2 * launches)

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """Normalised queries and keys of all heads, values, the inverses, and fp32 numbers of a head: two
        norms, the decay's sum, beta, and what the gates keep. Megatron normalises before it repeats.
        """
        e, heads = options.activation_bytes, self.value_heads
        repeated = heads * self.key_dim * e
        is_normalised_first = options.layers.repeats_normalised_heads and self.key_heads < heads
        first = (self.keys * e,) * 2 if is_normalised_first else ()
        return (
            *first, repeated, repeated, self.output_elements * e, heads * self.chunk * e, 8.0 * _FP32 * heads,
        )  # fmt: skip

    def state_bytes(self) -> float:
        return 2 * self.value_heads * self.key_dim * self.value_dim / self.chunk

    def _repeats(self, options: WorkOptions) -> tuple[int, int]:
        """Bytes and kernels of repeating queries and keys."""
        if self.key_heads == self.value_heads:
            return 0, 0
        return 2 * (self.keys + self.value_heads * self.key_dim) * options.activation_bytes, 2
