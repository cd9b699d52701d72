"""Kernels, copies and collectives of a GPU, from the kept content of a Kineto file."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from typing import Any

from zsim.trace.collective_names import (
    collective_kind,
    count_elements,
    full_tensor_bytes,
    group_name,
    is_collective_kernel,
    parse_dtype,
    parse_int,
    parse_messages,
    parse_ranks,
)
from zsim.trace.readers.kineto.file import Context, DeviceEvent, Event, HostEvent, KinetoFile, Thread
from zsim.trace.readers.recording import UNKNOWN, Ranges, Recording
from zsim.trace.trace import COLLECTIVES, SpanInfo

_COPY_KERNEL = re.compile(r"copy|CatArray|chunk_cat|split_with_sizes", re.IGNORECASE)
_STREAM_LABEL = re.compile(r"^stream \d+ ?(?P<label>.*?)(?: \(\d+\))?$")
_LANE = re.compile(r" \(\d+\)$")


def add_device_spans(recording: Recording, file: KinetoFile) -> None:
    """Add every kernel, copy and memset to the recording, in the order in which the host launched them."""
    collectives = _Collectives(recording, file)
    context = Context(file)
    launches = file.launches
    no_launch: tuple[int, int, Thread] = (UNKNOWN, UNKNOWN, (None, None))
    rows = [(launches.get(event.correlation, no_launch), event) for event in file.device_events]
    rows.sort(key=lambda row: (row[1].start if row[0] is no_launch else row[0][0], row[1].start))
    spans: list[tuple[DeviceEvent, int, SpanInfo, int]] = []
    follows_wait = _follows_wait(file, [launch for launch, _ in rows])
    for launch, event in rows:
        launch_start, launch_end, thread = launch
        phase, module = context.at(thread, launch_start) if launch is not no_launch else ("", "")
        info, sequence = _span_info(file, event, launch, phase, module, collectives)
        issue = min(launch_end, event.start) if launch is not no_launch else UNKNOWN
        if event.kind == "memcpy" and launch_end >= event.end:  # to or from pageable memory: the host waits
            recording.host_blocks.append((launch_start, launch_end, None))
        spans.append((event, issue, info, sequence))
    names = _stream_names(file, spans)
    for (event, issue, info, sequence), waits in zip(spans, follows_wait, strict=True):
        stream_info = info._replace(stream=names[event.device, event.stream])
        recording.add(stream_info, event.start, event.end, issue, sequence, waits)
    if collectives.num_unsized:
        recording.notes.append(f"{collectives.num_unsized} collectives whose size is not recorded")
    if collectives.num_assumed:
        recording.notes.append(
            f"{collectives.num_assumed} collectives whose group is not recorded: taken to be all ranks"
        )


def _follows_wait(file: KinetoFile, launches: list[tuple[int, int, Thread]]) -> list[bool]:
    """Per launch, whether its thread made a stream wait since the thread's previous launch."""
    previous_launches: dict[Thread, int] = {}
    flags = []
    for launch_start, _, thread in launches:
        waits = file.waits.get(thread, [])
        last_launch = previous_launches.get(thread, 0)
        flags.append(bisect_left(waits, launch_start) > bisect_left(waits, last_launch))
        previous_launches[thread] = launch_start
    return flags


def _span_info(
    file: KinetoFile,
    event: DeviceEvent,
    launch: tuple[int, int, Thread],
    phase: str,
    module: str,
    collectives: _Collectives,
) -> tuple[SpanInfo, int]:
    """An event's SpanInfo, whose stream is named later, and a collective's sequence number in its group."""
    args = event.args
    if file.is_from_zsim and "kind" in args:
        return _zsim_info(recording_args=args, event=event, collectives=collectives)
    if event.kind == "memcpy":
        lower = event.name.lower()
        kind = "h2d" if "htod" in lower else "d2h" if "dtoh" in lower else "copy"
        return SpanInfo(
            event.name, kind, "", parse_int(args.get("bytes")), phase=phase, module=module
        ), UNKNOWN
    if event.kind == "memset":
        return SpanInfo(event.name, "copy", "", phase=phase, module=module), UNKNOWN
    if is_collective_kernel(event.name) or "Collective name" in args:
        return collectives.describe(event, launch, phase, module)
    kind = "copy" if _COPY_KERNEL.search(event.name) else "optimizer" if phase == "optimizer" else "compute"
    return SpanInfo(event.name, kind, "", phase=phase, module=module), UNKNOWN


def _zsim_info(recording_args: Event, event: DeviceEvent, collectives: _Collectives) -> tuple[SpanInfo, int]:
    """The SpanInfo and sequence number of an event in zsim's export, which has zsim's fields besides
    Kineto's."""
    args = recording_args
    name, kind = str(args.get("op", event.name)), str(args["kind"])
    phase, module = str(args.get("phase", "")), str(args.get("module", ""))
    if kind in COLLECTIVES:
        info, sequence = collectives.describe_metadata(args, kind, name, phase, module)
        return info, sequence
    is_kernel = kind not in ("h2d", "d2h") and event.kind == "kernel"
    count = parse_int(args.get("bytes"))
    if is_kernel:
        flops = float(args.get("flops", 0.0))
        return SpanInfo(name, kind, "", phase=phase, module=module, flops=flops, hbm_bytes=count), UNKNOWN
    return SpanInfo(name, kind, "", count, phase=phase, module=module), UNKNOWN


