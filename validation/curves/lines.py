"""Straight lines that others put through NCCL's times, against the same lines through zsim's times.

    python -m validation.curves.lines

`lines.csv` has the bandwidth and the constant of unweighted least-squares lines t = b + x/B, x the bus bytes,
through 1 MiB to 1 GiB in powers of two (MooreThreads/SimuMax@4dcaae51 simu_tools/efficency_test,
`fit_bw_latency`). Large messages determine such a line: its constant is no latency of a small message, which
is why it is compared with zsim's line and not with zsim's rounds.

# [Note: one thread for eight GPUs]
Their nccl-tests run in one process with one thread (`-g 8`), which launches on all GPUs one after the other.
Its log of 8 H100 (nccl_fit.py) has 44 to 47 us for every collective up to 8 MiB, and 75 us for an
all-to-all, where one process per GPU takes 19 us on 8 B200 (`networks.csv`, Vultr, 1 MiB); its all-reduces
from 16 MiB on are NVIDIA's (`all_reduce.csv`, H100, 8 GPUs) within 3 %. So a call takes the longer of that
floor and its own time, which a second line shows: it raises the constant.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from validation.curves.measured import Curve, curve_of, preset_constants, read_curves
from zsim.cost.collectives.rounds import bus_bytes

LINES = Path(__file__).with_name("lines.csv")
SIZES = tuple(2**power for power in range(20, 31))
FLOORS = {"all_to_all": 75e-6}  # of 8 H100, see [Note: one thread for eight GPUs]
FLOOR = 45e-6


class Line(NamedTuple):
    """Bus bytes per second, and seconds at no bytes."""

    bandwidth: float
    constant: float


class Published(NamedTuple):
    """A published line, and zsim's curve of the same collective."""

    curve: Curve
    line: Line

    def simulated(self, floor: float = 0.0) -> Line:
        """The line through zsim's times, none of them below `floor` seconds."""
        curve, constants = self.curve, preset_constants(self.curve.cluster.name)
        return line_through(
            curve, lambda size: max(floor, curve.seconds(size, constants) - curve.harness_seconds)
        )


def line_through(curve: Curve, seconds: Callable[[int], float], sizes: tuple[int, ...] = SIZES) -> Line:
    """The unweighted least-squares line through `seconds` of every size."""
    moved = [bus_bytes(curve.kind, size, curve.gpus) for size in sizes]
    slope, constant = np.polyfit(moved, [seconds(size) for size in sizes], 1)
    return Line(1 / float(slope), float(constant))


def read_lines(path: Path = LINES) -> Iterator[Published]:
    """The published lines in the order of the file."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            curve = curve_of(row["cluster"], row["collective"], 1, int(row["gpus"]))  # type: ignore[arg-type]
            bandwidth, constant = row["line_gigabytes_per_second"], row["constant_us"]
            yield Published(curve, Line(float(bandwidth) * 1e9, float(constant) * 1e-6))


def measured_lines() -> Iterator[Published]:
    """The same lines through the curves of one node that are published point by point, without what their
    measuring programs add."""
    for curve in read_curves():
        seconds = {point.size_bytes: curve.measured_seconds(point) for point in curve.points}
        sizes = tuple(size for size in SIZES if size in seconds)
        if curve.communicator.num_domains == 1 and len(sizes) > 5:
            harness = curve.harness_seconds
            line = line_through(curve, lambda size, of=seconds, less=harness: of[size] - less, sizes)  # type: ignore[misc]
            yield Published(curve, line)


def main() -> None:
    """Print the lines: bandwidth in GB/s and constant in us."""
    print("curve                                     measured      zsim          zsim, floor of the harness")
    for published in read_lines():
        own = published.curve
        floor = FLOORS.get(own.kind, FLOOR)
        lines = published.line, published.simulated(), published.simulated(floor)
        _print(f"SimuMax, {own.gpus} GPUs of {own.cluster.name}, {own.kind}", lines)
    for published in measured_lines():
        own = published.curve
        _print(own.name, (published.line, published.simulated()))


def _print(what: str, lines: tuple[Line, ...]) -> None:
    cells = [f"{line.bandwidth / 1e9:7.1f} {line.constant * 1e6:5.1f}" for line in lines]
    print(f"{what:50s} {' '.join(cells)}")


if __name__ == "__main__":
    main()
