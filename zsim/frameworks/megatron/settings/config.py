"""Megatron's data parallelism, resolved for a release.

Releases of Megatron-Core are 0.4 and later. Those of Megatron-LM before Core are 1.0 (April 2020) to 3.0.
Read from NVIDIA/Megatron-LM: local DDP joins gradients for one all-reduce and copies the sums back until 2.5
(`megatron/model/distributed.py`), and keeps them in one contiguous buffer from 2.6 on (e8fb052f). Products
add their weights' gradients to it themselves (`--gradient-accumulation-fusion`, 83b1e42f of February 2022)
and there is a distributed optimizer (329fe582) from 3.0 on. Core 0.4 overlaps reductions (2d5220a4) and
gathers (f048bf8c) and looks for NaN before it reduces (b1116a0c). Core 0.10 has several instances of the
distributed optimizer (bb84eb93).

# [Note: what settings demand]
Demands of settings on each other and on the release are read in Megatron-Core 0.16.1: training/arguments.py
`validate_args`, core/optimizer/optimizer_config.py, core/distributed/fsdp and
core/transformer/transformer_config.py. `SINCE` is by the commits that
`zsim.frameworks.megatron.settings.config` names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.megatron.settings.experts import HostEvents, host_events
from zsim.frameworks.megatron.settings.fsdp import MegatronFsdp, check_fsdp_layout, resolve_megatron_fsdp
from zsim.frameworks.megatron.settings.muon import MegatronMuon, refuse_muon_keys, resolve_megatron_muon
from zsim.frameworks.megatron.settings.precision_aware import (
    OptimizerOnCpu,
    PrecisionAware,
    resolve_cpu_optimizer,
    resolve_precision_aware,
)
from zsim.frameworks.megatron.settings.table import NEWEST_CORE, MegatronTable
from zsim.specs.strategy.registry import Framework
from zsim.specs.strategy.requirement import SettingRequirement, check_requirements
from zsim.specs.strategy.table import StrategyConfig
from zsim.specs.strategy.training import HOPPER, LARGE_WORKSPACE, NUM_HANDLES, TrainingConfig, workspace_bytes

_DDP_BUCKET = 25 * 2**20  # bytes of gradients; nanotron's `ddp_bucket_cap_mb`
_FIRST_CORE_RELEASE, _INSTANCES_RELEASE = (0, 4), (0, 10)
_SEND_WAIT_RELEASE, _SCATTER_RELEASE, _REPLICA_SAVE_RELEASE = (0, 18), (2, 1), (0, 15)
_PLACEHOLDER_RELEASE = (0, 13)
_BUFFER_RELEASE, _SHARDING_RELEASE = (2, 6), (3, 0)  # of Megatron-LM before Core
_ENGINE_WORKSPACE = 2**22  # Transformer Engine's, before Hopper


@dataclass(frozen=True, slots=True)
class MegatronConfig(StrategyConfig):
    """Megatron's data parallelism, resolved."""

    kind: ClassVar[str] = "megatron"

    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    param_dtype: str
    grad_dtype: str
    average_in_collective: bool
    bucket_size: int | None
    """Elements of a bucket. None if all gradients are one bucket."""
    optimizer_instances: int
    is_contiguous: bool
    """Gradients live in one persistent buffer. Otherwise they live in `.grad` and are joined to be
    reduced.
    """
    fuses_accumulation: bool
    """The product for a weight's gradient adds it to the buffer."""
    checks_nan: bool
    """The host reads the norm of a bucket before it is reduced."""
    has_whole_tensor_owners: bool = False
    """InternEvo's distributed optimizer, never Megatron's. Gradients are summed on all ranks, and whole
    tensors belong to ranks, which broadcast them.
    """
    is_nanotron: bool = False
    """nanotron's own gradients and ZeRO-1 (zsim/frameworks/megatron/nanotron.py)."""
    host_events: HostEvents = field(default_factory=HostEvents)
    skips_update: bool = False
    """The loss scale is still falling, and gradients that overflow are thrown away."""
    overlap_p2p: bool = True
    """In the interleaved schedule, messages between stages overlap with computation."""
    align_grad_reduce: bool = True
    """In the interleaved schedule, all pipeline ranks reduce a chunk's gradients at the same point."""
    align_param_gather: bool = True
    """In the interleaved schedule, all pipeline ranks gather a chunk's parameters at the same point."""
    overlap_p2p_warmup_flush: bool = False
    """In the interleaved schedule, messages overlap in warm-up and cool-down as well."""
    micro_batch_group: int | None = None
    """Micro-batches that a chunk runs before the next chunk, in the interleaved schedule. None for as many as
    pipeline ranks.
    """
    waits_sends: bool = False
    """A forward's send is waited for at once (core 0.18, 260cba71)."""
    scatters_messages: bool = False
    """Tensor-parallel ranks send a part of an activation each and gather it after it arrives
    (`scatter_gather_tensors_in_pipeline` of Megatron-LM before Core).
    """
    fp8_param_gather: bool = False
    """The weights of fp8 products are kept and gathered in fp8."""
    overlap_expert_parallel: bool = False
    """Experts' exchanges of one micro-batch run during another's layers
    (`zsim.frameworks.megatron.pipeline_runtime`). One forward more is ahead (`get_pp_rank_microbatches` of
    Megatron-LM d98e8a64).
    """
    delay_wgrad_compute: bool = False
    """Under `overlap_expert_parallel`, the gradients of weights run as steps of their own."""
    fsdp: MegatronFsdp | None = None
    """Megatron-FSDP, in place of the buffers."""
    precision_aware: PrecisionAware | None = None
    """Types of the precision-aware optimizer's states."""
    offload: OptimizerOnCpu | None = None
    """The optimizer on the CPU."""
    saves_replicated_states: bool = False
    """In a checkpoint every tensor-parallel rank writes the states of what all of them hold (core 0.15:
    training/checkpointing.py `dp_reshardable`).
    """
    workspaces: tuple[int, ...] = ()
    """Bytes of each workspace of cuBLAS that torch's allocator holds."""
    keeps_placeholders: bool = False
    """Transformer Engine keeps a tensor of every weight's shape (2.3, which containers have had since core
    0.13).
    """
    synchronizes_timers: bool = False
    """Timers wait for the device around every forward, backward and exchange of messages."""
    test_mode: bool = False
    """Layers compare the norms of their queries and keys with those of other ranks."""
    distributes_checkpoints: bool = False
    """Tensor-parallel ranks share the inputs of recomputed layers."""
    muon: MegatronMuon | None = None
    """Megatron's own Muon, whose states the distributed optimizer has if its matrices are laid out
    for ranks.
    """

    def label(self, world_size: int, ranks: int) -> str:
        if self.fsdp is not None:
            return f"Megatron-FSDP {self.fsdp.sharding}"
        if self.muon is not None and self.shards_states:
            return "Megatron, layer-wise Muon"
        return "Megatron, distributed optimizer" if self.distributed_optimizer else "Megatron DDP"

    @property
    def plans_workspaces(self) -> bool:
        return bool(self.workspaces)

    @property
    def aligns_grad_reduce(self) -> bool:
        """Whether the gradients of a chunk start to be reduced at a step of the schedule, not in the chunk's
        own last backward.
        """
        return self.overlap_grad_reduce and self.align_grad_reduce

    @property
    def aligns_param_gather(self) -> bool:
        """Whether the parameters of a chunk start to be gathered at a step of the interleaved schedule."""
        return self.overlap_param_gather and self.align_param_gather

    @property
    def shards_states(self) -> bool:
        """Whether each data-parallel rank updates a part of the parameters."""
        return self.distributed_optimizer or (self.muon is not None and self.muon.owners != "all")


