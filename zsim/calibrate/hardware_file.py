"""The result of a calibration as a cluster file that extends the calibrated cluster's file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.calibrate.kernel_fits import CurveFit, fit_gpu, unfitted
from zsim.calibrate.link_fits import MIN_COLLECTIVES, MIN_COPIES, MIN_TRANSFERS, RING_KINDS, fit_cluster
from zsim.calibrate.measurements import Measurement, Measurements
from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.formats.toml import toml_text
from zsim.units import round_digits


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration."""

    name: str
    base: str
    tables: Mapping[str, Mapping[str, Any]]
    """The file's changes to `base`, by table ("gpu.gemm", "node_link")."""
    fits: tuple[CurveFit, ...]
    machines: tuple[str, ...]
    notes: tuple[str, ...]

    def toml(self) -> str:
        """The file: only what was fitted, each table with its source and the range of its points."""
        described = f"{self.base}, calibrated from {', '.join(sources(self.fits))}"
        data: dict[str, Any] = {
            "schema": 1, "extends": self.base, "name": self.name, "description": described,
        }  # fmt: skip
        for path, content in self.tables.items():
            *parents, last = path.split(".")
            table = data
            for parent in parents:
                table = table.setdefault(parent, {})
            table[last] = {key: value for key, value in content.items() if value != {}}
        return toml_text(data)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "base": self.base,
            "machines": list(self.machines),
            "notes": list(self.notes),
            "fits": [_fit_dict(fit) for fit in self.fits],
            "tables": {table: dict(content) for table, content in self.tables.items()},
        }


def calibrate(
    cluster: Cluster, base: str, name: str, measured: Measurements, quiet: float = 0.1
) -> Calibration:
    """Fit the tables of `cluster`, which was loaded from `base`, to the measurements.

    Rows measured while others used more than `quiet` of the machine are left out. Raises InputError when
    nothing in the cluster follows from the measurements.
    """
    quiet_rows = tuple(row for row in measured.rows if row.foreign_cpu_fraction <= quiet)
    notes = list(measured.notes)
    if len(quiet_rows) < len(measured.rows):
        num_dropped = len(measured.rows) - len(quiet_rows)
        noun = "row" if num_dropped == 1 else "rows"
        notes.append(
            f"{num_dropped} {noun} left out: others used more than {quiet:.0%} of the machine meanwhile"
        )
    rows = Measurements(quiet_rows, measured.machines, (), measured.sources)
    notes += unfitted(cluster.gpu, rows)
    gpu, gpu_fits = fit_gpu(cluster.gpu, rows)
    changes, cluster_fits = fit_cluster(cluster.model_copy(update={"gpu": gpu}), rows)
    fits = (*gpu_fits, *cluster_fits)
    if not fits:
        raise InputError(f"nothing of '{base}' follows from these measurements: {_missing(quiet_rows)}")
    tables: dict[str, dict[str, Any]] = {}
    for fit in gpu_fits:
        for dotted, value in fit.values.items():
            table, _, key = dotted.partition(".")
            table_fits = [fit for fit in gpu_fits if _is_fit_of(fit, table)]
            content = tables.setdefault(f"gpu.{table}", _origin(table_fits, rows))
            if key.startswith("by_dtype."):
                content.setdefault("by_dtype", {})[key.removeprefix("by_dtype.")] = round_digits(value, 4)
            else:
                content[key] = _quantity(value, fit.units.get(dotted, ""))
            if dotted == "gemm.max_fraction" and cluster.gpu.gemm.transformer_engine_ratio != 1:
                content["transformer_engine_ratio"] = 1.0  # the base's is to what that sustains, not to these
            content["measured_range"] = {**content.get("measured_range", {}), **fit.ranges}
    if "max_fraction" in tables.get("gpu.gemm", {}):
        notes.append(_products_alone(tables["gpu.gemm"]["max_fraction"], base, cluster))
        tables["gpu.gemm"]["source"] += f"; {notes[-1]}"
    for table, values in changes.items():
        table_fits = [fit for fit in cluster_fits if _is_fit_of(fit, table)]
        content = _origin(table_fits, rows) | {key: _file_value(key, value) for key, value in values.items()}
        content["measured_range"] = {key: span for fit in table_fits for key, span in fit.ranges.items()}
        tables[table] = content
    return Calibration(name, base, tables, fits, measured.machines, tuple(notes))


