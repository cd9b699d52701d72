"""Quantities in files are strings with a unit; inside they are plain SI numbers.

kB, MB, GB, TB, PB are powers of 1000 bytes; KiB, MiB, GiB, TiB, PiB powers of 1024; a small b is a bit.
A bare number where a unit is needed is an error that names the units it could have (0 needs none).
The pydantic types at the end (`Bytes`, `BytesPerSecond`, ...) do the parsing in file schemas.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

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
FLOPS_PER_SECOND: dict[str, float] = {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()}
WATTS: dict[str, float] = {"W": 1.0, "kW": 1e3, "MW": 1e6}

_QUANTITY = re.compile(r"^\s*([-+]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*$")


def parse_quantity(text: object, units: dict[str, float]) -> float:
    """`"400 Gb/s"` with `BYTES_PER_SECOND` -> 5e10.

    Raises ValueError for a bare number, an unknown unit, a negative or a not finite value.
    """
    examples = ", ".join(list(units)[:12])
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"expected a quantity as a string with a unit ({examples}), found {text!r}")
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"'{text}' is not a quantity; expected a number and a unit ({examples})")
    value, unit = float(match[1].replace("_", "")), match[2]
    if not unit and value != 0:
        raise ValueError(f"'{text}' has no unit; expected one of {examples}")
    if unit and unit not in units:
        raise ValueError(f"unknown unit '{unit}' in '{text}'; expected one of {examples}")
    result = value * units.get(unit, 1.0)
    if not math.isfinite(result) or result < 0:
        raise ValueError(f"'{text}' must be a finite, non-negative quantity")
    return result


def _parser(units: dict[str, float], *, whole: bool = False) -> BeforeValidator:
    def parse(text: Any) -> float | int:
        value = parse_quantity(text, units)
        return round(value) if whole else value

    return BeforeValidator(parse)


Bytes = Annotated[int, _parser(BYTES, whole=True)]
BytesPerSecond = Annotated[float, _parser(BYTES_PER_SECOND)]
Seconds = Annotated[float, _parser(SECONDS)]
FlopsPerSecond = Annotated[float, _parser(FLOPS_PER_SECOND)]
Watts = Annotated[float, _parser(WATTS)]


def format_bytes(count: float) -> str:
    """Decimal bytes for people: 1.5 GB."""
    return _scaled(count, "B")


def format_rate(bytes_per_second: float) -> str:
    """Decimal bytes per second for people: 400.0 GB/s."""
    return _scaled(bytes_per_second, "B/s")


def format_flops(flops_per_second: float) -> str:
    """FLOP/s for people: 431.2 TFLOP/s."""
    return _scaled(flops_per_second, "FLOP/s")


def _scaled(value: float, unit: str) -> str:
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds for people: 3.21 s, 14.2 ms, 8.0 us."""
    if abs(seconds) >= 1:
        return f"{seconds:.3f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us"
