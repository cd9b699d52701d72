"""The layout of a job: its model over the ranks, its degrees of parallelism, the attention of its GPUs."""

from __future__ import annotations

from zsim.arrays import distinct
from zsim.dataclass import dataclass
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.kernel_choices import attention_of, runs_flash_2, with_attention, with_release
from zsim.specs.experiment.model_split import with_context_inner
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.strategies import asked_parallelism, with_predictions
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import ModelSpec
from zsim.specs.model.tiling import with_tiled_linears
from zsim.specs.model.vocabulary import with_padded_vocabulary
from zsim.specs.strategy.megatron_table import MegatronTable
from zsim.specs.strategy.parallelism import Parallelism, resolve_parallelism
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.partition import layer_weights
from zsim.specs.strategy.tables import DeepSpeedTable


@dataclass(frozen=True, slots=True)
class Layout:
    """A model over the ranks of a job, before its training is known."""

    model: ModelSpec
    """The model with the framework's additions: DeepSpeed's tiles, or Megatron's multi-token prediction and
    padded vocabulary.
    """
    asked: ParallelismTable
    """The degrees as the experiment asks for them."""
    parallelism: Parallelism
    placement: Placement
    whole: Cluster
    """The cluster, whose GPUs run the chosen attention."""
    cluster: Cluster
    """The cluster with only the types of nodes that the job is on, as all checks of GPUs see it."""
    runs_flash_2: bool
    """Whether FlashAttention-2 runs on any of the job's GPUs."""

    @property
    def replicas(self) -> int:
        """Number of replicas of the model, each of which trains on sequences of its own."""
        return self.placement.world_size // self.parallelism.model_ranks


def lay_out(
    experiment: Experiment, model: ModelSpec, cluster: Cluster, placement: Placement, notes: list[str]
) -> Layout:
    """The layout of `model`. Adds notes about what the framework changes to `notes`.

    Raises InputError for degrees that do not fit the ranks or the model, NotSimulatedError for what zsim
    lacks.
    """
    table = experiment.strategy
    if isinstance(table, DeepSpeedTable) and table.tile_numel is not None:
        model = with_tiled_linears(model, table.tile_numel)
    asked, style = asked_parallelism(experiment)
    parallelism = resolve_parallelism(
        asked, style, table.kind, placement.world_size, len(model.blocks), layer_weights(model)
    )
    parallelism = with_release(parallelism, table, asked)
    choices = [attention_of(experiment.training, table, [gpu], model, parallelism) for gpu in cluster.gpus]
    used = _types_in_use(cluster, placement)
    runs_second = any(runs_flash_2(choices[kind], table, cluster.gpus[kind]) for kind in used)
    whole = with_attention(cluster, choices)
    parallelism = with_context_inner(parallelism, placement.world_size, placement.gpus_per_node)
    if isinstance(table, MegatronTable):
        if table.mtp_layers:
            model, parallelism = with_predictions(model, table, parallelism)
        multiple = table.vocabulary_multiple * parallelism.tensor
        model, unpadded = with_padded_vocabulary(model, multiple), model.vocab_size
        if model.vocab_size != unpadded:
            notes.append(f"Megatron pads the vocabulary of {unpadded:,} to {model.vocab_size:,}")
    in_use = _of_types(whole, used)
    return Layout(model, asked, parallelism, placement, whole, in_use, runs_second)


def _types_in_use(cluster: Cluster, placement: Placement) -> list[int]:
    return list(distinct(cluster.type_of_node[list(placement.nodes)])) if cluster.nodes else [0]


def _of_types(cluster: Cluster, used: list[int]) -> Cluster:
    """The cluster with only the types of nodes in `used`. The first of them is used where a single one is
    needed.
    """
    if not cluster.nodes:
        return cluster
    nodes = [cluster.nodes[kind] for kind in used]
    keys = ("gpu", "gpus_per_node", "node_link", "pcie", "nic", "host")
    first = {key: getattr(nodes[0], key) for key in keys}
    return cluster.model_copy(update={**first, "nodes": tuple(nodes)})