def resolve_megatron(
    table: MegatronTable, training: TrainingConfig, world_size: int, capability: float | None = None
) -> MegatronConfig:
    """The table resolved for `world_size` ranks on GPUs of compute capability `capability`.

    Raises InputError for what Megatron's own argument checks refuse and for what the release lacks.
    """
    release = _parse_release(table.version)
    has_core = is_core(table.version)
    check_release(table, (has_core, release))
    _check_combination(table, world_size)
    _check_fp8(table, training)
    compute_dtype = "bf16" if training.precision == "fp8" else training.precision
    if table.grad_reduce_dtype not in ("fp32", compute_dtype):
        raise InputError(
            f"strategy.grad_reduce_dtype: found '{table.grad_reduce_dtype}' with parameters in "
            f"{compute_dtype}; expected 'fp32' or '{compute_dtype}'"
        )
    if table.engine == "internevo" and table.grad_reduce_dtype != compute_dtype:
        raise InputError(
            f"strategy.grad_reduce_dtype: found '{table.grad_reduce_dtype}' (the default is 'fp32'), but "
            f"engine 'internevo' reduces gradients in the parameters' type; expected '{compute_dtype}'"
        )
    ranks = world_size // table.optimizer_instances
    bucket_size = table.bucket_size or max(40_000_000, 1_000_000 * ranks)
    is_megatron, is_internevo = table.engine == "megatron", table.engine == "internevo"
    is_nanotron = table.engine == "nanotron"
    muon = resolve_megatron_muon(table, release, training) if training.optimizer == "muon" else None
    if muon is None:
        refuse_muon_keys(table)
    is_sharded = table.distributed_optimizer if muon is None else muon.owners == "laid out"
    overlaps_grad_reduce = table.overlap_grad_reduce
    if is_nanotron:  # torch's DDP without ZeRO, with its buckets of 25 MiB
        overlaps_grad_reduce, bucket_size = (
            not table.distributed_optimizer,
            _DDP_BUCKET // DTYPE_BYTES[compute_dtype],
        )
    has_buffer = has_core or release >= _BUFFER_RELEASE or table.grad_reduce_dtype != compute_dtype
    fuses_accumulation = (
        is_megatron
        and table.gradient_accumulation_fusion
        and (has_core or (release >= _SHARDING_RELEASE and table.grad_reduce_dtype == "fp32"))
    )
    return MegatronConfig.resolve(
        table,
        distributed_optimizer=is_sharded,
        overlap_grad_reduce=overlaps_grad_reduce,
        overlap_param_gather=table.overlap_param_gather and not is_nanotron,
        param_dtype=compute_dtype,
        grad_dtype=table.grad_reduce_dtype,
        average_in_collective=table.average_in_collective or is_nanotron,
        bucket_size=bucket_size if overlaps_grad_reduce else None,
        is_contiguous=has_buffer and not is_internevo,
        fuses_accumulation=fuses_accumulation,
        checks_nan=has_core and is_megatron and table.check_for_nan and table.fsdp_sharding is None,
        has_whole_tensor_owners=is_internevo,
        is_nanotron=is_nanotron,
        host_events=host_events(table, training, has_core),
        waits_sends=has_core and release >= _SEND_WAIT_RELEASE,
        saves_replicated_states=has_core and release >= _REPLICA_SAVE_RELEASE,
        scatters_messages=is_megatron and not has_core and release >= _SCATTER_RELEASE,
        fsdp=resolve_megatron_fsdp(table, ranks),
        precision_aware=resolve_precision_aware(table, release, training),
        offload=resolve_cpu_optimizer(table, release),
        workspaces=_cublas_workspaces(table, capability) if has_core and is_megatron else (),
        keeps_placeholders=fuses_accumulation
        and has_core
        and release >= _PLACEHOLDER_RELEASE
        and table.transformer_impl == "transformer_engine",
        synchronizes_timers=is_megatron and table.timing_log_level == 2,
        test_mode=is_megatron and table.test_mode,
        distributes_checkpoints=table.distribute_saved_activations,
        muon=muon,
    )


