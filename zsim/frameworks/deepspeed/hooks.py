"""The hooks of DeepSpeed's stages in a plan.

Moments outside the steady step are read at DeepSpeed 0.19.8: runtime/zero/stage3.py and stage_1_and_2.py
(`initialize_optimizer_states`), runtime/engine.py (`_zero3_consolidated_16bit_state_dict`,
`load_checkpoint`), and torch's serialization.py, whose `save` copies one storage at a time to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.pipeline import DeepSpeedRuntime
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.torch.moments import EVERY_RANK, PRETRAINED, evaluation
from zsim.plan.framework_hooks import FrameworkHooks, FrozenStorage
from zsim.plan.hooks import Hooks
from zsim.plan.moments import (
    BUILDING,
    GATHERED_SAVE,
    LOADING,
    RESUMING,
    SAVING,
    BetweenSteps,
    JobMoment,
    loading,
)
from zsim.plan.stage import Stage
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import TrainingConfig


class DeepSpeedHooks(FrameworkHooks[DeepSpeedConfig]):
    """The schedule of the optimizer's class. A run imports only that one."""

    def make(self, stage: Stage, config: DeepSpeedConfig) -> Hooks:
        if config.zero.is_mics:
            from zsim.frameworks.deepspeed.stage3.mics import MicsSchedule

            return MicsSchedule(stage, config)
        if config.deep_compile is not None and config.optimizer_wrapper == "zero3":
            from zsim.frameworks.deepspeed.stage3.deep_compile import make_deep_compile

            return make_deep_compile(stage, config)
        if config.optimizer_wrapper == "zero3" and config.zero.zenflow is not None:
            from zsim.frameworks.deepspeed.stage3.zenflow import ZenFlow3Schedule

            return ZenFlow3Schedule(stage, config)
        if config.optimizer_wrapper == "zero3":
            from zsim.frameworks.deepspeed.stage3.schedule import Zero3Schedule

            return Zero3Schedule(stage, config)
        if config.optimizer_wrapper == "zero12" and config.zero.zenflow is not None:
            from zsim.frameworks.deepspeed.stage12.zenflow import ZenFlowSchedule

            return ZenFlowSchedule(stage, config)
        if config.optimizer_wrapper == "zero12" and config.deep_compile is not None:
            from zsim.frameworks.deepspeed.stage12.deep_compile import DeepCompileZero12Schedule

            return DeepCompileZero12Schedule(stage, config)
        if config.optimizer_wrapper == "zero12" and config.scatters_after_backward:
            from zsim.frameworks.deepspeed.stage12.scatter_after_backward import ScatterAfterBackwardSchedule

            return ScatterAfterBackwardSchedule(stage, config)
        if config.optimizer_wrapper == "zero12":
            from zsim.frameworks.deepspeed.stage12.schedule import Zero12Schedule

            return Zero12Schedule(stage, config)
        if config.one_bit is not None:
            from zsim.frameworks.deepspeed.one_bit import OneBitSchedule

            return OneBitSchedule(stage, config)
        from zsim.frameworks.deepspeed.stage0 import Zero0Schedule

        return Zero0Schedule(stage, config)

    def pipeline(self, config: DeepSpeedConfig, parallelism: ParallelismConfig) -> DeepSpeedRuntime:
        return DeepSpeedRuntime(parallelism, config.pipeline)

    def gathers_in_forward(self, config: DeepSpeedConfig) -> bool:
        return config.stage == 3

    def frozen_storage(self, config: DeepSpeedConfig, training: TrainingConfig, ranks: int) -> FrozenStorage:
        zero = config.zero
        shards = (zero.mics_shard_size if zero.is_mics else ranks) if config.stage == 3 else 1
        return FrozenStorage(config.param_dtype, shards, "gpu" if zero.offload_param is None else "host")

    def is_offloaded(self, config: DeepSpeedConfig) -> bool:
        zero = config.zero
        is_kept = zero.offload_param is None and zero.offload_optimizer is None
        return not is_kept or config.activation_checkpointing.cpu_checkpointing

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return deepspeed_moments(state)


HOOKS = DeepSpeedHooks()


_FILE_BYTES = 5_000_000_000  # of a shard of a published checkpoint: save_pretrained's max_shard_size in 4.x


def deepspeed_moments(state: BetweenSteps) -> Iterator[JobMoment]:
    """Loading, evaluation, building the optimizer, saving, gathering 16-bit weights and resuming."""
    config = state.job.strategy
    assert isinstance(config, DeepSpeedConfig)
    yield _loading_moment(state, config)
    yield from evaluation(state)
    if not config.optimizer_wrapper.startswith("zero"):
        return
    partitions = partition_numels(state, config)
    yield from _building_moments(state, config, max(partitions))
    yield from _file_moments(state, config, partitions)
    if config.stage == 3 and config.zero.gather_16bit_weights_on_model_save:
        yield _gathered_save_moment(state, config)


