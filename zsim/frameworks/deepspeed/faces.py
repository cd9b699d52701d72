"""The settings of DeepSpeed on the page, and its typed table in notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pydantic

from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.deepspeed.studies import STAGE as JSON_STAGE
from zsim.frameworks.deepspeed.studies import ZERO, parameter_offload_block, state_offload_block
from zsim.frameworks.torch.fields import ZERO_STAGE
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.typed_tables import TypedTable
from zsim.ui.field import STAGE, Field, FrameworkFields

_STATES, _PARAMETERS = "offload_optimizer", "offload_param"
_DEVICES = {"no": None, "host memory": "cpu", "NVMe": "nvme"}


class DeepSpeedFields(FrameworkFields):
    """The stage and the offloading, which the JSON has in blocks of its own."""

    def values(self, job: Job) -> Iterator[tuple[str, Any]]:
        zero = job.strategy.zero  # type: ignore[attr-defined]
        yield STAGE, zero.stage
        yield _STATES, zero.offload_optimizer and zero.offload_optimizer.device
        yield _PARAMETERS, zero.offload_param and zero.offload_param.device

    def translate(
        self, data: Mapping[str, Any], changes: Mapping[str, Any], job_with: Callable[[Any], Job]
    ) -> dict[str, Any]:
        translated = dict(changes)
        strategy = data.get("strategy")
        if STAGE in translated and isinstance(strategy, Mapping) and strategy.get("config") is not None:
            translated[JSON_STAGE] = translated.pop(STAGE)
        if _STATES in translated:
            translated[ZERO + _STATES] = state_offload_block(translated.pop(_STATES))
        if _PARAMETERS in translated:
            device, numel = translated.pop(_PARAMETERS), 0
            if device == "nvme":
                numel = _largest_shard_numel(job_with(translated))
            translated[ZERO + _PARAMETERS] = parameter_offload_block(device, numel)
        return translated

    def shown(self, key: str, value: Any) -> tuple[str, Any]:
        if key == JSON_STAGE:
            return STAGE, value
        name = key.removeprefix(ZERO)
        is_offload = name in (_STATES, _PARAMETERS) and isinstance(value, Mapping)
        return name, value["device"] if is_offload else value

    def shown_keys(self) -> frozenset[str]:
        return frozenset((JSON_STAGE, f"{ZERO}{_STATES}.device", f"{ZERO}{_PARAMETERS}.device"))

    def unstated_settings(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """DeepSpeed's own precision, where a stage alone means bf16."""
        precision_keys = [f"strategy.config.{name}.enabled" for name in ("bf16", "fp16")]
        is_json = any(key.startswith(ZERO) for key in values)
        if is_json and not any(key in values for key in precision_keys):
            yield precision_keys[0], False


def _largest_shard_numel(job: Job) -> int:
    """Elements of the largest parameter's shard, which NVMe buffers must hold."""
    return -(-max(parameter.numel for _, parameter in job.model.named_parameters()) // job.world_size)


FIELDS = DeepSpeedFields(
    "DeepSpeed ZeRO",
    position=1,
    fields=(
        ZERO_STAGE,
        Field(_STATES, "Offload", "optimizer states", choices=_DEVICES, is_half=True),
        Field(_PARAMETERS, "Offload", "parameters", choices=_DEVICES, stages=(3,), is_half=True),
    ),
    has_degrees=True,
    reads_bare_files=True,
)


class DeepSpeed(TypedTable, DeepSpeedTable):
    """DeepSpeed's ZeRO, a stage with its defaults or a configuration.

    `zsim.DeepSpeed(stage=3)` or `zsim.DeepSpeed(config="ds_config.json")`, where `config` may also be the
    file's content as a dict.
    """

    kind: Literal["deepspeed"] = pydantic.Field(default="deepspeed", description="whose data parallelism")
