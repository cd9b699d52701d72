"""A Kineto file as a Recording: its rank, steps and memory, and its spans on GPU or CPU."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.trace.collective_names import parse_int
from zsim.trace.readers.json_stream import JsonStream
from zsim.trace.readers.kineto.file import KinetoFile, load
from zsim.trace.readers.kineto.gpu import add_device_spans
from zsim.trace.readers.kineto.host import add_backend_spans, add_cpu_spans
from zsim.trace.readers.recording import Recording

_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.IGNORECASE)


def read_kineto(path: Path, stream: JsonStream) -> Recording:
    """The recording of one rank. Raises InputError for a file that is damaged or has no spans."""
    file = load(path, stream)
    info = file.head.get("distributedInfo")
    distributed: dict[str, Any] = info if isinstance(info, dict) else {}
    groups = distributed.get("pg_config")
    if groups is not None and not isinstance(groups, list):
        raise InputError(
            f"{path}: distributedInfo: pg_config is {str(groups)[:40]!r}; expected a list of groups"
        )
    rank = parse_int(distributed.get("rank"), rank_in_name(path))
    largest = max((parse_int(event.args.get("Group size"), 1) for event in file.comms), default=1)
    world_size = parse_int(distributed.get("world_size")) or max(largest, rank + 1)
    recording = Recording(path, rank, world_size, str(distributed.get("backend", "")))
    recording.metadata = _metadata(file, distributed)
    return fill_recording(recording, file)


def fill_recording(recording: Recording, file: KinetoFile) -> Recording:
    """The recording, filled with the file's spans, steps and memory.

    Raises InputError if there are no spans.
    """
    if file.device_events:
        add_device_spans(recording, file)
    else:
        add_cpu_spans(recording, file)
        recording.metadata["computes_on"] = "cpu"
    if any(event.name.startswith("gloo:") for event in file.backend_ranges):
        add_backend_spans(recording, file)
    if not len(recording):
        raise InputError(
            f"{file.path}: has no kernel, copy, collective or CPU operator in {sum(file.counts.values())} "
            "events; expected a profile with ProfilerActivity.CUDA, or of a CPU run"
        )
    recording.sort()
    recording.host_blocks += [(start, end, None) for start, end, _ in file.blocks]
    recording.host_blocks.sort(key=lambda block: block[:2])
    recording.allocator_blocks = sorted(file.allocator_spans)
    recording.steps = _steps(file, recording)
    _add_memory(recording, file)
    _shift_times(recording, file.base)
    return recording


def rank_in_name(path: Path) -> int:
    """`rank3.json.gz`, `worker3_step_12.pt.trace.json` -> 3, or 0 if the name has no rank."""
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else 0


def _metadata(file: KinetoFile, distributed: dict[str, Any]) -> dict[str, Any]:
    devices = file.head.get("deviceProperties")
    device = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    facts = {
        "gpu": str(device["name"]) if device.get("name") else None,
        "gpu_memory_bytes": parse_int(device.get("totalGlobalMem")) or None,
        "sm_count": parse_int(device.get("numSms")) or None,
        "nccl_version": distributed.get("nccl_version"),
        "provenance": file.head.get("provenance"),
        "process_groups": distributed.get("pg_config"),
    }
    if file.is_from_zsim:
        facts |= {key: file.head.get(key) for key in ("source", "model", "cluster", "framework")}
        host_ahead = file.head.get("host_ahead_seconds")
        facts["host_ahead_seconds"] = (
            host_ahead if isinstance(host_ahead, float) and 0 <= host_ahead < math.inf else None
        )
    return {key: value for key, value in facts.items() if value is not None}


def _steps(file: KinetoFile, recording: Recording) -> list[tuple[int, int, int]]:
    """The host's steps (number, start, end), which are the ranges `ProfilerStep#N`.

    Without a schedule there are none, and a step then ends with the last `Optimizer.step#...` before the next
    backward.
    """
    if file.is_from_zsim:  # zsim writes the whole step, the host may have been done with it earlier
        host_end = max([0, *recording.issue, *(end for _, end, _ in recording.host_blocks)])
        return [(number, start, max(min(end, host_end), start)) for number, start, end in file.steps]
    if file.steps:
        return sorted(set(file.steps), key=lambda step: step[1])
    ends = [end for _, _, end in sorted(file.optimizer_steps, key=lambda step: step[2])]
    backward = sorted(start for rows in file.backward.values() for start, _ in rows)
    if backward:
        next_ends = [*ends[1:], 2**62]
        ends = [
            end
            for end, next_end in zip(ends, next_ends, strict=True)
            if bisect_right(backward, next_end) > bisect_right(backward, end) or next_end == 2**62
        ]
    first = min(min(recording.start), min((i for i in recording.issue if i >= 0), default=2**62))
    starts = [first, *ends[:-1]]
    if ends:
        recording.notes.append("steps end with Optimizer.step: the profiler wrote no ProfilerStep")
    return [(number, start, end) for number, (start, end) in enumerate(zip(starts, ends, strict=False), 1)]


def _add_memory(recording: Recording, file: KinetoFile) -> None:
    """Add the allocator's events. For a file that zsim wrote, add the counters by category."""
    seen_devices: set[str] = set()
    for time, device, change, total in sorted(file.memory):
        if device not in seen_devices:
            seen_devices.add(device)
            recording.memory.append((time, device, "allocated", total - change, "start"))
        recording.memory.append((time, device, "allocated", change, ""))
    levels_now: dict[tuple[str, str], int] = {}
    for time, name, levels in sorted(file.counters, key=lambda row: row[0]):
        device = name.removesuffix(" memory")
        changes = [
            (parse_int(level) - levels_now.get((device, category), 0), category)
            for category, level in levels.items()
        ]
        for change, category in sorted(changes):  # frees come first, so that no false peak arises
            levels_now[device, category] = levels_now.get((device, category), 0) + change
            if change:
                recording.memory.append((time, device, category, change, ""))


def _shift_times(recording: Recording, base: int) -> None:
    """Shift all times from the file's zero (`baseTimeNanoseconds`) to the clock's."""
    if not base:
        return
    for column in (recording.issue, recording.start, recording.end):
        for row, value in enumerate(column):
            column[row] = value + base if value >= 0 else value
    recording.steps = [(number, start + base, end + base) for number, start, end in recording.steps]
    recording.host_blocks = [(start + base, end + base, info) for start, end, info in recording.host_blocks]
    recording.allocator_blocks = [(start + base, end + base) for start, end in recording.allocator_blocks]
    recording.memory = [(time + base, *other_values) for time, *other_values in recording.memory]  # type: ignore[misc]
