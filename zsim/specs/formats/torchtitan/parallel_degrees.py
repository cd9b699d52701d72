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
from zsim.specs.formats.torchtitan.keys import (
    CONTEXT_DEGREE,
    CONTEXT_KEYS,
    EXPERT_DEGREE,
    EXPERT_KEYS,
    EXPERT_TENSOR_DEGREE,
    PIPELINE_DEGREE,
    PIPELINE_KEYS,
    TENSOR_DEGREE,
    TENSOR_KEYS,
)
from zsim.specs.formats.torchtitan.settings import TitanSettings

# torch 2.13's `get_schedule_class`, which compares in lower case.
SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "interleaved-zero-bubble",
    "ZBVZeroBubble": "zbv-zero-bubble",
    "DualPipeV": "dualpipe-v",
}
_SINGLE = ("1f1b", "gpipe")
_CSV_CLASSES = {"pipelineschedulesingle": 1, "pipelineschedulemulti": 2, "_pipelinescheduleruntime": 2}
COMM_BACKENDS = {"standard": "all-to-all", "deepep": "deepep"}
ROTATE_METHODS = {"allgather": "all-gather", "alltoall": "p2p"}
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


def read_degrees(read: TitanSettings) -> None:
    """Write `[parallelism]`, and the micro-batches of a pipeline, into the file's settings.

    Raises InputError for what torchtitan refuses, NotSimulatedError for what zsim does not simulate.
    """
    for key in (TENSOR_DEGREE, PIPELINE_DEGREE, CONTEXT_DEGREE, EXPERT_DEGREE, EXPERT_TENSOR_DEGREE):
        if read.get(key, 1) < 1:
            raise InputError(f"{read.file.name}: {key}: found {read.get(key, 1)}, expected at least 1")
    idle: list[str] = []
    for key, keys, reader in (
        (TENSOR_DEGREE, TENSOR_KEYS, _read_tensor),
        (PIPELINE_DEGREE, PIPELINE_KEYS, _read_pipeline),
        (CONTEXT_DEGREE, CONTEXT_KEYS, _read_context),
        (EXPERT_DEGREE, EXPERT_KEYS, _read_experts),
    ):
        degree = read.get(key, 1)
        if degree > 1:
            read.file.says[_OWN[key]] = degree
            reader(read)
        else:
            idle += [one for one in keys if one in read.values]
    if idle:
        read.file.note(f"no effect without the parallelism that they belong to: {', '.join(idle)}")


_OWN: Mapping[str, str] = {
    TENSOR_DEGREE: "parallelism.tensor",
    PIPELINE_DEGREE: "parallelism.pipeline",
    CONTEXT_DEGREE: "parallelism.context",
    EXPERT_DEGREE: "parallelism.expert",
}


def _read_tensor(read: TitanSettings) -> None:
    keys = ("parallelism.disable_loss_parallel", "parallelism.enable_loss_parallel")
    if read.get(keys[0], False) or not read.get(keys[1], True):
        read.put("parallelism.loss_parallel", False, *keys)
    key = "parallelism.enable_sequence_parallel"
    read.put("parallelism.sequence_parallel", read.get(key, True), key)
    keys = ("parallelism.enable_async_tensor_parallel", "compile.enable_async_tensor_parallel")
    if not any(read.get(key, False) for key in keys):
        return
    components = read.get("compile.components", ["model", "loss"])
    if not (read.get("compile.enable", False) and "model" in components):
        key = next(key for key in keys if read.get(key, False))
        name = read.file.name
        raise InputError(
            f"{name}: {key}: torchtitan refuses asynchronous tensor parallelism without torch.compile; "
            'expected compile.enable = true and "model" in compile.components'
        )
    read.put("parallelism.async_tensor", True, *keys)


def _read_context(read: TitanSettings) -> None:
    key = "parallelism.context_parallel_rotate_method"
    read.put("parallelism.context_method", read.choose(key, "allgather", ROTATE_METHODS), key)
    key = "parallelism.context_parallel_load_balancer"
    if read.get(key, "headtail") != "headtail":
        raise NotSimulatedError(
            f"{read.file.name}: {key}: zsim does not simulate '{read.get(key, '')}' yet, only 'headtail'"
        )


def _read_experts(read: TitanSettings) -> None:
    """Read the ranks of an expert's products, and the library that dispatches tokens
    (`expert_parallel_comm_backend`).
    """
    if EXPERT_TENSOR_DEGREE in read.values:
        read.put("parallelism.expert_tensor", read.get(EXPERT_TENSOR_DEGREE, 1), EXPERT_TENSOR_DEGREE)
    key = "parallelism.expert_parallel_comm_backend"
    if key in read.values:
        read.put("parallelism.dispatcher", read.choose(key, "standard", COMM_BACKENDS), key)


def _read_pipeline(read: TitanSettings) -> None:
    file, pipeline = read.file, read.get(PIPELINE_DEGREE, 1)
    csv = read.get(SCHEDULE_CSV, "")
    if csv:
        file.says["parallelism.schedule_csv"] = csv
        virtual = _CSV_CLASSES.get(str(read.get(SCHEDULE, "1F1B")).lower())
        schedule = None if virtual is not None else _schedule(read)
    else:
        virtual, schedule = None, _schedule(read)
    if schedule is not None:
        read.put("parallelism.schedule", schedule, SCHEDULE)
    stages = virtual or (1 if schedule in _SINGLE else 2)
    for key, own in (
        (FIRST_LESS, "first_stage_less_layers"),
        (LAST_LESS, "last_stage_less_layers"),
    ):
        if read.get(key, 1) < 0:
            raise InputError(f"{file.name}: {key}: found {read.get(key, 1)}, expected at least 0")
        read.put(f"parallelism.{own}", read.get(key, 1), key)
    if MODULES in read.values:
        _read_modules(read, pipeline)
    elif read.get(SPLIT_POINTS, []):
        _read_split_points(read, pipeline)
    elif LAYERS in read.values:
        _read_layers(read, pipeline, is_single=stages == 1)
    elif stages > 1:
        file.assumes["parallelism.virtual_stages"] = stages
    _read_micro_batches(read)


