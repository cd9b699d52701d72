"""The code that runs a layer's routed experts, as far as resolving and planning depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.cost.kernels.moved_rows import TRANSFORMERS_KERNELS, ExpertKernelSet

Dispatch = Literal["none", "rows", "rows and scores", "slots"]


@dataclass(frozen=True, slots=True)
class ExpertLibrary:
    """A library's layer of routed experts. The defaults are transformers', whose experts are whole on every
    rank.
    """

    name: str = "transformers"
    """Its name in error messages."""
    title: str = "transformers"
    """Its name in sentences."""
    owner: str = "transformers"
    """The name in sentences of the program that it is a part of."""
    kernels: ExpertKernelSet = TRANSFORMERS_KERNELS
    """The kernels that score experts and rearrange rows."""

    # -- parallelism ------------------------------------------------------------------------------------

    dispatch: Dispatch = "none"
    """What goes to the ranks of its experts: nothing, rows alone, rows with their scores that the ranks of an
    expert's products gather, or all slots of every expert's capacity. See [Note: whose dispatch].
    """
    splits_like_products: bool = False
    """By default the ranks that share products share an expert's, too. With several ranks to an expert any
    number of them may, and dispatchers that send a token once take it.
    """
    splits_with_products: bool = False
    """Experts that are on no ranks of their own are split like the other products."""
    keeps_products_whole: bool = False
    """An expert's products are on one rank."""
    has_tensor_lanes: bool = False
    """The ranks of a layer's experts have the same tensor index. Each sends its part of the rows that all
    ranks of tensor parallelism have, and these gather what comes back.
    """
    needs_sequence_parallelism: bool = False
    """Beside tensor parallelism, sequence parallelism has to be on."""
    drops_tokens: bool = False
    """An expert may take no more rows than its capacity."""
    min_capacity: int = 0
    """Rows that every expert has at least, where all have the whole rows of their capacity. 0 where they have
    those that are routed to them.
    """
    pads_to_fullest: bool = False
    """All experts have as many rows as the fullest."""
    has_expert_groups: bool = False
    """Experts are reduced and sharded over a group of their own even where all ranks have all experts."""
    waits_for_counts: bool = False
    """The host reads the rows of each expert also where all ranks have all experts."""

    # -- modules ----------------------------------------------------------------------------------------

    expert_list: str = "experts"
    """The name of the list of experts that run one after the other, in the names of their modules."""
    runs_shared_first: bool = False
    """Shared experts run before the router."""
    casts_gate_output: bool = False
    """A gate in fp32 is a product of operands as they are, with an output in fp32."""
    sorts_local_rows: bool = False
    """Rows are sorted by expert also where no other rank has experts."""
    separates_gate: bool = False
    """The two outputs of a gated expert's first product are products of their own."""
    sorts_parameters: bool = False
    """Parameters are registered by their names, w1, w2 and w3."""
    has_int32_counts: bool = False
    """Counts of rows are exchanged in int32."""
    clamps_quick_gelu: bool = False
    """The activation of gpt-oss is one kernel, a clamped quick GELU."""
    scores_activations: bool = False
    """The scores are a factor of the experts' activation."""
    scales_biases: bool = False
    """Products that are not a loop multiply the second one's bias by the row's score."""
    balances_in_turn: bool = False
    """Forced balance gives token after token its k consecutive experts, and does not draw them."""
    balances_without_gate: bool = False
    """Forced balance takes the place of the gate, whose product and scores are not computed."""


TRANSFORMERS = ExpertLibrary()
