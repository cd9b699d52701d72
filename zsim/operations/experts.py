"""The routed experts of a layer, as a model's file states them.

A family's block has a `Router` and `Experts`. `zsim.plan.parallel.experts` puts in place of `Experts` what
runs: rows rearranged by expert, grouped products, an activation, and their exchanges. A *row* is one token on
its way to one of its experts. A module that sees rows says how many per token (`Module.rows_per_token`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.operations.operation import Module, Operation, Role

ExpertAdapterKind = Literal["merged", "shared", "each"]
"""Adapters on experts: "merged" into their weights before they are read (PEFT's `target_parameters`), one
"shared" by all experts of a rank, or one for "each" (Megatron-Bridge's)."""


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Low-rank adapters on routed experts."""

    kind: ExpertAdapterKind
    first: int = 0
    """Rank of the adapters on the experts' first products (both of gated ones). 0 without."""
    second: int = 0
    """Rank of the adapters on the experts' second products. 0 without."""
    casts: bool = False
    """Merged adapters are cast from fp32 to the weights' type."""


@dataclass(frozen=True, slots=True)
class Experts(Operation):
    """All routed experts of a layer: `top_k` of `num_experts` MLPs of `expert_features` per token.

    Parameters whose name contains "down" are those of the second product. Those with "lora_" in it are those
    of the `adapters`.
    """

    num_experts: int
    top_k: int
    in_features: int
    expert_features: int
    act: str = "silu"
    """The experts' non-linearity."""
    is_gated: bool = True
    """The first product has two outputs, of which one is multiplied by the activation of the other."""
    adapters: ExpertAdapters | None = None

    @property
    def role(self) -> Role:
        return Role.EXPERTS

    @property
    def active_fraction(self) -> float:
        return self.top_k / self.num_experts

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        products = 3 if self.is_gated else 2
        return 2.0 * self.top_k * products * self.in_features * self.expert_features
