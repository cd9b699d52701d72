"""The axes of the search, as data: one `TunedAxis` per decision, so a new decision is a new entry.

`STRUCTURE` decides where states are kept and how the batch is cut. Every combination is considered, except
for the loss, which is varied only for the best few and where memory requires it (`zsim.study.tune.refine`).
`DETAILS` are sizes and switches that improve a good structure slightly. They are refined one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zsim.frameworks.deepspeed.settings.zero_schema import ZERO_KEYS, json_key
from zsim.frameworks.megatron.settings.config import is_core_since
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.experiment.programs import find_config_mapping
from zsim.specs.model.expert_layer import has_experts
from zsim.study.tune.base import RECOMPUTED, Base, value_of
from zsim.study.tune.degrees import ORDER, PIPELINE, VIRTUAL, data_ranks, degrees, replicas_of

ZERO = "strategy.config.zero_optimization."
STAGE = ZERO + "stage"
MICRO_BATCH, ACCUMULATION = "training.micro_batch_size", "training.gradient_accumulation_steps"
CHECKPOINTING, EVERY = "training.activation_checkpointing", "training.checkpoint_every"
BLOCKS = "training.block_checkpointing"
LOSS = "training.cross_entropy"
NVME_PATH = "/local_nvme"
_MAX_MICRO_BATCHES = 512
_MODULES = (0, 12)  # the release of Megatron-Core that brought --recompute-modules
_DRIVES = {"device": "nvme", "nvme_path": NVME_PATH, "pin_memory": True}


@dataclass(frozen=True)
class AxisChoice:
    """One value of an axis: dotted overrides, and its label in tables."""

    label: str
    overrides: Mapping[str, Any]


Chosen = Mapping[str, Any]
Choices = Callable[[Base, Chosen], Iterable[AxisChoice]]


@dataclass(frozen=True)
class TunedAxis:
    """One decision.

    Choices that the configuration of the experiment's program cannot express are left out, unless the
    configuration has them already.
    """

    name: str
    choices: Choices
    """The choices, which depend on those made on earlier axes. An empty list means that there is nothing to
    decide.
    """
    kinds: tuple[str, ...] = field(default=())
    """The strategies that have this axis (all when empty)."""

    def choices_of(self, base: Base, chosen: Chosen) -> list[AxisChoice]:
        if self.kinds and base.kind not in self.kinds:
            return []
        return [choice for choice in self.choices(base, chosen) if _is_expressible(base, choice)]


def _is_expressible(base: Base, choice: AxisChoice) -> bool:
    return all(
        find_config_mapping(base.program, base.kind, key, value) is not None
        or value == value_of(base, {}, key)
        for key, value in choice.overrides.items()
    )


def _values(key: str, name: str, *values: Any) -> Choices:
    """Choices of the same `values` for every base."""

    def choices(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
        return [AxisChoice(f"{name} {_format_value(value)}", {key: value}) for value in values]

    return choices


def _limit_to_stages(stages: tuple[int, ...], inner: Choices) -> Choices:
    """The choices of `inner` at these DeepSpeed stages, and none at other stages."""

    def choices(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
        return inner(base, chosen) if stage_of(base, chosen) in stages else []

    return choices


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float) and value >= 10**4:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return str(value)


def stage_of(base: Base, chosen: Chosen) -> int:
    stage = chosen.get(STAGE, base.data["strategy"]["config"]["zero_optimization"].get("stage", 0))
    assert isinstance(stage, int)
    return stage


# -- structure ------------------------------------------------------------------------------------------


def _stages(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    return [AxisChoice(f"ZeRO-{stage}" if stage else "no ZeRO", {STAGE: stage}) for stage in (0, 1, 2, 3)]


def state_offload_block(device: str | None) -> dict[str, Any] | None:
    """DeepSpeed's block for optimizer states on "cpu" or "nvme", or None for the GPU."""
    if device != "nvme":
        return None if device is None else {"device": device, "pin_memory": True}
    return {**_DRIVES, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}


