"""Activation checkpointing: which blocks and modules are recomputed.

`training.block_checkpointing` names blocks. `recompute_modules`, `recompute_method` and `recompute_layers`
are Megatron's, as in Megatron-Core 0.16.1 (`core/transformer/transformer_block.py` `_checkpointed_forward`,
`transformer_config.py`, `transformer_layer.py`). "full" by the method "uniform" has one checkpoint per n
layers of a stage. By "block" it checkpoints the first n layers of every (virtual) stage. "selective" runs
modules again, by default the core of attention. Core runs a fused core again as well. Megatron-LM before Core
did not checkpoint it (`megatron/model/transformer.py` of core 0.4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.megatron.settings.config import is_core
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.experiment.placement import parse_node_numbers
from zsim.specs.experiment.tables import Experiment
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import AttentionKind, Checkpointing

_KEY = "training.block_checkpointing"
CORE, LATENT = "core_attn", "mla_up_proj"
_METHOD, _LAYERS, _MODULES = (
    "training.recompute_method",
    "training.recompute_layers",
    "training.recompute_modules",
)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The work that is recomputed."""

    policy: Checkpointing
    """Policy of every block, unless `blocks` has one for each."""
    blocks: tuple[Checkpointing, ...] = ()
    """Policy of each block, or () if all have the same."""
    layers_per_checkpoint: int = 1
    """Layers of a group under one checkpoint, where whole blocks are recomputed."""
    modules: tuple[str, ...] = ()
    """Modules that are recomputed in addition to the core of attention, by Megatron's names."""


def resolve_recomputation(
    experiment: Experiment,
    table: TrainingTable,
    parallelism: ParallelismConfig,
    num_blocks: int,
    attention: AttentionKind,
) -> Recomputation:
    """The recomputation that `[training]` asks for.

    Raises InputError for keys that contradict each other and for what Megatron refuses. Raises
    NotSimulatedError for what Megatron has and zsim lacks.
    """
    _check_keys(table)
    _check_policies(experiment, table)
    recomputation = Recomputation(table.activation_checkpointing, block_policies(table, num_blocks))
    stages = parallelism.layers_per_stage or (num_blocks,)
    if table.recompute_method == "block":
        count = table.recompute_layers or 1
        return replace(recomputation, blocks=_first_blocks(stages, count))
    if table.recompute_method == "uniform":
        count = _check_uniform(stages, table.recompute_layers or 1)
        _check_group(experiment, count)
        return replace(recomputation, layers_per_checkpoint=count)
    if table.activation_checkpointing != "selective":
        return recomputation
    modules = table.recompute_modules if table.recompute_modules is not None else (CORE,)
    strategy = experiment.strategy
    is_ignored = (
        isinstance(strategy, MegatronTable) and not is_core(strategy.version) and attention == "flash"
    )
    has_core = CORE in modules and not is_ignored
    other_modules = tuple(name for name in modules if name != CORE)
    if isinstance(strategy, MegatronTable) and _keeps_norm(strategy, parallelism):
        other_modules = tuple("input_layernorm" if name == "layernorm" else name for name in other_modules)
    if LATENT in other_modules and (attention != "flash" or parallelism.context > 1):
        raise NotSimulatedError(
            f"{_MODULES}: zsim simulates recomputation of '{LATENT}' with attention 'flash' and without "
            f"context parallelism, found '{attention}' and context = {parallelism.context}"
        )
    return replace(recomputation, policy="selective" if has_core else "none", modules=other_modules)


def _keeps_norm(strategy: MegatronTable, parallelism: ParallelismConfig) -> bool:
    """Whether the norm before the router is an output of the router's CUDA graph, and therefore not
    recomputed.

    Megatron then recomputes only the norm before attention (core 0.16.1 core/transformer/transformer_layer.py
    `can_recompute_pre_mlp_layernorm_for_cudagraph`).
    """
    graphs = strategy.cuda_graph_modules
    is_inside = "moe_preprocess" in graphs and parallelism.experts.dispatcher == "all-to-all"
    return "moe_router" in graphs and not is_inside


def apply_pipeline_interval(
    table: TrainingTable, config: DeepSpeedConfig | None, parallelism: ParallelismConfig
) -> TrainingTable:
    """`[training]` with the checkpoints that PipelineModule makes, by default reentrant ones.

    There is one for every `pipeline.activation_checkpoint_interval` layers of a stage, as DeepSpeed's JSON
    says. Raises InputError where `[training]` says something else, NotSimulatedError for several layers in
    one.
    """
    interval = 0 if config is None else config.pipeline.activation_checkpoint_interval
    if config is None or parallelism.pipeline == 1 or not interval:
        return table
    key, policy = f"{config.name}: pipeline.activation_checkpoint_interval", table.activation_checkpointing
    if policy != "full" and "activation_checkpointing" in table.model_fields_set:
        raise InputError(
            f"{key}: found {interval}, which checkpoints layers, with training.activation_checkpointing "
            f"'{policy}'; expected 'full', or an interval of 0"
        )
    if interval > 1:
        raise NotSimulatedError(
            f"{key}: zsim does not simulate one checkpoint around {interval} layers yet; expected 1"
        )
    is_reentrant = config.pipeline.use_reentrant is not False
    changes = {"checkpoint_is_reentrant": is_reentrant, "checkpoint_stops_early": not is_reentrant}
    return table.model_copy(update={"activation_checkpointing": "full", **changes})


