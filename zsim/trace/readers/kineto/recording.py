"""A Kineto file as a Recording: its rank, steps and memory, and its spans on GPU or CPU."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.trace.collective_names import collective_kind, count_elements, full_tensor_bytes, parse_int
from zsim.trace.readers.content import JsonStream
from zsim.trace.readers.kineto.file import Context, HostEvent, KinetoFile, Thread, load
from zsim.trace.readers.kineto.gpu import add_device_spans, first_dims, first_dtype
from zsim.trace.readers.recording import UNKNOWN, Recording
from zsim.trace.trace import SpanInfo

# gloo has no reduce-scatter: torch asks for one, and gloo runs one of these
_SUBSTITUTES = {"reduce_scatter": ("all_reduce", "all_to_all")}


def add_backend_spans(recording: Recording, file: KinetoFile) -> None:
    """Add gloo's collectives: the kind of the call (`c10d::...`), with the times of the range of gloo
    (`gloo:...`)."""
    context = Context(file)
    ranges = [event for event in file.backend_ranges if collective_kind(event.name) not in ("barrier", "")]
    ranges.sort(key=lambda event: (event.start, event.end))
    calls = [event for event in file.comms if collective_kind(event.name) not in ("barrier", "")]
    calls.sort(key=lambda event: event.start)
    num_barriers = len(file.backend_ranges) - len(ranges)
    used_ranges: set[int] = set()
    world = recording.world_size
    for call in calls:
        number = _matching_range(call, ranges, used_ranges)
        if number is None:
            continue
        used_ranges.add(number)
        phase, module = context.at(call.thread, call.start)
        kind = collective_kind(call.name)
        info = _span_info(ranges[number].name, kind, call, world, phase, module)
        recording.add(info, ranges[number].start, ranges[number].end, call.start)
        if call.end >= ranges[number].end:
            recording.host_blocks.append((call.start, call.end, info))
    for number, event in enumerate(ranges):
        if number not in used_ranges:
            info = _span_info(event.name, collective_kind(event.name), event, world, "", "")
            recording.add(info, event.start, event.end)
    recording.groups.setdefault("world", tuple(range(world)))
    if len(recording.metadata.get("process_groups", ())) > 1:
        recording.notes.append("gloo does not say which group a collective is of: taken to be all ranks")
    if num_barriers:
        recording.metadata["barriers"] = num_barriers


def _matching_range(call: HostEvent, ranges: list[HostEvent], used_ranges: set[int]) -> int | None:
    """Index of the first later range that gloo can have run for a call: of the call's kind, or a substitute
    for it."""
    kind = collective_kind(call.name)
    kinds = (kind, *_SUBSTITUTES.get(kind, ()))
    for number, event in enumerate(ranges):
        if number not in used_ranges and event.start >= call.start and collective_kind(event.name) in kinds:
            return number
    return None


def _span_info(name: str, kind: str, event: HostEvent, world: int, phase: str, module: str) -> SpanInfo:
    dtype, dtype_bytes = first_dtype(event.args)
    if event.name.startswith("c10d::"):  # its inputs are the output and the input
        dims = event.args.get("Input Dims")
        shapes = dims[:2] if isinstance(dims, list) else []
        full = max((count_elements(shape) for shape in shapes), default=0) * dtype_bytes
    else:
        full = full_tensor_bytes(kind, count_elements(first_dims(event.args)), 0, dtype_bytes, world)
    return SpanInfo(name, kind, "", full, dtype, "world", world, phase, module)


def add_cpu_spans(recording: Recording, file: KinetoFile) -> None:
    """Add the outermost operators of each thread, for a file without kernels, where the CPU computes."""
    context = Context(file)
    names = list(file.op_names)
    main = _main_thread(file)
    workers = {event.thread for event in file.backend_ranges if event.name.startswith("gloo:")}
    for thread in sorted(set(file.ops) - workers, key=str):
        starts, ends, numbers = file.ops[thread]
        stream = "compute" if thread == main else f"thread {thread[1]}"
        covered_until = -(2**62)
        for row in sorted(range(len(starts)), key=lambda row: (starts[row], -ends[row])):
            name = names[numbers[row]]
            if starts[row] < covered_until:
                continue
            covered_until = ends[row]
            if name.startswith("c10d::") or name == "record_param_comms":
                continue
            phase, module = context.at(thread, starts[row])
            kind = "optimizer" if phase == "optimizer" else "compute"
            info = SpanInfo(name, kind, stream, phase=phase, module=module)
            recording.add(info, starts[row], ends[row], UNKNOWN)


def _main_thread(file: KinetoFile) -> Thread | None:
    if file.step_thread or file.optimizer_thread:
        return file.step_thread or file.optimizer_thread
    return max(file.ops, key=lambda thread: (len(file.ops[thread][0]), str(thread)), default=None)


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
