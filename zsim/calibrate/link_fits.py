"""Fits a cluster's tables to timed collectives, copies, files and host work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.calibrate.kernel_fits import CurveFit, FitParameter, fit_points, robust_fit, sources, value_range
from zsim.calibrate.measurements import Measurement, Measurements
from zsim.cost.collectives.rounds import bus_bytes, ring_rounds
from zsim.cost.rates.host_calls import load_host_costs
from zsim.cost.rates.offload import stream_bytes_per_second
from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster, Nvme

_ORIGIN = ("source", "evidence", "measured_range")
RING_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
MIN_COLLECTIVES, MIN_COPIES, MIN_TRANSFERS = 4, 2, 2  # rows that are fitted


def fit_cluster(cluster: Cluster, measured: Measurements) -> tuple[dict[str, dict[str, Any]], list[CurveFit]]:
    """Changed tables of the cluster file by name, and the fits behind them. `cluster` has the fitted GPU."""
    tables: dict[str, dict[str, Any]] = {}
    fits: list[CurveFit] = []
    for fit in (_host, _framework, _collectives, _host_copies, _drives, _host_optimizer):
        changes, new_fits = fit(cluster, measured)
        for table, values in changes.items():
            tables.setdefault(table, {}).update(values)
        fits += new_fits
    return tables, fits


TablesAndFits = tuple[dict[str, dict[str, Any]], list[CurveFit]]


def _host(cluster: Cluster, measured: Measurements) -> TablesAndFits:
    """The host's cost of issuing one kernel.

    On a CPU that is part of the kernel (`_launch`), and the machine's cores are taken from its name ("2 x AMD
    EPYC").
    """
    rows = measured.select("host", what="launch")
    if cluster.gpu.vendor == "cpu" and (cores := cpu_cores(measured)):
        fit = CurveFit("the machine", {"host.cores": cores}, (), {}, measured.sources)
        return {"host": {"cores": cores}}, [fit]
    if cluster.gpu.vendor == "cpu" or not rows:
        return {}, []
    seconds = _seconds_per_call(rows)
    name = "host.seconds_per_launch"
    fit = CurveFit("launch of one kernel", {name: seconds}, (), {}, sources(rows), {name: "s"})
    return {"host": {"seconds_per_launch": seconds}}, [fit]


def _seconds_per_call(rows: list[Measurement]) -> float:
    """Seconds per call of the fastest row: other load only ever makes a row slower."""
    return min(row.seconds / row.calls for row in rows)


def _framework(cluster: Cluster, measured: Measurements) -> TablesAndFits:
    """Factor on the frameworks' Python of this host relative to the reference host: of a call of
    `nn.Identity`, which is the same with and without a GPU."""
    rows = measured.select("host", what="module_call")
    if not rows:
        return {}, []
    factor = _seconds_per_call(rows) / load_host_costs().seconds["identity_call"]
    name = "host.overhead_factor"
    fit = CurveFit("the frameworks' Python", {name: factor}, (), {}, sources(rows))
    return {"host": {"overhead_factor": factor}}, [fit]


def _collectives(cluster: Cluster, measured: Measurements) -> TablesAndFits:
    """Fits start, round and rate of one ring edge, for groups within a node and groups across nodes.

        t = base + n_intra r_intra + n_inter r_inter + b / x

    n is the rounds of the ring, b the bus bytes of the call, x the bytes per second of the slowest edge.
    Within a node x is `node_link.bandwidth` times `efficiency`. Between nodes NCCL's channels use the cards
    of all ranks of a node side by side, so there x is the number of those ranks times a GPU's share of the
    cards times the cards' efficiency, as long as the links inside the node are not slower.
    """
    rows = [row for row in measured.select("collective") if row["kind"] in RING_KINDS and row.bytes > 0]
    if cluster.collectives.backend == "gloo":  # its reduce-scatter is an all-reduce, its broadcast not a ring
        rows = [row for row in rows if row["kind"] in ("all_gather", "all_reduce")]
    inner_rows = [
        row
        for row in rows
        if int(row["nodes"] or 1) == 1 and _has_core_per_rank(cluster, row, cpu_cores(measured))
    ]
    outer_rows = [row for row in rows if int(row["nodes"] or 1) > 1]
    tables: dict[str, dict[str, Any]] = {}
    fits: list[CurveFit] = []
    protocol = "tcp" if "tcp" in cluster.collectives.protocols else "simple"
    base = cluster.collectives.protocols[protocol]
    inner_rate = cluster.node_link.bandwidth * cluster.node_link.efficiency
    if len(inner_rows) >= MIN_COLLECTIVES:
        start = cluster.node_link.bandwidth * cluster.node_link.efficiency or 1e9
        fit, values = _ring_fit("collectives within a node", inner_rows, start, base.base, base.intra_round)
        inner_rate = values["rate"]
        fits.append(fit)
        tables |= _ring_tables(cluster, protocol, values, "node_link", "intra_round")
    if len(outer_rows) >= MIN_COLLECTIVES:
        start = cluster.nic.bandwidth * cluster.nic.per_node / cluster.gpus_per_node * cluster.nic.efficiency
        if inner_rate > 0:  # begin where the cards are what is slower
            start = min(
                start, 0.9 * inner_rate / max(int(row["ranks"]) // int(row["nodes"]) for row in outer_rows)
            )
        fit, values = _ring_fit(
            "collectives across nodes", outer_rows, start, base.base, base.inter_round, inner_rate=inner_rate
        )
        fits.append(fit)
        ring_tables = _ring_tables(cluster, protocol, values, "nic", "inter_round")
        for table, changes in ring_tables.items():
            tables.setdefault(table, {}).update(changes)
    return tables, fits


def cpu_cores(measured: Measurements) -> int | None:
    """The cores of the machine if only one was measured and its name begins with their number, else None."""
    core_counts = {
        int(match[1]) for machine in measured.machines if (match := re.match(r"(\d+) x ", machine))
    }
    return core_counts.pop() if len(core_counts) == 1 else None


def _has_core_per_rank(cluster: Cluster, row: Measurement, cores: int | None) -> bool:
    """False on a CPU for more ranks than cores: ranks that share a core do not measure the link."""
    return cluster.gpu.vendor != "cpu" or int(row["ranks"]) <= (cores or cluster.host.cores)


_MAX_MEDIAN_ERROR = 0.5  # with a median error above this the points are no measurement of a link


def _ring_fit(
    title: str,
    rows: list[Measurement],
    rate: float,
    base: float,
    round_seconds: float,
    *,
    inner_rate: float | None = None,
) -> tuple[CurveFit, dict[str, float]]:
    parameters = [
        FitParameter("base", max(base, 1e-6), 1e-7, 1e-1),
        FitParameter("round", max(round_seconds, 1e-7), 1e-8, 1e-2),
        FitParameter("rate", rate, rate / 1e3, rate * 1e3),
    ]
    measured = [row.seconds for row in rows]

    def predict(values: Mapping[str, float]) -> list[float]:
        seconds = []
        for row in rows:
            ranks, nodes = int(row["ranks"]), int(row["nodes"] or 1)
            rounds = ring_rounds(str(row["kind"]), ranks, nodes)
            steps = rounds.inter if nodes > 1 else rounds.intra
            moved_bytes = bus_bytes(str(row["kind"]), row.bytes, ranks)
            edge = (
                values["rate"]
                if inner_rate is None
                else _node_edge(values["rate"], inner_rate, ranks // nodes)
            )
            seconds.append(values["base"] + steps * values["round"] + moved_bytes / edge)
        return seconds

    values, stuck = robust_fit(parameters, predict, measured)
    labels = [f"{row['kind']} of {row.bytes:.0f} B on {row['ranks']}" for row in rows]
    xs = [row.bytes for row in rows]
    fit = CurveFit(
        title,
        {"start": values["base"], "round": values["round"], "edge": values["rate"]},
        fit_points(labels, xs, measured, predict(values)),
        {"bytes": value_range(xs), "ranks": value_range([float(row["ranks"]) for row in rows])},
        sources(rows),
        {"start": "s", "round": "s", "edge": "B/s"},
        stuck,
    )
    if fit.median_error > _MAX_MEDIAN_ERROR:
        raise InputError(
            f"{title}: no start, round and rate fit these {len(rows)} points (half are off by more than "
            f"{fit.median_error:.0%}); were they taken beside other work, or stamped when calls had returned?"
        )
    return fit, values


def _node_edge(per_gpu: float, inner_rate: float, ranks: int) -> float:
    """Bytes per second of a ring from node to node.

    Each of a node's `ranks` has `per_gpu` of the cards, and the ring also runs over links of `inner_rate` (0:
    none) between them.
    """
    return per_gpu * ranks if ranks <= 1 or inner_rate <= 0 else min(per_gpu * ranks, inner_rate)


def _ring_tables(
    cluster: Cluster, protocol: str, values: dict[str, float], link: str, round_name: str
) -> dict[str, dict[str, Any]]:
    """The fitted values as tables: the rate is the link's efficiency if the link has a data sheet, else its
    bandwidth."""
    rate: dict[str, Any]
    if link == "nic":
        share = cluster.nic.bandwidth * cluster.nic.per_node / cluster.gpus_per_node
        rate = {"efficiency": min(1.0, values["rate"] / share)}
    elif cluster.node_link.kind != "none" and values["rate"] <= cluster.node_link.bandwidth:
        rate = {"efficiency": values["rate"] / cluster.node_link.bandwidth}
    else:
        rate = {"bandwidth": values["rate"], "efficiency": 1.0, "kind": "switch"}
    costs = cluster.collectives.protocols[protocol]
    changed = {"base": values["base"], round_name: values["round"]}
    protocols = {name: dict(cost) for name, cost in cluster.collectives.protocols.items()}
    protocols[protocol] = dict(costs) | changed
    return {link: rate, "collectives": {"protocols": protocols}}


def _host_copies(cluster: Cluster, measured: Measurements) -> TablesAndFits:
    """Fits pinned copies over PCIe, one way at a time: t = latency + bytes / rate."""
    rows = [
        row
        for row in measured.select("host_copy", pinned=True)
        if row["way"] in ("h2d", "d2h") and row.bytes > 0
    ]
    if len(rows) < MIN_COPIES:
        return {}, []
    parameters = [
        FitParameter("pcie.latency", max(cluster.pcie.latency, 1e-6), 1e-7, 1e-3),
        FitParameter("pcie.efficiency", cluster.pcie.efficiency, 0.01, 1.0),
    ]

    def predict(values: Mapping[str, float]) -> list[float]:
        rate = cluster.pcie.bandwidth * values["pcie.efficiency"]
        return [values["pcie.latency"] + row.bytes / rate for row in rows]

    measured_seconds, xs = [row.seconds for row in rows], [row.bytes for row in rows]
    values, stuck = robust_fit(parameters, predict, measured_seconds)
    labels = [f"{row['way']} {row.bytes:.0f} B" for row in rows]
    points = fit_points(labels, xs, measured_seconds, predict(values))
    fit = CurveFit(
        "copies over PCIe",
        values,
        points,
        {"bytes": value_range(xs)},
        sources(rows),
        {"pcie.latency": "s"},
        stuck,
    )
    return {"pcie": {"latency": values["pcie.latency"], "efficiency": values["pcie.efficiency"]}}, [fit]


def _drives(cluster: Cluster, measured: Measurements) -> TablesAndFits:
    """Fits bandwidth and latency of one drive each way, by Little's law (`zsim.cost.rates.offload`)."""
    tables: dict[str, Any] = {}
    fits: list[CurveFit] = []
    base = cluster.nvme
    if base is None:
        rows = measured.select("file")
        if not rows:
            return {}, []
        base = Nvme.model_validate(_UNKNOWN_DRIVE)
    for op, name in (("read", "read_bandwidth"), ("write", "write_bandwidth")):
        rows = [
            row for row in measured.select("file", op=op) if row["direct"] is not False and _rate_of(row) > 0
        ]
        if len(rows) < MIN_TRANSFERS:
            continue
        fit, values = _drive_fit(base, op, name, rows)
        fits.append(fit)
        tables |= {name: values[name], f"{op}_latency": values["latency"], "efficiency": 1.0}
    if not tables:
        return {}, []
    if cluster.nvme is None:
        tables = {key: value for key, value in base if key not in _ORIGIN} | tables
    return {"nvme": tables}, fits