def _products_alone(fraction: float, base: str, cluster: Cluster) -> str:
    """A note on the products' fitted rate beside the one that steps sustain."""
    gemm = cluster.gpu.gemm
    return (
        f"gemm.max_fraction {fraction:.3g} is of products timed alone, where '{base}' has "
        f"{gemm.max_fraction:.3g} ({gemm.evidence}): at its power limit a GPU sustains less in training, so "
        "steps may be predicted too short; for sustained rates set it by a training step timed there, or "
        "leave [gpu.gemm] out of the file"
    )


# The rows that a fit of a family takes.
_NEEDED_ROWS = {
    "collective": f"{MIN_COLLECTIVES} of {', '.join(RING_KINDS[:-1])} or {RING_KINDS[-1]}, "
    "all within a node or all across nodes, of several sizes",
    "host_copy": f"{MIN_COPIES} sizes of pinned copies to or from the GPU",
    "file": f"{MIN_TRANSFERS} direct reads or {MIN_TRANSFERS} direct writes of several block sizes or depths",
    "gemm": "1 more than there are types, of types that the GPU has",
    "attention": "4 lengths, of a type that the GPU has",
    "copy": "2 sizes",
    "interference": "1 group of ranks both beside other work and not",
}


def _missing(rows: Sequence[Measurement]) -> str:
    """The rows of each family, and how many a fit of it takes."""
    counts = Counter(row.family for row in rows)
    if not counts:
        return "no rows are left"
    texts = []
    for family, count in sorted(counts.items()):
        needed = f" (expected at least {_NEEDED_ROWS[family]})" if family in _NEEDED_ROWS else ""
        texts.append(f"{count} {'row' if count == 1 else 'rows'} of {family}{needed}")
    return ", ".join(texts)


def sources(fits: Sequence[CurveFit]) -> list[str]:
    return list(dict.fromkeys(source for fit in fits for source in fit.sources))


_TABLE_OF = {"collectives within": ("node_link", "collectives"), "collectives across": ("nic", "collectives")}


def _is_fit_of(fit: CurveFit, table: str) -> bool:
    for start, tables in _TABLE_OF.items():
        if fit.title.startswith(start):
            return table in tables
    return any(name.split(".")[0] == table for name in fit.values)


def _origin(fits: Sequence[CurveFit], measured: Measurements) -> dict[str, Any]:
    """`source` and `evidence` of a table: each of its fits, with its points and errors."""
    machine = f" on {'; '.join(measured.machines)}" if measured.machines else ""
    fit_texts = "; ".join(f"{fit.title}: {', '.join(fit.sources)}{machine}: {_errors(fit)}" for fit in fits)
    return {"source": f"zsim calibrate, {fit_texts}", "evidence": "calibrated"}


def _errors(fit: CurveFit) -> str:
    bound = f"; at a limit of the search: {', '.join(fit.at_bound)}" if fit.at_bound else ""
    if not fit.points:
        return f"one figure{bound}"
    errors = f"median error {fit.median_error:.1%}, worst {fit.worst_error:.0%}"
    return f"{len(fit.points)} points, {errors}{bound}"


def _file_value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _file_value(name, item) for name, item in value.items()}
    if isinstance(value, float):
        return _quantity(value, _UNIT_OF.get(key, ""))
    return f"{value} B" if key in ("capacity", "write_cache") and value is not None else value


_UNIT_OF = {
    "seconds_per_launch": "s", "latency": "s", "read_latency": "s", "write_latency": "s", "base": "s",
    "intra_round": "s", "inter_round": "s", "network_overhead": "s", "ramp": "s", "network_ramp": "s",
    "bandwidth": "B/s", "pageable_bandwidth": "B/s", "read_bandwidth": "B/s", "write_bandwidth": "B/s",
    "sustained_write_bandwidth": "B/s", "thread_bandwidth": "B/s",
}  # fmt: skip


def _quantity(value: float, unit: str) -> Any:
    """A number as files have it: seconds in microseconds, rates in GB/s or GFLOP/s, bytes as integers."""
    if unit == "s":
        return f"{round_digits(value * 1e6, 4)} us"
    if unit == "B/s":
        return f"{round_digits(value / 1e9, 4)} GB/s"
    if unit == "FLOP/s":
        return f"{round_digits(value / 1e9, 4)} GFLOP/s"
    if unit == "B":
        return f"{round(value)} B"
    return round_digits(value, 4)


def _fit_dict(fit: CurveFit) -> dict[str, Any]:
    return {
        "title": fit.title,
        "values": dict(fit.values),
        "units": dict(fit.units),
        "ranges": {name: list(ends) for name, ends in fit.ranges.items()},
        "sources": list(fit.sources),
        "at_bound": list(fit.at_bound),
        "points": len(fit.points),
        "median_absolute_error": fit.median_error,
        "worst_absolute_error": fit.worst_error,
        "bias": fit.bias,
    }
