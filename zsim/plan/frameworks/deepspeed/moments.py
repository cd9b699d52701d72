"""DeepSpeed's moments outside the steady step.

Read at DeepSpeed 0.19.8: runtime/zero/stage3.py and stage_1_and_2.py (`initialize_optimizer_states`),
runtime/engine.py (`_zero3_consolidated_16bit_state_dict`, `load_checkpoint`), and torch's serialization.py,
whose `save` copies one storage at a time to the host.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.dtypes import DTYPE_BYTES
from zsim.plan.moments import (
    BUILDING,
    EVERY_RANK,
    GATHERED_SAVE,
    LOADING,
    PRETRAINED,
    RESUMING,
    SAVING,
    BetweenSteps,
    JobMoment,
    evaluation,
    loading,
)
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig

_FP32 = DTYPE_BYTES["fp32"]
_FILE_BYTES = 5_000_000_000  # of a shard of a published checkpoint: save_pretrained's max_shard_size in 4.x


def deepspeed_moments(held: BetweenSteps) -> Iterator[JobMoment]:
    """Loading, evaluation, building the optimizer, saving, gathering 16-bit weights and resuming."""
    config = held.job.strategy
    assert isinstance(config, DeepSpeedConfig)
    yield _loading(held, config)
    yield from evaluation(held)
    if not config.optimizer_wrapper.startswith("zero"):
        return
    partitions = partition_numels(held, config)
    yield from _building(held, config, max(partitions))
    yield from _files(held, config, partitions)
    if config.stage == 3 and config.zero.gather_16bit_weights_on_model_save:
        yield _gathered_save(held, config)


def partition_numels(held: BetweenSteps, config: DeepSpeedConfig) -> list[int]:
    """Elements of a rank's flat fp32 tensors: one, or in stage 3 one per sub-group, which is full once it has
    `sub_group_size` of a rank's elements or more."""
    trained = [one.numel for _, one in held.job.model.named_parameters() if one.trainable]
    ranks = config.zero.mics_shard_size if config.zero.is_mics else held.job.data_parallel_size
    if config.optimizer_wrapper != "zero3":
        return [-(-sum(trained) // ranks)]
    found = [0]
    for numel in trained:
        if found[-1] >= config.zero.sub_group_size:
            found.append(0)
        found[-1] += -(-numel // ranks)
    return found


def _loading(held: BetweenSteps, config: DeepSpeedConfig) -> JobMoment:
    if config.stage < 3 or not config.zero_init:
        return loading(held, EVERY_RANK, PRETRAINED, held.local_ranks)
    whole = held.job.model.numel * DTYPE_BYTES["bf16"]
    return JobMoment(
        LOADING, None, held.local_ranks * min(_FILE_BYTES, whole),
        "every rank reads one file of a pretrained model at a time (safetensors, from_pretrained under "
        "deepspeed.zero.Init)",
        PRETRAINED, False,
    )  # fmt: skip


def _building(held: BetweenSteps, config: DeepSpeedConfig, largest: int) -> Iterator[JobMoment]:
    """States that are made before the first step by an update with gradients of zero. Stage 3 makes those of
    one sub-group at a time.
    """
    is_made_before = config.stage == 3 or not config.release.makes_states_in_first_step
    if not is_made_before or config.zero.offload_optimizer is not None:
        return
    states = held.gpu_bytes_of("parameters", "optimizer_states")
    yield JobMoment(
        BUILDING, held.context_bytes + states + _FP32 * largest, None,
        "makes all states before the first step, by an update with gradients of zero of "
        f"{'a sub-group' if config.stage == 3 else 'the partition'}; what torch's allocator still caches "
        "from building the model is not known (17.6 GiB in a published case, hiyouga/LlamaFactory#5590)",
        "DeepSpeed 0.19.8 `initialize_optimizer_states`", True,
    )  # fmt: skip


def _files(held: BetweenSteps, config: DeepSpeedConfig, partitions: list[int]) -> Iterator[JobMoment]:
    """Saving the partitions, and reading them back completely. In stages 1 and 2 every rank also reads the
    model's file.
    """
    offload = config.zero.offload_optimizer
    if offload is None:
        yield JobMoment(
            SAVING, None, held.host_bytes + held.local_ranks * _FP32 * max(partitions),
            "torch.save copies one flat tensor of each rank's states at a time to the host",
            "torch 2.13 serialization.py `_save`", True,
        )  # fmt: skip
    elif offload.device != "cpu":
        return  # swap files are copied as they are
    if held.num_states is None:
        return
    each = _FP32 + held.num_states * DTYPE_BYTES[config.optimizer_states_dtype]
    states = sum(partitions) * each
    model = 0 if config.stage == 3 else held.job.model.numel * DTYPE_BYTES[config.param_dtype]
    what = "its partition of masters and moments"
    yield JobMoment(
        RESUMING, None, held.host_bytes + held.local_ranks * (states + model),
        f"every rank reads {what}{' and all 16-bit weights' if model else ''} into host memory "
        "(torch.load to the CPU) before they are copied",
        "DeepSpeed 0.19.8 runtime/engine.py `load_checkpoint`", False,
    )  # fmt: skip


def _gathered_save(held: BetweenSteps, config: DeepSpeedConfig) -> JobMoment:
    """`save_16bit_model`: module by module, all ranks gather its parameters and rank 0 copies them."""
    modules: dict[str, int] = {}
    for name, parameter in held.job.model.named_parameters():
        owner = name.rpartition(".")[0]
        modules[owner] = modules.get(owner, 0) + parameter.numel
    each = DTYPE_BYTES[config.param_dtype]
    return JobMoment(
        GATHERED_SAVE,
        held.gpu_bytes + each * max(modules.values()),
        held.host_bytes + each * held.job.model.numel,
        "stage3_gather_16bit_weights_on_model_save: all weights in 16 bits in the host memory of rank 0, "
        "gathered module by module",
        "DeepSpeed 0.19.8 runtime/engine.py `_zero3_consolidated_16bit_state_dict`", True,
    )  # fmt: skip