def _cublas_workspaces(table: MegatronTable, capability: float | None) -> tuple[int, ...]:
    """Bytes of cuBLAS's workspaces, or () where the GPUs' compute capability is not known.

    Those of torch's handles are large everywhere under CUBLAS_WORKSPACE_CONFIG=:4096:8, which Megatron's
    tests in deterministic mode set. Transformer Engine has one of its own, of 4 MiB, or of 32 MiB from Hopper
    on (pytorch/module/base.py `get_cublas_workspace_size_bytes`, 1.0 to 2.5).
    """
    if capability is None:
        return ()
    torch_workspace = LARGE_WORKSPACE if table.deterministic_mode else workspace_bytes(capability)
    engine_workspace = LARGE_WORKSPACE if capability >= HOPPER else _ENGINE_WORKSPACE
    return (torch_workspace,) * NUM_HANDLES + (
        (engine_workspace,) if table.transformer_impl == "transformer_engine" else ()
    )


def _check_fp8(table: MegatronTable, training: TrainingConfig) -> None:
    for key in ("fp8_param_gather", "tp_only_amax_red"):
        if getattr(table, key) and training.precision != "fp8":
            raise InputError(
                f"strategy.{key}: found true with training.precision '{training.precision}', where nothing "
                "is cast; expected precision 'fp8', or false"
            )


