"""Measurements that make a step better known, with their commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zsim.dataclass import dataclass
from zsim.report.trust.grounds import Ground

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
         "gpu.interference", "host", "pcie", "offload"),
        (MICROBENCH, "microbench.json"),
    ),
    **dict.fromkeys(("node_link", "nic", "network", "collectives"), (NCCL_TESTS, "all_gather.txt")),
    "nvme": (FIO, "read.json"),
}  # fmt: skip

KNOWN = frozenset({"measured", "calibrated"})
_SMALL = 0.01  # of the step; below it a better number does not show


@dataclass(frozen=True, slots=True)
class WantedNumbers:
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


def measurements(
    found: Sequence[Ground], cluster: str, nodes: int, gpus_per_node: int
) -> tuple[WantedNumbers, ...]:
    """The measurements that replace numbers which are neither measured nor calibrated, the largest part of
    the step first.

    Links are measured on at most 2 of the job's `nodes`. Parts below 1 % of the step are left out.
    """
    nodes = min(nodes, 2)
    ranks = nodes * gpus_per_node
    by_file: dict[str, WantedNumbers] = {}
    for table, fraction in _unknown(found):
        command, file = _RUNS[table]
        before = by_file.get(file)
        log = f" --ranks {ranks} --nodes {nodes}" if command is NCCL_TESTS else ""
        tables = (*before.tables, table) if before and table not in before.tables else (table,)
        by_file[file] = WantedNumbers(
            command.format(ranks=ranks, per_node=gpus_per_node),
            f"zsim calibrate {file} --base {cluster}{log} --name ours --out ours.toml",
            before.tables if before and table in before.tables else tables,
            (before.step_fraction if before else 0.0) + fraction,
            _PROGRAMS[command],
        )
    return tuple(sorted(by_file.values(), key=lambda one: -one.step_fraction))


def _unknown(found: Sequence[Ground]) -> Iterator[tuple[str, float]]:
    """The tables to measure. A part with several weak tables counts once, with the first."""
    for one in found:
        if one.evidence in KNOWN or one.step_fraction < _SMALL:
            continue
        rest = one.step_fraction
        for table in one.weakest:
            if table in _RUNS:
                yield table, rest
                rest = 0.0
