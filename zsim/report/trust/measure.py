"""Measurements that make a step better known, with their commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zsim.report.trust.evidence_items import EvidenceItem

MICROBENCH = "python -m validation.microbench --out microbench.json"
NCCL_TESTS = "mpirun -np {ranks} -N {per_node} ./build/all_gather_perf -b 1M -e 4G -f 4 -g 1 > all_gather.txt"
FIO = (
    "fio --name=read --rw=read --bs=1M --iodepth=32 --direct=1 --ioengine=libaio --size=32G "
    "--directory=/nvme --output-format=json > read.json"
)

_PROGRAMS = {
    MICROBENCH: "in a checkout of zsim's source, with torch: the wheel has no package `validation`",
    NCCL_TESTS: "of NVIDIA's nccl-tests, built with MPI=1",
    FIO: "with fio, from your system's packages",
}

# Table -> (what to run where, the file it writes), of those that `zsim calibrate` fits.
_RUNS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("gpu.peak", "gpu.gemm", "gpu.attention", "gpu.memory", "gpu.memory_bound", "gpu.launch",
         "gpu.interference", "host", "pcie", "c2c", "offload"),
        (MICROBENCH, "microbench.json"),
    ),
    **dict.fromkeys(("node_link", "nic", "network", "collectives"), (NCCL_TESTS, "all_gather.txt")),
    "nvme": (FIO, "read.json"),
}  # fmt: skip

KNOWN = frozenset({"measured", "calibrated"})
_LEAST_FRACTION = 0.01  # of the step; below it a better number does not show


@dataclass(frozen=True, slots=True)
class ProposedMeasurement:
    """A command that measures numbers which nobody has measured, and on which the step rests."""

    command: str
    calibrate: str
    """The command that makes a cluster file of what `command` writes."""
    tables: tuple[str, ...]
    """The tables whose numbers are measured."""
    step_fraction: float
    """The fraction of the step that rests on them."""
    program: str
    """Which program `command` runs, and where that comes from."""


def propose_measurements(
    items: Sequence[EvidenceItem], cluster: str, nodes: int, gpus_per_node: int
) -> tuple[ProposedMeasurement, ...]:
    """The measurements that replace numbers which are neither measured nor calibrated, the largest part of
    the step first.

    Links are measured on at most 2 of the job's `nodes`. Parts below 1 % of the step are left out.
    """
    nodes = min(nodes, 2)
    ranks = nodes * gpus_per_node
    by_file: dict[str, ProposedMeasurement] = {}
    for table, fraction in _unmeasured_tables(items):
        command, file = _RUNS[table]
        previous = by_file.get(file)
        log = f" --ranks {ranks} --nodes {nodes}" if command is NCCL_TESTS else ""
        tables = (*previous.tables, table) if previous and table not in previous.tables else (table,)
        by_file[file] = ProposedMeasurement(
            command.format(ranks=ranks, per_node=gpus_per_node),
            f"zsim calibrate {file} --base {cluster}{log} --name ours --out ours.toml",
            previous.tables if previous and table in previous.tables else tables,
            (previous.step_fraction if previous else 0.0) + fraction,
            _PROGRAMS[command],
        )
    return tuple(sorted(by_file.values(), key=lambda measurement: -measurement.step_fraction))


def _unmeasured_tables(items: Sequence[EvidenceItem]) -> Iterator[tuple[str, float]]:
    """The tables to measure. A part with several weak tables counts once, with the first."""
    for item in items:
        if item.evidence in KNOWN or item.step_fraction < _LEAST_FRACTION:
            continue
        fraction = item.step_fraction
        for table in item.weakest:
            if table in _RUNS:
                yield table, fraction
                fraction = 0.0
