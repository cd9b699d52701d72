"""`[training]` resolved: every setting of a step has a value that the model and the GPUs allow.

Checks of an experiment whose model was captured from a torch module, against the example of the
capture.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.operation import Role
from zsim.operations.traced import CaptureInfo
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.training.attention import attention_kind, release_number
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.table import NEWEST, TrainingTable
from zsim.specs.model.config_reader import MAX_BLOCKS
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS, CrossEntropy, LayerKernels, TrainingConfig
from zsim.units import format_bytes

_DEFAULT_SEQUENCE = 4096
_MAX_TOKENS = 2**27
_MANY_BLOCKS = (
    2_500  # measured: 3,200 dense ones take 14 s and 0.7 GB, 4,000 with experts over a minute and 1.8 GB
)
_BLOCK_BYTES = (100e3, 900e3)  # of one in memory: measured, Megatron's dense ones and those with experts
_MAX_PARAMETERS = 10**16
_TABLE_OF_4_BITS = (4, 57)  # transformers of October 2025; bitsandbytes 0.48, with a table, is of September
_MAX_LOOPED = 13  # micro-batches that are simulated where they repeat (zsim.engine.micro_batches)


def resolve_training(
    table: TrainingTable,
    model: ModelSpec,
    cluster: Cluster,
    optimizer: str,
) -> tuple[TrainingConfig, Sequence[str]]:
    """The training of `table`, with the optimizer of that name, and notes on settings without effect.

    Raises InputError for a precision that a GPU lacks
    and for a sequence that the model cannot take.
    """
    notes: list[str] = []
    precision = table.precision or cluster.default_precision
    gpu = next((gpu for gpu in cluster.gpus if getattr(gpu.peak, precision) is None), cluster.gpu)
    if getattr(gpu.peak, precision) is None:
        choices = [name for name in ("fp8", "bf16", "fp16", "fp32") if getattr(gpu.peak, name) is not None]
        raise InputError(
            f"training.precision: GPU '{gpu.name}' has no {precision} arithmetic; it has {', '.join(choices)}"
        )
    attention = attention_kind(table.attention, cluster, precision)
    max_length = model.max_positions
    length = (
        captured_length(model, table.sequence_length)
        or table.sequence_length
        or min(max_length or _DEFAULT_SEQUENCE, _DEFAULT_SEQUENCE)
    )
    if max_length and length > max_length:
        if model.learned_positions:
            raise InputError(
                f"training.sequence_length: found {length}, but '{model.name}' has {max_length} learned "
                "positions"
            )
        notes.append(
            f"sequence_length {length} is beyond the {max_length} positions that '{model.name}' states"
        )
    connections = table.device_max_connections
    if connections != DEFAULT_CONNECTIONS and gpu.vendor != "nvidia":
        notes.append(f"training.device_max_connections is CUDA's: without effect on GPU '{gpu.name}'")
        connections = DEFAULT_CONNECTIONS
    if table.garbage_collection_threshold is not None:
        notes.append(
            "training.garbage_collection_threshold: no effect: torch collects only below a limit that a "
            "script sets (set_per_process_memory_fraction), and none is simulated"
        )
    has_branches = table.has_4_bits and release_number(table.transformers or NEWEST) < _TABLE_OF_4_BITS
    if has_branches:
        notes.append(
            f"training.transformers: {table.transformers} is taken with a bitsandbytes before 0.48, whose 4 "
            "bits become 16 through branches"
        )
    training = TrainingConfig(
        sequence_length=length,
        micro_batch_size=table.micro_batch_size or 1,
        gradient_accumulation_steps=table.gradient_accumulation_steps or 1,
        precision=precision,
        activation_checkpointing=table.activation_checkpointing,
        attention=attention,
        compile=table.compile,
        optimizer=optimizer,
        paged_states=table.paged_states,
        stochastic_rounding=table.stochastic_rounding,
        gradient_clipping=table.gradient_clipping or 0.0,
        liger=table.liger,
        cross_entropy=cross_entropy_of(table),
        checkpoint_every=table.checkpoint_every,
        checkpoint_stops_early=table.checkpoint_stops_early,
        checkpoint_is_reentrant=table.checkpoint_is_reentrant,
        expandable_segments=table.expandable_segments,
        max_split_size_mb=table.max_split_size_mb,
        roundup_power2_divisions=table.roundup_power2_divisions,
        optimizer_implementation=table.optimizer_implementation,
        device_max_connections=connections,
        autocast=table.autocast,
        stored_dtype=table.stored_dtype,
        deterministic_sms=max(gpu.sm_count if gpu.attention.is_deterministic else 0 for gpu in cluster.gpus),
        writes_scores=any(gpu.attention.writes_scores for gpu in cluster.gpus),
        reference=table.reference,
        reference_forwards=table.reference_forwards,
        reference_dtype=table.frozen_dtype or "",
        branches_on_4_bits=has_branches,
    )
    return training, notes


def layer_kernels_of(
    table: TrainingTable, strategy: StrategyTable, parallelism: ParallelismConfig
) -> LayerKernels:
    """Whose kernels blocks have. The default is the framework's."""
    return table.layer_kernels or training_of(strategy.kind).layer_kernels(strategy, parallelism)


