"""The frozen originals that PEFT keeps next to the trained copies of `modules_to_save`.

`ModulesToSaveWrapper` (PEFT 0.21.2 utils/other.py) deep-copies a module, trains the copy and freezes the
original, which stays a submodule that is never called. DDP, and ZeRO before stage 3, hold it completely.
ZeRO-3 shards it and never fetches it. FSDP shards it with the unit that it is in. zsim leaves out that FSDP
gathers it with that unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.ops import Memory
from zsim.specs.model.spec import ModelSpec, Parameter
from zsim.specs.strategy.training import TrainingConfig

NOTE = "PEFT's frozen originals of modules_to_save are in memory, but not in what FSDP gathers"


def originals(
    models: Iterable[ModelSpec], strategy: Any, training: TrainingConfig, ranks: int
) -> list[Memory]:
    """Memory of the originals in a rank's stages, among `ranks` data-parallel ranks. [] if no module is
    copied.
    """
    trained_models = [model for model in models if model.trainable_numel < model.numel]
    parameters = [
        parameter
        for model in trained_models
        for _, parameter in model.named_parameters()
        if parameter.original_dtype
    ]
    if not parameters:
        return []
    shards = _shards(strategy, ranks)
    default_dtype = strategy.param_dtype if isinstance(strategy, DeepSpeedConfig) else training.stored_dtype
    size = sum(
        _numel(parameter, shards) * DTYPE_BYTES[_dtype(parameter, default_dtype)] for parameter in parameters
    )
    is_offloaded = getattr(strategy, "cpu_offload", False)
    if isinstance(strategy, DeepSpeedConfig):
        is_offloaded = strategy.zero.offload_param is not None
    return [Memory("parameters", size, "host" if is_offloaded else "gpu")]


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


def _shards(strategy: Any, ranks: int) -> int:
    """The ranks over which a frozen parameter is cut."""
    if isinstance(strategy, DeepSpeedConfig):
        if strategy.stage < 3:
            return 1
        return strategy.zero.mics_shard_size if strategy.zero.is_mics else ranks
    if isinstance(strategy, Fsdp1Config) and strategy.sharding_strategy == "NO_SHARD":
        return 1
    return ranks // strategy.replicate if isinstance(strategy, Fsdp1Config | Fsdp2Config) else 1
