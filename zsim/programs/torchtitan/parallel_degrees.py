"""torchtitan's tensor, pipeline and context parallelism -> `[parallelism]`.

Read in torchtitan v0.2.2 (`config/job_config.py`, `distributed/pipeline_parallel.py`, `parallel_dims.py`,
`tensor_parallel.py`), v0.1.0 (`distributed/pipeline.py`) and the sources after it (`config/configs.py`,
`trainer.py`). A step is `passes` whole pipelines, each with a local batch in micro-batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.programs.torchtitan.keys import (
    CONTEXT_DEGREE,
    CONTEXT_KEYS,
    EXPERT_DEGREE,
    EXPERT_KEYS,
    EXPERT_TENSOR_DEGREE,
    FORCED_BALANCE,
    PIPELINE_DEGREE,
    PIPELINE_KEYS,
    SCHEDULES,
    TENSOR_DEGREE,
    TENSOR_KEYS,
)
from zsim.specs.formats.file_values import FileValues

_SINGLE = ("1f1b", "gpipe")
_CSV_CLASSES = {"pipelineschedulesingle": 1, "pipelineschedulemulti": 2, "_pipelinescheduleruntime": 2}
_PREFIX = "parallelism.pipeline_parallel_"
SCHEDULE, SCHEDULE_CSV = f"{_PREFIX}schedule", f"{_PREFIX}schedule_csv"
MICRO_BATCH, MICRO_BATCHES = f"{_PREFIX}microbatch_size", f"{_PREFIX}microbatches"
NUM_MICRO_BATCHES = "parallelism.num_pp_microbatches"
LAYERS, FIRST_LESS, LAST_LESS = (
    f"{_PREFIX}layers_per_stage",
    f"{_PREFIX}first_stage_less_layers",
    f"{_PREFIX}last_stage_less_layers",
)
SPLIT_POINTS, MODULES = f"{_PREFIX}split_points", "parallelism.module_fqns_per_model_part"
_LAYER = re.compile(r"layers\.(\d{1,6})")
_LOCAL = "training.local_batch_size"


def read_degrees(settings: FileValues) -> None:
    """Write `[parallelism]`, and the micro-batches of a pipeline, into the file's settings.

    Raises InputError for what torchtitan refuses, NotSimulatedError for what zsim does not simulate.
    """
    for key in (TENSOR_DEGREE, PIPELINE_DEGREE, CONTEXT_DEGREE, EXPERT_DEGREE, EXPERT_TENSOR_DEGREE):
        if settings.get(key, 1) < 1:
            raise InputError(
                f"{settings.file.name}: {key}: found {settings.get(key, 1)}, expected at least 1"
            )
    idle: list[str] = []
    for key, keys, reader in (
        (TENSOR_DEGREE, TENSOR_KEYS, _read_tensor),
        (PIPELINE_DEGREE, PIPELINE_KEYS, _read_pipeline),
        (CONTEXT_DEGREE, CONTEXT_KEYS, _read_context),
        (EXPERT_DEGREE, EXPERT_KEYS, _read_experts),
    ):
        degree = settings.get(key, 1)
        if degree > 1:
            settings.file.settings[_SETTINGS[key]] = degree
            reader(settings)
        else:
            idle += [idle_key.key for idle_key in keys if idle_key.key in settings.values]
    if idle:
        settings.file.note(f"no effect without the parallelism that they belong to: {', '.join(idle)}")


_SETTINGS: Mapping[str, str] = {
    TENSOR_DEGREE: "parallelism.tensor",
    PIPELINE_DEGREE: "parallelism.pipeline",
    CONTEXT_DEGREE: "parallelism.context",
    EXPERT_DEGREE: "parallelism.expert",
}


def _read_tensor(settings: FileValues) -> None:
    keys = ("parallelism.disable_loss_parallel", "parallelism.enable_loss_parallel")
    if settings.get(keys[0], False) or not settings.get(keys[1], True):
        settings.put("parallelism.loss_parallel", False, *keys)
    settings.read("parallelism.enable_sequence_parallel")
    keys = ("parallelism.enable_async_tensor_parallel", "compile.enable_async_tensor_parallel")
    if not any(settings.get(key, False) for key in keys):
        return
    components = settings.get("compile.components", ["model", "loss"])
    if not (settings.get("compile.enable", False) and "model" in components):
        key = next(key for key in keys if settings.get(key, False))
        name = settings.file.name
        raise InputError(
            f"{name}: {key}: torchtitan refuses asynchronous tensor parallelism without torch.compile; "
            'expected compile.enable = true and "model" in compile.components'
        )
    settings.put("parallelism.async_tensor", True, *keys)


def _read_context(settings: FileValues) -> None:
    settings.read("parallelism.context_parallel_rotate_method")
    key = "parallelism.context_parallel_load_balancer"
    if settings.get(key, "headtail") != "headtail":
        raise NotSimulatedError(
            f"{settings.file.name}: {key}: zsim does not simulate '{settings.get(key, '')}' yet, only "
            "'headtail'"
        )


def _read_experts(settings: FileValues) -> None:
    """Read the ranks of an expert's products, and the library that dispatches tokens
    (`expert_parallel_comm_backend`).
    """
    settings.read(EXPERT_TENSOR_DEGREE, "parallelism.expert_parallel_comm_backend")
    if settings.get(FORCED_BALANCE, False):
        settings.put("parallelism.expert_imbalance", 1.0, FORCED_BALANCE)


def _read_pipeline(settings: FileValues) -> None:
    file, pipeline = settings.file, settings.get(PIPELINE_DEGREE, 1)
    csv = settings.get(SCHEDULE_CSV, "")
    if csv:
        file.settings["parallelism.schedule_csv"] = csv
        virtual = _CSV_CLASSES.get(str(settings.get(SCHEDULE, "1F1B")).lower())
        schedule = None if virtual is not None else _schedule(settings)
    else:
        virtual, schedule = None, _schedule(settings)
    if schedule is not None:
        settings.put("parallelism.schedule", schedule, SCHEDULE)
    stages = virtual or (1 if schedule in _SINGLE else 2)
    for key in (FIRST_LESS, LAST_LESS):
        if settings.get(key, 1) < 0:
            raise InputError(f"{file.name}: {key}: found {settings.get(key, 1)}, expected at least 0")
        settings.keys[key].read(file, settings.values)  # also 0
    if MODULES in settings.values:
        _read_modules(settings, pipeline)
    elif settings.get(SPLIT_POINTS, []):
        _read_split_points(settings, pipeline)
    elif LAYERS in settings.values:
        _read_layers(settings, pipeline, is_single=stages == 1)
    elif stages > 1:
        file.defaults["parallelism.virtual_stages"] = stages
    _read_micro_batches(settings)


def _schedule(settings: FileValues) -> str:
    requested = str(settings.get(SCHEDULE, "1F1B"))
    schedules = {name.lower(): schedule for name, schedule in SCHEDULES.items()}
    if requested.lower() not in schedules:
        raise InputError(
            f"{settings.file.name}: {SCHEDULE}: found '{requested}', expected one of {', '.join(SCHEDULES)}"
            f"{did_you_mean(requested, SCHEDULES)}"
        )
    return schedules[requested.lower()]


def _read_micro_batches(settings: FileValues) -> None:
    """Read the micro-batches of a pipeline.

    A local batch is cut into pieces of `pipeline_parallel_microbatch_size`. After 0.3 the file gives the
    number of micro-batches, and each is a local batch.
    """
    file, local_batch = settings.file, settings.get(_LOCAL, 8)
    if NUM_MICRO_BATCHES in settings.values:
        count, size, key = settings.get(NUM_MICRO_BATCHES, 1), local_batch, NUM_MICRO_BATCHES
        if count < 1:
            raise InputError(f"{file.name}: {key}: found {count}, expected at least 1")
    else:
        key = MICRO_BATCHES if MICRO_BATCHES in settings.values else MICRO_BATCH
        requested = settings.get(key, 1)
        if requested < 1 or local_batch % requested:
            divisors = [divisor for divisor in range(1, local_batch + 1) if local_batch % divisor == 0]
            nearest = min(divisors, key=lambda divisor: abs(divisor - requested))
            raise InputError(
                f"{file.name}: {key}: found {requested}, which does not divide {_LOCAL} {local_batch}, as "
                f"torchtitan asks; the nearest that does is {nearest}"
            )
        size, count = (
            (local_batch // requested, requested)
            if key == MICRO_BATCHES
            else (requested, local_batch // requested)
        )
    settings.put("training.micro_batch_size", size, _LOCAL, key)
    file.micro_batches_per_pass = count


def _read_layers(settings: FileValues, pipeline: int, *, is_single: bool) -> None:
    """Read `pipeline_parallel_layers_per_stage`: enough stages for all layers, those that the ends lack
    included.
    """
    layers_per_stage, name = settings.get(LAYERS, 1), settings.file.name
    missing_layers = settings.get(FIRST_LESS, 1) + settings.get(LAST_LESS, 1)
    if layers_per_stage < 1:
        raise InputError(f"{name}: {LAYERS}: found {layers_per_stage}, expected at least 1")

    def resolve_stages(num_layers: int) -> Mapping[str, Any]:
        total = num_layers + missing_layers
        stages = math.ceil(total / layers_per_stage)
        is_divisible = stages % pipeline == 0 and (stages == pipeline if is_single else stages > pipeline)
        if not is_divisible:
            nearest = _nearest_layers_per_stage(total, pipeline, layers_per_stage, is_single=is_single)
            raise InputError(
                f"{name}: {LAYERS}: found {layers_per_stage}: {num_layers} layers and {missing_layers} for "
                f"the ends make {stages} stages, but {pipeline} ranks with this schedule need "
                f"{pipeline if is_single else f'a multiple of {pipeline} above it'}; the nearest that fits "
                f"is {nearest}"
            )
        return {} if is_single else {"parallelism.virtual_stages": stages // pipeline}

    settings.file.resolve_stages = resolve_stages


def _nearest_layers_per_stage(total: int, pipeline: int, layers_per_stage: int, *, is_single: bool) -> int:
    def fits(number: int) -> bool:
        stages = math.ceil(total / number)
        return stages % pipeline == 0 and (stages == pipeline if is_single else stages > pipeline)

    fitting = [number for number in range(1, total + 1) if fits(number)]
    return min(fitting, key=lambda number: abs(number - layers_per_stage), default=1)


def _read_modules(settings: FileValues, pipeline: int) -> None:
    """Read `module_fqns_per_model_part`: the layers that each stage names."""
    stages = settings.get(MODULES, [])
    if not stages or not all(isinstance(stage, list) for stage in stages):
        raise InputError(
            f"{settings.file.name}: {MODULES}: found {stages!r}, expected a list of lists of names"
        )
    layers = [sum(bool(_LAYER.fullmatch(str(name))) for name in stage) for stage in stages]
    _put_stages(settings, MODULES, layers, pipeline)


def _read_split_points(settings: FileValues, pipeline: int) -> None:
    """Read `pipeline_parallel_split_points` (until 0.1): the first layer of every stage but the first."""
    points: list[int] = []
    for point in settings.get(SPLIT_POINTS, []):
        match = _LAYER.fullmatch(str(point).strip())
        if match is None:
            raise InputError(f"{settings.file.name}: {SPLIT_POINTS}: found {point!r}, expected 'layers.8'")
        points.append(int(match[1]))

    def resolve_stages(num_layers: int) -> Mapping[str, Any]:
        edges = [0, *points, num_layers]
        return {"parallelism.layers_per_stage": [b - a for a, b in pairwise(edges)]}

    _check_stages(settings, SPLIT_POINTS, len(points) + 1, pipeline)
    settings.file.resolve_stages = resolve_stages


def _put_stages(settings: FileValues, key: str, layers: list[int], pipeline: int) -> None:
    _check_stages(settings, key, len(layers), pipeline)
    settings.file.settings["parallelism.layers_per_stage"] = layers


def _check_stages(settings: FileValues, key: str, stages: int, pipeline: int) -> None:
    if stages % pipeline:
        nearest = max(1, round(stages / pipeline)) * pipeline
        raise InputError(
            f"{settings.file.name}: {key}: found {stages} stages on {pipeline} pipeline ranks, expected a "
            f"multiple; the nearest is {nearest}"
        )
    if stages > pipeline:
        settings.file.settings["parallelism.virtual_stages"] = stages // pipeline
