"""Time benchmarks, and store the results in a file."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from validation.machine_load import CpuLoad, foreign_fraction
from validation.provenance import provenance

FORMAT = 1
MIN_REPEATS, MAX_REPEATS = 5, 200
BUDGET_SECONDS = 0.5  # per measurement on the host, after warming up
GPU_BUDGET_SECONDS, GPU_MIN_REPEATS = 0.15, 8


@dataclass(frozen=True)
class Benchmark:
    """One measurement to make: `prepare` builds the tensors and returns the function to time.

    `work` holds FLOPs, bytes, elements or calls as zsim counts them: full tensors of collectives, reads plus
    writes of kernels. `timed_on` is the clock to use, the host's or the device's; `threads` is torch's number
    of threads in this process."""

    family: str
    parameters: dict[str, Any]
    prepare: Callable[[], Callable[[], Any]]
    work: dict[str, float] = field(default_factory=dict)
    timed_on: str = "host"
    threads: int = 1

    @property
    def key(self) -> str:
        """Family and parameters on one line."""
        return key_of(self.family, self.parameters)


def key_of(family: str, parameters: dict[str, Any]) -> str:
    return f"{family} " + " ".join(f"{name}={value}" for name, value in parameters.items())


@dataclass(frozen=True)
class Times:
    """Wall seconds and thread CPU seconds of each repeat (no CPU seconds where a GPU is timed)."""

    wall: Sequence[float]
    cpu: Sequence[float] = ()
    foreign_cpu_fraction: float = 0.0


def measure(benchmark: Benchmark) -> Times:
    """Prepare, warm up, repeat."""
    torch.set_num_threads(benchmark.threads)
    run = benchmark.prepare()
    load = CpuLoad()
    wall, cpu = time_on_host(run) if benchmark.timed_on == "host" else (time_on_gpu(run), [])
    return Times(wall, cpu, foreign_fraction(*load.since()))


def time_on_host(run: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """(wall, thread CPU) seconds of each repeat, as many repeats as the budget allows."""
    for _ in range(3):
        run()
    wall: list[float] = []
    cpu: list[float] = []
    begun = time.perf_counter()
    while len(wall) < MIN_REPEATS or (
        len(wall) < MAX_REPEATS and time.perf_counter() - begun < BUDGET_SECONDS
    ):
        start, cpu_start = time.perf_counter(), time.thread_time()
        run()
        cpu.append(time.thread_time() - cpu_start)
        wall.append(time.perf_counter() - start)
    return wall, cpu


def time_on_gpu(run: Callable[[], Any]) -> list[float]:
    """Seconds of each repeat by CUDA events. Repeats are issued without waiting, so the device is timed and
    not the launch."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start_time = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - start_time, 1e-6)
    repeats = int(min(MAX_REPEATS, max(GPU_MIN_REPEATS, GPU_BUDGET_SECONDS / once)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median, mean, 10th and 90th percentile, minimum, count; None for an empty list.

    The mean is needed because a step is a sum of parts: its mean is the sum of means, while medians of skewed
    times add up to too little."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    low, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.1, 0.9))
    rounded = {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "p10": low,
        "p90": high,
        "min": ordered[0],
    }
    return {name: float(f"{value:.4g}") for name, value in rounded.items()} | {"repeats": len(ordered)}


class ResultFile:
    """The results so far, one row each, written after each measurement."""

    def __init__(self, path: Path, command: str, device: str) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            rows = json.loads(path.read_text())["measurements"]
            self.rows = {key_of(row["family"], row["parameters"]): row for row in rows}
        self.provenance = provenance(command, device=device_name(device))

    def has(self, benchmark: Benchmark, quieter_than: float = 1.0) -> bool:
        """Whether it was measured already, while others used no more than `quieter_than` of the machine."""
        row = self.rows.get(benchmark.key)
        return row is not None and row["foreign_cpu_fraction"] <= quieter_than

    def add(self, benchmark: Benchmark, times: Times) -> None:
        """Store the measurement, unless the file has one that was disturbed less."""
        if self.has(benchmark, quieter_than=times.foreign_cpu_fraction):
            return
        self.rows[benchmark.key] = {
            "family": benchmark.family,
            "parameters": benchmark.parameters,
            "work": benchmark.work,
            "timed_on": benchmark.timed_on,
            "threads": benchmark.threads,
            "seconds": spread(times.wall),
            "cpu_seconds": spread(times.cpu),
            "foreign_cpu_fraction": times.foreign_cpu_fraction,
        }
        head = json.dumps(self.provenance)
        rows = ",\n".join(f"  {json.dumps(row)}" for row in self.rows.values())
        partial = self.path.with_suffix(".partial")
        partial.write_text(
            f'{{"format": {FORMAT},\n "provenance": {head},\n "measurements": [\n{rows}\n]}}\n'
        )
        partial.rename(self.path)


def device_name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


def rates(work: dict[str, float], seconds: float) -> str:
    """The rates, for the progress line."""
    parts = []
    if "flops" in work:
        parts.append(f"{work['flops'] / seconds / 1e12:8.3f} TFLOP/s")
    if "bytes" in work:
        parts.append(f"{work['bytes'] / seconds / 1e9:8.3f} GB/s")
    if "calls" in work:
        parts.append(f"{seconds / work['calls'] * 1e6:8.2f} us each")
    return " ".join(parts)


def sizes(smallest: int, largest: int, factor: int = 4) -> Iterator[int]:
    """The sizes smallest, smallest x factor, ... up to largest."""
    while smallest <= largest:
        yield smallest
        smallest *= factor
