"""DeepSpeed's JSON -> DeepSpeedConfig: every key with its exact meaning, checked as DeepSpeed would check it.

Facts from the released sources of DeepSpeed 0.8.2 to 0.19.8 (config.py, zero/config.py, engine.py,
precision_config.py, zero/stage_1_and_2.py, zero/stage3.py), "auto" from transformers 5.23
(integrations/deepspeed.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings import checks, resolve, zenflow, zeropp
from zsim.frameworks.deepspeed.settings.config import (
    BatchSizes,
    DeepSpeedConfig,
    Dtype,
    TrainingValues,
)
from zsim.frameworks.deepspeed.settings.deep_compile import (
    check_offloading,
    deep_compile_notes,
    deep_compile_of,
)
from zsim.frameworks.deepspeed.settings.effects import (
    ineffective_key_notes,
    sequence_notes,
    super_offload_notes,
)
from zsim.frameworks.deepspeed.settings.one_bit import resolve_one_bit
from zsim.frameworks.deepspeed.settings.reader import Reading, read_deepspeed_file
from zsim.frameworks.deepspeed.settings.release import NEWEST, Release, parse_release
from zsim.frameworks.deepspeed.settings.schema import (
    ActivationCheckpointingBlock,
    Bf16Block,
    DataTypesBlock,
    PipelineBlock,
)
from zsim.frameworks.deepspeed.settings.unsimulated import (
    find_unsimulated,
    unmodelled_notes,
)
from zsim.frameworks.deepspeed.settings.zero_schema import ZERO_KEYS, json_key

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"

# Default of Hugging Face's TrainingArguments, for an "auto" that the experiment leaves open.
_HF_MAX_GRAD_NORM = 1.0

Value = TypeVar("Value", int, float)


def load_deepspeed_config(
    source: str | Path | Mapping[str, Any],
    *,
    world_size: int,
    hidden_size: int,
    version: str = NEWEST,
    training: TrainingValues | None = None,
    lenient: bool = False,
    name: str | None = None,
    gpus_per_node: int | None = None,
    replicas: int | None = None,
    optimizer_step: int | None = None,
) -> DeepSpeedConfig:
    """Read, check and resolve a DeepSpeed JSON (a path or the object itself).

    `world_size` counts the GPUs that ZeRO shards over. `replicas` counts those with batches of their own
    (default: all, and fewer with sequence parallelism). `gpus_per_node` counts those of one node (default:
    all of them). `hidden_size` fills Hugging Face's "auto" sizes. `training` holds the experiment's values.
    `name` begins every message (default: the path). `optimizer_step` is the simulated step where an
    optimizer's steps differ. `lenient` turns unknown keys, and keys of other releases,
    from errors into notes. Settings that zsim does not simulate are read, and `refuse_unsimulated` raises for
    them.

    Raises InputError for whatever DeepSpeed `version` would refuse, and where file and experiment disagree.
    """
    if world_size < 1 or hidden_size < 1:
        raise InputError(f"world size {world_size}, hidden size {hidden_size}: expected at least 1")
    training = training or TrainingValues()
    release = parse_release(version, "[strategy] version")
    reading = read_deepspeed_file(
        source, name=name, release=release, hidden_size=hidden_size, lenient=lenient
    )
    return _Resolver(
        reading, release, training, world_size, gpus_per_node or world_size, replicas or world_size,
        optimizer_step,
    ).config()  # fmt: skip


class _Resolver:
    """Resolves one reading. It is a class only to carry the inputs and the origins collected on the way."""

    def __init__(
        self,
        reading: Reading,
        release: Release,
        training: TrainingValues,
        world_size: int,
        gpus_per_node: int,
        replicas: int,
        optimizer_step: int | None,
    ) -> None:
        self.reading = reading
        self.release = release
        self.training = training
        self.world_size = world_size
        self.gpus_per_node = gpus_per_node
        self.replicas = replicas
        self.optimizer_step = optimizer_step
        self.origins: dict[str, str] = {}

    def config(self) -> DeepSpeedConfig:
        reading, release = self.reading, self.release
        file, where = reading.file, reading.where
        bf16 = file.bf16 or Bf16Block.model_construct()
        zero = resolve.resolve_zero(reading.zero, release)
        checks.check_zero(reading, zero, release)
        zenflow.check_zenflow(where, zero)
        check_offloading(where, file.compile, zero)
        zeropp.check_zero_plus_plus(reading, zero, self.world_size, self.gpus_per_node)
        precision, origin = resolve.resolve_precision(reading, self.training)
        self.origins["precision"] = origin if origin != "default" else f"default {release}"
        param: Dtype = "bf16" if precision == "fp8" else precision
        checks.check_precision_blocks(reading, zero, param, release)
        accumulate = resolve.resolve_grad_accum_dtype(
            file.data_types or DataTypesBlock.model_construct(), zero.stage, param, release
        )
        offload = reading.zero.offload_optimizer
        checks.check_first_releases(reading, zero, param, accumulate, release)
        wrapper = resolve.resolve_wrapper(
            zero.stage,
            param,
            accumulate,
            release,
            is_cpu_offloaded=offload is not None and offload.device == "cpu",
            where=where,
        )
        checks.check_optimizer(reading, zero, release)
        optimizer = resolve.resolve_optimizer(file, zero)
        deep_compile = deep_compile_of(file.compile, zero)
        one_bit, one_bit_notes = resolve_one_bit(reading, wrapper, self.optimizer_step)
        clipping = self._gradient_clipping()
        checks.check_gradient_norm(reading, zero, clipping, wrapper)
        batch = zenflow.overwrite_batch(self._batch(), zero, self.replicas)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            self.origins.setdefault(key, "worked out")
        self._trace_origins()
        master, states = resolve.resolve_state_dtypes(
            file, release, is_offloaded=optimizer.implementation == "cpu"
        )
        communication = file.communication_data_type or resolve.default_communication_dtype(
            zero.stage, param, release
        )
        shares_sequences = self.world_size > self.replicas
        if shares_sequences:  # `DeepSpeedEngine._configure_distributed_model` overwrites it
            communication = file.seq_parallel_communication_data_type or "fp32"
        num_nodes = self.world_size // self.gpus_per_node
        notes = [
            *reading.notes,
            *self._unfilled_auto_notes(),
            *self._resolved_auto_notes(precision, batch, clipping),
            *ineffective_key_notes(reading, zero, wrapper, release, num_nodes),
            *sequence_notes(reading, shares_sequences=shares_sequences),
            *zeropp.zero_plus_plus_notes(reading, zero, communication, param, release),
            *unmodelled_notes(reading),
            *one_bit_notes,
            *super_offload_notes(reading, zero, clipping),
            *zenflow.zenflow_notes(where, zero),
            *deep_compile_notes(where, file.compile, zero),
        ]
        sizes = None if file.tensor_parallel is None else file.tensor_parallel.tensor_parallel
        return DeepSpeedConfig(
            name=where,
            release=release,
            gpus_per_node=self.gpus_per_node,
            zero=zero,
            precision=precision,
            param_dtype=param,
            grad_accum_dtype=accumulate,
            communication_dtype=communication,
            master_weights_dtype=master,
            optimizer_states_dtype=states,
            check_grad_overflow=resolve.resolve_overflow_check(wrapper, param, bf16, release),
            optimizer=optimizer,
            optimizer_wrapper=wrapper,
            gradient_clipping=clipping,
            batch=batch,
            aio=resolve.resolve_aio(file.aio, release),
            activation_checkpointing=file.activation_checkpointing
            or ActivationCheckpointingBlock.model_construct(),
            pipeline=file.pipeline or PipelineBlock.model_construct(),
            expert_parallel=file.expert_parallel,
            unsimulated=find_unsimulated(reading, zero, optimizer, release),
            notes=tuple(notes),
            origins=tuple(self.origins.items()),
            one_bit=one_bit,
            deep_compile=deep_compile,
            tp_grain_size=sizes.tp_grain_size if sizes is not None else 1,
        )

    def _batch(self) -> BatchSizes:
        file, training, autos = self.reading.file, self.training, self.reading.autos
        micro_key, steps_key = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        micro = self._merge(
            micro_key, file.train_micro_batch_size_per_gpu, "micro_batch_size", training.micro_batch_size
        )
        steps = self._merge(
            steps_key, file.gradient_accumulation_steps, steps_key, training.gradient_accumulation_steps
        )
        if file.train_batch_size is not None:
            self.origins["train_batch_size"] = "file"
        elif micro is None and (micro_key in autos or "train_batch_size" in autos):
            micro = 1
            self.origins[micro_key] = "auto"
        return resolve_batch(
            self.reading.where,
            world_size=self.replicas,
            train_batch_size=file.train_batch_size,
            micro_batch_size=micro,
            gradient_accumulation_steps=steps,
        )

    def _gradient_clipping(self) -> float:
        key = "gradient_clipping"
        value = self._merge(key, self.reading.file.gradient_clipping, key, self.training.gradient_clipping)
        if value is not None:
            return value
        if key in self.reading.autos:
            self.origins[key] = "auto"
            return _HF_MAX_GRAD_NORM
        return self.release.default_gradient_clipping

    def _merge(self, key: str, file_value: Value | None, name: str, requested: Value | None) -> Value | None:
        """The file's value or the experiment's. Raises InputError if both are given and differ."""
        if file_value is not None and requested is not None and file_value != requested:
            raise InputError(
                f"{self.reading.where}: {key}: found {file_value:g}, but [training] {name} is {requested:g}; "
                "make them equal or leave one out"
            )
        if file_value is not None:
            self.origins[key] = "file"
            return file_value
        if requested is not None:
            self.origins[key] = "auto" if key in self.reading.autos else "experiment"
        return requested

    def _trace_origins(self) -> None:
        reading = self.reading
        for bare in (bare for bare, key in ZERO_KEYS.items() if key.effect):
            path = f"zero_optimization.{bare}"
            if path in reading.filled:
                self.origins[f"zero_optimization.{json_key(bare)}"] = "auto"
            elif reading.says(path):
                self.origins[f"zero_optimization.{json_key(bare)}"] = "file"
        for key in (
            "communication_data_type",
            "data_types.grad_accum_dtype",
            "bf16.check_grad_overflow",
            "optimizer.type",
        ):
            if reading.says(key):
                self.origins[key] = "file"

    def _resolved_auto_notes(self, precision: str, batch: BatchSizes, clipping: float) -> list[str]:
        """A note of the values taken for "auto"."""
        reading = self.reading
        values = {
            "train_batch_size": batch.train_batch_size,
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.gradient_accumulation_steps,
            "gradient_clipping": clipping,
        }
        resolved = [f"precision {precision}"] if self.origins["precision"] == "auto" else []
        resolved += [f"{key} {value:,}" for key, value in values.items() if key in reading.autos]
        for path in sorted(reading.filled):
            bare = path.rpartition(".")[2]
            resolved.append(f"{json_key(bare)} {getattr(reading.zero, bare):,}")
        return [f"{reading.where}: 'auto' is taken as {', '.join(resolved)}"] if resolved else []

    def _unfilled_auto_notes(self) -> list[str]:
        """A note of the keys whose "auto" nothing fills, for which DeepSpeed's default is taken."""
        reading = self.reading
        unfilled = sorted(
            key
            for key in reading.autos
            if key.startswith("zero_optimization.") and not key.endswith("load_from_fp32_weights")
        )
        if not unfilled:
            return []
        return [f"{reading.where}: {', '.join(unfilled)}: 'auto' that nobody fills is DeepSpeed's default"]


