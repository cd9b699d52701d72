"""A resolved DeepSpeed JSON: every key with the value that DeepSpeed would use.

Sizes (`_size`, `_threshold`, `_parameters`, `_distance`) are *elements* (numel), as in DeepSpeed, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from zsim.frameworks.deepspeed.settings.json_types import Names
from zsim.frameworks.deepspeed.settings.one_bit import OneBit
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.schema import (
    ActivationCheckpointingBlock,
    ExpertParallelBlock,
    PipelineBlock,
)
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.deepspeed.settings.zero_schema import (
    LeafModuleBlock,
    OffloadOptimizerBlock,
    OffloadParamBlock,
    ZeroBlock,
)
from zsim.specs.strategy.registry import Framework
from zsim.specs.strategy.table import StrategyConfig
from zsim.specs.strategy.training import Precision

Dtype = Literal["bf16", "fp16", "fp32"]
OffloadDevice = Literal["cpu", "nvme"]
OptimizerWrapper = Literal["none", "fp16_optimizer", "bf16_optimizer", "zero12", "zero3"]
OptimizerImplementation = Literal["fused", "torch", "cpu"]


class ParameterOffload(OffloadParamBlock):
    """`offload_param` with a device, on which stage 3 keeps the shards of the 16-bit parameters.

    A shard larger than `buffer_size` cannot go to NVMe.
    """

    device: OffloadDevice
    pin_memory: bool


class OptimizerOffload(OffloadOptimizerBlock):
    """`offload_optimizer` with a device, which holds fp32 weights and Adam's moments. The CPU runs
    the step.
    """

    device: OffloadDevice
    pin_memory: bool


class LeafModules(LeafModuleBlock):
    """`leaf_module`, with the release's default classes if the file names none."""

    classes: Names = ()


class ZeroConfig(ZeroBlock):
    """`zero_optimization` in force: every key as DeepSpeed uses it, after DeepSpeed's own overrides.

    Types are narrower than the file's where the file may leave a value open. An offload that the stage does
    not have is None.
    """

    use_multi_rank_bucket_allreduce: bool
    overlap_comm: bool
    leaf_module: LeafModules
    offload_param: ParameterOffload | None
    offload_optimizer: OptimizerOffload | None

    @property
    def is_mics(self) -> bool:
        return self.stage == 3 and self.mics_shard_size > 0


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """The optimizer of a DeepSpeed JSON."""

    name: str | None
    """DeepSpeed's lower-case name. None if the script makes the optimizer."""
    implementation: OptimizerImplementation
    training_name: str | None = None
    """The name that `training.optimizer` has for it."""
    allows_untested: bool = False
    """The file's `zero_allow_untested_optimizer`."""
    forces_cpu_optimizer: bool = True
    """The file's `zero_force_ds_cpu_optimizer`."""
    orthogonalisation: Literal["gram", "standard"] = "gram"
    """Muon's `ns_method`."""
    by_head: bool = False
    """Muon's `per_head_muon`."""


@dataclass(frozen=True, slots=True)
class AioConfig:
    """`aio`: how NVMe is read and written, as far as it affects time."""

    block_size_bytes: int
    queue_depth: int
    intra_op_parallelism: int
    use_gds: bool


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """`train_batch_size = micro_batch_size x gradient_accumulation_steps x world size`."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True, slots=True)
class TrainingValues:
    """The values of the experiment's [training] table. None where it leaves the choice to the JSON."""

    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    precision: Precision | None = None
    gradient_clipping: float | None = None
    auto_precision: Precision = "bf16"
    """The best precision that the GPU supports, for a JSON that says "auto" while the experiment
    gives none.
    """


@dataclass(frozen=True, slots=True)
class DeepCompile:
    """DeepCompile with the passes of its own schedules: at stage 3 after the fifth step the gathers are
    issued ahead and some parameters stay gathered, or from the second step on optimizer states are moved.
    """

    num_buckets: int
    """Buffers of gradients, which are reduced in turns."""
    moves: Literal["gathers", "states", "activations", "parameters"] = "gathers"
    """What the passes of stage 3 move: gathers ahead, optimizer states off the GPU for forward and backward,
    activations off the GPU between them, or shards that are in host memory to the GPU."""
    pins_activations: bool = True
    """Whether activations wait in page-locked host memory."""
    tensor_bytes: int = 0
    """GPU bytes that the passes let tensors take."""


