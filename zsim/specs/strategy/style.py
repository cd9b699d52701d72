"""The code that splits a model's layers among ranks, as far as resolving and planning depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from zsim.specs.model.spec import ContextLibrary, ContextMethod
from zsim.specs.strategy.experts import Dispatcher
from zsim.specs.strategy.parallelism_table import ScheduleName

FusedProjections = Literal["never", "with tensor ranks", "always"]
TensorOverlap = Literal["never", "async_tensor", "always"]


@dataclass(frozen=True, slots=True)
class ModelParallelStyle:
    """A library's tensor, pipeline and context parallelism. Each framework's folder has those that it knows.

    The defaults are those of torch without a library on top.
    """

    name: str = "torch"
    """Its name in JSON and in tables of results."""
    title: str = "torch"
    """Its name in sentences."""
    schedule_title: str = "torch"
    """The name in sentences of the library that its pipeline schedules are of."""

    splits_models: bool = True
    """Otherwise there is data parallelism alone."""

    # -- the layers -------------------------------------------------------------------------------------

    fused_projections: FusedProjections = "never"
    """When projections of one input are one product."""
    cuts_unevenly: bool = False
    """Ranks may have parts of different sizes, so that no degree has to divide heads and widths."""
    repeats_kv_heads: bool = False
    """Tensor-parallel ranks may share a head of keys and values."""

    # -- tensor parallelism -----------------------------------------------------------------------------

    has_dtensors: bool = False
    """Parameters are torch's DTensors, which the host dispatches and whose functional collectives copy what
    is gathered or scattered of several sequences.
    """
    has_sequence_parallelism: bool = True
    is_sequence_parallel: bool = False
    """The default of `sequence_parallel`."""
    tensor_overlap: TensorOverlap = "never"
    """When the gradient of a product's input is reduced beneath the product for its weight's gradient."""
    cuts_products: bool = False
    """`async_tensor` cuts products into pieces that overlap with their collectives."""
    scattered_pieces: int | None = None
    """The pieces of a reduce-scatter beneath its product. None for one per rank."""
    runs_local_rows_first: bool = False
    """With `async_tensor` products run on the rank's own rows while the others' are gathered."""
    reduces_per_product: bool = False
    """Every product reduces its own input's gradient. Otherwise products of one input share a reduction."""
    reduces_in_line: bool = False
    """With sequence parallelism an input's gradient is scattered in line, after both products."""
    cuts_vocabulary: bool = True
    """Embedding and head are cut along the vocabulary. Otherwise all ranks have all logits."""
    cuts_towers: bool = False
    """A vision tower is cut as the language model is. Otherwise every tensor-parallel rank has it whole."""
    sums_adapters_partially: bool = False
    """An adapter's output is a part of the sum that a row reduces."""
    gathers_for_experts: bool = False
    """A layer's input is gathered before its routed experts, all of whose rows every tensor-parallel rank
    has.
    """

    mixers: tuple[str, ...] | None = None
    """The mixers other than attention that its layers have, by their `mixer_title`. None for all."""
    tensor_mixers: tuple[str, ...] = ()
    """The mixers other than attention that are cut along their heads, by their `mixer_title`."""

    # -- pipelines --------------------------------------------------------------------------------------

    schedules: tuple[ScheduleName, ...] = get_args(ScheduleName)
    schedule: ScheduleName = "1f1b"
    """The default schedule of one stage per rank."""
    reads_schedule_files: bool = False
    """`schedule_csv` is read."""
    has_passes: bool = False
    """A step may run several pipelines one after the other."""
    missing_end_layers: int = 0
    """Layers by which the first and the last stage are shorter, where nothing says how many."""
    has_equal_stages: bool = False
    """Layers that do not divide by the stages are refused."""
    balances_stages: bool = False
    """Layers are dealt out to stages by their parameters, where nothing says a split."""
    registers_tied_head_first: bool = False
    """The last stage registers the embedding that it shares before its own parameters."""
    empties_outputs: bool = False
    """A stage frees the data of an output when it is sent."""

    # -- context parallelism ----------------------------------------------------------------------------

    context_library: ContextLibrary = "torch"
    has_simulated_context: bool = True
    context_methods: tuple[ContextMethod, ...] = ("all-gather", "p2p")
    """The default comes first."""
    has_zigzag: bool = False
    """A rank has one chunk from the front and one from the back of every sequence."""
    masks_windows: bool = False
    """Attention with a window is FlexAttention's."""
    repeats_kv_heads_in_context: bool = False
    """Context ranks that exchange heads repeat those of keys and values until each has one."""

    context_mixers: tuple[str, ...] = ()
    """The mixers other than attention around which ranks exchange heads for tokens."""

    # -- routed experts ---------------------------------------------------------------------------------

    dispatchers: tuple[Dispatcher, ...] = ("all-to-all",)
    """The default comes first."""
    splits_expert_tokens: bool = False
    """Tensor-parallel ranks send a part each of a layer's tokens to experts that are not cut."""

    def __str__(self) -> str:
        return self.name

    def features_of_rank(self, total: int, ranks: int, name: str, num_kv_heads: int, grain: int) -> int:
        """The features, of `total` of the layer `name`, that the rank with the most of them has.

        `num_kv_heads` is of the model's attention, and `grain` a number of features that stay together.
        """
        return total // ranks
