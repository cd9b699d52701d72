"""A span log of `validation.record` (`rankN.jsonl.gz`) as a Recording. Its fields are in
validation/tracing.py.

The log nests: a model's forward contains its units, and units contain waits for collectives. Computation is
the time of the innermost unit that is not waiting, so an interrupted unit becomes several spans.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.trace.collective_names import parse_int
from zsim.trace.readers.content import Content
from zsim.trace.readers.recording import UNKNOWN, Recording
from zsim.trace.trace import SpanInfo

Event = dict[str, Any]
_PHASES = {"update": "optimizer", "optimizer": "optimizer"}
_NUMBERS = (
    "step",
    "issue_ns",
    "done_ns",
    "wait0_ns",
    "wait1_ns",
    "post_ns",
    "bytes",
    "group",
    "stride",
    "seq",
)
_MAXIMUM = 2**61  # columns hold 64 bits
_LONGEST_LINE = 2**24  # characters
_TEXTS = ("kind", "op", "unit", "phase", "dtype")
_ENDS = ("done_ns", "wait1_ns", "post_ns")  # the backend's end; when the host stopped waiting
_OPTIMIZERS = frozenset({"adamw", "update", "optimizer"})


def read_span_log(content: Content) -> Recording:
    """The recording of one rank. Raises InputError for a line that is not an event, and for a log without
    events."""
    path, lines = content.path, read_objects(content)
    header = next(lines, {})
    recording = Recording(path, parse_int(header.get("rank")), parse_int(header.get("world_size"), 1))
    provenance = header.get("provenance")
    recording.backend = str(provenance.get("backend", "")) if isinstance(provenance, dict) else ""
    recording.metadata = {
        key: header[key] for key in ("provenance", "case", "model", "clock") if key in header
    }
    recording.metadata["computes_on"] = "cpu"
    recording.groups["world"] = tuple(range(recording.world_size))
    clock = header.get("clock")
    if isinstance(clock, dict):
        recording.clock_zero = parse_int(clock.get("epoch_ns")) - parse_int(clock.get("perf_counter_ns"))
    events = list(lines)
    if not events:
        raise InputError(f"{path}: has a header and no events; expected collectives and computing")
    steps: dict[int, tuple[int, int]] = {}
    endless = Counter[str]()
    for event in events:
        _check(path, event)
        start, end = event["issue_ns"], _end(event)
        if event["kind"] == "phase":
            first, last = steps.get(event["step"], (start, end))
            steps[event["step"]] = min(first, start), max(last, end)
        elif event["kind"] == "coll":
            _add_collective(recording, event)
            endless[event["op"]] += not any(key in event for key in _ENDS)
        elif event["kind"] == "io":
            kind = f"nvme_{event['op']}"
            unit = str(event.get("unit", ""))
            name = f"{event['op']} {unit}".strip()
            info = SpanInfo(
                name, kind, "nvme", parse_int(event.get("bytes")), phase=_phase(event), module=unit
            )
            recording.add(info, start, end, start)
        elif event["kind"] == "mem":
            recording.memory.append((start, "gpu", event["op"], event["bytes"], event.get("unit", "")))
    for event, start, end in _compute_segments(events):
        recording.add(_compute_info(event), start, end, start)
    recording.notes += [
        f"{count} {name} without an end in the log: how long they took is not known, and 0 stands for it"
        for name, count in endless.items()
        if count
    ]
    recording.sort()
    recording.steps = [(number, *bounds) for number, bounds in sorted(steps.items())]
    return recording


def read_objects(content: Content) -> Iterator[Event]:
    """The object on each line. Raises InputError for a line that is not an object."""
    path = content.path
    for number, line in enumerate(content.lines(_LONGEST_LINE), 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(
                f"{path}: line {number} is not JSON: {line[:40]!r}; is the file cut off?"
            ) from None
        if not isinstance(event, dict):
            raise InputError(f"{path}: line {number} is {line[:40]!r}; expected an object")
        yield event


def _check(path: Path, event: Event) -> None:
    missing = [key for key in ("kind", "op", "issue_ns", "step") if key not in event]
    if missing:
        raise InputError(f"{path}: event {json.dumps(event)[:60]} has no '{missing[0]}'; expected a span log "
                         "of validation.record")  # fmt: skip
    for key, value in event.items():
        is_number = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAXIMUM
        if (key in _NUMBERS and not is_number) or (key in _TEXTS and not isinstance(value, str)):
            expected = "a text" if key in _TEXTS else "a whole number of 64 bits"
            raise InputError(
                f"{path}: event {json.dumps(event)[:60]}: {key} is {value!r}; expected {expected}"
            )


def _end(event: Event) -> int:
    """End of an event: as the backend reported it, else when the host stopped waiting for it."""
    issued = parse_int(event["issue_ns"])
    return next((parse_int(event[key]) for key in _ENDS if key in event), issued)


def _phase(event: Event) -> str:
    phase = str(event.get("phase", ""))
    return _PHASES.get(phase, phase)


def _add_collective(recording: Recording, event: Event) -> None:
    size = parse_int(event.get("group"), 1)
    if not 1 <= size <= recording.world_size:
        raise InputError(
            f"{recording.path}: event {json.dumps(event)[:60]}: group is {size}; expected 1 to the "
            f"{recording.world_size} ranks of the header's world_size"
        )
    stride = parse_int(event.get("stride"), 0)  # logs older than this key do not have it
    group = "world" if size == recording.world_size else f"group of {size}"
    group += f", {stride} apart" if group != "world" and stride > 1 else ""
    recording.groups.setdefault(group, _group_ranks(recording.rank, size, stride))
    info = SpanInfo(event["op"], event["op"], "", parse_int(event.get("bytes")), event.get("dtype", ""),
                    group, size, _phase(event), event.get("unit", ""))  # fmt: skip
    recording.add(
        info, event["issue_ns"], _end(event), event["issue_ns"], parse_int(event.get("seq"), UNKNOWN)
    )
    if "wait0_ns" in event and "wait1_ns" in event:
        recording.host_blocks.append((event["wait0_ns"], event["wait1_ns"], info))


def _group_ranks(rank: int, size: int, stride: int) -> tuple[int, ...]:
    """The group of `size` ranks, `stride` apart, that `rank` is in, or () if the stride is not known."""
    span = size * stride
    if not span:
        return ()
    first = rank // span * span + rank % stride
    return tuple(range(first, first + span, stride))


def _compute_info(event: Event) -> SpanInfo:
    phase = _phase(event)
    kind = "optimizer" if event["op"] in _OPTIMIZERS else "compute"
    name = f"{event['op']} {event.get('unit', '')}".strip()
    return SpanInfo(name, kind, "compute", phase=phase, module=event.get("unit", ""))


def _compute_segments(events: list[Event]) -> Iterator[tuple[Event, int, int]]:
    """Segments (event, start, end) of each unit's exclusive time, without its inner units and the host's
    waits."""
    rows: list[tuple[int, int, Event | None]] = []
    for event in events:
        if event["kind"] in ("comp", "phase") and "done_ns" in event:
            rows.append((event["issue_ns"], -event["done_ns"], event))
        elif event["kind"] == "coll" and "wait1_ns" in event:
            rows.append((event["wait0_ns"], -event["wait1_ns"], None))
    rows.sort(key=lambda row: row[:2])
    stack: list[tuple[int, Event | None]] = []  # (end, event)
    now = 0
    for start, negative_end, unit in [*rows, (2**62, -(2**62), None)]:
        while stack and stack[-1][0] <= start:
            end, inner = stack.pop()
            if inner is not None and end > now:
                yield inner, now, end
            now = max(now, end)
        if stack and stack[-1][1] is not None and start > now:
            yield stack[-1][1], now, start
        now = max(now, start)
        stack.append((-negative_end, unit))