def check_distributed_checkpoints(
    table: MegatronTable, training: TrainingConfig, tensor: int, *, shares_sequences: bool
) -> None:
    """Raises InputError where Megatron refuses to share the inputs of recomputed layers among `tensor` ranks
    (Megatron-Core 0.16.1 training/arguments.py `validate_args`, core/transformer/transformer_config.py).
    """
    if not table.distribute_saved_activations:
        return
    key = "strategy.distribute_saved_activations"
    if table.engine != "megatron":
        raise InputError(f"{key}: belongs to engine 'megatron', found '{table.engine}'; expected false")
    if training.activation_checkpointing != "full":
        raise InputError(
            f"{key}: found true with training.activation_checkpointing "
            f"'{training.activation_checkpointing}', and Megatron shares the inputs of whole layers alone; "
            "expected 'full', or false"
        )
    if tensor == 1:
        raise InputError(f"{key}: found true without tensor parallelism; expected parallelism.tensor > 1")
    if shares_sequences:
        raise InputError(
            f"{key}: found true with sequence parallelism, under which every rank has its part of the input "
            "already, and which Megatron refuses; expected parallelism.sequence_parallel = false, or false"
        )


def check_megatron_layout(table: MegatronTable, pipeline: int, expert: int, connections: int) -> None:
    """Raises InputError for parallelism or hardware queues that Megatron-FSDP does not combine with."""
    check_fsdp_layout(table, _parse_release(table.version), pipeline, expert, connections)


def is_core_since(version: str, core: tuple[int, int] = (0, 8)) -> bool:
    """Whether a release is one of Megatron-Core from `core` on."""
    return is_core(version) and _parse_release(version) >= core


def is_before_3(version: str) -> bool:
    """Whether a release is one of Megatron-LM before 3.0."""
    return not is_core(version) and _parse_release(version) < _SHARDING_RELEASE


def is_core(version: str) -> bool:
    """Whether a release is one of Megatron-Core, not of Megatron-LM before it."""
    return _parse_release(version)[0] == 0


