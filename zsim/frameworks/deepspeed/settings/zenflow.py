"""`zero_optimization.zenflow`: what DeepSpeed refuses of it, and what of it is simulated.

Read in DeepSpeed 0.19.6 `runtime/zenflow/engine.py`, `engine_stage3.py` and `zenflow_stage_1_and_2.py`.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import BatchSizes, ZeroConfig
from zsim.frameworks.deepspeed.settings.release import Release

_SINCE = (0, 19, 4)  # the first release whose optimizer's process is native (#8058)


def check_zenflow(where: str, zero: ZeroConfig) -> None:
    """Raises InputError for a block that DeepSpeed refuses."""
    block = zero.zenflow
    if block is None or zero.stage == 0:
        return
    where = f"{where}: zero_optimization.zenflow"
    if zero.offload_optimizer is None or zero.offload_optimizer.device != "cpu":
        raise InputError(f"{where}: needs zero_optimization.offload_optimizer with device 'cpu'")
    if block.offload and not zero.overlap_comm:
        raise InputError(f"{where}.offload: found true without zero_optimization.overlap_comm; expected both")
    if block.select_strategy == "auto" and block.select_interval is not None:
        raise InputError(
            f"{where}.select_interval: found {block.select_interval} with select_strategy 'auto', which has "
            "its own; expected 'step' or 'epoch', or no interval"
        )
    if block.select_strategy != "auto" and block.select_interval is None:
        raise InputError(
            f"{where}.select_interval: missing; select_strategy '{block.select_strategy}' needs a number"
        )
    is_by_step = block.select_strategy == "step" and block.select_interval
    if is_by_step and block.update_interval and (block.select_interval or 0) < block.update_interval:
        raise InputError(
            f"{where}.select_interval: found {block.select_interval}, below update_interval "
            f"{block.update_interval}; expected at least as much"
        )


def find_unsimulated_zenflow(zero: ZeroConfig, release: Release) -> str:
    """The part of the block that is not simulated. Empty where all of it is."""
    if zero.zenflow is None or zero.stage == 0:
        return ""
    if zero.stage == 3 and (names := _additions(zero)):
        return f"ZenFlow at stage 3 with {names[0]}"
    if zero.stage == 1 and not zero.overlap_comm:
        return "ZenFlow at stage 1 without overlap_comm, which reduces after backward,"
    if release.number < _SINCE:
        return "ZenFlow before 0.19.4 (strategy.version)"
    if zero.zenflow.update_interval is None:
        return "ZenFlow's update_interval 'auto', which follows gradients (a number, such as 4, would do),"
    return ""


def _additions(zero: ZeroConfig) -> list[str]:
    """Features of stage 3 that are not simulated with ZenFlow."""
    assert zero.offload_optimizer is not None
    additions = {
        "MiCS": zero.is_mics,
        "hpZ": zero.zero_hpz_partition_size > 1,
        "qwZ": zero.zero_quantized_weights,
        "qgZ": zero.zero_quantized_gradients,
        "super_offload": zero.offload_optimizer.super_offload,
        "a ratio below 1": zero.offload_optimizer.ratio < 1,
        "offload_param": zero.offload_param is not None,
    }
    return [name for name, is_on in additions.items() if is_on]


def overwrite_batch(batch: BatchSizes, zero: ZeroConfig, replicas: int) -> BatchSizes:
    """The batch of an interval: DeepSpeed overwrites the accumulation steps with `update_interval`."""
    if zero.zenflow is None or zero.stage == 0 or not zero.zenflow.update_interval:
        return batch
    steps = zero.zenflow.update_interval
    train_batch_size = batch.micro_batch_size * steps * replicas
    return replace(batch, train_batch_size=train_batch_size, gradient_accumulation_steps=steps)


def zenflow_notes(where: str, zero: ZeroConfig) -> list[str]:
    block = zero.zenflow
    if block is None or zero.stage == 0:
        return []
    return [
        f"{where}: zero_optimization.zenflow: update_interval takes the place of "
        f"gradient_accumulation_steps: a step is an interval of {block.update_interval} iterations, each of "
        f"which updates {block.topk_ratio:.0%} of the columns; choosing them anew is left out"
    ]