def resolve_batch(
    where: str,
    *,
    world_size: int,
    train_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
) -> BatchSizes:
    """`train_batch_size = micro_batch_size x gradient_accumulation_steps x world_size`, in sequences.

    Missing values follow DeepSpeed: two numbers give the third, and one alone means one accumulation step.
    `where` begins the message of an error.

    Raises InputError for a value below 1, if neither of the first two is given, and if the product does not
    hold.
    """
    assert world_size >= 1
    train, micro, steps = train_batch_size, micro_batch_size, gradient_accumulation_steps
    for key, value in ((_TRAIN, train), (_MICRO, micro), (_STEPS, steps)):
        if value is not None and value < 1:
            raise InputError(f"{where}: {key}: found {value}, expected at least 1")
    if train is None and micro is None:
        raise InputError(
            f"{where}: {_MICRO}: missing; give it, or {_TRAIN}, here or as [training] micro_batch_size"
        )
    if train is None:
        assert micro is not None
        steps = steps or 1
        return BatchSizes(micro * steps * world_size, micro, steps)
    factors = [(key, value) for key, value in ((_MICRO, micro), (_STEPS, steps)) if value is not None]
    if micro is None:
        steps = steps or 1
        micro = train // (world_size * steps)
    elif steps is None:
        steps = train // (micro * world_size)
    if train != micro * steps * world_size:
        raise InputError(f"{where}: {_TRAIN}: found {train}, {_describe_expected(factors, world_size)}")
    return BatchSizes(train, micro, steps)


def _describe_expected(factors: list[tuple[str, int]], world_size: int) -> str:
    product = math.prod(value for _, value in factors) * world_size
    terms = " x ".join([f"{key} {value}" for key, value in factors] + [f"{world_size} GPUs"])
    if len(factors) == 2:
        return f"expected {terms} = {product}"
    missing = [key for key in (_MICRO, _STEPS) if key not in dict(factors)]
    follows = f"{missing[0]} follows" if factors else f"{_MICRO} follows, {_STEPS} is 1"
    return f"expected a multiple of {terms} = {product} ({follows})"