def parameter_offload_block(device: str | None, largest_shard_numel: int) -> dict[str, Any] | None:
    """DeepSpeed's block for parameters, with buffers for the largest shard, or None for the GPU."""
    if device != "nvme":
        return state_offload_block(device)
    return {**_DRIVES, "buffer_size": max(10**8, largest_shard_numel), "buffer_count": 12}


def _offloads(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Nothing, the optimizer states, or states and parameters on the host or on the drives."""
    stage = stage_of(base, chosen)
    keys = (ZERO + "offload_optimizer", ZERO + "offload_param")
    no_offload = AxisChoice("", dict.fromkeys(keys))
    if stage == 0:
        return [no_offload]
    cpu = state_offload_block("cpu")
    choices = [no_offload, AxisChoice("optimizer on CPU", dict(zip(keys, (cpu, None), strict=True)))]
    if stage < 3:
        return choices
    choices.append(AxisChoice("optimizer, parameters on CPU", dict(zip(keys, (cpu, cpu), strict=True))))
    if base.job.cluster.nvme is None or base.job.cluster.nvme.drives == 0:
        return choices
    states, shards = state_offload_block("nvme"), parameter_offload_block("nvme", base.largest_shard_numel)
    choices += [
        AxisChoice("optimizer on NVMe", dict(zip(keys, (states, None), strict=True))),
        AxisChoice("optimizer on NVMe, parameters on CPU", dict(zip(keys, (states, cpu), strict=True))),
        AxisChoice(
            "optimizer, parameters on NVMe",
            {**dict(zip(keys, (states, shards), strict=True)), ZERO + "stage3_max_reuse_distance": 0},
        ),
    ]
    return choices


def _zero_plus_plus(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Secondary shards inside the node (hpZ), so that gathers of backward stay inside it. Not with parameters
    offloaded."""
    key, per_node = ZERO + "zero_hpz_partition_size", base.job.gpus_per_node
    if stage_of(base, chosen) != 3 or base.job.num_nodes == 1 or chosen.get(ZERO + "offload_param"):
        return []
    return [AxisChoice("", {key: 1}), AxisChoice(f"hpZ {per_node}", {key: per_node})]


def _quantised(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """int8 gathers (qwZ) and int4 reductions (qgZ). They change the numerics, so they are tried only on
    request."""
    weights, gradients = ZERO + "zero_quantized_weights", ZERO + "zero_quantized_gradients"
    if stage_of(base, chosen) != 3 or base.job.num_nodes == 1 or chosen.get(ZERO + "offload_param"):
        return []
    return [
        AxisChoice("", {weights: False, gradients: False}),
        AxisChoice("qwZ", {weights: True, gradients: False}),
        AxisChoice("qwZ qgZ", {weights: True, gradients: True}),
    ]


def _reshards(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Reshard to all ranks, to the node, or not at all."""
    key, per_node = "strategy.reshard_after_forward", base.job.gpus_per_node
    choices = [AxisChoice("", {key: True}), AxisChoice("no reshard", {key: False})]
    shard = data_ranks(base, chosen) // chosen.get("strategy.replicate", 1)
    if 1 < per_node < shard and shard % per_node == 0:
        choices.append(AxisChoice(f"reshard to {per_node}", {key: per_node}))
    return choices


def replica_counts(base: Base) -> list[int]:
    """Possible replica counts: 1, and replicas of whole nodes (powers of two and the number of nodes)."""
    nodes = base.job.num_nodes
    counts = {1, nodes} | {2**power for power in range(nodes.bit_length()) if nodes % 2**power == 0}
    return sorted(counts)


def _replicas(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    key = "strategy.replicate"
    for count in replica_counts(base):
        if data_ranks(base, chosen) % count:
            continue
        yield AxisChoice("" if count == 1 else f"{count} replicas", {key: count})


def _shardings(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """FSDP1's sharding strategies, the hybrid ones with every group of whole nodes."""
    key, replicate = "strategy.sharding_strategy", "strategy.replicate"
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        yield AxisChoice(name, {key: name, replicate: None})
    for count in replica_counts(base):
        if count > 1 and base.world_size // count > 1:
            for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
                yield AxisChoice(f"{name} {count} replicas", {key: name, replicate: count})


def _optimizers(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Megatron's optimizer states on every rank or distributed, and the overlap of communication with forward
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


def _host_offload(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    key = "strategy.cpu_offload"
    return [AxisChoice("", {key: False}), AxisChoice("parameters, states on CPU", {key: True})]


def divisors(count: int) -> list[int]:
    small = [number for number in range(1, int(count**0.5) + 1) if count % number == 0]
    return sorted({*small, *(count // number for number in small)})


def _micro_batches(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Every division of a replica's sequences into equal micro-batches."""
    sequences = base.batch_sequences // replicas_of(base, chosen)
    for size in divisors(sequences):
        steps = sequences // size
        if steps <= _MAX_MICRO_BATCHES:
            yield micro_batch_choice(size, steps)


def micro_batch_choice(size: int, steps: int) -> AxisChoice:
    """The choice of `steps` micro-batches of `size` sequences."""
    suffix = f" x {steps}" if steps > 1 else ""
    return AxisChoice(f"micro-batch {size}{suffix}", {MICRO_BATCH: size, ACCUMULATION: steps})


def _checkpointings(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """No checkpointing, whole blocks, every second block, and a form in between: selective by op where
    attention is one op whose output can be saved, else the core of attention alone."""
    intermediate = "selective" if base.job.training.attention == "math" else "selective-op"
    reset: dict[str, Any] = {BLOCKS: {}} if base.job.training.block_checkpointing else {}
    names = ("none", intermediate, "full")
    forms = [AxisChoice(f"checkpointing {name}", {CHECKPOINTING: name, EVERY: 1, **reset}) for name in names]
    forms.insert(-1, AxisChoice("checkpointing every 2nd block", {CHECKPOINTING: "full", EVERY: 2, **reset}))
    return forms


def _recomputations(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Megatron's choices: nothing, the core of attention where it is not one kernel, the MLP or the experts'
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


def _losses(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """The configured loss, one whose kernel saves only the logits, and one that never holds all logits."""
    configured = base.job.training.cross_entropy
    for name in dict.fromkeys((configured, "fused", "fused_linear")):
        yield AxisChoice("" if name == configured else f"cross entropy {name}", {LOSS: name})


def _reductions(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Whether several micro-batches reduce after each one, or after the last."""
    key = "strategy.no_sync"
    if chosen.get(ACCUMULATION, base.job.training.gradient_accumulation_steps) == 1:
        return [AxisChoice("", {key: False})]
    return [AxisChoice("", {key: False}), AxisChoice("no_sync", {key: True})]


def _degrees(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Degrees of the experiments that have a `[parallelism]` table, or are asked to search it."""
    splits = degrees(base) if "parallelism" in base.data else []
    return [AxisChoice(label, overrides) for label, overrides in splits]


PARALLELISM = TunedAxis("parallelism", _degrees, ("megatron", "fsdp2"))
FSDP = ("fsdp1", "fsdp2")
LOSSES = TunedAxis("cross-entropy", _losses, ("ddp", "deepspeed", *FSDP))
STRUCTURE: tuple[TunedAxis, ...] = (
    PARALLELISM,
    TunedAxis("stage", _stages, ("deepspeed",)),
    TunedAxis("offload", _offloads, ("deepspeed",)),
    TunedAxis("hpZ", _zero_plus_plus, ("deepspeed",)),
    TunedAxis("sharding", _shardings, ("fsdp1",)),
    TunedAxis("optimizer", _optimizers, ("megatron",)),
    TunedAxis("replicas", _replicas, ("fsdp2",)),
    TunedAxis("reshard", _reshards, ("fsdp2",)),
    TunedAxis("offload", _host_offload, ("fsdp2",)),
    TunedAxis("checkpointing", _checkpointings, ("ddp", "deepspeed", *FSDP)),
    TunedAxis("checkpointing", _recomputations, ("megatron",)),
    LOSSES,
    TunedAxis("micro-batch", _micro_batches),
    TunedAxis("no_sync", _reductions, FSDP),
)
# Only on request: it changes the numerics of training.
QUANTISED = TunedAxis("quantised", _quantised, ("deepspeed",))


# -- details --------------------------------------------------------------------------------------------


def _offloads_states(base: Base, chosen: Chosen) -> bool:
    return chosen.get(ZERO + "offload_optimizer") is not None


_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "none")
_WRAPPING = ("torchtitan", "torchtitan-0.1", "huggingface")


def _reuse_distances(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """How long a gathered parameter is kept, together with the limit on elements gathered at once. With
    parameters on drives none are kept, since the buffers would be too few."""
    param = chosen.get(ZERO + "offload_param")
    if stage_of(base, chosen) != 3 or (param or {}).get("device") == "nvme":
        return
    for size in (0, 10**9, 4 * 10**9):
        live = {ZERO + "stage3_max_live_parameters": max(size, 10**9)}
        yield AxisChoice(f"reuse {_format_value(size)}", {ZERO + "stage3_max_reuse_distance": size, **live})


def _sub_groups(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    if stage_of(base, chosen) != 3 or not _offloads_states(base, chosen):
        return []
    return _values(ZERO + "sub_group_size", "sub-groups", 10**7, 10**8, 10**9)(base, chosen)


def _detail(name: str, key: str, *values: Any, kind: str) -> TunedAxis:
    """An axis of one key with these values."""
    return TunedAxis(name, _values(key, name, *values), (kind,))


def _zero_detail(name: str, bare: str, *values: Any) -> TunedAxis:
    """An axis of one key of DeepSpeed's `zero_optimization`, at the stages where the key has an effect."""
    choices = _values(ZERO + json_key(bare), name, *values)
    return TunedAxis(name, _limit_to_stages(ZERO_KEYS[bare].stages, choices), ("deepspeed",))


def _orders(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Which ranks are neighbours, data-parallel or pipeline ranks: who shares a node, and its links."""
    split = base.job.parallelism
    pipeline = chosen.get(PIPELINE, split.pipeline)
    if "parallelism" not in base.data or pipeline == 1 or replicas_of(base, chosen) == 1:
        return []
    return [AxisChoice("", {ORDER: None}), AxisChoice("order tp-cp-pp-dp", {ORDER: "tp-cp-pp-dp"})]


DETAILS: tuple[TunedAxis, ...] = (
    TunedAxis("order", _orders, ("megatron",)),
    _zero_detail("overlap_comm", "overlap_comm", True, False),
    _zero_detail("bucket", "reduce_bucket_size", 50_000_000, 200_000_000, 500_000_000),
    _zero_detail("prefetch", "prefetch_bucket_size", 0, 10**7, 50_000_000, 200_000_000),
    _zero_detail("persistence", "param_persistence_threshold", 10**4, 10**5, 10**6),
    TunedAxis("reuse", _reuse_distances, ("deepspeed",)),
    TunedAxis("sub-groups", _sub_groups, ("deepspeed",)),
    _detail("backward prefetch", "strategy.backward_prefetch", *_PREFETCH, kind="fsdp1"),
    _detail("forward prefetch", "strategy.forward_prefetch", True, False, kind="fsdp1"),
    _detail("limit_all_gathers", "strategy.limit_all_gathers", True, False, kind="fsdp1"),
    _detail("wrapping", "strategy.wrapping", *_WRAPPING, kind="fsdp2"),
    _detail("buckets", "strategy.bucket_cap_mb", 25.0, 100.0, 400.0, kind="ddp"),
    _detail("bucket view", "strategy.gradient_as_bucket_view", True, False, kind="ddp"),
)
