"""DeepSpeed's universal checkpoints: what `ds_to_universal` makes of a save, and who reads it.

Transcribed from DeepSpeed 0.19.8 checkpoint/ds_to_universal.py (`main`), runtime/engine.py and
runtime/zero/stage3.py (`_load_universal_checkpoint`). One machine converts. `num_extract_workers` processes
cut the partitions into a file per parameter, state and rank, and `num_merge_workers` merge these. In stages 1
and 2 a rank reads the full parameters that its partition has a part of, in stage 3 all of them. Without it a
checkpoint of ZeRO is read by as many ranks as wrote it, or refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from zsim.arrays import Ints
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.goodput.checkpoints.saved import (
    STATES,
    STEP_BYTES,
    ModelStates,
    SavedFile,
    SavedFiles,
    StateTensor,
    archive_bytes,
    trainable_tensors,
    untied_tensors,
)

_EXTRACT_WORKERS, _MERGE_WORKERS = 4, 2  # the converter's defaults
_GLOBAL_STATE = "zero/optimizer_state.pt"
_GLOBAL_STATE_BYTES = 2013  # without tensors: recorded (traces/checkpoints/files.json)


def add_universal_files(
    saved: SavedFiles, model_states: ModelStates, config: DeepSpeedConfig, *, has_steps: bool
) -> SavedFiles:
    """The save with the files of its conversion. With `has_steps` the optimizer counts steps in a tensor.

    Raises InputError without partitions to convert, NotSimulatedError for states that are in none.
    """
    if config.optimizer_wrapper not in ("zero12", "zero3", "bf16_optimizer"):
        raise InputError(
            "run.checkpoint.format: found 'universal' without ZeRO, whose checkpoint any number of ranks "
            "reads; expected 'deepspeed', or ZeRO stage 1 to 3"
        )
    if saved.copied is not None:
        raise NotSimulatedError(
            "run.checkpoint.format: found 'universal' with states on NVMe, which are in no partition's file, "
            "and DeepSpeed's converter reads those; expected 'deepspeed'"
        )
    files = (
        *_common_files(saved, config),
        *_parameter_files(model_states, has_steps and config.stage < 3, config),
    )
    return replace(
        saved,
        converted=files,
        conversion_workers=(_EXTRACT_WORKERS, _MERGE_WORKERS),
        read=_read_bytes(files, model_states, config),
    )


def _common_files(saved: SavedFiles, config: DeepSpeedConfig) -> Iterator[SavedFile]:
    """The files that are taken over, and the states that are no parameter's. In stage 3 these are all of rank
    0's.
    """
    for file in saved.files:
        if file.name.endswith("_model_states.pt") and not file.name.startswith("layer_"):
            yield file._replace(rank=0)
    if config.stage < 3:
        yield SavedFile(_GLOBAL_STATE, 0, overhead=_GLOBAL_STATE_BYTES)
    else:
        first = next(file for file in saved.files if file.name.endswith("_optim_states.pt"))
        yield first._replace(name=_GLOBAL_STATE)


def _parameter_files(
    model_states: ModelStates, has_steps: bool, config: DeepSpeedConfig
) -> Iterator[SavedFile]:
    """A file per parameter and state, in its type in the partitions. A tied weight's second name has the
    masters' numbers, in stages 1 and 2.
    """
    for stage in model_states.tensors:
        for tensor in stage:
            if tensor.tied_to is not None and config.stage == 3:
                continue
            numel = tensor.numel * model_states.model_shards_of(tensor)
            moments = STATES[model_states.optimizer] if _has_states(tensor) else ()
            for name in ("fp32", *moments):
                dtype = config.master_weights_dtype if name == "fp32" else config.optimizer_states_dtype
                size = DTYPE_BYTES[dtype] * numel
                yield SavedFile(f"zero/{tensor.name}/{name}.pt", 0, 0, size, archive_bytes(size) - size)
            if has_steps and _has_states(tensor):
                overhead = archive_bytes(STEP_BYTES) - STEP_BYTES
                yield SavedFile(f"zero/{tensor.name}/step.pt", 0, 0, STEP_BYTES, overhead)


def _has_states(tensor: StateTensor) -> bool:
    return tensor.is_trainable and tensor.tied_to is None


def _read_bytes(files: tuple[SavedFile, ...], model_states: ModelStates, config: DeepSpeedConfig) -> Ints:
    """Bytes that each rank reads to load."""
    bytes_per_rank = np.zeros(model_states.world_size, dtype=np.int64)
    element_bytes = DTYPE_BYTES[config.master_weights_dtype]
    element_bytes += DTYPE_BYTES[config.optimizer_states_dtype] * model_states.num_states
    if config.stage == 3:
        bytes_per_rank += sum(file.bytes for file in files if file.name.startswith("zero/"))
        return bytes_per_rank
    for stage, groups in zip(model_states.tensors, model_states.ranks, strict=True):
        numels = [tensor.numel for tensor in trainable_tensors(stage)]
        full_bytes = [
            element_bytes * tensor.numel * model_states.model_shards_of(tensor)
            for tensor in trainable_tensors(stage)
        ]
        ends = np.cumsum(numels)
        starts = ends - numels
        module = DTYPE_BYTES[config.param_dtype] * sum(tensor.numel for tensor in untied_tensors(stage))
        for ranks in groups:
            partition_numel = -(-int(ends[-1]) // len(ranks))
            for shard, rank in enumerate(ranks):
                overlaps = (starts < (shard + 1) * partition_numel) & (ends > shard * partition_numel)
                bytes_per_rank[rank] = module + int(np.array(full_bytes)[overlaps].sum())
    return bytes_per_rank
