"""The degrees of parallelism in a DeepSpeed JSON, and the combinations with them that DeepSpeed refuses.

Read in DeepSpeed 0.19.8: `runtime/tensor_parallel/config.py` and `runtime/engine.py` (AutoTP),
`runtime/config.py` (`sequence_parallel_size` divides the world that batches are counted over),
`runtime/pipe/engine.py` (a pipeline asserts ZeRO below stage 2). The releases that have AutoTP with stage 3:
`runtime/engine.py` of 0.16.4 to 0.19.5. Ulysses with AutoTP: `_configure_tensor_parallel_states` there puts
AutoTP's groups in the place of Ulysses' (`runtime/sequence_parallel/parallel_state_sp.py`), and its hook
`check_dataloader_inputs_same_across_ranks` asserts at the first forward, in all of 0.16.4 to 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.frameworks.deepspeed.parallelism import AUTOTP, SPLIT_LAYERS
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.experts import autoep_degrees
from zsim.frameworks.deepspeed.settings.text import load_object
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle

_TENSOR = "tensor_parallel.autotp_size"
_ULYSSES = "sequence_parallel_size"
_STAGES = "pipeline.stages"
_STAGE_3_SINCE = (0, 19, 4)


def merge_degrees(
    table: ParallelismTable, source: str | Path | Mapping[str, Any], name: str | None
) -> tuple[ParallelismTable, ModelParallelStyle]:
    """`[parallelism]` with the degrees of the JSON, and the style that they belong to.

    The style is AutoTP's if the JSON asks for it, and otherwise that of Megatron-DeepSpeed's models.

    Raises InputError where both give a degree and they differ.
    """
    where, data = load_object(source, name)
    degrees = _read_degrees(data)
    experts = autoep_degrees(data)
    if experts:
        degrees["expert"] = ("expert_parallel.autoep_size", experts["expert"])
    _check_inner_size(where, data, degrees["tensor"][1] if "tensor" in degrees else 0)
    changes: dict[str, Any] = {}
    for key, (path, degree) in degrees.items():
        requested = getattr(table, key)
        if key in table.model_fields_set and requested != degree:
            raise InputError(
                f"parallelism.{key}: found {requested}, but {where} says {path} {degree}; make them equal or "
                "leave one out"
            )
        changes[key] = degree
    if "dispatcher" in experts and table.dispatcher is None:
        changes["dispatcher"] = experts["dispatcher"]
    if "tensor" in degrees and _lookup(data, "tensor_parallel.tp_overlap_comm") is True:
        changes["async_tensor"] = True
    # Degrees that are no numbers are the schema's to refuse; all others are at least 1.
    return table.model_copy(update=changes), AUTOTP if "tensor" in degrees else SPLIT_LAYERS


def _read_degrees(data: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """{key of `[parallelism]`: (key of the JSON, degree)} for degrees above 1."""
    candidates = {
        "tensor": (_TENSOR, _lookup(data, _TENSOR)),
        "context": (_ULYSSES, data.get(_ULYSSES)),
        "pipeline": (_STAGES, _lookup(data, _STAGES)),
    }
    return {
        key: (path, degree)
        for key, (path, degree) in candidates.items()
        if isinstance(degree, int) and not isinstance(degree, bool) and degree > 1
    }


def _check_inner_size(where: str, data: Mapping[str, Any], autotp_size: int) -> None:
    for name in ("tp", "tensor_parallel"):
        size = _lookup({"block": _lookup(data, f"tensor_parallel.{name}")}, "block.tp_size")
        if autotp_size and isinstance(size, int) and size not in (1, autotp_size):
            raise InputError(
                f"{where}: tensor_parallel.{name}.tp_size: found {size}, but {_TENSOR} is {autotp_size}, and "
                f"DeepSpeed refuses two sizes; expected {autotp_size}"
            )


def _lookup(data: Mapping[str, Any], path: str) -> Any:
    block, _, key = path.partition(".")
    inner = data.get(block)
    return inner.get(key) if isinstance(inner, Mapping) else None


def check_degrees(config: DeepSpeedConfig, parallelism: ParallelismConfig) -> None:
    """Raises InputError for what DeepSpeed refuses with tensor, pipeline and sequence parallelism."""
    where, pipeline = config.name, config.pipeline
    if parallelism.style == SPLIT_LAYERS and parallelism.async_tensor:
        raise InputError(
            "parallelism.async_tensor: Megatron-DeepSpeed's layers always reduce beneath the weights' "
            f"gradients and have nothing else to overlap; expected false, or {where}: {_TENSOR} with "
            "tp_overlap_comm"
        )
    has_split_messages = parallelism.pipeline > 1 and parallelism.tensor > 1
    if has_split_messages and pipeline.grad_partitioned and not pipeline.pipe_partitioned:
        raise InputError(
            f"{where}: pipeline.grad_partitioned: found true without pipe_partitioned: one stage sends a "
            "gradient in two messages, and the other waits for one; expected both true or both false"
        )
    if parallelism.pipeline > 1 and config.stage > 1:
        raise InputError(
            f"{where}: zero_optimization.stage: found {config.stage} with {parallelism.pipeline} pipeline "
            "stages: ZeRO-2 and ZeRO-3 shard gradients that a pipeline accumulates, and DeepSpeed's "
            "PipelineEngine refuses them; the nearest stage is 1"
        )
    if parallelism.style != AUTOTP:
        return
    if parallelism.pipeline > 1:
        raise InputError(
            f"{where}: {_TENSOR}: found {parallelism.tensor} with {parallelism.pipeline} pipeline stages: "
            "AutoTP counts data-parallel ranks without them, and PipelineEngine refuses that; expected "
            "pipeline 1, or autotp_size 0 and a model that splits its own layers"
        )
    if config.stage == 3 and config.release.number < _STAGE_3_SINCE:
        raise InputError(
            f"{where}: {_TENSOR}: found {parallelism.tensor} at stage 3, which DeepSpeed {config.release} "
            "refuses beside AutoTP; expected stage 2, or strategy.version 0.19.4 or newer"
        )
    if parallelism.context > 1:
        raise InputError(
            f"{where}: {_ULYSSES}: found {parallelism.context} with {_TENSOR} {parallelism.tensor}: both "
            "take ranks that follow each other for their group, and DeepSpeed asserts that AutoTP's ranks "
            "get the same tokens where Ulysses gives each a part; expected one of the two"
        )


def disable_overlap_in_pipeline(config: DeepSpeedConfig, parallelism: ParallelismConfig) -> DeepSpeedConfig:
    """The configuration as PipelineEngine runs it, with `overlap_comm` off.

    It is `_configure_zero_optimizer` of `runtime/engine.py` that turns it off.
    """
    if parallelism.pipeline == 1 or not config.zero.overlap_comm:
        return config
    note = (
        f"{config.name}: zero_optimization.overlap_comm: DeepSpeed turns it off under a pipeline, whose "
        "gradients it reduces after all backwards"
    )
    zero = config.zero.model_copy(update={"overlap_comm": False})
    return replace(config, zero=zero, notes=(*config.notes, note))