def cross_entropy_of(table: TrainingTable) -> CrossEntropy:
    """The chosen kernels of the loss. The default is fused with the LM head under Liger, and one kernel under
    torch.compile.
    """
    if table.cross_entropy is not None:
        return table.cross_entropy
    return "fused_linear" if table.liger else "fused" if table.compile else "eager"


def size_warning(
    model: ModelSpec,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    *,
    every_micro_batch: bool,
    may_repeat: bool = True,
) -> str | None:
    """A warning for a step that takes long to simulate. None for one of a usual size. `may_repeat` says
    whether micro-batches without a pipeline may be alike.
    """
    blocks = _num_blocks(
        model, training, parallelism, every_micro_batch=every_micro_batch, may_repeat=may_repeat
    )
    if blocks <= _MANY_BLOCKS:
        return None
    micro_batches = blocks // len(model.blocks)
    of_batches = f" of {micro_batches:,} micro-batches" if micro_batches > 1 else ""
    text = (
        f"{len(model.blocks):,} blocks{of_batches} are simulated one by one, in "
        f"{format_bytes(blocks * _BLOCK_BYTES[0])} to {format_bytes(blocks * _BLOCK_BYTES[1])} of memory"
    )
    if micro_batches == 1:
        return text
    return f"{text}; simulation.every_micro_batch = false simulates a few micro-batches"


def _num_blocks(
    model: ModelSpec,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    *,
    every_micro_batch: bool,
    may_repeat: bool = True,
) -> int:
    """Blocks of all micro-batches of a step that are simulated. Without a pipeline micro-batches repeat, as a
    rule. Where they do not, `check_blocks` bounds their plan.
    """
    micro_batches = training.gradient_accumulation_steps
    if parallelism.pipeline == 1:
        return len(model.blocks) * (min(micro_batches, _MAX_LOOPED) if may_repeat else micro_batches)
    has_repeated_micro_batches = (
        parallelism.schedule in ("1f1b", "interleaved-1f1b") and parallelism.passes == 1
    )
    max_micro_batches = (
        3 * parallelism.pipeline if has_repeated_micro_batches and not every_micro_batch else micro_batches
    )
    return len(model.blocks) * min(micro_batches, max_micro_batches)


