"""What a DeepSpeed JSON means: every key resolved to the value DeepSpeed would use.

Sizes (`_size`, `_threshold`, `_parameters`, `_distance`) are *elements* (numel), as in DeepSpeed, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.specs.strategy.deepspeed.json_types import Names
from zsim.specs.strategy.deepspeed.release import Release
from zsim.specs.strategy.deepspeed.schema import ActivationCheckpointingBlock
from zsim.specs.strategy.deepspeed.zero_schema import (
    LeafModuleBlock,
    OffloadOptimizerBlock,
    OffloadParamBlock,
    ZeroBlock,
)
from zsim.specs.strategy.training import Precision

Dtype = Literal["bf16", "fp16", "fp32"]
OffloadDevice = Literal["cpu", "nvme"]
OptimizerWrapper = Literal["none", "fp16_optimizer", "bf16_optimizer", "zero12", "zero3"]
OptimizerImplementation = Literal["fused", "torch", "cpu"]


class ParameterOffload(OffloadParamBlock):
    """`offload_param` with a device: where stage 3 keeps the shards of the 16-bit parameters.

    A shard larger than `buffer_size` cannot go to NVMe.
    """

    device: OffloadDevice
    pin_memory: bool


class OptimizerOffload(OffloadOptimizerBlock):
    """`offload_optimizer` with a device: where fp32 weights and Adam's moments live; the CPU steps."""

    device: OffloadDevice
    pin_memory: bool


class LeafModules(LeafModuleBlock):
    """`leaf_module` with the release's own classes where the file names none."""

    classes: Names = ()


class ZeroConfig(ZeroBlock):
    """`zero_optimization` in force: every key as DeepSpeed uses it, after what it overrides itself.

    Narrower than the file where it may leave a value open; offload that the stage does not know is None.
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
    """`optimizer`: DeepSpeed's lower-case name; None where the file has no block and the script makes one."""

    name: str | None
    implementation: OptimizerImplementation


@dataclass(frozen=True, slots=True)
class AioConfig:
    """`aio`: how NVMe is read and written, as far as it changes the time."""

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
    infinities first, which costs a reduction and a wait. `gpus_per_node`: the `device_count()` that qgZ and
    MiCS build their groups from. `origins`: where each setting comes from, as in `Setting`. `zero_init`: the
    model is built under `deepspeed.zero.Init`; the script's choice, not the file's.
    `delayed_parameter_update`: the CPU updates one step late. `fetches_one_by_one`: stage 3 as it was before
    0.6, for published runs of then.
    """

    name: str
    release: Release
    gpus_per_node: int
    zero: ZeroConfig
    precision: Precision
    param_dtype: Dtype
    grad_accum_dtype: Dtype
    communication_dtype: Dtype
    master_weights_dtype: Dtype
    optimizer_states_dtype: Dtype
    check_grad_overflow: bool
    optimizer: OptimizerChoice
    optimizer_wrapper: OptimizerWrapper
    gradient_clipping: float
    batch: BatchSizes
    aio: AioConfig
    activation_checkpointing: ActivationCheckpointingBlock
    unsimulated: tuple[Unsimulated, ...]
    notes: tuple[str, ...]
    origins: tuple[tuple[str, str], ...]
    zero_init: bool = True
    delayed_parameter_update: bool = False
    fetches_one_by_one: bool = False

    @property
    def version(self) -> str:
        return str(self.release)

    @property
    def stage(self) -> int:
        return self.zero.stage
