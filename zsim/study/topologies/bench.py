"""nccl-tests on a simulated cluster: one collective over a range of sizes, compared with measured curves."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.cost.collectives.rounds import bus_bytes
from zsim.errors import InputError, check_choice, unreadable_reason
from zsim.fabric.fabric import idle_fabric
from zsim.plan.ops import Collective, CollectiveKind, Group
from zsim.reading import read_text
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology

KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
)  # fmt: skip
SMALLEST, LARGEST = 8, 2**34
_COLUMNS = (
    "curve", "cluster", "nodes", "gpus", "collective", "size_bytes", "bus_gigabytes_per_second",
    "harness_seconds", "source",
)  # fmt: skip
_MAX_GPUS, _MAX_BYTES = 10**6, 2**60
_SCORED = (2**16, 2**32)  # bytes: the range in which errors are counted


@dataclass(frozen=True, slots=True)
class BenchRow:
    """The result for one size. `size_bytes` is the full tensor, as in nccl-tests."""

    size_bytes: int
    seconds: float
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    algorithm: str
    protocol: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A measured point of a curve and the simulated one."""

    curve: str
    cluster: str
    size_bytes: int
    measured_bus_bytes_per_second: float
    simulated_bus_bytes_per_second: float
    error: float
    """Simulated over measured time, less one."""
    is_scored: bool
    """The size is within 64 KiB to 4 GiB."""
    algorithm: str
    protocol: str
    source: str


def bench(
    cluster: Cluster,
    num_nodes: int,
    kind: str,
    group_size: int | None = None,
    *,
    gpus_per_node: int | None = None,
    sizes: Sequence[int] | None = None,
) -> list[BenchRow]:
    """Time of one collective by size, on otherwise idle links.

    `group_size` None means all GPUs. Otherwise consecutive groups of this size run concurrently (as
    nccl-tests does with NCCL_TESTS_SPLIT). `sizes` are powers of two from 8 B to 16 GiB when None.
    """
    check_choice(f"--collective: found '{kind}', ", kind, KINDS)
    chosen = next(name for name in KINDS if name == kind)
    topology = Topology(cluster, num_nodes, gpus_per_node or cluster.gpus_per_node)
    size = group_size or topology.world_size
    if size < 1 or topology.world_size % size:
        raise InputError(f"--group: found {size}, expected a divisor of the {topology.world_size} GPUs")
    name = "bench"
    collectives = [Collective(chosen, full, "fp32", name) for full in sizes or _powers(SMALLEST, LARGEST)]
    fabric = idle_fabric(topology, Group.regular(name, topology.world_size, size), collectives)
    forced = cluster.collectives.force_algorithm
    available = list(
        dict.fromkeys(method.algorithm for method in fabric.communicator(name).methods.get(kind, []))
    )
    if forced is not None and forced not in available and size > 1:
        raise InputError(
            f"--algorithm: {kind} in groups of {size} on {num_nodes} nodes of {cluster.name} has no "
            f"'{forced}'; expected {' or '.join(available)}"
        )
    rows = []
    for collective in collectives:
        transfer = fabric.transfer(collective, 0)
        seconds = transfer.isolated_seconds
        bus = bus_bytes(kind, collective.bytes, size)
        rates = (collective.bytes / seconds, bus / seconds) if seconds > 0 else (0.0, 0.0)
        rows.append(BenchRow(collective.bytes, seconds, *rates, transfer.algorithm, transfer.protocol))
    return rows


def force_choice(cluster: Cluster, algorithm: str | None, protocol: str | None, plan: bool) -> Cluster:
    """The cluster with a forced algorithm or protocol (NCCL_ALGO, NCCL_PROTO), else NCCL's own choice."""
    costs = cluster.collectives
    names = sorted({"ring", "tree", *costs.algorithms})
    if algorithm is not None:
        check_choice(f"--algorithm: found '{algorithm}', ", algorithm, names)
    protocols = sorted(
        {
            *costs.protocols,
            *(p for algorithm_protocols in costs.algorithms.values() for p in algorithm_protocols),
        }
    )
    if protocol is not None:
        check_choice(f"--protocol: found '{protocol}', ", protocol, protocols)
    if plan and costs.generation is None:
        raise InputError(f"--nccl-choice: cluster '{cluster.name}' does not say its 'generation'")
    changes = {
        "force_algorithm": algorithm or costs.force_algorithm,
        "force_protocol": protocol or costs.force_protocol,
        "choice": "tuning-model" if plan else costs.choice,
    }
    return cluster.model_copy(update={"collectives": costs.model_copy(update=changes)})


def compare_curves(path: Path) -> list[CurvePoint]:
    """Simulate every point of a table of measured curves (columns: validation/curves/README.md)."""
    curves: dict[str, list[dict[str, str]]] = {}
    for row in _read(path):
        curves.setdefault(row["curve"], []).append(row)
    points: list[CurvePoint] = []
    for name, rows in curves.items():
        first = rows[0]
        nodes, gpus = int(first["nodes"]), int(first["gpus"])
        sizes = [int(row["size_bytes"]) for row in rows]
        cluster = load_cluster(first["cluster"])
        simulated = bench(cluster, nodes, first["collective"], gpus_per_node=gpus // nodes, sizes=sizes)
        for row, bench_row in zip(rows, simulated, strict=True):
            bus = bus_bytes(first["collective"], bench_row.size_bytes, gpus)
            measured = float(row["bus_gigabytes_per_second"]) * 1e9
            seconds = bench_row.seconds + float(row["harness_seconds"] or 0)
            low, high = _SCORED
            points.append(
                CurvePoint(
                    name,
                    cluster.name,
                    bench_row.size_bytes,
                    measured,
                    bus / seconds,
                    measured * seconds / bus - 1,
                    low <= bench_row.size_bytes <= high and measured > 0,
                    bench_row.algorithm,
                    bench_row.protocol,
                    row["source"],
                )
            )
    return points


def median_error(points: Sequence[CurvePoint]) -> float | None:
    """Median absolute error of the scored points."""
    scored = [abs(point.error) for point in points if point.is_scored]
    return statistics.median(scored) if scored else None


def _powers(smallest: int, largest: int) -> list[int]:
    sizes = [smallest]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes


def _read(path: Path) -> list[dict[str, str]]:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    reader = csv.DictReader(text.splitlines())
    try:
        rows = list(reader)
    except csv.Error as error:
        raise InputError(f"{path.name}: line {reader.line_num}: not a CSV file: {error}") from None
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"{path.name}: missing column '{missing[0]}'")
    if not rows:
        raise InputError(f"{path.name}: no row below the header line; expected one per measured call")
    for number, row in enumerate(rows, 2):
        if not _has_numbers(row):
            raise InputError(
                f"{path.name}: line {number}: expected numbers in {', '.join(_COLUMNS[2:4])}, "
                f"{', '.join(_COLUMNS[5:8])}, whole GPUs on each node, and at least a byte"
            )
    return rows


def _has_numbers(row: Mapping[str, str]) -> bool:
    """Whether every cell that enters a calculation is a number."""
    try:
        nodes, gpus, size = int(row["nodes"]), int(row["gpus"]), int(row["size_bytes"])
        rate, harness = float(row["bus_gigabytes_per_second"]), float(row["harness_seconds"] or 0)
    except (TypeError, ValueError):
        return False
    is_consistent = 1 <= nodes <= gpus <= _MAX_GPUS and gpus % nodes == 0 and 1 <= size <= _MAX_BYTES
    return is_consistent and 0 <= rate < math.inf and 0 <= harness < math.inf