@dataclass(frozen=True, slots=True)
class UnsimulatedSetting:
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
class DeepSpeedConfig(StrategyConfig):
    """A DeepSpeed JSON, resolved for one release, one model and one world size."""

    kind: ClassVar[str] = "deepspeed"

    name: str
    release: Release
    gpus_per_node: int
    """The `device_count()` that qgZ and MiCS build their groups from."""
    zero: ZeroConfig
    precision: Precision
    param_dtype: Dtype
    """The type of the stored and gathered weights."""
    grad_accum_dtype: Dtype
    """The type of accumulated gradients."""
    communication_dtype: Dtype
    """The type of gradient reductions."""
    master_weights_dtype: Dtype
    optimizer_states_dtype: Dtype
    check_grad_overflow: bool
    """The step looks for infinities first, which costs a reduction and a wait."""
    optimizer: OptimizerChoice
    optimizer_wrapper: OptimizerWrapper
    gradient_clipping: float
    batch: BatchSizes
    aio: AioConfig
    activation_checkpointing: ActivationCheckpointingBlock
    pipeline: PipelineBlock
    """The block of `PipelineEngine`, without effect elsewhere."""
    expert_parallel: ExpertParallelBlock | None
    """AutoEP's block."""
    unsimulated: tuple[UnsimulatedSetting, ...]
    notes: tuple[str, ...]
    origins: tuple[tuple[str, str], ...]
    """(key, origin) of each setting, as in `Setting`."""
    zero_init: bool = True
    """The model is built under `deepspeed.zero.Init`, which is the script's choice, not the file's."""
    delayed_parameter_update: bool = False
    """The CPU updates one step late."""
    host_gradient_sums: bool = True
    """Offloaded 16-bit gradients of stage 3 are summed in host memory."""
    fetches_one_by_one: bool = False
    """Stage 3 gathers as before release 0.6, for runs published then."""
    scatters_after_backward: bool = False
    """Stage 1 is that of before release 0.4, for runs published then."""
    one_bit: OneBit | None = None
    """The simulated step of 1-bit Adam, 1-bit LAMB or 0/1 Adam."""
    deep_compile: DeepCompile | None = None
    """DeepCompile, where it is on."""
    tp_grain_size: int = 1
    """AutoTP's grain: the number of features of which its parts are multiples."""

    def label(self, world_size: int, ranks: int) -> str:
        """The stage and its extensions, as in "ZeRO-3 + hpZ 8 + qwZ + qgZ", or "MiCS 4 x 8" (groups x GPUs
        per group).
        """
        zero = self.zero
        if zero.is_mics:
            return f"MiCS {world_size // zero.mics_shard_size} x {zero.mics_shard_size}"
        words = [f"ZeRO-{zero.stage}"]
        if zero.stage == 3:
            hpz = min(zero.zero_hpz_partition_size, world_size)
            words += [f"hpZ {hpz}"] if hpz > 1 else []
            words += ["qwZ"] if zero.zero_quantized_weights else []
            words += ["qgZ"] if zero.zero_quantized_gradients else []
        words += ["DeepCompile"] if self.deep_compile is not None else []
        return " + ".join(words)

    @property
    def version(self) -> str:
        return str(self.release)

    @property
    def stage(self) -> int:
        return self.zero.stage

    def without_origins(self) -> Self:
        return replace(self, name="", notes=(), origins=())


class DeepSpeedFramework(Framework[DeepSpeedTable, DeepSpeedConfig]):
    table = DeepSpeedTable
    title = "DeepSpeed"
    order = 4
    other_names = {
        f"{name}{stage}": f'kind = "deepspeed" and stage = {stage}'
        for name in (
            "zero",
            "zerostage",
            "deepspeedzero",
            "deepspeedstage",
            "deepspeedzerostage",
            "stage",
            "ds",
        )
        for stage in range(4)
    } | dict.fromkeys(("zero", "ds", "zeropp"), 'kind = "deepspeed"')
    unread_keys = frozenset(
        {
            "training.lora.preparation", "training.autocast", "training.stored_dtype",
            "parallelism.async_tensor", "parallelism.gather_per_product", "parallelism.virtual_stages",
            "parallelism.expert_padding",
        }
    )  # fmt: skip


FRAMEWORK = DeepSpeedFramework()