_UNKNOWN_DRIVE = {
    "source": "calibrated from file measurements", "evidence": "calibrated", "drives": 1, "capacity": "1 TB",
    "read_bandwidth": "1 GB/s", "write_bandwidth": "1 GB/s",
}  # fmt: skip


def _rate_of(row: Measurement) -> float:
    return row.rate_bytes_per_second or (row.bytes / row.seconds if row.seconds > 0 else 0.0)


def _drive_fit(base: Nvme, op: str, name: str, rows: list[Measurement]) -> tuple[CurveFit, dict[str, float]]:
    rates = [_rate_of(row) for row in rows]
    parameters = [
        FitParameter(name, max(rates) / base.drives, min(rates) / 10, max(rates) * 10),
        FitParameter("latency", 1e-4, 1e-6, 1e-1),
    ]

    def predict(values: Mapping[str, float]) -> list[float]:
        changes = {name: values[name], f"{op}_latency": values["latency"], "efficiency": 1.0}
        drive = base.model_copy(update=changes)
        return [
            1e9 / stream_bytes_per_second(drive, op, int(row["block_bytes"]), int(row["depth"]), 1)  # type: ignore[arg-type]
            for row in rows
        ]

    measured = [1e9 / rate for rate in rates]  # seconds of a gigabyte
    values, stuck = robust_fit(parameters, predict, measured)
    labels = [f"{op} {row['block_bytes']} B x {row['depth']}" for row in rows]
    xs = [float(row["block_bytes"] * row["depth"]) for row in rows]
    ranges = {
        "block_bytes": value_range([float(row["block_bytes"]) for row in rows]),
        "depth": value_range([float(row["depth"]) for row in rows]),
    }
    drive_values = {f"nvme.{name}": values[name], f"nvme.{op}_latency": values["latency"]}
    units = {f"nvme.{name}": "B/s", f"nvme.{op}_latency": "s"}
    fit = CurveFit(
        f"drive, {op}",
        drive_values,
        fit_points(labels, xs, measured, predict(values)),
        ranges,
        sources(rows),
        units,
        stuck,
    )
    return fit, values


