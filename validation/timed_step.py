"""A training step timed on the device at hand: seconds, the host's part, the allocator's peaks, a trace.

Several programs share one GPU in turn: each waits for the lock of a file before its first use of the device,
so that the next one imports its libraries meanwhile."""

from __future__ import annotations

import argparse
import fcntl
import gc
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from validation.record import kineto

WARM_UP = 2
PLACES = ("nvme_folder", "kineto", "json", "turn")  # paths on this machine: not recorded
STATE = "clocks.sm clocks.mem power.draw temperature.gpu clocks_throttle_reasons.active driver_version"


def add_step_options(arguments: argparse.ArgumentParser, *, steps: int) -> None:
    """The options that every program of a timed step has; `steps`: how many it times if not told."""
    add = arguments.add_argument
    add("--micro-batch-size", type=int, default=1)
    add("--sequence-length", type=int, default=64)
    add("--steps", type=int, default=steps)
    add("--kineto", type=Path, help="also PyTorch's trace of one step, trimmed, to this .json.gz")
    add("--json", type=Path)
    add("--turn", type=Path, help="a file whose lock is waited for before the device is used")


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without paths of this machine."""
    return {name: value for name, value in vars(options).items() if name not in PLACES}


def command_of(program: str, options: argparse.Namespace) -> str:
    """The command that asks for it again; a switch has no value."""
    asked = asked_of(options)
    switches = [name for name, value in asked.items() if isinstance(value, bool)]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items() if name not in switches]
    words += [f"--{name.replace('_', '-')}" for name in switches if asked[name]]
    return shlex.join(["python", "-m", f"validation.{program}", *words])


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """The exclusive lock of a file, for as long as the device is used; nothing without a file."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def time_steps(step: Callable[[], Any], device: str, steps: int) -> dict[str, Any]:
    """Two steps to warm up, then the seconds of each, how long the host took to issue it, and the allocator's
    peaks."""
    seconds, host_seconds = [], []
    for number in range(WARM_UP + steps):
        if number == WARM_UP and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        issued = time.perf_counter() - start
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            host_seconds.append(issued)
            seconds.append(time.perf_counter() - start)
    return {
        "step_seconds": {"median": statistics.median(seconds), "all": [round(s, 6) for s in seconds]},
        "host_issue_seconds": statistics.median(host_seconds),
        "cuda_memory": cuda_memory(device),
        "gpu_state": gpu_state() if device == "cuda" else {},
    }


def profile_step(step: Callable[[], Any], device: str) -> torch.profiler.profile:
    """One more step under PyTorch's profiler, to be exported when the device is free for others."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiler:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    made: torch.profiler.profile = profiler
    return made


def write_trace(profiler: torch.profiler.profile, target: Path, origin: dict[str, Any]) -> None:
    """The trace of `profile_step`, trimmed, to a .json.gz."""
    raw = target.with_suffix(".raw")
    profiler.export_chrome_trace(str(raw))
    kineto.write_trimmed(raw, target, origin)


def release_memory(device: str) -> None:
    """Give the GPU's memory back to the driver, for the program whose turn is next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def cuda_memory(device: str) -> dict[str, int]:
    """The caching allocator's statistics; empty on a CPU."""
    if device == "cpu":
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "inactive_split_peak": stats["inactive_split_bytes.all.peak"],
        "alloc_retries": stats["num_alloc_retries"],
    }


def gpu_state() -> dict[str, str]:
    """Clocks, power and throttling reasons, just after the last step; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    names = STATE.split()
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return dict(zip(names, (value.strip() for value in answer.split(",")), strict=False))
