"""Megatron in searches, whole runs and on the page: what to vary, bounds, what a save writes, its fields.

# [Note: reduced behind the last backward]
Megatron reduces what it does not overlap after the last backward, and gathers parameters after the update.
With overlap a stage is one bucket (but for the first: `MegatronSchedule`), which is complete when the stage's
last backward ends. The rank with stage 0 does so behind the drain. The others are done before it, but where
the norm of the gradients is taken over all ranks none goes on until all are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import NotSimulatedError
from zsim.frameworks.megatron.checkpoint_files import megatron_files
from zsim.frameworks.megatron.parallelism import MEGATRON
from zsim.frameworks.megatron.settings.config import MegatronConfig, is_core_since
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.goodput.checkpoints.saved import (
    STATE_MEASURED,
    FrameworkCheckpoint,
    ModelStates,
    SavedFiles,
)
from zsim.plan.ops import CollectiveKind
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.checkpoint import CheckpointTable
from zsim.specs.model.expert_layer import has_experts
from zsim.study.tune.axes import (
    DISPATCHERS,
    EXPERT,
    EXPERTS,
    LAYOUTS,
    MICRO_BATCHES,
    ORDER,
    PARALLELISM,
    PIPELINE,
    RECIPES,
    VIRTUAL,
    replicas_of,
)
from zsim.study.tune.framework import (
    BLOCKS,
    CHECKPOINTING,
    LOSS,
    RECOMPUTED,
    AxisChoice,
    Base,
    Chosen,
    FrameworkBounds,
    FrameworkTuning,
    TunedAxis,
)
from zsim.ui.field import Field, FrameworkFields

_FUSED = "megatron-fused"
_MODULES = (0, 12)  # the release of Megatron-Core that brought --recompute-modules


def _optimizers(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Optimizer states on every rank or distributed, and the overlap of communication with forward
    and backward."""
    distributed, reduce = "strategy.distributed_optimizer", "strategy.overlap_grad_reduce"
    gather, bucket = "strategy.overlap_param_gather", "strategy.bucket_size"
    reset: dict[str, Any] = {bucket: None} if getattr(base.job.experiment.strategy, "bucket_size", 0) else {}
    return [
        AxisChoice("states on every rank", {distributed: False, reduce: False, gather: False, **reset}),
        AxisChoice("states on every rank, overlapped", {distributed: False, reduce: True, gather: False}),
        AxisChoice("distributed optimizer", {distributed: True, reduce: False, gather: False, **reset}),
        AxisChoice("distributed optimizer, overlapped", {distributed: True, reduce: True, gather: True}),
    ]


