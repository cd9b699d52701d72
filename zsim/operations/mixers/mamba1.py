"""Mamba's selective scan (Jamba)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zsim.cost.kernels.kernel import ScanKind
from zsim.cost.kernels.shapes import WorkOptions
from zsim.operations.mixers.mixer import LinearMixer, Scan
from zsim.operations.sharding import FeatureCut

_FP32 = 4


@dataclass(frozen=True, slots=True)
class SelectiveScan(LinearMixer):
    """The selective scan of `width` channels with states of `state` numbers, token after token.

    Gu and Dao 2023, "Mamba" (arXiv 2312.00752), mamba_ssm's kernel (e9594ce1
    csrc/selective_scan/selective_scan_fwd_kernel.cuh, selective_scan_bwd_kernel.cuh): 9 FLOPs per token,
    channel and number of the state, none of them in matrix products. It reads inputs, time steps, gate, B and
    C and writes the output before and after the gate, with the states of every 2,048th token. Backward scans
    in both directions.
    """

    width: int
    state: int = 16

    title: ClassVar[str] = "Mamba"
    scan_kind: ClassVar[ScanKind] = "selective_scan"

    @property
    def chunk_tokens(self) -> int:
        return 2048

    @property
    def split_counts(self) -> tuple[tuple[str, int], ...]:
        return (("channels of Mamba", self.width),)

    @property
    def output_elements(self) -> int:
        return self.width

    @property
    def input_elements(self) -> int:
        return 3 * self.width + 2 * self.state

    def cut_features(self, cut: FeatureCut) -> SelectiveScan:
        return replace(self, width=cut.features(self.width))

    def forward_scan(self, element: int) -> Scan:
        moved = (5 * self.width + 2 * self.state) * element + self.state_bytes()
        return Scan(9.0 * self.width * self.state, moved, 1)

    def backward_scan(self, element: int) -> Scan:
        """It reads all of forward's inputs, the output and its gradient, and writes four gradients."""
        moved = (9 * self.width + 2 * self.state) * element + 2 * _FP32 * self.state + self.state_bytes()
        return Scan(27.0 * self.width * self.state, moved, 3)

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """Inputs, time steps, gate, B and C, the output before the gate, and states."""
        e = options.activation_bytes
        return (*(self.width * e,) * 4, 2 * self.state * e, self.state_bytes())

    def state_bytes(self) -> float:
        return 2 * _FP32 * self.width * self.state / self.chunk_tokens
