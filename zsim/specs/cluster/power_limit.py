"""A GPU at another power limit than its file's: `power_limit` of a GPU (nvidia-smi -pl, a chip's cTDP).

Matrix products and fused attention run at the limit, so they slow down with it. Kernels bound by memory do so
only where the limit is below what they draw ("The Illusion of Power Capping in LLM Decode", arXiv 2605.11999,
abstract: decoding draws 137 to 300 of an H200's 700 W, so that no cap slows it).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from zsim.errors import InputError
from zsim.reading import MAX_TOML_BYTES, parse_toml, read_user_file
from zsim.resources import PRESETS
from zsim.specs.cluster.gpu import AttentionEfficiency, Gpu, Power
from zsim.specs.cluster.table import EVIDENCE_ORDER, Evidence
from zsim.specs.messages import validate_table

_PRESET = PRESETS / "power_law.toml"


class PowerPair(BaseModel):
    """One chip at two power limits: watts, and rates in any one unit.

    `residual` is the law's error at the second limit, predicted over measured, less 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    chip: str
    watts: tuple[float, float]
    rates: tuple[float, float]
    residual: float
    source: str = Field(min_length=1)


class PowerLaw(BaseModel):
    """`presets/power_law.toml`: the exponent of rate over power, and the range of limits for which it is
    offered.

    The range is in fractions of a file's limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    schema_version: Literal[1] = Field(alias="schema")
    exponent: float = Field(gt=0)
    range: tuple[float, float]
    source: str = Field(min_length=1)
    evidence: Evidence
    pairs: tuple[PowerPair, ...]


def load_power_law() -> PowerLaw:
    """The shipped law."""
    content = read_user_file(_PRESET, MAX_TOML_BYTES).decode("utf-8")
    return validate_table(parse_toml(content, _PRESET.name), _PRESET.name, PowerLaw)


def apply_power_limit(gpu: Gpu) -> Gpu:
    """The GPU at its `power_limit`, unchanged without one.

        f' = f (P / P0) ^ a

    f is the fraction of peak that products or attention reach at the file's limit P0 (`[power] maximum`), P
    the limit, and a `[power] exponent`, or the law's of `presets/power_law.toml`.

    Raises InputError for a GPU whose file does not state its power, and for limits outside of the law's
    range.
    """
    limit = gpu.power_limit
    if limit is None:
        return gpu
    if gpu.power is None:
        raise InputError(
            f"GPU '{gpu.name}': power_limit: its file does not say what it draws; expected a [power] table "
            "with `maximum` and `idle`"
        )
    if limit == gpu.power.maximum:
        return gpu
    law = load_power_law()
    file_limit = gpu.power.maximum
    lowest, highest = (file_limit * end for end in law.range)
    if not lowest <= limit <= highest:
        raise InputError(
            f"GPU '{gpu.name}': power_limit: found {limit:g} W, expected {lowest:g} to {highest:g} W "
            f"({law.range[0]:.0%} to {law.range[1]:.0%} of the {file_limit:g} W of its file)"
        )
    exponent = law.exponent if gpu.power.exponent is None else gpu.power.exponent
    factor = (limit / file_limit) ** exponent
    remark = (
        f"; at {limit:g} of {file_limit:g} W times {factor:.3f}, exponent {exponent:g} "
        "(presets/power_law.toml)"
    )
    gemm = gpu.gemm.model_copy(
        update={
            "max_fraction": gpu.gemm.max_fraction * factor,
            "by_dtype": {dtype: value * factor for dtype, value in gpu.gemm.by_dtype.items()},
            **_origin(gpu.gemm.source + remark, gpu.gemm.evidence, law),
        }
    )
    attention = _slow_attention(gpu.attention, factor).model_copy(
        update=_origin(gpu.attention.source + remark, gpu.attention.evidence, law)
    )
    changes: dict[str, Any] = {
        "name": f"{gpu.name} at {limit:g} W",
        "description": f"{gpu.description}, limited to {limit:g} W",
        "gemm": gemm,
        "attention": attention,
        "power": _limit_power(gpu.power, limit),
    }
    memory_bound = gpu.power.memory_bound
    if memory_bound is not None and memory_bound > limit:
        slower = (limit / memory_bound) ** exponent
        table = gpu.memory_bound
        names = ("elementwise_fraction", "optimizer_fraction", "copy_fraction")
        changes["memory_bound"] = table.model_copy(
            update={
                **{name: getattr(table, name) * slower for name in names},
                **_origin(
                    f"{table.source}; the limit is below their {memory_bound:g} W", table.evidence, law
                ),
            }
        )
    return gpu.model_copy(update=changes)


def _origin(source: str, grade: Evidence, law: PowerLaw) -> dict[str, Any]:
    return {"source": source, "evidence": max(grade, law.evidence, key=EVIDENCE_ORDER.index)}


def _slow_attention(table: AttentionEfficiency, factor: float) -> AttentionEfficiency:
    """The curve and its variants at `factor` times their height."""
    variants = {
        name: curve.model_copy(
            update={
                "forward_fraction": curve.forward_fraction * factor,
                "backward_fraction": curve.backward_fraction * factor,
            }
        )
        for name, curve in table.variants.items()
    }
    return table.model_copy(
        update={
            "forward_fraction": table.forward_fraction * factor,
            "backward_fraction": table.backward_fraction * factor,
            "variants": variants,
        }
    )


def _limit_power(power: Power, limit: float) -> Power:
    """The GPU's power, nowhere above the limit."""
    changes: dict[str, Any] = {"maximum": limit, "idle": min(power.idle, limit)}
    for name in ("memory_bound", "communication"):
        watts = getattr(power, name)
        if watts is not None:
            changes[name] = min(watts, limit)
    return power.model_copy(update={**changes, "source": f"{power.source}; limited to {limit:g} W"})