def check_size(
    model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig, *, every_micro_batch: bool
) -> None:
    """Raises InputError for a step too large for any machine, whose simulation would exhaust this one's
    memory.

    Of micro-batches that are identical, only those that are simulated count: at most three for every pipeline
    rank.
    """
    context = parallelism.context
    check_blocks(
        model, training, _num_blocks(model, training, parallelism, every_micro_batch=every_micro_batch)
    )
    if training.micro_batch_tokens > _MAX_TOKENS * context:
        raise InputError(
            f"training.micro_batch_size: found {training.micro_batch_tokens:,} tokens in a micro-batch, "
            f"expected at most {_MAX_TOKENS * context:,}"
        )
    if model.numel > _MAX_PARAMETERS:
        raise InputError(
            f"model '{model.name}': found {model.numel:,} parameters, expected at most {_MAX_PARAMETERS:,}"
        )


def check_blocks(model: ModelSpec, training: TrainingConfig, num_blocks: int) -> None:
    """Raises InputError for a step of which so many blocks are planned one by one that memory would not do.

    Measured: 4,096 blocks of a pipeline take 0.5 GB under Megatron and 1.2 GB under FSDP2.
    """
    if num_blocks > MAX_BLOCKS:
        micro_batches = training.gradient_accumulation_steps
        raise InputError(
            f"training.gradient_accumulation_steps: {micro_batches:,} micro-batches of {len(model.blocks):,} "
            f"blocks are more than zsim simulates; expected at most {MAX_BLOCKS:,} blocks in a step, or "
            "simulation.every_micro_batch = false with a schedule whose micro-batches are alike"
        )


_NEED_ATTENTION = ("selective", "selective-op")


def captured_length(model: ModelSpec, requested: int | None) -> int | None:
    """The length of a captured model's samples, or None for other models.

    Raises InputError if `requested`, the experiment's own length, differs from it.
    """
    captured = model.captured
    if captured is None:
        return None
    length = captured.sequence_length
    if requested is not None and requested != length:
        raise InputError(
            f"training.sequence_length: found {requested:,}, but '{model.name}' was captured with samples of "
            f"{length:,} {'position' if length == 1 else 'positions'}, and a length is part of what was "
            f"seen; expected {length:,}, or an example of that length (training.micro_batch_size is free)"
        )
    return length


def check_captured(
    model: ModelSpec, kind: str, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    """Raises InputError for settings that a captured module has no place for, NotSimulatedError for those
    that zsim cannot apply to one."""
    if model.captured is None:
        return
    where = f"model '{model.name}' was captured from a torch module"
    training_of(kind).check_any_model(where)
    if not parallelism.is_trivial:
        raise NotSimulatedError(
            f"parallelism: {where}, which zsim cuts along data parallelism only; expected degrees of 1, or a "
            "preset or config.json"
        )
    if training.autocast:
        raise NotSimulatedError(
            f"training.autocast: {where} in the type that its weights are gathered in; expected autocast = "
            "false (param_dtype instead), or a preset or config.json"
        )
    policies = {training.activation_checkpointing, *training.block_checkpointing}
    for policy in _NEED_ATTENTION:
        blocks = [block for block in model.blocks if block.is_wrapped]
        if policy in policies and not all(
            any(module.role is Role.MIXER for module in block.modules) for block in blocks
        ):
            raise InputError(
                f"training.activation_checkpointing: found '{policy}', which runs causal attention of every "
                f"block again, but {where} and not all its blocks have one; expected 'full' or 'none'"
            )


def captured_notes(model: ModelSpec) -> list[str]:
    """Sentences of the report about a captured model."""
    captured = model.captured
    if captured is None:
        return []
    notes = [
        f"the model was captured from a torch module with {captured.samples:,} "
        f"{'sample' if captured.samples == 1 else 'samples'} of {_positions(captured)}"
    ]
    if captured.unpriced:
        names = ", ".join(captured.unpriced)
        notes.append(f"operators without a price, taken at memory bandwidth (assumed): {names}")
    return [*notes, *captured.notes]


def _positions(captured: CaptureInfo) -> str:
    length = captured.sequence_length
    return "one position" if length == 1 else f"{length:,} positions"