class _Collectives:
    """Describes a collective's kernel, by any of the three generations."""

    def __init__(self, recording: Recording, file: KinetoFile) -> None:
        self.recording = recording
        self.num_unsized = self.num_assumed = 0
        comms_with_id = (
            event for event in file.comms if event.external_id >= 0 and _describes_collective(event.args)
        )
        self._by_external_id = {event.external_id: event for event in comms_with_id}
        self._ranges_by_thread: dict[Thread, Ranges[HostEvent]] = {}
        for event in (*file.comms, *file.backend_ranges):
            self._ranges_by_thread.setdefault(event.thread, Ranges()).add(event.start, event.end, event)

    def describe(
        self, event: DeviceEvent, launch: tuple[int, int, Thread], phase: str, module: str
    ) -> tuple[SpanInfo, int]:
        kind = collective_kind(event.name)
        if "Collective name" in event.args:
            return self.describe_metadata(event.args, kind, event.name, phase, module)
        linked_event = self._by_external_id.get(event.external_id)
        if linked_event is not None and "Collective name" in linked_event.args:
            return self.describe_metadata(linked_event.args, kind, event.name, phase, module)
        thread_ranges = self._ranges_by_thread.get(launch[2])
        ranges = thread_ranges.containing(launch[0]) if thread_ranges is not None else []
        metadata_range = next((r for r in reversed(ranges) if "Collective name" in r.args), None)
        if metadata_range is not None:
            return self.describe_metadata(metadata_range.args, kind, event.name, phase, module)
        sized_range = next((r for r in reversed(ranges) if count_elements(r.args.get("Input Dims"))), None)
        kind_of_range = next(
            (range_kind for r in reversed(ranges) if (range_kind := collective_kind(r.name))), kind
        )
        return self._describe_dims(
            sized_range or linked_event, kind_of_range, event.name, phase, module
        ), UNKNOWN

    def describe_metadata(
        self, args: Event, kernel_kind: str, name: str, phase: str, module: str
    ) -> tuple[SpanInfo, int]:
        kind = collective_kind(str(args.get("Collective name", ""))) or kernel_kind
        dtype, dtype_bytes = parse_dtype(str(args.get("dtype", "")))
        size = parse_int(args.get("Group size"), 1)
        recording = self.recording
        group = group_name(args, size, recording.world_size)
        ranks = parse_ranks(args.get("Process Group Ranks"), size)
        if len(ranks) == size or group not in recording.groups:
            recording.groups[group] = ranks if len(ranks) == size else ()
        full = full_tensor_bytes(
            kind,
            parse_int(args.get("In msg nelems")),
            parse_int(args.get("Out msg nelems")),
            dtype_bytes,
            size,
        )
        self.num_unsized += full == 0
        info = SpanInfo(
            name,
            _traced_kind(kind),
            "",
            full,
            dtype,
            group,
            size,
            phase,
            module,
            messages=parse_messages(args),
        )
        return info, parse_int(args.get("Seq"), UNKNOWN)

    def _describe_dims(
        self, sized: HostEvent | None, kind: str, name: str, phase: str, module: str
    ) -> SpanInfo:
        """The SpanInfo of a collective of which only the input's shape is known. Its group is taken to be all
        ranks.
        """
        world = self.recording.world_size
        self.num_assumed += 1
        full, dtype = 0, ""
        if sized is not None:
            dtype, dtype_bytes = first_dtype(sized.args)
            full = full_tensor_bytes(kind, count_elements(first_dims(sized.args)), 0, dtype_bytes, world)
        self.num_unsized += full == 0
        self.recording.groups.setdefault("world", tuple(range(world)))
        return SpanInfo(name, _traced_kind(kind), "", full, dtype, "world", world, phase, module)


def first_dims(args: Event) -> Any:
    """The shape of the first input, or of all its tensors if it is a list."""
    dims = args.get("Input Dims")
    return next((shape for shape in dims if count_elements(shape)), []) if isinstance(dims, list) else []


def first_dtype(args: Event) -> tuple[str, int]:
    """The dtype of the first input that has one. A list of tensors is taken to be fp32."""
    kinds = args.get("Input type")
    for kind in kinds if isinstance(kinds, list) else []:
        dtype = parse_dtype(str(kind))
        if dtype[1]:
            return dtype
    return "fp32", 4


def _describes_collective(args: Event) -> bool:
    return "Collective name" in args or bool(count_elements(args.get("Input Dims")))


def _traced_kind(kind: str) -> str:
    """The kind in the trace: a barrier, and a kernel of unknown kind, count as an all-reduce."""
    return "all_reduce" if kind in ("barrier", "") else kind


def _stream_names(
    file: KinetoFile, spans: list[tuple[DeviceEvent, int, SpanInfo, int]]
) -> dict[tuple[Any, Any], str]:
    """A name for each stream: its label if it has one.

    Otherwise the stream with the maximum kernel time is "compute", and any other has the name of its most
    frequent kind of work.
    """
    busy: Counter[tuple[Any, Any]] = Counter()
    kinds: dict[tuple[Any, Any], Counter[str]] = {}
    for event, _, info, _ in spans:
        key = event.device, event.stream
        kinds.setdefault(key, Counter())[info.kind] += 1
        if info.kind in ("compute", "optimizer", "copy") and event.kind == "kernel":
            busy[key] += event.end - event.start
    compute = max(busy, key=lambda key: (busy[key], str(key)), default=None)
    names: dict[tuple[Any, Any], str] = {}
    for key in sorted(kinds, key=lambda key: (key != compute, -kinds[key].total(), str(key))):
        label = _label(file.thread_names.get(key, ""))
        name = label or ("compute" if key == compute else kinds[key].most_common(1)[0][0])
        names[key] = name if label or name not in names.values() else f"{name} (stream {key[1]})"
    return names


def _label(thread_name: str) -> str:
    match = _STREAM_LABEL.match(thread_name)
    if match:
        return match["label"].strip()
    return _LANE.sub("", thread_name)
