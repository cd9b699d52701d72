"""The operations of mixture-of-experts layers: as a model's file states them, and as a framework's code runs
them.

A family's block has a `Router` and `Experts`. `zsim.plan.parallel.experts` puts in place of `Experts` what
runs: rows rearranged by expert, grouped products, an activation, and their exchanges. A *row* is one token on
its way to one of its experts. A module that sees rows says how many per token (`Module.rows_per_token`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScoreFunction = Literal["softmax", "sigmoid"]
ExpertsLibrary = Literal[
    "transformers", "transformers-4", "torchtitan", "kempnerforge", "megatron", "megatron-fused", "autoep",
    "deepspeed-moe",
]  # fmt: skip
"""Whose code rearranges rows; "transformers-4": its releases before 5; "megatron-fused": with
`--moe-permute-fusion`; "autoep": DeepSpeed's replacement of transformers' layers, "deepspeed-moe": its own
layer, `deepspeed.moe.layer.MoE`."""
GroupedKernel = Literal["grouped", "streams", "loop"]
"""One kernel for all experts; a product per expert on four streams (Transformer Engine); one after the
other."""
ExpertAdapterKind = Literal["merged", "shared", "each"]
"""Adapters on experts: "merged" into their weights before they are read (PEFT's `target_parameters`), one
"shared" by all experts of a rank, or one for "each" (Megatron-Bridge's)."""
MoveKind = Literal["permute", "sort", "unsort", "unpermute", "add", "map", "loop", "select", "put"]
SharedOutput = Literal["none", "added", "gated"]


@dataclass(frozen=True, slots=True)
class Router:
    """The gate's product, the scores, and the choice of `top_k` of `num_experts` experts for every token."""

    in_features: int
    num_experts: int
    top_k: int
    score: ScoreFunction = "softmax"
    num_groups: int = 1
    """Groups of experts. With more than 1, the best `top_groups` of them are left to choose from."""
    top_groups: int = 1
    in_fp32: bool = False
    """The product is of fp32 copies of input and weight."""
    has_fp32_output: bool = False
    """The product is of the operands as they are, summed to fp32."""
    has_choice_bias: bool = False
    """A bias without a gradient is added to the scores for the choice only."""
    normalizes: bool = True
    """The chosen scores are divided by their sum."""
    has_auxiliary_loss: bool = False
    """A loss that balances the experts is computed."""
    library: ExpertsLibrary = "transformers"
    is_merged: bool = False
    """The weight is a sum with adapters', as in `GroupedLinear`."""


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
class Experts:
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


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """The products of `num_experts` experts, each of its own rows with its own `in_features x out_features`
    weight.

    All experts have as many rows.
    """

    num_experts: int
    in_features: int
    out_features: int
    kernel: GroupedKernel = "grouped"
    scored_bias_bytes: int = 0
    """Bytes of one score, where an expert's bias is multiplied by the row's score and added after the
    product, expert by expert. 0 if the bias is added as it is.
    """
    is_merged: bool = False
    """The weight is a sum with adapters', so that it gets a gradient though it is frozen itself."""
    is_adapter: bool = False
    """The product reads the rows that the adapted product reads."""
    pads: Literal["", "map", "copies"] = ""
    """In fp8 every expert has rows up to a multiple: in the routing map, or by copies."""
    position: Literal["", "first", "last"] = ""
    """Under Megatron, whether it is the first of an expert's products, which reads the layer's rows, or the
    last, which makes them.
    """


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """The weights of `num_experts` experts, to which adapters are added before a product reads the sum.

    The weights are `in_features x out_features` and the adapters of rank `rank`.
    """

    num_experts: int
    in_features: int
    out_features: int
    rank: int
    casts: bool = False
    """Both of the adapters' weights are cast from fp32."""


@dataclass(frozen=True, slots=True)
class Rearrange:
    """Rows of `width` elements brought into another order, `rows` per token that the module sees."""

    kind: MoveKind
    """The rearrangement. "permute" copies every token once for each of its experts, in the order of experts.
    "sort" and "unsort" bring rows of several senders into the order of experts, and back. "unpermute" sums up
    the rows of every token. "add" moves none. "map" moves none, but makes the map of rows to experts. Of
    experts that run one by one, "loop" makes the output that they add to and their masks, "select" gathers
    the rows of one, and "put" multiplies its rows by their scores and adds them to the output.
    """
    width: int
    rows: float
    library: ExpertsLibrary = "transformers"
    shared: SharedOutput = "none"
    """The output of shared experts is added, gated by a number per token, or as it is."""
    num_experts: int = 1
    padding: float = 1.0
    """Rows of `num_experts` experts that are all padded to the fullest, over those that are routed."""
