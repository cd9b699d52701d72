"""How something is timed, and the file that results go to."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from validation.provenance import provenance

MIN_REPEATS, MAX_REPEATS = 5, 200
BUDGET_SECONDS = 0.6  # per measurement, after warming up


@dataclass(frozen=True)
class Benchmark:
    """One measurement to make: `prepare` builds the tensors and gives the thing to time.

    `work` holds FLOPs and bytes as zsim counts them: full tensors of collectives, reads plus writes of
    kernels."""

    family: str
    parameters: dict[str, Any]
    prepare: Callable[[], Callable[[], Any]]
    work: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Family and parameters in one line: what the file knows it by."""
        return f"{self.family} " + " ".join(f"{name}={value}" for name, value in self.parameters.items())


def time_repeats(run: Callable[[], Any], device: str) -> list[float]:
    """Seconds of each repeat, by CUDA events on a GPU; as many as the budget allows.

    On a GPU repeats are issued without waiting, so what is timed is the device and not the launch.
    """
    for _ in range(3):
        run()
    if device == "cpu":
        seconds: list[float] = []
        begun = time.perf_counter()
        while len(seconds) < MIN_REPEATS or (
            len(seconds) < MAX_REPEATS and time.perf_counter() - begun < BUDGET_SECONDS
        ):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return seconds
    torch.cuda.synchronize()
    start_time = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - start_time, 1e-6)
    repeats = int(min(MAX_REPEATS, max(20, BUDGET_SECONDS / once)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, minimum, count."""
    ordered = sorted(seconds)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.1, 0.9)]
    return {
        "median": statistics.median(ordered),
        "p10": at[0],
        "p90": at[1],
        "min": ordered[0],
        "repeats": len(ordered),
    }


class ResultFile:
    """Results so far, written after each measurement."""

    def __init__(self, path: Path, command: str, device: str) -> None:
        self.path = path
        self.data: dict[str, Any] = {"provenance": {}, "measurements": {}}
        if path.exists():
            self.data = json.loads(path.read_text())
        self.data["provenance"] = {**provenance(command), "device": device_name(device)}

    def has(self, benchmark: Benchmark) -> bool:
        return benchmark.key in self.data["measurements"]

    def add(self, benchmark: Benchmark, seconds: dict[str, float]) -> None:
        self.data["measurements"][benchmark.key] = {
            "family": benchmark.family,
            "parameters": benchmark.parameters,
            "work": benchmark.work,
            "seconds": seconds,
        }
        head = json.dumps(self.data["provenance"])
        rows = ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.data["measurements"].items()
        )
        partial = self.path.with_suffix(".partial")
        partial.write_text(f'{{"provenance": {head},\n "measurements": {{\n{rows}\n}}}}\n')
        partial.rename(self.path)


def device_name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


def rates(work: dict[str, float], seconds: float) -> str:
    """For the progress line."""
    parts = []
    if "flops" in work:
        parts.append(f"{work['flops'] / seconds / 1e12:8.3f} TFLOP/s")
    if "bytes" in work:
        parts.append(f"{work['bytes'] / seconds / 1e9:8.3f} GB/s")
    return " ".join(parts)


def sizes(smallest: int, largest: int, factor: int = 4) -> Iterator[int]:
    """smallest, smallest x factor, ... up to largest."""
    while smallest <= largest:
        yield smallest
        smallest *= factor