def _parse_release(version: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(\.\d{1,4})?", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if not _FIRST_CORE_RELEASE <= release <= _SHARDING_RELEASE:
        raise InputError(
            f"strategy.version: found '{version}', expected a release of Megatron-Core from 0.4 on, as in "
            f"'{NEWEST_CORE}', or of Megatron-LM before it, '1.0' to '3.0'"
        )
    return release


def _check_combination(table: MegatronTable, world_size: int) -> None:
    """See `REQUIREMENTS` for the demands of one setting on another."""
    gathers_parameters = table.distributed_optimizer or table.layer_wise_optimizer
    if table.overlap_param_gather and not gathers_parameters:
        raise InputError(
            "strategy.overlap_param_gather: Megatron gathers parameters only with distributed_optimizer, and "
            "overlaps it only with overlap_grad_reduce; expected both to be true"
        )
    check_requirements(table, REQUIREMENTS)
    modules = table.cuda_graph_modules
    if "moe_preprocess" in modules and "moe_router" not in modules:
        raise InputError(
            "strategy.cuda_graph_modules: found 'moe_preprocess' without 'moe_router', which Megatron "
            "refuses; expected both"
        )
    instances = table.optimizer_instances
    if world_size % instances:
        raise InputError(
            f"strategy.optimizer_instances: found {instances}, expected a divisor of {world_size} GPUs"
        )


class MegatronFramework(Framework[MegatronTable, MegatronConfig]):
    table = MegatronTable
    title = "Megatron"
    order = 5
    other_names = dict.fromkeys(
        ("megatronlm", "mcore", "megatroncore", "nemo", "megatronbridge"), 'kind = "megatron"'
    )
    unread_keys = frozenset(
        {
            "training.lora.preparation", "training.autocast", "training.stored_dtype",
            "parallelism.gather_per_product", "parallelism.first_stage_less_layers",
            "parallelism.last_stage_less_layers", "parallelism.expert_padding",
        }
    )  # fmt: skip


FRAMEWORK = MegatronFramework()


_REFUSED = "which Megatron refuses"
_FSDP_ALONE = "and it belongs to Megatron-FSDP"
_OTHER_ENGINE = "and it belongs to engine 'megatron'"
_FSDP_GAP = "beside which zsim does not simulate it"

SINCE: Mapping[str, str] = {
    "distributed_optimizer": "3.0",
    "overlap_grad_reduce": "0.4.0",
    "overlap_param_gather": "0.4.0",
    "average_in_collective": "0.4.0",
    "optimizer_instances": "0.10.0",
    "precision_aware_optimizer": "0.11.0",
    "fsdp_sharding": "0.13.0",
}
"""The first release that has a setting. Releases of Core, "0.4.0" and later, follow those of Megatron-LM."""

REQUIREMENTS = (
    SettingRequirement(
        "overlap_param_gather", "overlap_grad_reduce", "without which Megatron overlaps no gathers"
    ),
    *(
        SettingRequirement(key, "engine", _OTHER_ENGINE, expected=("megatron",))
        for key in ("cuda_graph", "cuda_graph_modules", "version", "fsdp_sharding")
    ),
    SettingRequirement("cuda_graph_modules", "cuda_graph", "one graph of the whole step", expected=(False,)),
    SettingRequirement(
        "engine", "distributed_optimizer", "which has no other optimizer", values=("internevo",)
    ),
    SettingRequirement("bucket_size", "overlap_grad_reduce", "where all gradients are one bucket"),
    SettingRequirement("optimizer_instances", "distributed_optimizer", "of which they are instances"),
    *(
        SettingRequirement(key, "fsdp_sharding", _FSDP_ALONE, expected=())
        for key in (
            "fsdp_unit_size",
            "fsdp_double_buffer",
            "fsdp_gather_group",
            "keep_fp8_transpose_cache",
            "fsdp_outer_sharding",
            "gradient_reduce_div_fusion",
        )
    ),
    SettingRequirement(
        "fsdp_sharding", "distributed_optimizer", "whose step copies Megatron-FSDP's main weights back"
    ),
    SettingRequirement(
        "precision_aware_optimizer",
        "fsdp_sharding",
        "under which no gradient reaches it (`decoupled_grad` is never set)",
        expected=(None,),
    ),
    SettingRequirement(
        "fsdp_sharding",
        "overlap_grad_reduce",
        "with which Megatron-FSDP reduces nothing (`all_reduce_gradients` skips every buffer)",
        values=("no_shard",),
    ),
    SettingRequirement("cuda_graph", "fsdp_sharding", _FSDP_GAP, expected=(None,), is_simulated=False),
    *(
        SettingRequirement(key, "precision_aware_optimizer", _REFUSED)
        for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    SettingRequirement(
        "precision_aware_optimizer", "distributed_optimizer", "beside which alone Megatron has it"
    ),
    SettingRequirement(
        "main_grads_dtype", "grad_reduce_dtype", _REFUSED, expected=("bf16",), values=("bf16",)
    ),
    SettingRequirement("fp8_param_gather", "distributed_optimizer", "which alone gathers parameters"),
    SettingRequirement("delay_wgrad_compute", "overlap_expert_parallel", _REFUSED),
    SettingRequirement("overlap_shared_experts", "overlap_expert_parallel", _REFUSED, expected=(False,)),
    SettingRequirement(
        "overlap_expert_parallel", "fsdp_sharding", _FSDP_GAP, expected=(None,), is_simulated=False
    ),
)


def check_release(table: MegatronTable, order: tuple[bool, tuple[int, int]]) -> None:
    """Raises InputError for the first setting that the release lacks, whose `order` is whether it is one of
    Core, and its number.
    """
    for key, version in SINCE.items():
        is_set = getattr(table, key) != MegatronTable.model_fields[key].default
        if is_set and order < release_order(version):
            raise InputError(
                f"strategy.{key}: Megatron {table.version} does not have it; expected a strategy.version "
                f"from '{version}' on"
            )


def release_order(version: str) -> tuple[bool, tuple[int, int]]:
    """The place of a release among all: those of Megatron-LM, then those of Core."""
    major, minor = (int(number) for number in version.split(".")[:2])
    return major == 0, (major, minor)
