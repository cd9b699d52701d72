"""The work of mixture-of-experts layers: as a model's file states it, and as a framework's code runs it.

A family's block has a `Router` and `Experts`. `zsim.plan.parallel.experts` puts in place of `Experts` what
runs: rows rearranged by expert, grouped products, an activation, and their exchanges. A *row* is one token on
its way to one of its experts; a module that sees rows says how many per token (`Module.rows_per_token`).
"""

from __future__ import annotations

from typing import Literal

from zsim.dataclass import dataclass

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
    """The gate's product, the scores, and the choice of `top_k` of `num_experts` experts for every token.

    `num_groups` > 1: of so many groups of experts the best `top_groups` are left to choose from. `in_fp32`:
    the product is of fp32 copies of input and weight; `has_fp32_output`: of the operands as they are, summed
    to fp32. `has_choice_bias`: a bias without a gradient is added to the scores for the choice only.
    `normalizes`: the chosen scores are divided by their sum. `has_auxiliary_loss`: a loss that balances the
    experts is computed. `is_merged`: as of `GroupedLinear`.
    """

    in_features: int
    num_experts: int
    top_k: int
    score: ScoreFunction = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    in_fp32: bool = False
    has_fp32_output: bool = False
    has_choice_bias: bool = False
    normalizes: bool = True
    has_auxiliary_loss: bool = False
    library: ExpertsLibrary = "transformers"
    is_merged: bool = False


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Low-rank adapters on routed experts: ranks of those on their first products (both of gated ones) and on
    the second, 0 without. `casts`: merged ones are cast from fp32 to the weights' type."""

    kind: ExpertAdapterKind
    first: int = 0
    second: int = 0
    casts: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """All routed experts of a layer: `top_k` of `num_experts` MLPs of `expert_features` per token. `act`:
    their non-linearity; `is_gated`: their first product has two outputs, of which one is multiplied by the
    activation of the other. Parameters whose name contains "down" are those of the second product, those with
    "lora_" in it their `adapters`'."""

    num_experts: int
    top_k: int
    in_features: int
    expert_features: int
    act: str = "silu"
    is_gated: bool = True
    adapters: ExpertAdapters | None = None


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """The products of `num_experts` experts, each of its own rows with its own `in_features x out_features`
    weight; all experts have as many rows. `scored_bias_bytes`: of one score, where an expert's bias is
    multiplied by the row's score and added behind the product, expert by expert; 0: added as it is.
    `is_merged`: its weight is a sum with adapters', so that it gets a gradient though it is frozen itself.
    `is_adapter`: it reads the rows that the product beside it reads. `pads`: in fp8 every expert has rows up
    to a multiple: in the routing map, or by copies. `place`: of the first of an expert's products, which
    reads the layer's rows, and of the last, which makes them, under Megatron."""

    num_experts: int
    in_features: int
    out_features: int
    kernel: GroupedKernel = "grouped"
    scored_bias_bytes: int = 0
    is_merged: bool = False
    is_adapter: bool = False
    pads: Literal["", "map", "copies"] = ""
    place: Literal["", "first", "last"] = ""


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """The weights of `num_experts` experts, `in_features x out_features`, to which adapters of rank `rank`
    are added before a product reads the sum. `casts`: both of the adapters' weights from fp32."""

    num_experts: int
    in_features: int
    out_features: int
    rank: int
    casts: bool = False


@dataclass(frozen=True, slots=True)
class Rearrange:
    """Rows of `width` elements brought into another order, `rows` per token that the module sees.

    permute: every token copied once for each of its experts, in the order of experts. sort, unsort: rows of
    several senders in the order of experts, and back. unpermute: the rows of every token summed up. add: none
    are moved. map: none are, the map of rows to experts is made. Of experts that run one by one, loop: the
    output that they add to and their masks are made; select: the rows of one are gathered; put: its rows are
    multiplied by their scores and added to the output. `shared`: the output of shared experts is
    added, gated by a number per token, or as it is. `padding`: rows of `num_experts` experts that are all
    padded to the fullest, over those that are routed.
    """

    kind: MoveKind
    width: int
    rows: float
    library: ExpertsLibrary = "transformers"
    shared: SharedOutput = "none"
    num_experts: int = 1
    padding: float = 1.0
