"""What a DeepSpeed JSON means: every key resolved to the value DeepSpeed would use.

Sizes (`_size`, `_threshold`, `_parameters`, `_distance`) are *elements* (numel), as in DeepSpeed, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.specs.strategy.training import Precision

Dtype = Literal["bf16", "fp16", "fp32"]
OffloadDevice = Literal["cpu", "nvme"]
OptimizerWrapper = Literal["none", "fp16_optimizer", "bf16_optimizer", "zero12", "zero3"]
OptimizerImplementation = Literal["fused", "torch", "cpu"]


@dataclass(frozen=True, slots=True)
class ParameterOffload:
    """`offload_param` with a device: where stage 3 keeps the shards of the 16-bit parameters.

    `buffer_size` and `max_in_cpu` are elements; a shard larger than `buffer_size` cannot go to NVMe.
    """

    device: OffloadDevice
    nvme_path: str | None
    buffer_count: int
    buffer_size: int
    max_in_cpu: int
    pin_memory: bool


@dataclass(frozen=True, slots=True)
class OptimizerOffload:
    """`offload_optimizer` with a device: where fp32 weights and Adam's moments live; the CPU steps.

    `ratio` is the fraction of sub-groups that the CPU steps (stage 3).
    """

    device: OffloadDevice
    nvme_path: str | None
    buffer_count: int
    pin_memory: bool
    pipeline_read: bool
    pipeline_write: bool
    ratio: float
    super_offload: bool
    cpuadam_cores_fraction: float


@dataclass(frozen=True, slots=True)
class LeafModules:
    """Modules that stage 3 fetches as one unit: by class, by name, by the end of the name."""

    classes: tuple[str, ...]
    names: tuple[str, ...]
    name_suffixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ZeroConfig:
    """`zero_optimization`, sizes in elements.

    `overlap_comm`, `contiguous_gradients` and `prefetch_bucket_size` are the effective values, after what
    DeepSpeed itself overrides; offload that the stage does not know is None.
    """

    stage: int
    contiguous_gradients: bool
    reduce_scatter: bool
    reduce_bucket_size: int
    use_multi_rank_bucket_allreduce: bool
    allgather_bucket_size: int
    gathers_step_in_buckets: bool
    overlap_comm: bool
    round_robin_gradients: bool
    compute_grad_norm: bool
    parameter_alignment: bool
    sub_group_size: int
    prefetch_bucket_size: int
    param_persistence_threshold: int
    model_persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    module_granularity_threshold: int
    use_all_reduce_for_fetch_params: bool
    allgather_sequential: bool
    gather_16bit_weights_on_model_save: bool
    memory_efficient_linear: bool
    enable_sanity_checks: bool
    leaf_module: LeafModules
    zero_hpz_partition_size: int
    zero_quantized_weights: bool
    zero_quantized_nontrainable_weights: bool
    zero_quantized_gradients: bool
    has_loco: bool
    mics_shard_size: int
    mics_hierarchical_params_gather: bool
    offload_param: ParameterOffload | None
    offload_optimizer: OptimizerOffload | None
    zenflow: bool

    @property
    def is_mics(self) -> bool:
        return self.stage == 3 and self.mics_shard_size > 0


@dataclass(frozen=True, slots=True)
class LossScaling:
    """`fp16`: `loss_scale` is None when it is dynamic (the file's 0)."""

    enabled: bool
    auto_cast: bool
    loss_scale: float | None
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    min_loss_scale: int

    @property
    def is_dynamic(self) -> bool:
        return self.loss_scale is None


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """`optimizer`: DeepSpeed's lower-case name; None where the file has no block and the script makes one."""

    name: str | None
    implementation: OptimizerImplementation


@dataclass(frozen=True, slots=True)
class AioConfig:
    """`aio`: how NVMe is read and written."""

    block_size_bytes: int
    queue_depth: int
    intra_op_parallelism: int
    single_submit: bool
    overlap_events: bool
    use_gds: bool


@dataclass(frozen=True, slots=True)
class ActivationCheckpointingConfig:
    """`activation_checkpointing`: read only by models that call `deepspeed.checkpointing` themselves."""

    partition_activations: bool
    cpu_checkpointing: bool
    contiguous_memory_optimization: bool
    number_checkpoints: int | None


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """`train_batch_size = micro_batch_size x gradient_accumulation_steps x world size`."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True, slots=True)
class TrainingValues:
    """What the experiment's [training] table says by itself; None where it leaves the JSON the choice.

    `auto_precision` is for a JSON that says "auto" where the experiment says nothing: what the GPU does best.
    """

    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    precision: Precision | None = None
    gradient_clipping: float | None = None
    auto_precision: Precision = "bf16"


@dataclass(frozen=True, slots=True)
class Unsimulated:
    """A key that DeepSpeed would act on and zsim does not simulate yet."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the resolved settings.

    `origin` is "file", "auto" (Hugging Face's filling), "experiment", "worked out" or "default X.Y.Z".
    """

    key: str
    value: str
    origin: str
    effect: str


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """A DeepSpeed JSON, resolved for one release, one model and one world size.

    `param_dtype` is what the weights are kept and gathered in, `grad_accum_dtype` what gradients are
    accumulated in, `communication_dtype` what they are reduced in. `check_grad_overflow`: the step looks for
    infinities first, which costs a reduction and a wait. `world_size` and `gpus_per_node` are the job's own,
    which qgZ and MiCS build their groups from. The `explicit_` values are what the file itself says, None
    where it leaves a value open (or "auto"). `zero_init`: the model is built under `deepspeed.zero.Init`; the
    script's choice, not the file's. `delayed_parameter_update`: the CPU updates one step late.
    `fetches_one_by_one`: stage 3 as it was before 0.6, for published runs of then.
    """

    name: str
    version: str
    world_size: int
    gpus_per_node: int
    zero: ZeroConfig
    precision: Precision
    param_dtype: Dtype
    grad_accum_dtype: Dtype
    communication_dtype: Dtype
    master_weights_dtype: Dtype
    optimizer_states_dtype: Dtype
    check_grad_overflow: bool
    fp16: LossScaling
    optimizer: OptimizerChoice
    optimizer_wrapper: OptimizerWrapper
    gradient_clipping: float
    batch: BatchSizes
    prescale_gradients: bool
    gradient_predivide_factor: float
    gradient_allreduce_op: str
    aio: AioConfig
    activation_checkpointing: ActivationCheckpointingConfig
    unsimulated: tuple[Unsimulated, ...]
    notes: tuple[str, ...]
    origins: tuple[tuple[str, str], ...]
    explicit_train_batch_size: int | None
    explicit_micro_batch_size: int | None
    explicit_gradient_accumulation_steps: int | None
    explicit_precision: Precision | None
    explicit_gradient_clipping: float | None
    zero_init: bool = True
    delayed_parameter_update: bool = False
    fetches_one_by_one: bool = False

    @property
    def stage(self) -> int:
        return self.zero.stage

    @property
    def micro_batch_size(self) -> int:
        return self.batch.micro_batch_size

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.batch.gradient_accumulation_steps

    @property
    def train_batch_size(self) -> int:
        return self.batch.train_batch_size
