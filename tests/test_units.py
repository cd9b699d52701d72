"""Quantities: what a unit is worth, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from zsim.reference.keys import find_keys
from zsim.units import (
    BYTES,
    BYTES_PER_SECOND,
    COUNTS,
    FLOPS_PER_SECOND,
    SECONDS,
    WATTS,
    Bytes,
    BytesPerSecond,
    Length,
    format_amount,
    format_bytes,
    format_energy,
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


def test_energy_and_amounts_have_three_digits_and_a_unit_of_their_size() -> None:
    assert format_energy(2310.4) == "2.31 GWh"
    assert format_energy(73.24) == "73.2 MWh"
    assert format_energy(0.4154) == "415 kWh"
    assert format_energy(0.9999) == "1.00 MWh"
    assert format_energy(8.05e-6) == "8.05 Wh"
    assert format_energy(0) == "0 Wh"
    assert format_amount(96_734.6) == "96,735"
    assert format_amount(99.97) == "100"
    assert format_amount(9.6) == "9.60"
    assert format_amount(0.042) == "0.0420"


def refusal(text: object, units: dict[str, float]) -> str:
    with pytest.raises(ValueError, match="unit") as caught:
        parse_quantity(text, units)
    return str(caught.value)


def test_an_unknown_rate_lists_units_of_bytes_and_of_bits() -> None:
    assert refusal("50 quick", BYTES_PER_SECOND) == (
        "unknown unit 'quick' in '50 quick'; expected one of B/s, kB/s, MB/s, GB/s, TB/s, KiB/s, MiB/s, "
        "GiB/s, TiB/s, b/s, kb/s, Mb/s, Gb/s, Tb/s, Gbit/s"
    )


@pytest.mark.parametrize(
    ("text", "units", "meant"),
    [
        ("400 GBit", BYTES_PER_SECOND, "'400 Gbit/s'"),
        ("400 Gbit", BYTES_PER_SECOND, "'400 Gbit/s'"),
        ("400 GBit/s", BYTES_PER_SECOND, "'400 Gbit/s'"),
        ("400 Gbits/sec", BYTES_PER_SECOND, "'400 Gbit/s'"),
        ("400 Gbps", BYTES_PER_SECOND, "'400 Gb/s'"),
        ("50 GBps", BYTES_PER_SECOND, "'50 GB/s'"),
        ("50 GB", BYTES_PER_SECOND, "'50 GB/s'"),
        ("50 Gbytes/s", BYTES_PER_SECOND, "'50 GB/s'"),
        ("50 gib/s", BYTES_PER_SECOND, "'50 GiB/s'"),
        ("50 gb/s", BYTES_PER_SECOND, "'50 GB/s' or '50 Gb/s'"),
        ("80 gb", BYTES, "'80 GB'"),
        ("80 kb", BYTES, "'80 kB'"),  # and not 'KB', which is the same
        ("5 \N{GREEK SMALL LETTER MU}s", SECONDS, "'5 us'"),
        ("5 msec", SECONDS, "'5 ms'"),
        ("5 seconds", SECONDS, "'5 s'"),
        ("989 TFLOPS", FLOPS_PER_SECOND, "'989 TFLOP/s'"),
        ("989 tflops/s", FLOPS_PER_SECOND, "'989 TFLOP/s'"),
        ("700 w", WATTS, "'700 W'"),
    ],
)
def test_a_unit_in_another_spelling_names_the_one_that_is_meant(
    text: str, units: dict[str, float], meant: str
) -> None:
    assert refusal(text, units).endswith(f"; did you mean {meant}?")


def test_a_unit_that_could_be_anything_has_no_suggestion() -> None:
    for text in ("50 quick", "50 Gx/s", "50 s"):
        assert "did you mean" not in refusal(text, BYTES_PER_SECOND)


def test_a_bare_number_is_shown_with_a_unit() -> None:
    """A number of millions is counted in the bare unit."""
    assert refusal(400, BYTES_PER_SECOND).endswith("Gbit/s, e.g. '400 GB/s'")
    assert refusal(50_000_000_000, BYTES_PER_SECOND).endswith("Gbit/s, e.g. '50000000000 B/s'")
    assert refusal(3, SECONDS) == "'3' has no unit; expected one of s, ms, us, µs, ns, e.g. '3 ms'"


def test_a_count_may_be_a_string_without_a_unit() -> None:
    """`run.tokens = "2e11"` was refused with "expected one of , k, M, B, G, T, e.g. '2e11 '"."""
    assert parse_quantity("2e11", COUNTS) == 2e11
    with pytest.raises(ValueError, match="expected one of k, M, G, T, B, Ki, Mi"):
        parse_quantity("2 Q", COUNTS)


@pytest.mark.parametrize(
    ("value", "tokens"), [("1M", 1_000_000), ("128Ki", 131_072), ("8k", 8000), (4096, 4096)]
)
def test_a_length_may_be_a_count(value: str | int, tokens: int) -> None:
    """ "1M" was refused, where `tokens = "15T"` is taken."""
    length = TypeAdapter(Length).validate_python(value)
    assert (length, type(length)) == (tokens, int)


@pytest.mark.parametrize("value", ["1.5", "0", "-1k", "M", 2.5, True, 2**27 + 1, "1G"])
def test_a_length_is_a_whole_number_from_1_to_2_to_the_27(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Length).validate_python(value)


@pytest.mark.parametrize(
    "path",
    [
        "training.sequence_length",
        "training.lengths.documents",
        "training.lengths.high",
        "training.lengths.pad_to",
        "rl.lengths.max_response",
        "rl.lengths.response.low",
        "run.phases[].sequence_length",
    ],
)
def test_every_length_may_be_a_count(path: str) -> None:
    """`rl.lengths.max_response = "1k"` was refused. A list has its limits at its values."""
    (key,) = find_keys(path)
    assert key.type.endswith('whole number, as in 4096, "1M" or "128Ki"')
    assert key.allowed == (() if key.name == "documents" else ("above 0", "at most 134,217,728"))
