"""gloo's collectives and work on CPU threads, from the kept content of a Kineto file without kernels."""

from __future__ import annotations

from zsim.trace.collective_names import collective_kind, count_elements, full_tensor_bytes
from zsim.trace.readers.kineto.context import Context
from zsim.trace.readers.kineto.file import HostEvent, KinetoFile, Thread
from zsim.trace.readers.kineto.gpu import first_dims, first_dtype
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