def _check_keys(table: TrainingTable) -> None:
    kind = table.activation_checkpointing
    if table.recompute_modules is not None and kind != "selective":
        raise InputError(
            f"{_MODULES}: found {list(table.recompute_modules)} with activation_checkpointing '{kind}'; "
            "expected 'selective'"
        )
    if table.recompute_method is not None and kind != "full":
        raise InputError(
            f"{_METHOD}: found '{table.recompute_method}' with activation_checkpointing '{kind}'; expected "
            "'full'"
        )
    if table.recompute_layers is not None and table.recompute_method is None:
        raise InputError(
            f"{_LAYERS}: found {table.recompute_layers} without {_METHOD}; expected 'uniform' (a checkpoint "
            "per so many layers) or 'block' (the first so many layers of a stage)"
        )
    if table.recompute_method is not None and (table.checkpoint_every > 1 or table.block_checkpointing):
        other_key = "checkpoint_every" if table.checkpoint_every > 1 else "block_checkpointing"
        raise InputError(f"{_METHOD} and training.{other_key} both say which blocks; expected one of them")


def _check_policies(experiment: Experiment, table: TrainingTable) -> None:
    """Raises InputError for torch's selective checkpointing under Megatron, whose flag has no such value."""
    policies = (table.activation_checkpointing, *table.block_checkpointing.values())
    if isinstance(experiment.strategy, MegatronTable) and "selective-op" in policies:
        raise InputError(
            "training.activation_checkpointing: found 'selective-op', which is torch's; Megatron's "
            "--recompute-granularity has 'selective' (of recompute_modules, e.g. [\"mlp\"]) and 'full'"
        )


def _first_blocks(stages: tuple[int, ...], count: int) -> tuple[Checkpointing, ...]:
    """The first `count` layers of every stage are checkpointed. Empty if those are all layers."""
    policies: list[Checkpointing] = []
    for layers in stages:
        policies += ["full" if number < count else "none" for number in range(layers)]
    return () if all(policy == "full" for policy in policies) else tuple(policies)


def _check_uniform(stages: tuple[int, ...], count: int) -> int:
    for layers in stages:
        if layers % count:
            divisors = [
                divisor for divisor in range(1, layers + 1) if all(stage % divisor == 0 for stage in stages)
            ]
            nearest = min(divisors, key=lambda divisor: abs(divisor - count))
            raise InputError(
                f"{_LAYERS}: found {count}, which does not divide the {layers} layers of a stage, and "
                f"Megatron's uniform checkpoints would run past its end; the nearest that does is {nearest}"
            )
    return count


def _check_group(experiment: Experiment, count: int) -> None:
    """Raises NotSimulatedError for one checkpoint around several layers, except under Megatron's DDP.

    Parameters stay whole there.
    """
    table = experiment.strategy
    if count == 1 or (isinstance(table, MegatronTable) and table.fsdp_sharding is None):
        return
    raise NotSimulatedError(
        f"{_LAYERS}: zsim simulates one checkpoint around {count} layers under Megatron's DDP only; expected "
        f"1 with {_METHOD} 'uniform'"
    )


def block_policies(table: TrainingTable, num_blocks: int) -> tuple[Checkpointing, ...]:
    """The policy of every block, or () if all blocks have the same.

    Blocks that are not named have `activation_checkpointing`. Raises InputError for blocks that the model
    does not have, for a block named twice, and in combination with `checkpoint_every`.
    """
    if not table.block_checkpointing:
        return ()
    if table.checkpoint_every > 1:
        raise InputError(f"{_KEY} and training.checkpoint_every both say which blocks; expected one of them")
    policies: list[Checkpointing] = [table.activation_checkpointing] * num_blocks
    named_blocks: set[int] = set()
    for text, policy in table.block_checkpointing.items():
        for number in _block_numbers(text):
            if number >= num_blocks:
                raise InputError(f"{_KEY}: found block {number}; the model has 0-{num_blocks - 1}")
            if number in named_blocks:
                raise InputError(f"{_KEY}: block {number} is named twice")
            named_blocks.add(number)
            policies[number] = policy
    return tuple(policies)


def _block_numbers(text: str) -> tuple[int, ...]:
    try:
        return parse_node_numbers(text)
    except ValueError:
        raise InputError(f"{_KEY}: found {text!r}, expected block numbers like '0-15' or '3,7'") from None
