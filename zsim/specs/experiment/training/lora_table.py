"""`[training.lora]`: adapters as PEFT configures them, and PEFT's own adapter_config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from zsim.errors import InputError, NotSimulatedError
from zsim.files import PRESETS
from zsim.reading import read_user_text
from zsim.specs.lazy_model import StrictTable
from zsim.specs.messages import validate_table
from zsim.specs.strategy.requirement import phrase


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"found {text!r}, expected a regular expression ({error})") from None
    return text


_Pattern = Annotated[str, AfterValidator(_pattern)]


class LoraTable(StrictTable):
    """`[training.lora]`. Defaults are PEFT 0.21's (tuners/lora/config.py).

    These are rank 8, alpha 8 (without effect on cost), no dropout, the family's own targets, and adapters in
    fp32 (`autocast_adapter_dtype`).
    """

    rank: int = Field(default=8, ge=1, strict=True, description="rank of the adapters")
    alpha: float = Field(
        default=8,
        gt=0,
        allow_inf_nan=False,
        description="scale of the adapters, over the rank; without effect on cost",
    )
    targets: _Pattern | Literal["all-linear"] | tuple[str, ...] | None = Field(
        default=None,
        description='ends of module names, "all-linear", or a string as a pattern; left out: '
        f"PEFT's choice for the model, or {phrase('training.lora.targets')}",
    )
    target_parameters: tuple[str, ...] = Field(
        default=(),
        description="ends of names of experts' stacked weights, as experts.gate_up_proj; PEFT merges "
        "adapters in every forward",
    )
    share_expert_adapters: bool = Field(
        default=True,
        description="experts of a rank that run together share one adapter "
        f"({phrase('training.lora.share_expert_adapters')})",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout before an adapter")
    stacked_dropout: Literal[0] | None = Field(
        default=None,
        description="0: no dropout before adapters on stacked weights, as PEFT demands; left out: `dropout`",
    )
    quantized: Literal["nf4", "int8"] | None = Field(
        default=None,
        description="frozen weights in bitsandbytes' 4 bits, or 8 (LLM.int8); left out: not quantized",
    )
    double_quantization: bool = Field(default=True, description="the scales of 4-bit weights in 8 bits")
    quantize_experts: bool = Field(
        default=False,
        description="experts' stacked weights in 4 bits as well (`replace_parameter_4bit`), "
        "dequantized in every forward",
    )
    preparation: Literal["peft", "none"] | None = Field(
        default=None,
        description='"peft": `prepare_model_for_kbit_training` casts unquantized weights and activations '
        f'to fp32; left out: "peft" {phrase("training.lora.preparation")}, "none" with Liger, unsloth\'s '
        "loss, `frozen_dtype` or stacked experts",
    )
    dtype: Literal["fp32", "bf16"] | None = Field(
        default=None,
        description="what adapters are kept in; left out: fp32, under autocast if the strategy has it",
    )
    kernels: Literal["peft", "unsloth"] = Field(
        default="peft",
        description="whose kernels of adapters: PEFT's, or unsloth's, of the activations' type",
    )
    exclude: _Pattern | tuple[str, ...] = Field(
        default=(), description="modules that get no adapter; a string is a pattern"
    )
    layers: tuple[int, ...] = Field(default=(), description="numbers of the blocks; all if left out")
    rank_pattern: dict[_Pattern, Annotated[int, Field(ge=1)]] = Field(
        default={}, description="ranks of single modules, by a pattern of their names"
    )
    alpha_pattern: dict[_Pattern, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default={}, description="the same of `alpha`; without effect on cost"
    )
    modules_to_save: tuple[_Pattern, ...] = Field(default=(), description="modules that are trained whole")
    config: str | None = Field(
        default=None, description="path of PEFT's adapter_config.json; left out: the keys of this table alone"
    )


@cache
def _config_keys() -> Mapping[str, Any]:
    """Under "keys", keys of adapter_config.json and ours. Under "unsupported", keys that change what is
    computed, with the values that do not.
    """
    keys: Mapping[str, Any] = json.loads((PRESETS / "adapter_config.json").read_text())
    return keys


def read_adapter_config(path: str | Path) -> dict[str, Any]:
    """The keys of `[training.lora]` that PEFT's adapter_config.json sets.

    Raises InputError for a file that is not one, NotSimulatedError for variants of LoRA with other work.
    """
    where = f"training.lora.config: {path}"
    try:
        data = json.loads(read_user_text(Path(path), "adapter_config.json", where))
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: is no JSON: {error}") from None
    kind = data.get("peft_type") if isinstance(data, Mapping) else None
    if kind != "LORA":
        raise InputError(
            f"training.lora.config: {path}: found peft_type {kind!r}, expected 'LORA' (PEFT's "
            "adapter_config.json of a LoRA adapter)"
        )
    keys = _config_keys()
    for key, plain in keys["unsupported"].items():
        if key in data and data[key] not in plain:
            raise NotSimulatedError(
                f"training.lora.config: {path}: {key} = {data[key]!r} is not simulated; expected {plain[0]!r}"
            )
    settings = {lora_key: data[key] for key, lora_key in keys["keys"].items() if data.get(key) is not None}
    for key in ("targets", "layers", "exclude", "modules_to_save", "target_parameters"):
        value = settings.get(key)
        if isinstance(value, list):
            settings[key] = tuple(sorted(value) if key == "targets" else value)
        elif isinstance(value, int):
            settings[key] = (value,)
    return settings


def merge_adapter_config(table: LoraTable) -> LoraTable:
    """The table combined with the content of its `config`. Two different values are an error."""
    if table.config is None:
        return table
    data = read_adapter_config(table.config)
    for key in sorted(table.model_fields_set & set(data)):
        value = getattr(table, key)
        if value != data[key] and value != LoraTable.model_fields[key].default:
            raise InputError(
                f"training.lora.{key}: found {value!r}, but {table.config} says {data[key]!r}; leave one out"
            )
    return validate_table(table.model_dump(exclude={*data, "config"}) | data, table.config, LoraTable)