def partition_numels(state: BetweenSteps, config: DeepSpeedConfig) -> list[int]:
    """Elements of a rank's flat fp32 tensors: one, or in stage 3 one per sub-group, which is full once it has
    `sub_group_size` of a rank's elements or more."""
    trained_numels = [
        parameter.numel for _, parameter in state.job.model.named_parameters() if parameter.trainable
    ]
    ranks = config.zero.mics_shard_size if config.zero.is_mics else state.job.data_parallel_size
    if config.optimizer_wrapper != "zero3":
        return [-(-sum(trained_numels) // ranks)]
    numels = [0]
    for numel in trained_numels:
        if numels[-1] >= config.zero.sub_group_size:
            numels.append(0)
        numels[-1] += -(-numel // ranks)
    return numels


def _loading_moment(state: BetweenSteps, config: DeepSpeedConfig) -> JobMoment:
    if config.stage < 3 or not config.zero_init:
        return loading(state, EVERY_RANK, PRETRAINED, state.local_ranks)
    model_bytes = state.job.model.numel * DTYPE_BYTES["bf16"]
    return JobMoment(
        LOADING, None, state.local_ranks * min(_FILE_BYTES, model_bytes),
        "every rank reads one file of a pretrained model at a time (safetensors, from_pretrained under "
        "deepspeed.zero.Init)",
        PRETRAINED, False,
    )  # fmt: skip


def _building_moments(state: BetweenSteps, config: DeepSpeedConfig, largest: int) -> Iterator[JobMoment]:
    """States that are made before the first step by an update with gradients of zero. Stage 3 makes those of
    one sub-group at a time.
    """
    makes_states_early = config.stage == 3 or not config.release.makes_states_in_first_step
    if not makes_states_early or config.zero.offload_optimizer is not None:
        return
    states = state.gpu_bytes_of("parameters", "optimizer_states")
    master_bytes = DTYPE_BYTES[config.master_weights_dtype]
    yield JobMoment(
        BUILDING, state.context_bytes + states + master_bytes * largest, None,
        "makes all states before the first step, by an update with gradients of zero of "
        f"{'a sub-group' if config.stage == 3 else 'the partition'}; what torch's allocator still caches "
        "from building the model is not known (17.6 GiB in a published case, hiyouga/LlamaFactory#5590)",
        "DeepSpeed 0.19.8 `initialize_optimizer_states`", True,
    )  # fmt: skip


def _file_moments(state: BetweenSteps, config: DeepSpeedConfig, partitions: list[int]) -> Iterator[JobMoment]:
    """Saving the partitions, and reading them back completely. In stages 1 and 2 every rank also reads the
    model's file, in which the Trainer leaves out what is frozen beside adapters
    (`exclude_frozen_parameters`).
    """
    offload = config.zero.offload_optimizer
    master_bytes = DTYPE_BYTES[config.master_weights_dtype]
    if offload is None:
        yield JobMoment(
            SAVING, None, state.host_bytes + state.local_ranks * master_bytes * max(partitions),
            "torch.save copies one flat tensor of each rank's states at a time to the host",
            "torch 2.13 serialization.py `_save`", True,
        )  # fmt: skip
    elif offload.device != "cpu":
        return  # swap files are copied as they are
    if state.num_states is None:
        return
    element_bytes = master_bytes + state.num_states * DTYPE_BYTES[config.optimizer_states_dtype]
    states = sum(partitions) * element_bytes
    model = 0
    if config.stage < 3:
        spec, has_adapters = state.job.model, state.job.experiment.training.lora is not None
        numel = spec.trainable_numel if has_adapters else spec.numel
        model = numel * DTYPE_BYTES[config.param_dtype]
    yield JobMoment(
        RESUMING, None, state.host_bytes + state.local_ranks * (states + model),
        f"every rank reads its partition of masters and moments{' and all 16-bit weights' if model else ''} "
        "into host memory (torch.load to the CPU) before they are copied",
        "DeepSpeed 0.19.8 runtime/engine.py `load_checkpoint`", False,
    )  # fmt: skip


def _gathered_save_moment(state: BetweenSteps, config: DeepSpeedConfig) -> JobMoment:
    """`save_16bit_model`: module by module, all ranks gather its parameters and rank 0 copies them."""
    modules: dict[str, int] = {}
    for name, parameter in state.job.model.named_parameters():
        owner = name.rpartition(".")[0]
        modules[owner] = modules.get(owner, 0) + parameter.numel
    element_bytes = DTYPE_BYTES[config.param_dtype]
    return JobMoment(
        GATHERED_SAVE,
        state.gpu_bytes + element_bytes * max(modules.values()),
        state.host_bytes + element_bytes * state.job.model.numel,
        "stage3_gather_16bit_weights_on_model_save: all weights in 16 bits in the host memory of rank 0, "
        "gathered module by module",
        "DeepSpeed 0.19.8 runtime/engine.py `_zero3_consolidated_16bit_state_dict`", True,
    )  # fmt: skip
