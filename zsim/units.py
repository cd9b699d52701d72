"""Quantities: strings with a unit in files, plain SI numbers in zsim.

kB, MB, GB, TB, PB are powers of 1000 bytes, and KiB, MiB, GiB, TiB, PiB powers of 1024. A small b is a bit. A
bare number where a unit is needed is an error that names the units it could have (0 needs none). The pydantic
types at the end (`Bytes`, `BytesPerSecond`, ...) do the parsing in file schemas.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, SerializationInfo, WithJsonSchema

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

BYTES: dict[str, float] = {
    **{f"{prefix}B": factor for prefix, factor in _DECIMAL.items()},
    **{f"{prefix}B": factor for prefix, factor in _BINARY.items()},
}
BYTES_PER_SECOND: dict[str, float] = {
    **{f"{unit}/s": factor for unit, factor in BYTES.items()},
    **{f"{prefix}b/s": factor / 8 for prefix, factor in _DECIMAL.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
}
SECONDS: dict[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
DURATION: dict[str, float] = {
    **SECONDS,
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}
COUNTS: dict[str, float] = {**_DECIMAL, "B": 10**9, "Ki": 2**10, "Mi": 2**20}
FLOPS_PER_SECOND: dict[str, float] = {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()}
WATTS: dict[str, float] = {"W": 1.0, "kW": 1e3, "MW": 1e6}

_UNLISTED_UNITS = re.compile(
    r"^(K(?!i)|E|P(?!F)|[kMT]?bit/s)"
)  # units that need not be in a list of examples
_COMMON_UNITS = ("GB/s", "GB", "TFLOP/s", "ms", "W")
_SPELLINGS = tuple(
    (re.compile(pattern), usual)
    for pattern, usual in (
        ("\N{GREEK SMALL LETTER MU}", "u"),
        (r"(?i)(bit|byte)s", r"\1"),
        (r"(?i)bit", "bit"),
        (r"(?i)byte", "B"),
        (r"(?i)sec(onds?)?$", "s"),
        (r"(?i)flops?(/s)?$", "FLOP/s"),
        (r"(?<=[bBt])ps$", "/s"),
    )
)
_QUANTITY = re.compile(r"^\s*([-+]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*$")


def parse_quantity(text: object, units: dict[str, float]) -> float:
    """`"400 Gb/s"` with `BYTES_PER_SECOND` -> 5e10.

    Raises ValueError for a bare number, an unknown unit, a negative or an infinite value.
    """
    examples = ", ".join(unit for unit in units if unit and not _UNLISTED_UNITS.match(unit))
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"expected a quantity as a string with a unit ({examples}), found {text!r}")
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"'{text}' is not a quantity; expected a number and a unit ({examples})")
    value, unit = float(match[1].replace("_", "")), match[2]
    if not unit and value != 0 and "" not in units:
        common_unit = next(
            (name for name in _COMMON_UNITS if name in units and abs(value) < 1e6), next(iter(units))
        )
        raise ValueError(f"'{text}' has no unit; expected one of {examples}, e.g. '{match[1]} {common_unit}'")
    if unit and unit not in units:
        suggestions = " or ".join(f"'{match[1]} {name}'" for name in _likely_units(unit, units))
        hint = f"; did you mean {suggestions}?" if suggestions else ""
        raise ValueError(f"unknown unit '{unit}' in '{text}'; expected one of {examples}{hint}")
    result = value * units.get(unit, 1.0)
    if not math.isfinite(result) or result < 0:
        raise ValueError(f"'{text}' must be a finite, non-negative quantity")
    return result


def _likely_units(unit: str, units: dict[str, float]) -> list[str]:
    """The units that someone who writes `GBit`, `Gbps`, `TFLOPS` or `GB` for a rate can mean.

    That is one unit, or both `Gb/s` and `GB/s` for `gb/s`, which does not distinguish bits and bytes.
    """
    text = unit
    for pattern, usual in _SPELLINGS:
        text = pattern.sub(usual, text)
    options = [text] if text in units else [f"{text}/s"] if f"{text}/s" in units else []
    for name in units if not options else ():
        is_same_spelling = name.lower() in (text.lower(), f"{text}/s".lower())
        if is_same_spelling and units[name] not in [units[option] for option in options]:
            options.append(name)
    return options


def _parser(units: dict[str, float], *, is_integer: bool = False) -> BeforeValidator:
    def parse(text: Any) -> float | int:
        value = parse_quantity(text, units)
        return round(value) if is_integer else value

    return BeforeValidator(parse)


AS_IN_FILES = {"as_in_files": True}  # context of a dump whose quantities have units again


def _writer(unit: str) -> PlainSerializer:
    def write(value: Any, info: SerializationInfo) -> Any:
        is_asked = info.context is not None and info.context.get("as_in_files")
        return f"{value!r} {unit}" if is_asked and isinstance(value, int | float) else value

    return PlainSerializer(write, return_type=Any)


def _quantity_schema(description: str, example: str) -> WithJsonSchema:
    """The JSON Schema of a quantity: a string with a unit, or 0."""
    return WithJsonSchema(
        {"type": ["string", "number"], "format": f'{description}, as in "{example}"', "examples": [example]}
    )


Bytes = Annotated[int, _parser(BYTES, is_integer=True), _writer("B"), _quantity_schema("bytes", "80 GiB")]
BytesPerSecond = Annotated[
    float, _parser(BYTES_PER_SECOND), _writer("B/s"), _quantity_schema("bytes per second", "400 Gb/s")
]
Seconds = Annotated[float, _parser(SECONDS), _writer("s"), _quantity_schema("time", "2 us")]
FlopsPerSecond = Annotated[
    float, _parser(FLOPS_PER_SECOND), _writer("FLOP/s"), _quantity_schema("FLOP per second", "989 TFLOP/s")
]
Duration = Annotated[float, _parser(DURATION), _writer("s"), _quantity_schema("time", "30 min")]
Watts = Annotated[float, _parser(WATTS), _writer("W"), _quantity_schema("power", "700 W")]


def _count(value: Any) -> Any:
    """`"15T"` -> 1.5e13, `"128Ki"` -> 131,072. A number is returned as it is."""
    count = parse_quantity(value, COUNTS) if isinstance(value, str) else value
    return int(count) if isinstance(value, str) and count == int(count) else count


Tokens = Annotated[
    float,
    BeforeValidator(_count),
    WithJsonSchema(
        {"type": ["string", "number"], "format": 'number, as in 1e12 or "15T"', "examples": ["15T"]}
    ),
]
Length = Annotated[
    int,
    Field(gt=0, le=2**27, strict=True),
    BeforeValidator(_count),
    WithJsonSchema(
        {
            "type": ["integer", "string"],
            "exclusiveMinimum": 0,
            "maximum": 2**27,
            "format": 'whole number, as in 4096, "1M" or "128Ki"',
            "examples": ["128Ki"],
        }
    ),
]


def format_bytes(count: float) -> str:
    """Decimal bytes as text: 1.50 GB."""
    return _format_scaled(count, "B")


GIGABYTES = "GB are 10^9 bytes; torch prints GiB, of which one is 1.074 GB"


def format_rate(bytes_per_second: float) -> str:
    """Decimal bytes per second as text: 400.00 GB/s."""
    return _format_scaled(bytes_per_second, "B/s")


def format_flops(flops_per_second: float) -> str:
    """FLOP/s as text: 431.20 TFLOP/s."""
    return _format_scaled(flops_per_second, "FLOP/s")


def format_percent(fraction: float | None, space: str = " ") -> str:
    """A fraction as text: 41.3 %. "-" for None. Narrow tables leave the space out."""
    return "-" if fraction is None else f"{fraction * 100:.1f}{space}%"


def format_energy(megawatt_hours: float) -> str:
    """Energy as text of three digits: 2.31 GWh, 73.2 MWh, 415 kWh, 8.05 Wh."""
    for unit, size in (("GWh", 1e3), ("MWh", 1.0), ("kWh", 1e-3)):
        if abs(megawatt_hours) >= 0.9995 * size:
            return f"{format_amount(megawatt_hours / size)} {unit}"
    return f"{format_amount(megawatt_hours * 1e6)} Wh"


def format_count(count: int, noun: str) -> str:
    """A number of things as text: "1 run", "1,024 runs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_gpus(count: int) -> str:
    """Number of GPUs: "1 GPU", "1,024 GPUs"."""
    return format_count(count, "GPU")