def _schedule(read: TitanSettings) -> str:
    given = str(read.get(SCHEDULE, "1F1B"))
    known = {name.lower(): own for name, own in SCHEDULES.items()}
    if given.lower() not in known:
        raise InputError(
            f"{read.file.name}: {SCHEDULE}: found '{given}', expected one of {', '.join(SCHEDULES)}"
            f"{did_you_mean(given, SCHEDULES)}"
        )
    return known[given.lower()]


def _read_micro_batches(read: TitanSettings) -> None:
    """Read the micro-batches of a pipeline.

    A local batch is cut into pieces of `pipeline_parallel_microbatch_size`. After 0.3 the file gives the
    number of micro-batches, and each is a local batch.
    """
    file, local = read.file, read.get(_LOCAL, 8)
    if NUM_MICRO_BATCHES in read.values:
        count, size, key = read.get(NUM_MICRO_BATCHES, 1), local, NUM_MICRO_BATCHES
        if count < 1:
            raise InputError(f"{file.name}: {key}: found {count}, expected at least 1")
    else:
        key = MICRO_BATCHES if MICRO_BATCHES in read.values else MICRO_BATCH
        number = read.get(key, 1)
        if number < 1 or local % number:
            divisors = [one for one in range(1, local + 1) if local % one == 0]
            nearest = min(divisors, key=lambda one: abs(one - number))
            raise InputError(
                f"{file.name}: {key}: found {number}, which does not divide {_LOCAL} {local}, as torchtitan "
                f"asks; the nearest that does is {nearest}"
            )
        size, count = (local // number, number) if key == MICRO_BATCHES else (number, local // number)
    read.put("training.micro_batch_size", size, _LOCAL, key)
    file.micro_batches_per_pass = count


def _read_layers(read: TitanSettings, pipeline: int, *, is_single: bool) -> None:
    """Read `pipeline_parallel_layers_per_stage`: enough stages for all layers, those that the ends lack
    included.
    """
    each, name = read.get(LAYERS, 1), read.file.name
    missing = read.get(FIRST_LESS, 1) + read.get(LAST_LESS, 1)
    if each < 1:
        raise InputError(f"{name}: {LAYERS}: found {each}, expected at least 1")

    def by_layers(num_layers: int) -> Mapping[str, Any]:
        total = num_layers + missing
        stages = math.ceil(total / each)
        is_whole = stages % pipeline == 0 and (stages == pipeline if is_single else stages > pipeline)
        if not is_whole:
            nearest = _nearest_each(total, pipeline, each, is_single=is_single)
            raise InputError(
                f"{name}: {LAYERS}: found {each}: {num_layers} layers and {missing} for the ends make "
                f"{stages} stages, but {pipeline} ranks with this schedule need "
                f"{pipeline if is_single else f'a multiple of {pipeline} above it'}; the nearest that fits "
                f"is {nearest}"
            )
        return {} if is_single else {"parallelism.virtual_stages": stages // pipeline}

    read.file.by_layers = by_layers


def _nearest_each(total: int, pipeline: int, each: int, *, is_single: bool) -> int:
    def fits(number: int) -> bool:
        stages = math.ceil(total / number)
        return stages % pipeline == 0 and (stages == pipeline if is_single else stages > pipeline)

    fitting = [number for number in range(1, total + 1) if fits(number)]
    return min(fitting, key=lambda number: abs(number - each), default=1)


def _read_modules(read: TitanSettings, pipeline: int) -> None:
    """Read `module_fqns_per_model_part`: the layers that each stage names."""
    parts = read.get(MODULES, [])
    if not parts or not all(isinstance(part, list) for part in parts):
        raise InputError(f"{read.file.name}: {MODULES}: found {parts!r}, expected a list of lists of names")
    layers = [sum(bool(_LAYER.fullmatch(str(name))) for name in part) for part in parts]
    _put_stages(read, MODULES, layers, pipeline)


def _read_split_points(read: TitanSettings, pipeline: int) -> None:
    """Read `pipeline_parallel_split_points` (until 0.1): the first layer of every stage but the first."""
    points: list[int] = []
    for point in read.get(SPLIT_POINTS, []):
        found = _LAYER.fullmatch(str(point).strip())
        if found is None:
            raise InputError(f"{read.file.name}: {SPLIT_POINTS}: found {point!r}, expected 'layers.8'")
        points.append(int(found[1]))

    def by_layers(num_layers: int) -> Mapping[str, Any]:
        edges = [0, *points, num_layers]
        return {"parallelism.layers_per_stage": [b - a for a, b in pairwise(edges)]}

    _check_stages(read, SPLIT_POINTS, len(points) + 1, pipeline)
    read.file.by_layers = by_layers


def _put_stages(read: TitanSettings, key: str, layers: list[int], pipeline: int) -> None:
    _check_stages(read, key, len(layers), pipeline)
    read.file.says["parallelism.layers_per_stage"] = layers


def _check_stages(read: TitanSettings, key: str, stages: int, pipeline: int) -> None:
    if stages % pipeline:
        nearest = max(1, round(stages / pipeline)) * pipeline
        raise InputError(
            f"{read.file.name}: {key}: found {stages} stages on {pipeline} pipeline ranks, expected a "
            f"multiple; the nearest is {nearest}"
        )
    if stages > pipeline:
        read.file.says["parallelism.virtual_stages"] = stages // pipeline
