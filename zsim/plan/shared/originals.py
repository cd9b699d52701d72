"""The frozen originals that PEFT keeps next to the trained copies of `modules_to_save`.

`ModulesToSaveWrapper` (PEFT 0.21.2 utils/other.py) deep-copies a module, trains the copy and freezes the
original, which stays a submodule that is never called. DDP, and ZeRO before stage 3, hold it completely.
ZeRO-3 shards it and never fetches it. FSDP shards it with the unit that it is in. zsim leaves out that FSDP
gathers it with that unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from zsim.dtypes import DTYPE_BYTES
from zsim.plan.ops import Device, Memory
from zsim.specs.model.spec import ModelSpec, Parameter


@dataclass(frozen=True, slots=True)
class FrozenStorage:
    """How a framework stores a frozen parameter."""

    dtype: str
    """The type of one that the model does not keep in a type of its own."""
    shards: int = 1
    """The number of ranks over which it is cut."""
    device: Device = "gpu"


def originals(models: Iterable[ModelSpec], storage: FrozenStorage) -> list[Memory]:
    """Memory of the originals in a rank's stages. [] if no module is copied."""
    trained_models = [model for model in models if model.trainable_numel < model.numel]
    parameters = [
        parameter
        for model in trained_models
        for _, parameter in model.named_parameters()
        if parameter.original_dtype
    ]
    if not parameters:
        return []
    size = sum(
        _numel(parameter, storage.shards) * DTYPE_BYTES[_dtype(parameter, storage.dtype)]
        for parameter in parameters
    )
    return [Memory("parameters", size, storage.device)]


def frozen_copy(models: Iterable[ModelSpec], storage: FrozenStorage) -> list[Memory]:
    """Memory of a frozen copy of all parameters in a rank's stages."""
    size = sum(
        _numel(parameter, storage.shards) * DTYPE_BYTES[parameter.stored_dtype or storage.dtype]
        for model in models
        for _, parameter in model.named_parameters()
    )
    return [Memory("parameters", size, storage.device)]


def _dtype(parameter: Parameter, default_dtype: str) -> str:
    return (
        parameter.stored_dtype or default_dtype
        if parameter.original_dtype == "as stored"
        else parameter.original_dtype
    )


def _numel(parameter: Parameter, shards: int) -> int:
    """Elements of the first rank's shard, which is cut by rows as in FSDP2. The others' shards differ by less
    than a row.
    """
    rows, *other_dimensions = parameter.shape or (1,)
    return -(-rows // shards) * prod(other_dimensions)