def format_setting(value: object) -> str:
    """A value as files spell it, text without quotes: true, 4096, full."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_tokens(count: float) -> str:
    """A number of tokens as text: 1.28B, 15T, 780M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size * (1 - 5e-4):
            return f"{float(f'{count / size:.3g}'):g}{unit}"
    return f"{count:,.0f}"


def format_amount(value: float | None) -> str:
    """A number as text: without decimals from 100 on, of three digits below: 96,735, 9.60, 0.0420. "-" where
    there is none.
    """
    if value is None:
        return "-"
    rounded = float(f"{value:.3g}")
    if value == 0 or abs(rounded) >= 100:
        return f"{value:,.0f}"
    return f"{rounded:.{2 - math.floor(math.log10(abs(rounded)))}f}"


def _format_scaled(value: float, unit: str) -> str:
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def round_digits(value: float, digits: int) -> float:
    """The value with so many significant digits."""
    return float(f"{value:.{digits}g}")


def format_seconds(seconds: float) -> str:
    """Seconds as text: 3.210 s, 14.20 ms, 8.0 us."""
    if abs(seconds) >= 1:
        return f"{seconds:.3f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us"


def format_duration(seconds: float) -> str:
    """Seconds, minutes, hours or days as text: 42.0 s, 3.5 min, 7.9 h, 54.0 days."""
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= (2 if unit != "days" else 1.5) * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if abs(seconds) >= 1 else format_seconds(seconds)
