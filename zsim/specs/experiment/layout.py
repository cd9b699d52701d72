"""The layout of a job: its model over the ranks, its degrees of parallelism, the attention of its GPUs.

# [Note: tiling]
Memory-centric tiling makes linear layers `deepspeed.zero.TiledLinear`, fetched and freed tile by tile. It is
part of the model's code, not of DeepSpeed's configuration. Only outputs are split (`out_splits`). The
concatenation of the outputs is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from zsim.arrays import unique
from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.model_split import resolve_context_inner
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.strategies import apply_multi_token_prediction, requested_parallelism
from zsim.specs.experiment.tables import Experiment
from zsim.specs.experiment.training.attention import apply_attention, attention_of, runs_flash_2
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.model.spec import Block, Embedding, Linear, Loss, ModelSpec, Module, Parameter
from zsim.specs.strategy.parallelism import ParallelismConfig, resolve_parallelism
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.partition import layer_weights
from zsim.specs.strategy.sentences import phrase
from zsim.specs.strategy.table import StrategyTable


@dataclass(frozen=True, slots=True)
class Layout:
    """A model over the ranks of a job, before its training is known."""

    model: ModelSpec
    """The model with the framework's additions: DeepSpeed's tiles, or Megatron's multi-token prediction and
    padded vocabulary.
    """
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

    @property
    def replicas(self) -> int:
        """Number of replicas of the model, each of which trains on sequences of its own."""
        return self.placement.world_size // self.parallelism.model_ranks


def resolve_layout(
    experiment: Experiment, model: ModelSpec, cluster: Cluster, placement: Placement, notes: list[str]
) -> Layout:
    """The layout of `model`. Adds notes about what the framework changes to `notes`.

    Raises InputError for degrees that do not fit the ranks or the model, NotSimulatedError for what zsim
    lacks.
    """
    table = experiment.strategy
    if isinstance(table, DeepSpeedTable) and table.tile_numel is not None:
        model = tile_linears(model, table.tile_numel)
    requested, style = requested_parallelism(experiment)
    parallelism = resolve_parallelism(
        requested, style, table.kind, placement.world_size, len(model.blocks), layer_weights(model)
    )
    parallelism = _resolve_reduce_overlap(parallelism, table, requested)
    choices = [attention_of(experiment.training, table, [gpu], model, parallelism) for gpu in cluster.gpus]
    type_indices = _types_in_use(cluster, placement)
    has_flash_2 = any(runs_flash_2(choices[kind], table, cluster.gpus[kind]) for kind in type_indices)
    full_cluster = apply_attention(cluster, choices)
    parallelism = resolve_context_inner(parallelism, placement.world_size, placement.gpus_per_node)
    if isinstance(table, MegatronTable):
        if table.mtp_layers:
            model, parallelism = apply_multi_token_prediction(model, table, parallelism)
        multiple = table.vocabulary_multiple * parallelism.tensor
        model, unpadded_size = _pad_vocabulary(model, multiple), model.vocab_size
        if model.vocab_size != unpadded_size:
            notes.append(f"Megatron pads the vocabulary of {unpadded_size:,} to {model.vocab_size:,}")
    job_cluster = _restrict_to_types(full_cluster, type_indices)
    return Layout(model, requested, parallelism, placement, full_cluster, job_cluster, has_flash_2)


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


def _types_in_use(cluster: Cluster, placement: Placement) -> list[int]:
    return list(unique(cluster.node_type_indices[list(placement.nodes)])) if cluster.nodes else [0]


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


def tile_linears(model: ModelSpec, most_numel: int) -> ModelSpec:
    """The model with every linear layer of a block with more than `most_numel` weights cut along its outputs
    into equal tiles of at most `most_numel`."""
    return model.map_blocks(lambda block: _tile_block(block, most_numel))


def _tile_block(block: Block, most_numel: int) -> Block:
    tiles = {module.name: _tiles(module, most_numel) for module in block.modules}
    registration = block.registration
    if registration is not None:
        registration = tuple(tile.name for name in registration for tile in tiles[name])
    return Block(
        block.kind, tuple(tile for block_tiles in tiles.values() for tile in block_tiles), registration
    )


def _tiles(module: Module, most_numel: int) -> tuple[Module, ...]:
    op_spec = module.op_spec
    if not isinstance(op_spec, Linear) or module.numel <= most_numel:
        return (module,)
    splits = min(ceil(module.numel / most_numel), op_spec.out_features)
    tiles = []
    for number in range(splits):
        rows = op_spec.out_features * (number + 1) // splits - op_spec.out_features * number // splits
        parameters = tuple(
            Parameter(parameter.name, _shape(parameter, op_spec, rows)) for parameter in module.parameters
        )
        name = f"{module.name}.linears.{number}"
        is_reader = module.shares_input or number > 0
        tiles.append(Module(name, Linear(op_spec.in_features, rows), parameters, is_reader))
    return tuple(tiles)


def _shape(parameter: Parameter, op_spec: Linear, rows: int) -> tuple[int, ...]:
    """The tile's shape: outputs are the first dimension, in GPT-2's Conv1D the last."""
    if (
        parameter.shape == (op_spec.in_features, op_spec.out_features)
        and op_spec.in_features != op_spec.out_features
    ):
        return op_spec.in_features, rows
    return (rows, *parameter.shape[1:])


def _pad_vocabulary(model: ModelSpec, multiple: int) -> ModelSpec:
    """The model with the rows of its embedding and LM head padded to a multiple of `multiple`."""
    old, new = model.vocab_size, -(-model.vocab_size // multiple) * multiple
    if new == old:
        return model

    def pad_modules(modules: tuple[Module, ...]) -> tuple[Module, ...]:
        return tuple(_pad_module(module, old, new) for module in modules)

    return replace(model, vocab_size=new, before=pad_modules(model.before), after=pad_modules(model.after))


def _pad_module(module: Module, old: int, new: int) -> Module:
    op_spec: Any = module.op_spec
    if isinstance(op_spec, Embedding) and op_spec.rows == old:
        op_spec = replace(op_spec, rows=new)
    elif isinstance(op_spec, Linear) and op_spec.out_features == old:
        op_spec = replace(op_spec, out_features=new)
    elif isinstance(op_spec, Loss):
        return replace(module, op_spec=replace(op_spec, vocab_size=new))
    else:
        return module
    parameters = tuple(
        Parameter(parameter.name, tuple(new if size == old else size for size in parameter.shape))
        for parameter in module.parameters
    )
    return replace(module, op_spec=op_spec, parameters=parameters)
