"""Quantities: what a unit is worth, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from zsim.units import (
    BYTES,
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    SECONDS,
    Bytes,
    BytesPerSecond,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 kB", 1_000),
        ("1 MB", 1_000_000),
        ("1 GB", 1_000_000_000),
        ("1.5 TB", 1_500_000_000_000),
        ("1 KiB", 1_024),
        ("1 MiB", 1_048_576),
        ("2 GiB", 2_147_483_648),
        ("80_000 MB", 80_000_000_000),
        ("1e3B", 1_000),
        ("0", 0),
    ],
)
def test_decimal_prefixes_are_thousands_and_binary_prefixes_are_1024s(text: str, expected: float) -> None:
    assert parse_quantity(text, BYTES) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400 Gb/s", 50e9),  # a small b is a bit: 400e9 / 8
        ("400 Gbit/s", 50e9),
        ("400 GB/s", 400e9),
        ("3.35 TB/s", 3.35e12),
        ("1 GiB/s", 1_073_741_824),
        ("8 b/s", 1),
    ],
)
def test_a_small_b_is_an_eighth_of_a_large_one(text: str, expected: float) -> None:
    assert parse_quantity(text, BYTES_PER_SECOND) == pytest.approx(expected, rel=1e-12)


def test_times_and_rates_of_arithmetic() -> None:
    """14 us = 14e-6 s in both spellings of micro; 989.4 TFLOP/s = 989.4e12."""
    assert parse_quantity("14 us", SECONDS) == pytest.approx(14e-6)
    assert parse_quantity("14 µs", SECONDS) == pytest.approx(14e-6)
    assert parse_quantity("0.5 ms", SECONDS) == pytest.approx(5e-4)
    assert parse_quantity("989.4 TFLOP/s", FLOPS_PER_SECOND) == pytest.approx(989.4e12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (50, "has no unit; expected one of B/s, kB/s"),
        ("50", "has no unit"),
        ("50 Gbps", "unknown unit 'Gbps'"),
        ("50 GB", "unknown unit 'GB' in '50 GB'"),
        ("-1 GB/s", "must be a finite, non-negative quantity"),
        ("1e400 GB/s", "must be a finite, non-negative quantity"),
        ("fast", "is not a quantity"),
        (float("nan"), "is not a quantity"),
        (True, "expected a quantity as a string with a unit"),
        (None, "expected a quantity as a string with a unit"),
    ],
)
def test_what_is_no_rate_is_refused_with_the_reason(text: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_quantity(text, BYTES_PER_SECOND)


def test_a_schema_reads_bytes_as_whole_numbers_and_rates_as_floats() -> None:
    class Disk(BaseModel):
        capacity: Bytes
        bandwidth: BytesPerSecond

    disk = Disk.model_validate({"capacity": "79.18 GiB", "bandwidth": "3.5 GB/s"})
    assert disk.capacity == 85_018_877_624  # 79.18 x 2^30 = 85,018,877,624.32
    assert isinstance(disk.capacity, int)
    assert disk.bandwidth == 3.5e9
    with pytest.raises(ValidationError, match="has no unit"):
        Disk.model_validate({"capacity": 80, "bandwidth": "3.5 GB/s"})


def test_numbers_for_people_use_decimal_prefixes() -> None:
    assert format_bytes(1_500_000_000) == "1.50 GB"
    assert format_bytes(999) == "999 B"
    assert format_rate(50e9) == "50.00 GB/s"
    assert format_flops(431.2e12) == "431.20 TFLOP/s"
    assert format_seconds(3.21) == "3.210 s"
    assert format_seconds(0.0142) == "14.20 ms"
    assert format_seconds(8e-6) == "8.0 us"