def _host_optimizer(cluster: Cluster, measured: Measurements) -> TablesAndFits:
    """Fused AdamW on the CPU with the maximum number of threads measured, as a fraction of the host's memory
    bandwidth, and with one, as bytes per second."""
    rows = [row for row in measured.select("adamw", kind="fused", place="cpu") if row.bytes > 0]
    if not rows:
        return {}, []
    threads = max(int(row["threads"] or 1) for row in rows)

    def largest(count: int) -> Measurement:
        return max((row for row in rows if int(row["threads"] or 1) == count), key=lambda row: row.bytes)

    row = largest(threads)
    fitted = {"optimizer_fraction": min(1.0, row.bytes / row.seconds / cluster.host.memory_bandwidth)}
    if any(int(row["threads"] or 1) == 1 for row in rows):
        fitted["thread_bandwidth"] = largest(1).bytes / largest(1).seconds
    fit = CurveFit(
        "AdamW on the CPU",
        {f"offload.{name}": value for name, value in fitted.items()},
        (),
        {"threads": (threads, threads)},
        sources([row]),
        {"offload.thread_bandwidth": "B/s"},
    )
    rates = {key: value for key, value in cluster.offload if key not in (*_ORIGIN, "spread")}
    return {"offload": rates | fitted}, [fit]
