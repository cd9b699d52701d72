"""The types of values in a DeepSpeed JSON.

As in DeepSpeed, blocks refuse unknown keys, `stage3_x` and the bare `x` are the same key, and 5e8 is a whole
number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from zsim.dtypes import ELEMENT_TYPES


def refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, found {str(value).lower()}")
    return value


_DTYPE_NAMES = {
    spelling: name for name in ("bf16", "fp16", "fp32") for spelling in ELEMENT_TYPES[name].spellings
}


def _parse_dtype(value: Any) -> Any:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def _lowercase(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Elements = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)]
Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]
Integer = Annotated[int, BeforeValidator(refuse_bool)]
Number = Annotated[float, BeforeValidator(refuse_bool)]
Amount = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, le=1)]
DtypeName = Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(_parse_dtype)]
CommunicationDtype = Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(_lowercase)]
Device = Literal["none", "cpu", "nvme"]


def _parse_names(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"found {value!r}, expected a list")
    return tuple(dict.fromkeys(value)) if all(isinstance(name, str) for name in value) else tuple(value)


Names = Annotated[tuple[str, ...], BeforeValidator(_parse_names)]


class JsonBlock(BaseModel):
    """A JSON object whose keys are all known. Validators are built when a file is first read."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, defer_build=True
    )
