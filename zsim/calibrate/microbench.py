"""The JSON of `python -m validation.microbench`: every row is checked against the declaration of its
family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zsim.calibrate.checked_table import COUNT, FLAG, TEXT, CheckedTable, excerpt
from zsim.calibrate.measurements import Measurement, Measurements
from zsim.errors import InputError, did_you_mean

_FORMAT = 1
_BOTH = ("forward", "both")
_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_MODULE: Mapping[str, Any] = {"tokens": COUNT, "width": COUNT, "dtype": _DTYPES, "direction": _BOTH}


class BenchFamily(NamedTuple):
    """Declaration of a family's rows."""

    parameters: Mapping[str, str | tuple[str, ...]]
    """By name, each a kind of value or the words to choose from."""
    work: str = ""
    """The key (`flops`, `bytes`, `calls`) that their seconds need to be of use."""


FAMILIES: Mapping[str, BenchFamily] = {
    "gemm": BenchFamily({"m": COUNT, "n": COUNT, "k": COUNT, "dtype": _DTYPES}, "flops"),
    "attention": BenchFamily(
        {
            "batch": COUNT,
            "heads": COUNT,
            "length": COUNT,
            "head_dim": COUNT,
            "dtype": _DTYPES,
            "direction": _BOTH,
        },
        "flops",
    ),
    "rms_norm": BenchFamily(_MODULE, "bytes"),
    "rms_norm_eager": BenchFamily(_MODULE),
    "silu_times": BenchFamily(_MODULE, "bytes"),
    "residual": BenchFamily(_MODULE, "bytes"),
    "rotary": BenchFamily(_MODULE),
    "embedding": BenchFamily({**_MODULE, "vocab": COUNT}),
    "cross_entropy": BenchFamily({**_MODULE, "vocab": COUNT}),
    "copy": BenchFamily({}, "bytes"),
    "fill": BenchFamily({}, "bytes"),
    "adamw": BenchFamily(
        {"kind": ("fused", "foreach", "loop"), "place": ("cpu", "cuda"), "numel": COUNT, "threads": COUNT},
        "bytes",
    ),
    "host": BenchFamily({"what": TEXT}, "calls"),
    "host_copy": BenchFamily({"way": ("h2d", "d2h", "both"), "pinned": FLAG}, "bytes"),
    "gemm_beside_copy": BenchFamily({"way": ("none", "h2d", "d2h", "both")}, "flops"),
    "file": BenchFamily(
        {"op": ("read", "write"), "block_bytes": COUNT, "depth": COUNT, "direct": FLAG}, "bytes"
    ),
    "collective": BenchFamily({"kind": TEXT, "ranks": COUNT}, "bytes"),
    "interference": BenchFamily({"measured": TEXT, "beside": FLAG, "ranks": COUNT}),
}


def microbench_measurements(path: Path, data: Mapping[str, Any]) -> Measurements:
    """Every row of the file's `measurements`.

    Raises InputError for a family that zsim does not know, and for a row that lacks a value or has another
    kind of value than expected.
    """
    if data.get("format") != _FORMAT:
        raise InputError(f"{path.name}: format {data.get('format')!r}, expected {_FORMAT}")
    row_list = data["measurements"]
    if not isinstance(row_list, list):
        raise InputError(f"{path.name}: measurements: found {excerpt(row_list)}, expected a list of rows")
    rows = [_row(path, CheckedTable(row, f"{path.name}: measurement {n}")) for n, row in enumerate(row_list)]
    provenance = CheckedTable(data.get("provenance") or {}, f"{path.name}: provenance").content
    versions = CheckedTable(provenance.get("versions") or {}, f"{path.name}: provenance: versions").content
    version_text = ", ".join(f"{name} {version}" for name, version in versions.items())
    machine = (
        f"{provenance.get('machine', 'unknown machine')} ({version_text}, "
        f"{provenance.get('date', 'no date')})"
    )
    return Measurements(tuple(rows), (machine,), (), (path.name,))


def _row(path: Path, row: CheckedTable) -> Measurement:
    name = row.required("family", TEXT)
    family = FAMILIES.get(name)
    if family is None:
        family_names = ", ".join(FAMILIES)
        raise InputError(
            f"{row.path_text}: unknown family '{name}', expected {family_names}{did_you_mean(name, FAMILIES)}"
        )
    parameters, work, seconds = row.subtable("parameters"), row.subtable("work"), row.subtable("seconds")
    for key, kind in family.parameters.items():
        parameters.required(key, kind)
    median_seconds = seconds.required("median", COUNT)
    low, high = seconds.number("p10", median_seconds), seconds.number("p90", median_seconds)
    if family.work:
        work.required(family.work, COUNT)
    return Measurement(
        family=name,
        parameters={**parameters.content, "measured_threads": row.content.get("threads")},
        seconds=float(median_seconds),
        source=path.name,
        flops=work.number("flops", 0.0),
        bytes=work.number("bytes", 0.0),
        calls=work.number("calls", 1.0),
        relative_deviation=max(abs(high - median_seconds), abs(median_seconds - low)) / median_seconds,
        foreign_cpu_fraction=row.number("foreign_cpu_fraction", 0.0),
    )
