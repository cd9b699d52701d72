"""The layout of a job: its model over the ranks, its degrees of parallelism, the attention of its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.arrays import unique
from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.framework_resolver import resolver_of
from zsim.specs.experiment.model_split import resolve_context_inner
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.tables import Experiment
from zsim.specs.experiment.training.attention import (
    apply_attention,
    attention_of,
    padding_mask_of,
    padding_note,
    runs_flash_2,
)
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig, resolve_parallelism
from zsim.specs.strategy.parallelism_table import ParallelismTable, layer_weights
from zsim.specs.strategy.requirement import phrase
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import PaddingMask


@dataclass(frozen=True, slots=True)
class Layout:
    """A model over the ranks of a job, before its training is known."""

    model: ModelSpec
    """The model with the framework's additions, and as it is padded and tiled."""
    requested_parallelism: ParallelismTable
    """The degrees as the experiment asks for them."""
    parallelism: ParallelismConfig
    placement: Placement
    full_cluster: Cluster
    """The cluster, whose GPUs run the chosen attention."""
    cluster: Cluster
    """The cluster with only the types of nodes that the job is on, as all checks of GPUs see it."""
    runs_flash_2: bool
    """Whether FlashAttention-2 runs on any of the job's GPUs."""
    padding_mask: PaddingMask | None = None
    """The mask that attention is handed where sequences are padded."""
    notes: Sequence[str] = ()
    """Notes on changes that the framework makes, and on attention's kernels."""

    @property
    def replicas(self) -> int:
        """Number of replicas of the model, each of which trains on sequences of its own."""
        return self.placement.world_size // self.parallelism.model_ranks


def resolve_layout(
    experiment: Experiment, model: ModelSpec, cluster: Cluster, placement: Placement
) -> Layout:
    """The layout of `model`.

    Raises InputError for degrees that do not fit the ranks or the model, NotSimulatedError for what zsim
    lacks.
    """
    table = experiment.strategy
    framework = resolver_of(table.kind)
    requested, style = framework.degrees(table, experiment.parallelism)
    parallelism = resolve_parallelism(
        requested, style, table.kind, placement.world_size, len(model.blocks), layer_weights(model)
    )
    parallelism = _resolve_reduce_overlap(parallelism, table, requested)
    choices = [attention_of(experiment.training, table, [gpu], model, parallelism) for gpu in cluster.gpus]
    mask = padding_mask_of(experiment.training, table, parallelism, model)
    type_indices = list(unique(cluster.node_type_indices[list(placement.nodes)])) if cluster.nodes else [0]
    has_flash_2 = any(runs_flash_2(choices[kind], table, cluster.gpus[kind]) for kind in type_indices)
    full_cluster = apply_attention(cluster, choices)
    parallelism = resolve_context_inner(parallelism, placement.world_size, placement.gpus_per_node)
    extended = framework.extend_model(table, model, parallelism)
    job_cluster = _restrict_to_types(full_cluster, type_indices)
    return Layout(
        extended.model,
        requested,
        extended.parallelism,
        placement,
        full_cluster,
        job_cluster,
        has_flash_2,
        mask,
        (
            *extended.notes,
            *padding_note(mask, [choices[kind] for kind in type_indices], experiment.training),
        ),
    )


def _resolve_reduce_overlap(
    parallelism: ParallelismConfig, strategy: StrategyTable, requested: ParallelismTable
) -> ParallelismConfig:
    """The parallelism with the reductions of inputs' gradients as requested, or as in the release of the
    framework.

    Raises InputError where there are none to choose.
    """
    overlaps = requested.overlap_tensor_reduce
    if overlaps is None:
        overlaps = training_of(strategy.kind).overlaps_tensor_reduce(strategy)
        return replace(parallelism, overlap_tensor_reduce=overlaps)
    is_theirs = parallelism.style.tensor_overlap == "always" and parallelism.tensor > 1
    if not is_theirs or parallelism.sequence_parallel:
        raise InputError(
            f"parallelism.overlap_tensor_reduce: found {str(overlaps).lower()}, which is "
            f"{phrase('parallelism.overlap_tensor_reduce')} for tensor parallelism without sequence "
            "parallelism; expected it left out"
        )
    return replace(parallelism, overlap_tensor_reduce=overlaps)


def _restrict_to_types(cluster: Cluster, type_indices: list[int]) -> Cluster:
    """The cluster with only the types of nodes in `type_indices`. The first of them is used where a single
    one is needed.
    """
    if not cluster.nodes:
        return cluster
    nodes = [cluster.nodes[kind] for kind in type_indices]
    keys = ("gpu", "gpus_per_node", "node_link", "pcie", "nic", "host")
    first = {key: getattr(nodes[0], key) for key in keys}
    return cluster.model_copy(update={**first, "nodes": tuple(nodes)})
