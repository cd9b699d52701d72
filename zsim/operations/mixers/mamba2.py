"""Mamba-2 (Nemotron-H, Nemotron 3, Granite 4, Bamba, Falcon-H1, Zamba2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zsim.cost.kernels.kernel import ScanKind
from zsim.cost.kernels.shapes import WorkOptions
from zsim.operations.mixers.mixer import LinearMixer, Scan
from zsim.operations.sharding import FeatureCut

_FP32 = 4


@dataclass(frozen=True, slots=True)
class StateSpace(LinearMixer):
    """State space duality of `num_heads` heads of width P, with `num_groups` groups G of states of N numbers.

    Dao and Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), in mamba_ssm's chunks of Q tokens (e9594ce1
    ops/triton/ssd_combined.py, ssd_chunk_state.py, ssd_state_passing.py, ssd_bmm.py, ssd_chunk_scan.py). Per
    token, d = H P:

        C B^T 2GQN, within a chunk 2HQP, states and their use 4HPN

    Backward makes the convolution, C B^T and the states again and has 6GQN + H (6QP + 10PN) in all. The
    states are fp32, and their traffic, written, passed on and read, is most of the bytes.
    """

    num_heads: int
    head_dim: int
    state: int
    num_groups: int = 1
    chunk: int = 256

    title: ClassVar[str] = "Mamba-2"
    scan_kind: ClassVar[ScanKind] = "state_space_scan"

    @property
    def chunk_tokens(self) -> int:
        return self.chunk

    @property
    def split_counts(self) -> tuple[tuple[str, int], ...]:
        return ("heads of Mamba-2", self.num_heads), ("groups of Mamba-2", self.num_groups)

    @property
    def output_elements(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def input_elements(self) -> int:
        return 2 * self.output_elements + 2 * self.num_groups * self.state + self.num_heads

    @property
    def exchanged_inputs(self) -> tuple[int, ...]:
        """Gate, inputs, B, C and time steps, each in an exchange of its own (Megatron-LM d98e8a64
        core/ssm/mamba_context_parallel.py).
        """
        groups = self.num_groups * self.state
        return (self.output_elements, self.output_elements, groups, groups, self.num_heads)

    @property
    def exchanged_outputs(self) -> tuple[int, ...]:
        return (self.output_elements,)

    def cut_features(self, cut: FeatureCut) -> StateSpace:
        """Ranks beyond the groups share one."""
        groups = max(1, cut.features(self.num_groups))
        return replace(self, num_heads=cut.features(self.num_heads), num_groups=groups)

    def forward_scan(self, element: int) -> Scan:
        d, groups, blocks, states = self._sizes
        flops = 2 * groups * self.chunk + self.num_heads * self.head_dim * (2 * self.chunk + 4 * self.state)
        moved = (5 * d + 4 * groups) * element + 2 * _FP32 * blocks + 4 * _FP32 * states
        return Scan(flops, moved + 3 * _FP32 * self.num_heads, 5)

    def backward_scan(self, element: int) -> Scan:
        d, groups, blocks, states = self._sizes
        flops = 6 * groups * self.chunk + self.num_heads * self.head_dim * (6 * self.chunk + 10 * self.state)
        moved = (16 * d + 20 * groups) * element + 5 * _FP32 * blocks + 11 * _FP32 * states
        return Scan(flops, moved + 6 * _FP32 * self.num_heads, 17, walks=2)

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """The gate and the time steps beside what the convolution keeps, and the output before the gate."""
        e, width = options.activation_bytes, self.output_elements
        return width * e, self.num_heads * e, width * e

    def state_bytes(self) -> float:
        return 2 * _FP32 * self._sizes[3]

    @property
    def _sizes(self) -> tuple[int, int, int, float]:
        """Numbers per token: of inputs, of B, of C B^T, of the states of all heads."""
        d = self.num_heads * self.head_dim
        return (
            d, self.num_groups * self.state, self.num_groups * self.chunk, d * self.state / self.chunk,
        )  # fmt: skip