def _recomputations(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Nothing, the core of attention where it is not one kernel, the MLP or the experts'
    activation, the first half of every stage's layers, all layers.
    """
    training, split, strategy = base.job.training, base.job.parallelism, base.job.experiment.strategy
    assert isinstance(strategy, MegatronTable)
    reset: dict[str, Any] = {BLOCKS: {}} if training.block_checkpointing else {}

    def choice(name: str, granularity: str, *values: Any) -> AxisChoice:
        recompute_keys = dict(zip(RECOMPUTED, values or (None, None, None), strict=True))
        return AxisChoice(name, {CHECKPOINTING: granularity, **recompute_keys, **reset})

    choices = [choice("checkpointing none", "none")]
    if training.attention == "math":
        choices.append(choice("checkpointing selective", "selective"))
    if strategy.engine == "megatron" and is_core_since(strategy.version, _MODULES):
        name = "moe_act" if has_experts(base.job.model) else "mlp"
        choices.append(choice(f"recomputing {name}", "selective", [name], None, None))
    stages = chosen.get(PIPELINE, split.pipeline) * (chosen.get(VIRTUAL, split.virtual_stages) or 1)
    half = -(-len(base.job.model.blocks) // stages) // 2
    if half:
        layers = f"{half} layer{'s' if half > 1 else ''}{' a stage' if stages > 1 else ''}"
        choices.append(choice(f"checkpointing {layers}", "full", None, "block", half))
    return [*choices, choice("checkpointing full", "full")]


def _orders(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Which ranks are neighbours, data-parallel or pipeline ranks: who shares a node, and its links."""
    split = base.job.parallelism
    pipeline = chosen.get(PIPELINE, split.pipeline)
    if "parallelism" not in base.data or pipeline == 1 or replicas_of(base, chosen) == 1:
        return []
    if chosen.get(EXPERT, split.experts.members) > 1:
        return []  # stages of experts are on the same ranks only where the pipeline comes last
    return [AxisChoice("", {ORDER: None}), AxisChoice("order tp-cp-pp-dp", {ORDER: "tp-cp-pp-dp"})]


def _losses(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """The configured loss, and the fused one of releases that have it, where no flag asks for another."""
    strategy, configured = base.job.experiment.strategy, base.job.training.cross_entropy
    assert isinstance(strategy, MegatronTable)
    if strategy.engine != "megatron" or not is_core_since(strategy.version) or configured == _FUSED:
        return []
    return [AxisChoice("", {LOSS: configured}), AxisChoice(f"cross entropy {_FUSED}", {LOSS: _FUSED})]


class MegatronTuning(FrameworkTuning[MegatronTable]):
    """Degrees, the optimizer's states, and what is recomputed."""

    label = "Megatron"
    structure = (
        PARALLELISM,
        TunedAxis("optimizer", _optimizers),
        TunedAxis("checkpointing", _recomputations),
        MICRO_BATCHES,
    )
    details = (
        TunedAxis("cross-entropy", _losses, changes_kernels=True),
        TunedAxis("order", _orders),
        EXPERTS,
        DISPATCHERS,
        LAYOUTS,
    )
    numerics = (RECIPES,)
    schedules = MEGATRON.schedules

    def sizes(self, table: MegatronTable, config: MegatronConfig) -> dict[str, tuple[str, float, bool]]:
        if config.bucket_size is None:
            return {}
        return {"bucket_size": ("strategy.bucket_size", float(config.bucket_size), True)}


TUNING = MegatronTuning()


class MegatronBounds(FrameworkBounds[MegatronConfig]):
    """Reductions behind the last backward, blocks' Python, and the model states."""

    counts_stages = True
    waits_for_messages = True
    calls_modules_eagerly = False

    def exposed_collectives(
        self, job: Job, config: MegatronConfig, numel: int, numel_of_last: int
    ) -> Iterator[tuple[CollectiveKind, int, str]]:
        """See [Note: reduced behind the last backward]. None where several optimizers or experts spread
        states over fewer ranks.
        """
        if config.optimizer_instances > 1 or job.parallelism.experts.ranks > 1:
            return
        if not config.is_contiguous or config.has_whole_tensor_owners or config.fsdp is not None:
            return
        reduced = numel_of_last if config.overlap_grad_reduce else numel
        yield "reduce_scatter" if config.distributed_optimizer else "all_reduce", reduced, config.grad_dtype
        if config.distributed_optimizer and not config.overlap_param_gather:
            yield "all_gather", numel, "fp8" if config.fp8_param_gather else config.param_dtype

    def checkpoint_share(self, job: Job, config: MegatronConfig) -> float:
        return 1 / job.parallelism.tensor if config.distributes_checkpoints else 1.0

    def block_overhead(self, config: MegatronConfig) -> str | None:
        return config.host_events.block

    def bytes_per_parameter(self, job: Job, config: MegatronConfig, moments: int) -> float:
        ranks = job.data_parallel_size * job.parallelism.context
        master = 0 if config.param_dtype == "fp32" else 4
        configured_states = config.precision_aware
        if config.offload is not None:
            states = 0.0
        elif configured_states is not None:
            moment = sum(DTYPE_BYTES[dtype] for dtype in configured_states.moment_dtypes)
            states = (
                moment + (configured_states.master_bytes if configured_states.has_masters else master)
            ) / ranks
        else:
            states = (master + 4 * moments) / (ranks if config.shards_states else 1)
        parameter = 1 if config.fp8_param_gather else DTYPE_BYTES[config.param_dtype]
        gradient = DTYPE_BYTES[config.grad_dtype]
        if config.fsdp is None:
            return parameter + gradient + states
        fsdp = config.fsdp
        shared = ranks // config.optimizer_instances
        num_shards = 1 if not fsdp.shards_states else ranks if fsdp.outer_sharding == "optim" else shared
        states = (4 + 4 * moments) / num_shards
        states += gradient / (shared if fsdp.shards_gradients else 1)
        return states + parameter / (shared if fsdp.shards_parameters else 1)


BOUNDS = MegatronBounds()


class MegatronCheckpoint(FrameworkCheckpoint[MegatronConfig]):
    """The files of `--ckpt-format torch_dist`."""

    formats = ("megatron",)

    def files(
        self, job: Job, config: MegatronConfig, states: ModelStates, table: CheckpointTable
    ) -> SavedFiles:
        if config.has_whole_tensor_owners:
            raise NotSimulatedError(
                f"run.checkpoint: the files of engine 'internevo' are not known; {STATE_MEASURED}"
            )
        if config.fsdp is not None:
            raise NotSimulatedError(
                "run.checkpoint: the files of Megatron-FSDP (--ckpt-format fsdp_dtensor) are not known; "
                f"{STATE_MEASURED}"
            )
        if config.offload is not None:
            raise NotSimulatedError(
                f"run.checkpoint: a save of states that the CPU holds is not known; {STATE_MEASURED}"
            )
        return megatron_files(states, config)


CHECKPOINT = MegatronCheckpoint()


FIELDS = FrameworkFields(
    "Megatron",
    position=5,
    has_degrees=True,
    fields=(
        Field("strategy.distributed_optimizer", "Optimizer", "states over the ranks",
              choices={"on every rank": False, "distributed": True}),
        Field("strategy.overlap_grad_reduce", "Reduction", "of gradients", is_half=True,
              choices={"after backward": False, "overlapped": True}),
        Field("strategy.overlap_param_gather", "Gather", "of parameters", is_half=True,
              choices={"after the update": False, "overlapped": True}),
    ),
)  # fmt: skip
